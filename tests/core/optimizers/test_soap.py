"""SOAP is emerging-optimizers' rule at a period of one, and the paper's at any."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from emerging_optimizers.soap import SOAP as EmergingSOAP

from canzona_cli.optimizers import SOAP

from . import reference as reference

# One gradient's factor has rank min(rows, cols). In the null space a basis is arbitrary, and Adam divides rounding by
# rounding; eps far above rounding (1e-7) keeps that out of a comparison. From the second step on the rank is full. Near
# gradients' own size it also keeps the rule, which knows no bound, within the bound (`test_bounds`).
SHAPES = [(10, 10), (8, 14), (14, 8)]
SQUARES = [(10, 10), (13, 13)]
EPS = 0.5


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Leaves emerging-optimizers' Adam uncompiled: compiling takes seconds and changes nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.99)])
def test_refreshed_at_every_step_it_is_emergings(betas: tuple[float, float]) -> None:
    """Square matrices: what one gradient leaves undecided, we choose by ourselves."""
    grads = reference.gradients(SQUARES, 8)
    ours, mine = reference.run(
        lambda p: SOAP(p, 0.02, betas=betas, eps=EPS, shampoo_beta=0.9, precondition_frequency=1), SQUARES, grads
    )
    theirs, other = reference.run(
        lambda p: EmergingSOAP(
            p,
            0.02,
            betas=betas,
            eps=EPS,
            shampoo_beta=0.9,
            weight_decay=0.1,
            fp32_matmul_prec="highest",
            qr_fp32_matmul_prec="highest",
        ),
        SQUARES,
        grads,
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    for (side, _), one, two in zip(SQUARES, mine.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert one["step"] == two["step"] == 8
        for key in ("L", "R"):
            torch.testing.assert_close(reference.unpacked(one, key, side), two[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("period", "spread"), [(2, False), (3, False), (10, False), (2, True), (3, True), (4, True)])
def test_is_the_papers_rule_at_any_period(period: int, spread: bool) -> None:
    """The first moment is the plain average of gradients, turned at each use: keeping it turned is the
    same. Spread over a period, bases are those of its beginning, used from its last step on. Square matrices: in a null
    space the bases of fp32 and fp64 would have nothing in common."""
    settings = {"weight_decay": 0.3, "betas": (0.8, 0.9), "shampoo_beta": 0.9, "eps": EPS}
    reference.assert_rule(
        lambda p: SOAP(p, 0.02, precondition_frequency=period, spread=spread, **settings),  # type: ignore[arg-type]
        SQUARES,
        reference.gradients(SQUARES, 14),
        partial(reference.soap, lr=0.02, period=period, late=period - 1 if spread else None, **settings),  # type: ignore[arg-type]
        rtol=1e-4,
        atol=2e-5,
    )


def test_with_both_sides_long_it_is_adamw() -> None:
    grads = reference.gradients(SHAPES, 6)
    ours, _ = reference.run(lambda p: SOAP(p, 0.02, max_preconditioner_dim=4), SHAPES, grads)
    adamw, _ = reference.run(lambda p: torch.optim.AdamW(p, 0.02, (0.9, 0.95), 1e-8, 0.1), SHAPES, grads)
    for a, b in zip(ours, adamw, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_long_side_is_not_rotated() -> None:
    """Adam of Q_L^T G alone; nothing mixes columns, so a column's update knows its own gradients only."""
    (p,) = reference.weights([(8, 14)])
    optimizer = SOAP([p], 0.02, max_preconditioner_dim=10, eps=EPS, precondition_frequency=1)
    reference.step_through(optimizer, [p], reference.gradients([(8, 14)], 3))
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq", "L", "Q_L"}
    before = p.detach().clone()
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in optimizer.state[p].items()
    }
    grad = reference.gradients([(8, 14)], 1, seed=5)[0][0]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    reference.step_through(optimizer, [p], [[grad]])
    q, turned = optimizer.state[p]["Q_L"], None
    turned = q.T @ (state["Q_L"] @ state["exp_avg"])
    turned = 0.9 * turned + 0.1 * q.T @ grad
    adam = (turned / (1 - 0.9**4)) / ((optimizer.state[p]["exp_avg_sq"] / (1 - 0.95**4)).sqrt() + EPS)
    torch.testing.assert_close(p.detach(), before - 0.02 * q @ adam, rtol=1e-4, atol=1e-5)
