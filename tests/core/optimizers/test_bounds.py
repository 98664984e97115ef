"""However few directions gradients have: no update is far longer than it should be, and rounding does not decide."""

import pytest
import torch

from canzona_cli.core.optimizers.decompositions import eigenbasis, orthonormalise
from canzona_cli.core.optimizers.soap import LONGEST
from canzona_cli.optimizers import SOAP

from . import reference as reference

RANKS = [1, 4, 48]


def _gradients(rank: int, steps: int, *, noise: float = 0.0) -> list[torch.Tensor]:
    """Yields gradients of a root mean square of about 0.01, of `rank` directions each, which differ at every step.

    Args:
        noise: Relative, of all directions, and drawn apart.
    """
    drawn, other = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    found = []
    for _ in range(steps):
        left, right = torch.randn(48, rank, generator=drawn), torch.randn(rank, 64, generator=drawn)
        grad = left @ right * (0.01 / rank**0.5)
        found.append(grad + noise * grad.square().mean().sqrt() * torch.randn(48, 64, generator=other))
    return found


def _moves(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lists the moves by step, in learning rates, where the rate is 1."""
    found = []
    for grad in grads:
        before = p.detach().clone()
        reference.step_through(optimizer, [p], [[grad]])
        found.append(p.detach() - before)
    return found


@pytest.mark.parametrize("period", [1, 2, 10])
@pytest.mark.parametrize("rank", RANKS)
def test_soap_moves_no_further_than_adam(rank: int, period: int) -> None:
    """Unbounded: up to 7,000 learning rates at a period of 1. At usual periods nothing has to be bounded."""
    told: list[str] = []
    p = torch.nn.Parameter(torch.zeros(48, 64))
    optimizer = SOAP(
        [p], 1.0, weight_decay=0.0, precondition_frequency=period, on_fallback=lambda _, reason: told.append(reason)
    )
    sizes = [float(move.square().mean().sqrt()) for move in _moves(optimizer, p, _gradients(rank, 40))]
    assert max(sizes) <= LONGEST
    assert all("learning rates long; it was bounded" in reason for reason in told)
    assert bool(told) == (period == 1) or period == 2


@pytest.mark.parametrize(("rank", "allowed"), [(4, 1e-3), (16, 1e-3), (48, 0.25)])
def test_rounding_does_not_decide_where_soap_goes(rank: int, allowed: float) -> None:
    """Gradients 3e-7 apart. With arbitrary eigenvectors, and noise divided by noise, runs were 60 to 81% of their way
    apart after three steps; seen now 8e-7, 9e-5 and 0.08: of 48 directions the least have singular values that are
    rounding to the factors."""
    ends = []
    for noise in (0.0, 3e-7):
        p = torch.nn.Parameter(torch.zeros(48, 64))
        _moves(SOAP([p], 1.0, weight_decay=0.0), p, _gradients(rank, 3, noise=noise))
        ends.append(p.detach())
    assert (ends[0] - ends[1]).norm() < allowed * ends[0].norm()


def test_what_no_gradient_has_does_not_move() -> None:
    """The same four directions at every step. Across them everything is rounding, of 1e-7 of the gradient; Adam would
    make whole steps of it, 98% of the way: seen 17%."""
    left = torch.linalg.qr(torch.randn(48, 4, generator=torch.Generator().manual_seed(0))).Q
    p = torch.nn.Parameter(torch.zeros(48, 64))
    grads = [left @ left.T @ grad for grad in _gradients(48, 12)]
    for move in _moves(SOAP([p], 1.0, weight_decay=0.0, eps=1e-30, precondition_frequency=3), p, grads):
        assert (move - left @ (left.T @ move)).norm() < 0.4 * move.norm()


def test_bases_of_few_directions_are_nearly_the_same_for_nearly_the_same_factors() -> None:
    """The same holds for columns that the factor says nothing about; each column with its sign, orthonormal."""
    one, other = (grad @ grad.T for grad in (_gradients(4, 1)[0], _gradients(4, 1, noise=3e-7)[0]))
    basis = eigenbasis(one)
    torch.testing.assert_close(basis.T @ basis, torch.eye(48), rtol=0, atol=1e-5)
    torch.testing.assert_close(basis, eigenbasis(other), rtol=0, atol=1e-4)
    assert bool((basis.gather(0, basis.abs().argmax(0, keepdim=True))[:, :4] > 0).all()), "signs are the library's"
    diagonal = (basis.T @ one @ basis).diagonal()
    torch.testing.assert_close(diagonal[:4], torch.linalg.eigvalsh(one).flip(0)[:4], rtol=1e-4, atol=0)


def test_a_refresh_leaves_what_it_knows_nothing_of_as_it_was() -> None:
    """Four directions of a factor, of which the previous basis had two: the other two come from its remaining columns,
    and the rest of those is only made orthogonal again."""
    previous = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(0))).Q
    new = torch.randn(48, 2, generator=torch.Generator().manual_seed(3))
    columns = torch.cat([previous[:, :2], new], dim=1)
    factor = columns @ columns.T
    basis = orthonormalise(factor @ previous, previous)
    torch.testing.assert_close(basis.T @ basis, torch.eye(48), rtol=0, atol=1e-5)
    outside = factor - basis[:, :4] @ (basis[:, :4].T @ factor)
    assert outside.norm() < 1e-5 * factor.norm()
    assert ((basis * previous).sum(0)[4:] > 0).all()
    columns *= 1 + 3e-7 * torch.randn(columns.shape, generator=torch.Generator().manual_seed(4))
    shaken = orthonormalise(columns @ columns.T @ previous, previous)
    torch.testing.assert_close(shaken, basis, rtol=0, atol=1e-3)
