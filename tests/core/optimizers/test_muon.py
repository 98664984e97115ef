"""Muon is emerging-optimizers' and torch's Muon, in any execution."""

from typing import Any, Literal

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

from canzona_cli.core.optimizers.muon_facts import CoefficientSet, ScaleMode
from canzona_cli.core.optimizers.newton_schulz import COEFFICIENTS, newton_schulz
from canzona_cli.optimizers import Muon, Workspace

from . import reference as reference

SHAPES = [(16, 16), (12, 40), (40, 12), (1, 8), (8, 1), (33, 17)]
NS_SETS = list(COEFFICIENTS)

# Five steps of updates of about 0.1, from fp32 products of sides up to 40: rounding comes to about 1e-6.
RTOL, ATOL = 1e-5, 5e-6
# Sums in another order may round the other way in bf16. Then elements of an orthogonalised matrix, at most 1, differ by
# a rounding, 2^-8, which the iteration multiplies by its slope near 1, below 4; five updates of lr 0.02 and scale
# 0.2 sqrt(40).
BF16_ATOL = 5 * 0.02 * 0.2 * 40**0.5 * 4 * 2**-8


def theirs(params: list[torch.nn.Parameter], *, ns: CoefficientSet = "quintic", **settings: object) -> EmergingMuon:
    given = {"nesterov": True, "fp32_matmul_prec": "highest", "extra_scale_factor": 0.2, "weight_decay": 0.1}
    return EmergingMuon(params, 0.02, coefficient_type=ns, **{**given, **settings})


def assert_same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize("ns", NS_SETS)
def test_every_coefficient_set_is_emergings(ns: CoefficientSet, steps: int) -> None:
    grads = reference.gradients(SHAPES, 5)
    ours, _ = reference.run(lambda p: Muon(p, 0.02, precision="fp32", coefficients=ns, ns_steps=steps), SHAPES, grads)
    others, _ = reference.run(lambda p: theirs(p, ns=ns, num_ns_steps=steps), SHAPES, grads)
    assert_same(ours, others)


@pytest.mark.parametrize(("mode", "nesterov"), [("spectral", True), ("unit_rms_norm", False), ("shape_scaling", True)])
def test_scales_and_momentum_are_emergings(mode: ScaleMode, nesterov: bool) -> None:
    grads = reference.gradients(SHAPES, 6)
    ours, _ = reference.run(
        lambda p: Muon(
            p,
            0.02,
            precision="fp32",
            scale_mode=mode,
            nesterov=nesterov,
            momentum=0.8,
            scale_factor=0.7,
            weight_decay=3.0,
        ),
        SHAPES,
        grads,
    )
    others, _ = reference.run(
        lambda p: theirs(p, scale_mode=mode, nesterov=nesterov, momentum=0.8, extra_scale_factor=0.7, weight_decay=3.0),
        SHAPES,
        grads,
    )
    assert_same(ours, others)


def test_bf16_is_as_near_to_torchs_muon_as_that_is_to_fp32() -> None:
    """torch's iterates in bf16 alone, from a gradient it rounds before it takes the norm."""
    grads = reference.gradients(SHAPES, 5)
    exact, low, torchs = (
        reference.run(make, SHAPES, grads)[0]
        for make in (
            lambda p: Muon(p, 0.02, precision="fp32", coefficients="simple"),
            lambda p: Muon(p, 0.02, coefficients="simple"),
            lambda p: torch.optim.Muon(p, 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        )
    )
    for a, b, c in zip(exact, low, torchs, strict=True):
        assert distance(b, c) <= 2 * distance(a, c) + 1e-6


@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64), (96, 1600), (800, 1600)])
def test_bf16_errs_no_more_than_emergings_bf16(shape: tuple[int, int]) -> None:
    """Both round every product to 8 bits. Which way a sum rounds differs with its order, so errors differ by chance;
    over a matrix of thousands of elements by far less than half. (800, 1600) takes the strips."""
    grads = reference.gradients([shape], 1)
    exact, ours, others = (
        reference.run(make, [shape], grads)[0][0]
        for make in (
            lambda p: Muon(p, 0.02, precision="fp32"),
            lambda p: Muon(p, 0.02),
            lambda p: theirs(p, fp32_matmul_prec="medium"),
        )
    )
    assert 0 < distance(ours, exact) <= 1.5 * distance(others, exact)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stacked_is_unstacked(precision: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks have all matrices of a shape, or at most so many; a matrix that is left over is updated alone."""
    shapes = [(12, 40), (40, 12), (12, 40), (16, 16), (12, 40), (40, 12)]
    grads = reference.gradients(shapes, 5)
    apart, _ = reference.run(lambda p: Muon(p, 0.02, precision=precision), shapes, grads)
    together, _ = reference.run(lambda p: Muon(p, 0.02, precision=precision, stack=True), shapes, grads)
    batches: list[tuple[int, ...]] = []

    def recording(x: torch.Tensor, *given: Any) -> torch.Tensor:
        batches.append(tuple(x.shape))
        return newton_schulz(x, *given)

    monkeypatch.setattr("canzona_cli.core.optimizers.muon.newton_schulz", recording)
    at_most = {(12, 40): 2, (40, 12): 9}
    some, _ = reference.run(lambda p: Muon(p, 0.02, precision=precision, stack=at_most), shapes, grads)
    assert sorted(batches) == sorted([(2, 12, 40), (12, 40), (16, 16), (2, 40, 12)] * 5)
    tolerance = ATOL if precision == "fp32" else BF16_ATOL
    for a, b, c in zip(apart, together, some, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
        torch.testing.assert_close(a, c, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("precision", "nesterov"), [("fp32", True), ("bf16", False)])
def test_blocks_of_rows_are_the_whole_matrix(
    nesterov: bool, precision: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole-tensor passes are what runs on CUDA. Passes are elementwise; only the norm is summed in another order,
    which in bf16 turns a rounding of the normalised matrix over here and there (as in the stacked case)."""
    grads = reference.gradients(SHAPES, 4)

    def run() -> list[torch.Tensor]:
        return reference.run(lambda p: Muon(p, 0.02, precision=precision, nesterov=nesterov), SHAPES, grads)[0]

    monkeypatch.setattr("canzona_cli.core.optimizers.muon_cpu.BLOCK", 50)
    blocked = run()
    monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    for a, b in zip(blocked, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=RTOL, atol=ATOL if precision == "fp32" else BF16_ATOL)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stack", [False, True])
def test_zero_gradient_only_decays(precision: Literal["fp32", "bf16"], stack: bool) -> None:
    before = reference.weights(SHAPES)
    after, _ = reference.run(
        lambda p: Muon(p, 0.02, precision=precision, stack=stack),
        SHAPES,
        [[torch.zeros(shape) for shape in SHAPES]],
    )
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old.detach() * (1 - 0.02 * 0.1))


