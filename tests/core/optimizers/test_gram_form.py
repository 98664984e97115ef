"""The Gram form is the standard form's polynomial, in fewer products, as exact, and doubted where it is not."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canzona_cli.core.costs.update import work
from canzona_cli.core.optimizers import gram_form, muon, muon_facts
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.optimizers.gram_form import gram_newton_schulz
from canzona_cli.core.optimizers.muon_facts import MUON_AROUND, CoefficientSet, iteration_work, segments
from canzona_cli.core.optimizers.newton_schulz import COEFFICIENTS, coefficients, newton_schulz
from canzona_cli.core.setup import Form
from canzona_cli.optimizers import Muon, NorMuon, Workspace

from . import reference
from .adversarial import KINDS, adversarial

HELD: tuple[tuple[CoefficientSet, float], ...] = (("quintic", 1.1), ("simple", 1.1), ("polar_express", 1.25))
SPECTRA = ("gaussian", "decaying by 10", "four large")


def exact(x: torch.Tensor, steps: Sequence[tuple[float, float, float]]) -> torch.Tensor:
    """Evaluates the polynomial in fp64."""
    y: torch.Tensor = x.double()
    for a, b, c in steps:
        gram = y @ y.mT
        y = a * y + torch.matmul(b * gram + c * gram @ gram, y)
    return y


def spectrum(name: str, rows: int, cols: int) -> torch.Tensor:
    """Draws a matrix of norm 1 in fp64."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if name != "gaussian":
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        values = torch.logspace(0, -1, rows) if name == "decaying by 10" else torch.full((rows,), 0.02)
        values[:4] = values[:4].clamp_min(0.5)
        x = (u * values) @ v
    return torch.div(x, x.norm())


