"""The Gram form in fp16, as on GPUs, is nearer to the exact polynomial than the standard form in bf16, whatever it is
given. Processors multiply fp16 slowly: shapes are small."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_cli.core.optimizers import gram_form, muon, muon_facts
from canzona_cli.core.optimizers.facts import Form
from canzona_cli.core.optimizers.gram_form import (
    LARGEST_NORM,
    alpha_numbers,
    gram_dtype,
    gram_newton_schulz,
    polynomial,
    starting_norm,
    unscaled_steps,
)
from canzona_cli.core.optimizers.muon_facts import CoefficientSet, segments
from canzona_cli.core.optimizers.newton_schulz import COEFFICIENTS, coefficients, newton_schulz
from canzona_cli.optimizers import Muon, NorMuon, Workspace

from . import reference
from .test_gram_form import apart, exact, spectrum, updated
from .test_shared import LR, cut, gaussian, parameter
from .test_shared import apart as apart_from_start
from .test_shared import muon as gram_muon

SETS = [*COEFFICIENTS]
HALF = torch.float16


@pytest.fixture
def _on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives products the type that matrices on CUDA have."""
    monkeypatch.setattr(muon, "gram_dtype", lambda dtype, _: gram_dtype(dtype, torch.device("cuda")))


@pytest.fixture(params=["processors", "GPUs"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _on_gpus: None) -> None:
    """Runs in fp16 by blocks of rows, and as whole tensors."""
    if request.param == "GPUs":
        monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)


def momentum(seed: int, power: float) -> torch.Tensor:
    """(64, 160) of norm 1 in fp64, whose singular values cover four decades as those of real momentum do."""
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    x = (u * 10.0 ** (-4 * torch.linspace(0, 1, 64, dtype=torch.float64) ** power)) @ v
    return torch.div(x, x.norm())


def stable_rank(x: torch.Tensor) -> float:
    return float(x.square().sum() / torch.linalg.matrix_norm(x, 2).square())


def in_half(x: torch.Tensor, steps: Sequence[gram_form.Step]) -> tuple[torch.Tensor, bool]:
    found, trusted = gram_newton_schulz((x * starting_norm(min(x.shape), HALF)).half(), steps, Workspace())
    return found, bool(trusted)


def test_gpus_and_processors_without_bf16_have_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert gram_dtype(torch.bfloat16, cuda) is HALF
    for narrow, expected in ((False, torch.bfloat16), (True, HALF)):
        monkeypatch.setattr(
            "canzona_cli.core.optimizers.gram_form.cpu_matmuls.is_installed", lambda narrow=narrow: narrow
        )
        assert gram_dtype(torch.bfloat16, cpu) is expected
        assert gram_dtype(torch.float32, cpu) is torch.float32
    assert gram_dtype(torch.float32, cuda) is torch.float32
    for side in (1, 3, 4, 63, 64, 4095, 4096, 5120, 10**6):
        norm = starting_norm(side, HALF)
        assert norm**2 <= side
        assert norm == LARGEST_NORM or 4 * norm**2 > side
        assert math.frexp(norm)[0] == 0.5
        assert starting_norm(side, torch.bfloat16) == starting_norm(side, torch.float32) == 1


@pytest.mark.parametrize("ns", SETS)
def test_it_is_nearer_than_standard_in_bf16_and_never_doubted(ns: CoefficientSet) -> None:
    steps = coefficients(ns, 5)
    given = [spectrum("gaussian", 64, 160), spectrum("gaussian", 48, 48)]
    given += [momentum(seed, power) for seed, power in enumerate((0.8, 1.0, 2.3))]
    ranks = [stable_rank(x) for x in given[2:]]
    assert 1.9 < min(ranks) < max(ranks) < 18
    for x in given:
        standard = apart(newton_schulz(x.bfloat16(), steps, Workspace()), exact(x, steps))
        for form in (x, x.mT.contiguous()):
            gram, trusted = in_half(form, steps)
            assert trusted
            assert apart(gram, exact(form, steps)) < 0.7 * standard


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number that any operation wrote, fresh memory aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and "empty" not in func.name():
            self.largest = max(self.largest, float(found.abs().max()))
        return found


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_nothing_is_above_a_fifteenth_of_fp16s_range(steps: int) -> None:
    """Eigenvalues of all sizes that the Gram matrix of an X of norm 1 can have, the largest that of rank one: in no
    other basis is an element above them. What is made of R is 9 t at most."""
    norm, values = LARGEST_NORM, torch.linspace(0, 1, 65)
    for ns in SETS:
        some = unscaled_steps(norm, coefficients(ns, steps))[: segments(steps)[0]]
        known = alpha_numbers(some, 1.0)
        alpha = known[0]
        assert isinstance(alpha, float)
        r = torch.diag(values * norm**2 - alpha)
        assert r.abs().max() < torch.finfo(HALF).max / 15
        with Written() as written:
            polynomial(r, some, known, Workspace())
        assert 0 < written.largest < 9 * norm, ns


