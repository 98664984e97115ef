"""KL-Shampoo is the paper's at any period, and its statistics are emerging-optimizers'."""

from functools import partial

import pytest
import torch
from emerging_optimizers.soap.soap import update_kronecker_factors_kl_shampoo

from canzona_cli.optimizers import KLShampoo
from canzona_cli.optimizers.kronecker import pack

from . import reference as reference

RULE = {"weight_decay": 0.3, "shampoo_beta": 0.9}


@pytest.mark.parametrize(("period", "spread"), [(1, False), (3, False), (10, False), (2, True), (4, True)])
def test_is_the_papers_rule_at_any_period(period: int, spread: bool) -> None:
    """Square matrices: what one gradient leaves undecided, we choose by ourselves. Spread over a period, bases are
    those of its beginning, used from its last step on."""
    shapes, late = [(10, 10), (13, 13)], period - 1 if spread else None
    reference.assert_rule(
        lambda p: KLShampoo(p, 0.02, betas=(0.8, 0.9), precondition_frequency=period, spread=spread, **RULE),  # type: ignore[arg-type]
        shapes,
        reference.gradients(shapes, 14),
        partial(reference.kl_shampoo, lr=0.02, beta1=0.8, period=period, late=late, **RULE),  # type: ignore[arg-type]
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("shape", [(8, 14), (14, 8)])
def test_a_side_that_is_too_long_has_no_factor(shape: tuple[int, int]) -> None:
    left, right = (side == 8 for side in shape)
    reference.assert_rule(
        lambda p: KLShampoo(p, 0.02, precondition_frequency=2, max_preconditioner_dim=8, **RULE),  # type: ignore[arg-type]
        [shape],
        reference.gradients([shape], 9),
        partial(reference.kl_shampoo, lr=0.02, beta1=0.9, period=2, left=left, right=right, **RULE),  # type: ignore[arg-type]
        rtol=1e-4,
        atol=2e-5,
    )


def test_factors_are_averaged_as_by_emerging() -> None:
    """Eigenvectors and eigenvalues of the factors are known exactly; after so many steps nothing is corrected."""
    (p,) = reference.weights([(9, 12)])
    optimizer = KLShampoo([p], 0.02, shampoo_beta=0.8, precondition_frequency=10_000)
    reference.step_through(optimizer, [p], reference.gradients([(9, 12)], 1))
    state, factors, bases = optimizer.state[p], [], []
    state["step"] = 1000
    for number, (side, length, other) in enumerate((("L", 9, 12), ("R", 12, 9))):
        drawn = torch.Generator().manual_seed(number)
        values = torch.rand(length, generator=drawn) + 0.5
        bases.append(torch.linalg.qr(torch.randn(length, length, generator=drawn)).Q)
        factors.append(bases[-1] @ values.diag() @ bases[-1].T)
        state[f"Q_{side}"], state[f"eigenvalues_{side}"] = bases[-1].clone(), values
        state[side] = pack(factors[-1] * other, state[side])
    [[grad]] = reference.gradients([(9, 12)], 1, seed=5)
    reference.step_through(optimizer, [p], [[grad]])
    update_kronecker_factors_kl_shampoo(factors, grad, 0.8, bases, 1e-30)
    torch.testing.assert_close(reference.unpacked(state, "L", 9) / 12, factors[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reference.unpacked(state, "R", 12) / 9, factors[1], rtol=1e-5, atol=1e-6)
    # Eigenvalues are those of the new factors, in the basis that both had.
    for side, factor, basis in zip("LR", factors, bases, strict=True):
        expected = (basis.T @ factor @ basis).diagonal()
        torch.testing.assert_close(state[f"eigenvalues_{side}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2.0**-40, 2.0**-12, 2.0**20])
def test_updates_do_not_depend_on_the_gradients_scale(size: float) -> None:
    shapes = [(10, 14), (14, 10)]
    grads = reference.gradients(shapes, 8)
    plain, scaled = (
        reference.run(
            lambda p: KLShampoo(p, 0.02, precondition_frequency=3),
            shapes,
            [[factor * grad for grad in of_step] for of_step in grads],
        )[0]
        for factor in (1.0, size)
    )
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_matrix_may_begin_without_gradient_and_rows_may_have_none() -> None:
    (p,) = reference.weights([(8, 12)])
    before = p.detach().clone()
    optimizer = KLShampoo([p], 0.02, weight_decay=0.0, precondition_frequency=2)
    reference.step_through(optimizer, [p], [[torch.zeros(8, 12)]] * 3)
    assert torch.equal(p.detach(), before)
    grads = reference.gradients([(8, 12)], 6)
    for (grad,) in grads:
        grad[2:5] = 0
    reference.step_through(optimizer, [p], grads)
    assert p.isfinite().all()
    moved = (p.detach() - before).norm(dim=1)
    assert moved[2:5].max() < 1e-4 * moved[0]
