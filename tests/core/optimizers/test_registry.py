"""A user's own optimizer: loaded from where the user says, tried out, and refused in words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from canzona_cli.core.optimizers.registry import UnusableOptimizer, load_class, probe
from canzona_cli.optimizers import Muon

Params = list[torch.nn.Parameter]

OWN = """
from dataclasses import dataclass
import torch

@dataclass
class Settings:
    power: float = 1.0

class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] * Settings().power)

class NotOne:
    pass

value = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "signed.py").write_text(OWN)
    (tmp_path / "mine" / "broken.py").write_text("import torch\nraise KeyError('lost')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("absolute", [False, True])
def test_a_file_is_loaded_from_the_working_directory(own: Path, absolute: bool) -> None:
    folder = own if absolute else Path()
    kind = load_class(f"{folder / 'mine' / 'signed.py'}:Signed", ())
    assert kind.__name__ == "Signed"
    probe(lambda p: kind(p, lr=0.1))  # type: ignore[call-arg]


def test_a_module_is_loaded_if_its_package_is_allowed() -> None:
    assert load_class("torch.optim:SGD", ["torch"]) is torch.optim.SGD


@pytest.mark.parametrize(
    ("source", "allow", "says"),
    [
        ("torch.optim:SGD", ["numpy"], "package torch, which may not be loaded .optimizer.allow lists numpy"),
        ("torch.optim:SDG", ["torch"], "torch.optim has no SDG; did you mean SGD"),
        ("torch.optimm:SGD", ["torch"], "cannot be imported: ModuleNotFoundError"),
        ("torch.nn:Linear", ["torch"], "not a subclass of torch.optim.Optimizer but the class Linear"),
        ("torch.optim.SGD", ["torch"], "neither path/to/file.py:Class nor module:Class"),
        ("mine/signed.py:Singed", [], "has no Singed; did you mean Signed"),
        ("mine/signed.py:Adam", [], "has no Adam; available: Signed"),
        ("mine/signed.py:value", [], "not a subclass of torch.optim.Optimizer but an object of type int"),
        ("mine/singed.py:Signed", [], "there is no file .*singed.py; did you mean signed.py"),
        ("nowhere/signed.py:Signed", [], "its folder has no .py file"),
        ("mine/broken.py:Signed", [], "broken.py fails when it is loaded: KeyError: 'lost'"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_cannot_be_loaded_is_refused(source: str, allow: list[str], says: str) -> None:
    with pytest.raises(UnusableOptimizer, match=says):
        load_class(source, allow)


@pytest.mark.parametrize("make", [lambda p: Muon(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1)])
def test_what_steps_matrices_is_accepted(make: Callable[[Params], torch.optim.Optimizer]) -> None:
    probe(make)


class Base(torch.optim.Optimizer):
    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    def matrices(self) -> Params:
        return list(self.param_groups[0]["params"])


class NotFinite(Base):
    def step(self) -> None:  # type: ignore[override]
        for p in self.matrices():
            p.div_(0.0)


class Only1D(Base):
    def __init__(self, params: Params) -> None:
        if any(p.ndim != 1 for p in params):
            raise TypeError("vectors only")
        super().__init__(params)


class Lazy(Base):
    def step(self) -> None:  # type: ignore[override]
        self.matrices()[0].mul_(0.5)


class Recasting(Base):
    def step(self) -> None:  # type: ignore[override]
        for p in self.matrices():
            p.data = p.data.half()


class NeedsAutograd(Base):
    def step(self) -> None:  # type: ignore[override]
        torch.autograd.grad(self.matrices()[0].sum(), self.matrices()[0])


class HiddenClosure(Base):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "closure needed"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, r"its step\(\) needs closure"),
        (NotFinite, "step 1 produced values that are not finite in a .4, 6. parameter"),
        (Only1D, "cannot be constructed with 2-D parameters: TypeError: vectors only"),
        (Lazy, "two steps left a .6, 4. parameter unchanged"),
        (Recasting, "step 1 turned a .4, 6. parameter of torch.float32 into .4, 6. of torch.float16"),
        (NeedsAutograd, "step 1 failed on 2-D parameters without closure or autograd: RuntimeError"),
        (HiddenClosure, "closure needed"),
        (lambda p: object(), "it is not a torch optimizer but an object of type object"),
    ],
)
def test_what_cannot_is_refused_in_words(make: Callable[[Params], torch.optim.Optimizer], says: str) -> None:
    with pytest.raises(UnusableOptimizer, match=says) as refused:
        probe(make)
    assert isinstance(refused.value, ValueError)