@pytest.mark.usefixtures("_either")
def test_scale_is_of_no_account() -> None:
    """Powers of two of it not for a single bit; and zeros move nothing."""
    x = momentum(3, 1.0).float()

    def moved(gradient: torch.Tensor) -> torch.Tensor:
        told: list[str] = []
        p = torch.nn.Parameter(torch.zeros(64, 160))
        p.grad = gradient
        optimizer = Muon(
            [p], 1.0, weight_decay=0.0, momentum=0.0, scale_factor=160**-0.5, form="gram",
            on_fallback=lambda _, reason: told.append(reason),
        )  # fmt: skip
        optimizer.step()
        doubted = optimizer.untrusted_count()
        assert not told
        assert doubted is None or not doubted
        return -p.detach()

    first = moved(x)
    for power in (-100, -30, 30, 100):
        assert torch.equal(moved(x * 2.0**power), first)
    wanted = exact(x.double() / x.double().norm(), coefficients("quintic", 5))
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e30):
        assert apart(moved(x * size), wanted) < 0.02
    assert not bool(moved(x * 0).any())


def test_the_last_product_is_added_up_in_fp32_where_it_is_asked_for() -> None:
    """A product of CUDA's, which fake tensors have too; processors do without, with the same result."""
    steps = coefficients("quintic", 5)
    for x in (spectrum("gaussian", 64, 160), spectrum("gaussian", 160, 64)):
        given = (x * starting_norm(64, HALF)).half()
        into = torch.empty(x.shape)
        rounded, _ = gram_newton_schulz(given.clone(), steps, Workspace())
        found, trusted = gram_newton_schulz(given, steps, Workspace(), into)
        assert found is into
        assert bool(trusted)
        assert not torch.equal(found, found.half().float())
        # The same sums, rounded once.
        torch.testing.assert_close(found, rounded.float(), rtol=2**-10, atol=1e-6)
        assert apart(found, exact(x, steps)) <= apart(rounded, exact(x, steps))
    with FakeTensorMode():
        a, out = torch.empty(4, 6, dtype=HALF, device="cuda"), torch.empty(4, 4, device="cuda")
        gram_form._matmul(a, a.mT, out)
        assert torch.mm(a, a.mT, out_dtype=torch.float32).device == out.device


