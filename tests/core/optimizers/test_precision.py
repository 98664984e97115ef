"""No part of an eigenvalue path runs in TF32, whatever the user and the process have set."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch.overrides import TorchFunctionMode

from canzona_cli.core.optimizers.kronecker import KroneckerOptimizer
from canzona_cli.optimizers import SOAP, Shampoo

from . import reference as reference


class Heard(TorchFunctionMode):
    """Every torch function by name, and what fp32 products would be made in when it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, str]] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.calls.append((getattr(func, "__name__", ""), *_precisions()))
        return func(*args, **(kwargs or {}))


def _precisions() -> tuple[str, str]:
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return cuda.fp32_precision, cpu.fp32_precision


@pytest.fixture
def _tf32() -> Iterator[None]:
    """Sets the precision as a user's script may have set it."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = _precisions()
    torch.set_float32_matmul_precision("high")
    assert cuda.fp32_precision == "tf32"
    yield
    cuda.fp32_precision, cpu.fp32_precision = before


@pytest.mark.usefixtures("_tf32")
@pytest.mark.parametrize(
    ("make", "decompositions"),
    [
        (lambda p: Shampoo(p, 0.02, precondition_frequency=2, precision="tf32"), {"linalg_eigh"}),
        (lambda p: Shampoo(p, 0.02, precondition_frequency=2, precision="tf32", roots="newton"), {"baddbmm"}),
        (lambda p: SOAP(p, 0.02, precondition_frequency=2, precision="tf32"), {"linalg_eigh", "linalg_qr", "mm"}),
    ],
)
def test_refreshes_never_run_in_tf32(
    make: Callable[[list[torch.nn.Parameter]], KroneckerOptimizer],
    decompositions: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, everywhere = Heard(), Heard()
    params = reference.weights([(8, 12), (12, 8)])
    optimizer = make(params)
    for name in ("_refresh", "_after_refresh"):

        def listened(*args: object, real: Callable[..., object] = getattr(optimizer, name)) -> object:
            with inside:
                return real(*args)

        monkeypatch.setattr(optimizer, name, listened)
    with everywhere:
        reference.step_through(optimizer, params, reference.gradients([(8, 12), (12, 8)], 4))
    assert {name for name, *_ in inside.calls} >= decompositions
    assert {precision for _, *precisions in inside.calls for precision in precisions} == {"ieee"}
    # The setting has its effect on the rest.
    assert {cuda for name, cuda, _ in everywhere.calls if name == "mm"} >= {"tf32"}
    assert _precisions()[0] == "tf32"