def test_steps_after_the_first_allocate_no_scratch() -> None:
    params = reference.weights(SHAPES)
    workspace = Workspace()
    first, second = Muon(params[:3], 0.02, workspace=workspace), Muon(params[3:], 0.02, workspace=workspace)
    grads = reference.gradients(SHAPES, 3)
    held = set()
    for of_step in grads:
        reference.step_through(first, params[:3], [of_step[:3]])
        reference.step_through(second, params[3:], [of_step[3:]])
        held.add(workspace.nbytes)
    assert len(held) == 1


def test_gradient_may_be_strided_and_is_only_read() -> None:
    (p,) = reference.weights([(12, 40)])
    (q,) = reference.weights([(12, 40)])
    grad = torch.randn(40, 24).T[::2]
    kept = grad.clone()
    p.grad, q.grad = grad, grad.contiguous()
    Muon([p], 0.02).step()
    Muon([q], 0.02).step()
    assert torch.equal(p, q)
    assert torch.equal(grad, kept)


def test_fp32_holds_whatever_the_process_has_set() -> None:
    grads = reference.gradients([(48, 96)], 2)
    exact, _ = reference.run(lambda p: Muon(p, 0.02, precision="fp32"), [(48, 96)], grads)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        again, _ = reference.run(lambda p: Muon(p, 0.02, precision="fp32"), [(48, 96)], grads)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(exact[0], again[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"ns_steps": 0}, "ns_steps is 0"), ({"weight_decay": -1.0}, "weight_decay is -1.0")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Muon(reference.weights([(4, 4)]), 0.02, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [torch.zeros(4), torch.zeros(4, 4).bfloat16(), torch.zeros(4, 6).T])
def test_other_than_whole_matrices_are_refused(p: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous 2-D float32"):
        Muon([torch.nn.Parameter(p)], 0.02)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["blocks", "whole", "stack", "gram"])
def test_updates_do_not_depend_on_the_gradients_scale(
    how: str, precision: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two not by a bit; others by the rounding of the scaled gradient: 6e-8 in fp32 times the slopes, and in
    bf16 an element here and there that rounds the other way."""
    if how == "whole":
        monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    shapes = [(12, 40), (12, 40)]
    grads = reference.gradients(shapes, 2)

    form: Literal["standard", "gram"] = "gram" if how == "gram" else "standard"

    def moved(factor: float) -> torch.Tensor:
        made = reference.run(
            lambda p: Muon(p, 1.0, weight_decay=0, precision=precision, stack=how == "stack", form=form),
            shapes,
            [[grad * factor for grad in of_step] for of_step in grads],
        )[0]
        return torch.cat([new - old.detach() for new, old in zip(made, reference.weights(shapes), strict=True)])

    one = moved(1.0)
    for exponent in (-90, -40, 40, 90):
        assert torch.equal(moved(2.0**exponent), one), exponent
    for factor in (1e-30, 1e-9, 1e30):
        assert distance(moved(factor), one) <= (1e-5 if precision == "fp32" else 2e-2) * float(one.norm()), factor