@pytest.mark.usefixtures("_on_gpus")
@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("lr", [0.02, 0.0])
def test_weights_move_in_one_pass_as_in_two(
    kind: type[Muon], ahead: bool, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decay and update of whole tensors are one pass; against blocks of rows, which take the update rounded to fp16 (of
    elements below 1, 2^-11), and fp32 is rounded otherwise. Sizes and decays as large as they come."""
    grads = reference.gradients([(12, 40), (40, 12), (16, 16)], 3)

    def run(decay: float) -> list[torch.Tensor]:
        return reference.run(
            lambda p: kind(p, lr, weight_decay=decay, nesterov=ahead, form="gram", fused=True),
            [(12, 40), (40, 12), (16, 16)],
            grads,
        )[0]

    blocked = [run(decay) for decay in (0.0, 0.1, 5.0)]
    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    for decay, others in zip((0.0, 0.1, 5.0), blocked, strict=True):
        for one, other in zip(run(decay), others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=3 * lr * 0.2 * 40**0.5 * 2**-10 + 1e-7)


@pytest.mark.usefixtures("_on_gpus")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [Muon, NorMuon])
def test_what_is_left_out_only_decays_even_if_not_finite(
    kind: type[Muon], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without the fused kernel, which is private to torch, does not call it."""
    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    filled: list[float] = []

    def broken(x: torch.Tensor, _steps: Any, _workspace: Any, into: torch.Tensor | None = None) -> Any:
        assert (into is not None) is fused
        assert into is None or into.dtype is torch.float32
        return (x if into is None else into).fill_(filled[-1]), torch.zeros((), dtype=torch.bool)

    if not fused:
        monkeypatch.delattr(torch, "_fused_sgd_")

    monkeypatch.setattr(muon, "gram_newton_schulz", broken)
    for number in (math.nan, math.inf, 3.0):
        filled.append(number)
        (p,) = reference.weights([(12, 40)])
        before = p.detach().clone()
        optimizer = kind([p], 0.02, form="gram", weight_decay=0.5, fused=fused)
        p.grad = torch.ones(12, 40)
        optimizer.step()
        torch.testing.assert_close(p.detach(), before * (1 - 0.02 * 0.5))
        doubted = optimizer.untrusted_count()
        assert doubted is not None
        assert doubted.item() == 1


@pytest.mark.usefixtures("_on_gpus")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_trusted(bad: float) -> None:
    x = momentum(4, 1.0).float()
    x[5, 7] = bad
    assert updated(x, "gram", "quintic")[1]
    split = cut(gaussian((32, 96), 0), 2, "bf16")
    x = x[:32, :96].contiguous()
    assert split.step(x) == [False, False]


@pytest.mark.usefixtures("_on_gpus")
@pytest.mark.parametrize("whole", [(48, 256), (64, 80)])
def test_fragments_lose_little_more_than_the_whole_and_less_than_in_bf16(whole: tuple[int, int]) -> None:
    start, gradient = gaussian(whole, 0), gaussian(whole, 1)
    right, p, standard = parameter(start), parameter(start), parameter(start)
    for one in (right, p, standard):
        one.grad = gradient
    gram_muon(right, "fp32").step()
    gram_muon(p, "bf16").step()
    Muon([standard], LR).step()
    split = cut(start, 4, "bf16")
    assert split.optimizers[0].dtype is HALF
    assert split.step(gradient) == [True] * 4
    error = apart_from_start(split.gathered(), right, start)
    assert error < 2 * apart_from_start(p, right, start)
    assert error < apart_from_start(standard, right, start) / 2


def test_in_standard_form_nothing_is_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosted, made again after doubt, and alone; and both types take the same scratch."""
    monkeypatch.setattr(gram_form, "DOUBT", -1.0)
    shapes: list[tuple[int, int]] = [(12, 40), (16, 16)]
    grads = reference.gradients(shapes, 2)
    start, gradient = gaussian((32, 64), 0), gaussian((32, 64), 1)

    def found(form: Form) -> tuple[list[torch.Tensor], int]:
        forms: dict[tuple[int, int], Form] = {(12, 40): form, (16, 16): "standard"}
        weights, optimizer = reference.run(lambda p: Muon(p, 0.02, form=forms), shapes, grads)
        split = cut(start, 2, "bf16")
        split.step(gradient)
        for p, optimizer_of in zip(split.fragments, split.optimizers, strict=True):
            p.copy_(start[:, : p.size(1)])
            optimizer_of.state[p][muon_facts.DISTRUSTED] = 1
        split.step_alone()
        assert isinstance(optimizer, Muon)
        return [*weights, split.gathered()], optimizer.workspace.nbytes

    before, held = found("gram")
    with monkeypatch.context() as patched:
        patched.setattr(muon, "gram_dtype", lambda dtype, _: gram_dtype(dtype, torch.device("cuda")))
        after, holds = found("gram")
    assert holds == held
    for one, other in zip(before, after, strict=True):
        # A doubted update lies in fp16, where what is below 6e-5 is rounded to 3e-8; weights are rounded to 2e-7.
        torch.testing.assert_close(one, other, rtol=0, atol=3e-7)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products of a few hundred rows: threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
