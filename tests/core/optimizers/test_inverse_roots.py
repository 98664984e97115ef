"""Inverse roots by Newton's iteration are those of eigenvalues in fp64, as exact as from eigenvalues in fp32, or are
told apart and replaced."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from canzona_cli.core.optimizers.decompositions import Order, damping, roots_by_eigenvalues, roots_by_newton
from canzona_cli.core.optimizers.shampoo_facts import NEWTON_MATMULS
from canzona_cli.optimizers import Shampoo

from . import reference as reference

EPS = 1e-12
"""`shampoo_eps`, as every run has it."""
SIDE = 96


def _factor(spectrum: str, condition: float) -> torch.Tensor:
    """Symmetric, positive definite, of small entries, as gradients' are."""
    basis = torch.linalg.qr(torch.randn(SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    values = {
        "even": torch.logspace(0, -math.log10(condition), SIDE, dtype=torch.float64),
        "half": torch.ones(SIDE, dtype=torch.float64).index_fill(0, torch.arange(SIDE // 2), 1 / condition),
        "one": torch.full((SIDE,), 1 / condition, dtype=torch.float64).index_fill(0, torch.tensor([0]), 1.0),
    }[spectrum]
    factor: torch.Tensor = (1e-9 * (basis * values) @ basis.mT).float()
    return factor


def _exact(factor: torch.Tensor, order: Order) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(factor.double())
    values = values.clamp_min(0) + damping(len(factor), EPS) * values[-1]
    exact: torch.Tensor = (vectors * values.pow(-1 / order)) @ vectors.mT
    return exact


def _error(root: torch.Tensor, exact: torch.Tensor) -> float:
    return float((root.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("spectrum", ["even", "half", "one"])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6, 1e8])
def test_newton_is_as_exact_as_eigenvalues(order: Order, spectrum: str, condition: float) -> None:
    """Either errs by rounding times the condition that damping leaves, at worst; Newton seen at 0.1 to 2 of it."""
    factor = _factor(spectrum, condition)
    exact = _exact(factor, order)
    roots, converged = roots_by_newton(factor[None], order, EPS)
    assert converged.tolist() == [True]
    left = 1 / (1 / condition + damping(SIDE, EPS))
    assert _error(roots[0], exact) <= 2.0**-24 * (8 + left)
    assert _error(roots_by_eigenvalues(factor, order, EPS), exact) <= 2.0**-24 * (32 + 4 * left)


@pytest.mark.parametrize("order", [2, 4])
def test_of_a_stack_each_is_told_by_itself(order: Order) -> None:
    """Zeros give the identity; what is not semi-definite, or no number, is told."""
    good, drawn = _factor("even", 1e4), torch.Generator().manual_seed(1)
    indefinite = torch.randn(SIDE, SIDE, generator=drawn)
    stack = torch.stack([good, torch.zeros_like(good), indefinite + indefinite.mT, good * torch.nan])
    roots, converged = roots_by_newton(stack, order, EPS)
    assert converged.tolist() == [True, True, False, False]
    torch.testing.assert_close(roots[1], torch.eye(SIDE), rtol=0, atol=1e-6)
    torch.testing.assert_close(roots[0], roots_by_newton(good[None], order, EPS)[0][0], rtol=1e-4, atol=0.01)


@pytest.mark.parametrize(("order", "sides"), [(4, 2), (2, 1)])
def test_the_plan_prices_the_products_that_are_made(order: Order, sides: int) -> None:
    with FlopCounterMode(display=False) as counted:
        roots_by_newton(torch.eye(SIDE)[None], order, EPS)
    vectors = 10 * 2 * SIDE**2
    assert counted.get_total_flops() - vectors == sum(NEWTON_MATMULS[sides]) * 2 * SIDE**3


def test_shampoo_by_newton_is_shampoo() -> None:
    """Roots of factors of few gradients, of a condition of 1e5."""
    shapes = [(24, 24), (24, 40), (40, 24)]
    grads = reference.gradients(shapes, 7)
    told: list[str] = []
    ours, _ = reference.run(
        lambda p: Shampoo(
            p, 0.02, roots="newton", precondition_frequency=3, on_fallback=lambda _, reason: told.append(reason)
        ),
        shapes,
        grads,
    )
    usual, _ = reference.run(lambda p: Shampoo(p, 0.02, precondition_frequency=3), shapes, grads)
    for mine, other, start in zip(ours, usual, reference.weights(shapes), strict=True):
        assert (mine - other).norm() <= 0.01 * (other - start).norm()
    assert not told


def test_what_does_not_converge_is_counted_and_taken_from_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    grads = reference.gradients([(8, 12)], 4)
    usual, _ = reference.run(lambda p: Shampoo(p, 0.02, precondition_frequency=2), [(8, 12)], grads)

    def never(factors: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return factors * torch.nan, torch.zeros(len(factors), dtype=torch.bool)

    monkeypatch.setattr("canzona_cli.core.optimizers.shampoo.roots_by_newton", never)
    fallen, _ = reference.run(
        lambda p: Shampoo(
            p, 0.02, roots="newton", precondition_frequency=2, on_fallback=lambda _, reason: told.append(reason)
        ),
        [(8, 12)],
        grads,
    )
    assert torch.equal(fallen[0], usual[0])
    assert (
        told
        == [f"the Newton iteration of {side} did not converge; its eigendecomposition is used" for side in ("L", "R")]
        * 2
    )