def polar(x: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return torch.mm(u, v)


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """Root mean square over the short side."""
    return float((x.double() - y).norm()) / math.sqrt(min(x.shape))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ns", COEFFICIENTS)
def test_in_fp32_it_is_the_polynomial_of_every_set(ns: CoefficientSet, steps: int) -> None:
    """Rounding, 6e-8, grows with the slopes: 477 in five steps, 8e-6 for standard too. Tall is wide, transposed, and a
    stack is each of its matrices."""
    triples = coefficients(ns, steps)
    x = torch.stack([spectrum("gaussian", 24, 60), spectrum("decaying by 10", 24, 60)])
    want = torch.stack([exact(one, triples) for one in x])
    for given, wanted in ((x, want), (x.mT.contiguous(), want.mT)):
        found, trusted = gram_newton_schulz(given.float(), triples, Workspace())
        torch.testing.assert_close(found, wanted.float(), rtol=0, atol=1e-4)
        assert trusted.tolist() == [True, True]
        for number, one in enumerate(given):
            alone, good = gram_newton_schulz(one.float().clone(), triples, Workspace())
            torch.testing.assert_close(alone, wanted[number].float(), rtol=0, atol=1e-4)
            assert bool(good)


def test_in_bf16_it_is_as_near_to_the_polar_factor_as_standard() -> None:
    """The error is at most 1.1 times as large: squares without their mean taken out, or without a restart, are 1.7 to
    30 times. The steep first steps of polar_express cost a little more."""
    for name in SPECTRA:
        x = spectrum(name, 128, 384).bfloat16()
        ideal = polar(x)
        for ns, ratio in HELD:
            triples = coefficients(ns, 5)
            standard = newton_schulz(x.clone(), triples, Workspace())
            gram, trusted = gram_newton_schulz(x.clone(), triples, Workspace())
            assert bool(trusted)
            assert apart(gram, ideal) <= ratio * apart(standard, ideal), (name, ns)


class Launched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the operations that a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        written = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        places = {value.untyped_storage().data_ptr() for value in read}
        view = all(value.untyped_storage().data_ptr() in places for value in written) and not func._schema.is_mutable
        if not view:
            self.names.append(func.name())
        return found


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_a_gpu_gets_the_launches_that_plans_count_and_no_numbers_that_the_host_knows(steps: int) -> None:
    """101 for five steps; working alpha and what follows from it out on the device took 195."""
    assert sum(segments(steps)) == steps
    x = spectrum("gaussian", 24, 56).half()[None]
    triples, workspace = coefficients("quintic", steps), Workspace()
    gram_newton_schulz(x.clone(), triples, workspace)  # makes the scratch
    with Launched() as found:
        gram_newton_schulz(x, triples, workspace)
    how = Algorithm(name="muon", ns_steps=steps, form="gram", stack=True)
    assert len(found.names) == work(how, 24, 56)[0].launches - MUON_AROUND
    assert steps != 5 or len(found.names) == 101


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operations read and write, what they work on in place both ways."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        given = kwargs or {}
        found = func(*args, **given)
        read = tree_leaves((args, {key: value for key, value in given.items() if key != "out"}))
        if func.overloadpacket is torch.ops.aten._fused_sgd_:
            if not bool(given["found_inf"]):
                self.bytes += 2 * args[0][0].nbytes + args[1][0].nbytes  # type: ignore[index]
        elif not func.is_view:
            self.bytes += sum(value.nbytes for value in (*read, found) if isinstance(value, torch.Tensor))
        if func.overloadpacket is torch.ops.aten.linalg_vector_norm and given.get("dtype") is torch.float64:
            self.bytes += 2 * 8 * read[0].numel()  # of a copy that it makes
        return found


@pytest.mark.parametrize(
    ("form", "kind", "stack", "fused"),
    [("standard", Muon, False, False), ("standard", NorMuon, True, False), ("gram", Muon, True, False),
     ("gram", NorMuon, False, True), ("gram", NorMuon, False, False), ("gram", NorMuon, True, True)],
)  # fmt: skip
def test_a_gpu_moves_around_the_iteration_what_plans_count(
    form: Form, kind: type[Muon], stack: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's part comes on top: whether weights are finite, 4 bytes, and their rounded copy, 6."""

    def iterated(x: torch.Tensor, _steps: object, _workspace: object, into: torch.Tensor | None = None) -> Any:
        return x if into is None else into, torch.ones(x.shape[:-2], dtype=torch.bool)

    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr(muon, "gram_dtype", lambda dtype, _: gram_form.gram_dtype(dtype, torch.device("cuda")))
    monkeypatch.setattr(muon, "newton_schulz", lambda x, *_: x)
    monkeypatch.setattr(muon, "gram_newton_schulz", iterated)
    both = [torch.nn.Parameter(torch.ones(256, 512)) for _ in range(2)]
    how = Algorithm(name="muon" if kind is Muon else "normuon", form=form, stack=stack, fused=fused)
    optimizer = kind(both, 0.01, form=form, stack=stack, fused=fused)
    for p in both:
        p.grad = torch.ones(256, 512)
    optimizer.step()  # makes state and scratch
    with Moved() as moved:  # type: ignore[no-untyped-call]
        optimizer.step()
    planned = work(how, 256, 512)[0].traffic - iteration_work(how, 256, 512).traffic
    assert moved.bytes / 2 == pytest.approx(planned - 10 * both[0].numel(), rel=1e-2)


def updated(x: torch.Tensor, form: Form, ns: CoefficientSet) -> tuple[torch.Tensor, bool]:
    """Returns what Muon makes of a gradient, of singular values about 1, and whether it fell back."""
    told: list[str] = []
    p = torch.nn.Parameter(torch.zeros_like(x))
    p.grad = x
    Muon(
        [p],
        1.0,
        weight_decay=0.0,
        momentum=0.0,
        scale_factor=1.0,
        scale_mode="unit_rms_norm",
        coefficients=ns,
        form=form,
        on_fallback=lambda _, reason: told.append(reason),
    ).step()
    return -p.detach() / (x.size(0) / x.size(1)) ** 0.5, bool(told)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [36, pytest.param(540, marks=pytest.mark.sweep)])
def test_bad_results_of_adversarial_matrices_are_found(
    count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is not finite comes of what is; no error is above 10 times standard's without a fallback, which is
    standard's bit by bit (in fp16, as on CUDA, but for what is below its normal numbers). Below 2^-8, bf16's rounding,
    errors are chance; and where the polynomial itself is far from the polar factor, standard is near to it by
    chance."""
    kind_of = gram_form.gram_dtype
    monkeypatch.setattr(muon, "gram_dtype", lambda dtype, _: kind_of(dtype, torch.device(device)))
    sets = [*COEFFICIENTS]
    fell = 0
    for seed in range(count):
        kind, x = adversarial(seed)
        ns = sets[seed // len(KINDS) % len(sets)]
        standard, _ = updated(x, "standard", ns)
        gram, fallen = updated(x, "gram", ns)
        fell += fallen
        if not bool(x.isfinite().all()):
            continue
        if bool(standard.isfinite().all()):
            assert bool(gram.isfinite().all()), (seed, kind, ns)
        if not bool(x.any()):
            assert not bool(gram.any())
        elif fallen:
            torch.testing.assert_close(gram, standard, rtol=0, atol=0 if device == "cpu" else 2.0**-24)
        elif bool(standard.isfinite().all()):
            unit = x.double() / x.double().norm()
            ideal = polar(unit)
            allowed = max(apart(standard, ideal), apart(exact(unit, coefficients(ns, 5)), ideal), 2.0**-8)
            assert apart(gram, ideal) <= 10 * allowed, (seed, kind, ns)
    assert fell


@pytest.mark.parametrize("stack", [False, True])
def test_doubted_updates_and_the_next_are_made_in_standard_form(stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is tried again."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon_facts.STANDARD_STEPS", 2)
    monkeypatch.setattr("canzona_cli.core.optimizers.gram_form.DOUBT", -1.0)
    shapes = [(12, 40), (12, 40), (40, 12)]
    grads = reference.gradients(shapes, 5)
    told: list[torch.Tensor] = []
    standard, _ = reference.run(lambda p: Muon(p, 0.02), shapes, grads)
    fallen, optimizer = reference.run(
        lambda p: Muon(p, 0.02, form="gram", stack=stack, on_fallback=lambda q, _: told.append(q)), shapes, grads
    )
    assert all(torch.equal(a, b) for a, b in zip(standard, fallen, strict=True))
    # In the first step and the fourth.
    assert [id(q) for q in told] == [id(p) for p in optimizer.param_groups[0]["params"]] * 2
    assert [optimizer.state[q][muon_facts.DISTRUSTED] for q in optimizer.param_groups[0]["params"]] == [1, 1, 1]


def test_where_nobody_waits_a_doubted_update_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes are CUDA's: whole tensors, and flags that the host reads later."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr("canzona_cli.core.optimizers.muon_facts.STANDARD_STEPS", 2)
    (p, q), grads = reference.weights([(12, 40), (12, 40)]), reference.gradients([(12, 40), (12, 40)], 4)
    optimizer = Muon([p, q], 0.02, form="gram")
    before = p.detach().clone()
    with monkeypatch.context() as doubting:
        doubting.setattr("canzona_cli.core.optimizers.gram_form.DOUBT", -1.0)
        reference.step_through(optimizer, [p, q], grads[:1])
    torch.testing.assert_close(p.detach(), before * (1 - 0.02 * 0.1))
    doubted = optimizer.untrusted_count()
    assert doubted is not None
    assert doubted.item() == 2
    assert [id(one) for one in optimizer.distrust_skipped()] == [id(p), id(q)]
    twin = torch.nn.Parameter(p.detach().clone())
    other = Muon([twin], 0.02)
    other.state[twin] = {"momentum_buffer": optimizer.state[p]["momentum_buffer"].clone()}
    for step in (1, 2):
        reference.step_through(optimizer, [p, q], [grads[step]])
        reference.step_through(other, [twin], [grads[step][:1]])
        assert torch.equal(p, twin)
        assert not optimizer.untrusted_count()
    reference.step_through(optimizer, [p, q], grads[3:])
    reference.step_through(other, [twin], [grads[3][:1]])
    assert not torch.equal(p, twin)
    doubted = optimizer.untrusted_count()
    assert doubted is not None
    assert doubted.item() == 0


def test_forms_are_chosen_by_shape() -> None:
    shapes = [(12, 40), (16, 16)]
    form: dict[tuple[int, int], Form] = {(12, 40): "gram", (16, 16): "standard"}
    grads = reference.gradients(shapes, 2)
    chosen, standard, gram = (
        reference.run(make, shapes, grads)[0]
        for make in (
            lambda p: Muon(p, 0.02, form=form),
            lambda p: Muon(p, 0.02),
            lambda p: Muon(p, 0.02, form="gram"),
        )
    )
    assert torch.equal(chosen[0], gram[0])
    assert not torch.equal(chosen[0], standard[0])
    assert torch.equal(chosen[1], standard[1])


def test_tall_loses_no_more_than_wide() -> None:
    """The result is the transposed one but for the order of sums: polynomials that do not quite commute, in the same
    order."""
    x = spectrum("gaussian", 64, 66).bfloat16()
    steps = coefficients("quintic", 5)
    wide = gram_newton_schulz(x.clone(), steps, Workspace())[0].clone()
    tall = gram_newton_schulz(x.mT.contiguous(), steps, Workspace())[0].mT
    wanted = exact(x, steps)
    assert apart(tall, wanted) < 1.3 * apart(wide, wanted)


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "passes of a device"])
def test_zeros_are_no_reason_for_doubt(stack: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another matrix moves in the same step; afterwards both are in Gram form."""
    if on_device:
        monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    told: list[str] = []
    params = [torch.nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
    optimizer = Muon(
        params, 0.02, form="gram", stack=stack, weight_decay=0.0, on_fallback=lambda _, text: told.append(text)
    )
    params[0].grad = torch.zeros(64, 128)
    params[1].grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert told == []
    assert optimizer.distrust_skipped() == []
    assert not any(optimizer.is_distrusted(p) for p in params)
    assert torch.equal(params[0].detach(), torch.ones(64, 128))
    assert not torch.equal(params[1].detach(), torch.ones(64, 128))
