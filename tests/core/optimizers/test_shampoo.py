"""Shampoo is its papers' rule."""

from functools import partial

import pytest
import torch

from canzona_cli.core.optimizers.decompositions import roots_by_eigenvalues
from canzona_cli.core.optimizers.facts import RootMethod
from canzona_cli.core.optimizers.shampoo_facts import newton_part
from canzona_cli.optimizers import Shampoo

from . import reference as reference

SHAPES = [(10, 10), (8, 14), (14, 8)]
RULE = {"weight_decay": 0.3, "betas": (0.8, 0.9), "shampoo_beta": 0.7, "eps": 1e-8, "shampoo_eps": 1e-2}


@pytest.mark.parametrize("period", [1, 3])
def test_is_the_papers_rule(period: int) -> None:
    """eps 1e-2 keeps an inverse fourth root's condition below 1e2^(1/4) a side, so fp32 keeps six digits."""
    reference.assert_rule(
        lambda p: Shampoo(p, 0.02, precondition_frequency=period, **RULE),  # type: ignore[arg-type]
        SHAPES,
        reference.gradients(SHAPES, 7),
        partial(reference.shampoo, lr=0.02, period=period, **RULE),  # type: ignore[arg-type]
        rtol=2e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("roots", ["newton", "eigh"])
@pytest.mark.parametrize("period", [2, 3, 10])
def test_a_refresh_in_parts_is_the_papers_with_later_roots(roots: RootMethod, period: int) -> None:
    """Roots are those of the factors at a period's beginning, used from the last step of Newton's iteration on, by both
    methods. Rounding: 1.3e-5 seen after forty steps of about 0.02; asserted 5e-5."""
    late = newton_part(6, 7, period)
    reference.assert_rule(
        lambda p: Shampoo(p, 0.02, precondition_frequency=period, spread=True, roots=roots, **RULE),  # type: ignore[arg-type]
        [(8, 14), (10, 10)],
        reference.gradients([(8, 14), (10, 10)], 4 * period),
        partial(reference.shampoo, lr=0.02, period=period, late=late, **RULE),  # type: ignore[arg-type]
        rtol=1e-4,
        atol=5e-5,
    )


@pytest.mark.parametrize(("max_dim", "left", "right"), [(10, True, False), (7, False, False)])
def test_long_sides_are_left_alone(max_dim: int, left: bool, right: bool) -> None:
    optimizer = reference.assert_rule(
        lambda p: Shampoo(p, 0.02, max_preconditioner_dim=max_dim, **RULE),  # type: ignore[arg-type]
        [(8, 14)],
        reference.gradients([(8, 14)], 5),
        partial(reference.shampoo, lr=0.02, period=10, left=left, right=right, **RULE),  # type: ignore[arg-type]
        rtol=2e-5,
        atol=2e-6,
    )
    assert {name for name, _ in reference.states(optimizer)} & {"L", "R"} == ({"L"} if left else set())


def test_noise_below_rounding_is_not_amplified() -> None:
    """A factor of one gradient has rank 4 of 32; what is beyond gets no more than the root of rounding."""
    g = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    root = roots_by_eigenvalues(g @ g.T, 4, 1e-12)
    largest = torch.linalg.matrix_norm(g @ g.T, 2)
    assert torch.linalg.matrix_norm(root, 2) <= (largest * 32**0.5 * 2**-23) ** -0.25 * 1.001


def test_zero_gradients_stay_finite_and_teach_later_steps_nothing() -> None:
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Shampoo([p], 0.1)
    reference.step_through(optimizer, [p], [[torch.zeros(4, 6)], [torch.ones(4, 6)]])
    assert p.isfinite().all()
    assert torch.equal(reference.unpacked(optimizer.state[p], "root_L", 4), torch.eye(4))
