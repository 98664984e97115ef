"""Naive update rules, written from the papers in fp64 and one formula a line, and runs that compare with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import _COEFFICIENT_SETS

from canzona_cli.core.optimizers.kronecker import unpack

Shape = tuple[int, int]


def gradients(shapes: Sequence[Shape], steps: int, seed: int = 1) -> list[list[torch.Tensor]]:
    """Gaussian gradients of every step and matrix."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def weights(shapes: Sequence[Shape]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def run(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    shapes: Sequence[Shape],
    grads: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Weights after the steps."""
    params = weights(shapes)
    optimizer = make(params)
    step_through(optimizer, params, grads)
    return [p.detach() for p in params], optimizer


def assert_rule(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    shapes: Sequence[Shape],
    grads: Sequence[Sequence[torch.Tensor]],
    rule: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
    *,
    rtol: float,
    atol: float,
) -> torch.optim.Optimizer:
    """Asserts that an optimizer moves each weight as a naive rule does by that weight's gradients."""
    ours, optimizer = run(make, shapes, grads)
    for index, (mine, start) in enumerate(zip(ours, weights(shapes), strict=True)):
        naive = rule(start.detach(), [of_step[index] for of_step in grads])
        torch.testing.assert_close(mine.double(), naive, rtol=rtol, atol=atol)
    return optimizer


def step_through(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    grads: Sequence[Sequence[torch.Tensor]],
) -> None:
    for of_step in grads:
        for p, grad in zip(params, of_step, strict=True):
            p.grad = grad.clone()
        optimizer.step()


def shampoo(
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    shampoo_beta: float,
    eps: float,
    shampoo_eps: float,
    period: int,
    left: bool = True,
    right: bool = True,
    late: int | None = None,
) -> torch.Tensor:
    """Shampoo (Gupta et al. 2018, algorithm 1) with averages and grafting (Shi et al. 2023, algorithm 2).

    Args:
        late: by how many steps roots are used later than those of the third refresh's and later factors; None: none
            are.
    """
    w = weight.double()
    rows, cols = w.shape
    L, R = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    root_l, root_r = torch.eye(rows).double(), torch.eye(cols).double()
    power = -1 / (2 * (left + right)) if left or right else 0.0
    for index, grad in enumerate(grads):
        g, t = grad.double(), index + 1
        L = shampoo_beta * L + (1 - shampoo_beta) * g @ g.T
        R = shampoo_beta * R + (1 - shampoo_beta) * g.T @ g
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        corrected = 1 - shampoo_beta**t
        if index % period == 0:
            begun = L / corrected, R / corrected
        if index == refreshed_at(index, period, late):
            root_l = _power(begun[0], power, shampoo_eps) if left else root_l
            root_r = _power(begun[1], power, shampoo_eps) if right else root_r
        mean = m / (1 - betas[0] ** t)
        update = root_l @ mean @ root_r
        adam = mean / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        update = update * adam.norm() / update.norm() if left or right else adam
        w = w - lr * weight_decay * w - lr * update
    return w


def soap(
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    shampoo_beta: float,
    eps: float,
    period: int,
    late: int | None = None,
) -> torch.Tensor:
    """SOAP (Vyas et al. 2024, algorithms 3 and 4); the first moment is kept in the weights' own basis, as there.

    Args:
        late: as for `shampoo`.
    """
    w = weight.double()
    rows, cols = w.shape
    L, R = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
    q_l, q_r = torch.eye(rows).double(), torch.eye(cols).double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for index, grad in enumerate(grads):
        g, t = grad.double(), index + 1
        L = shampoo_beta * L + (1 - shampoo_beta) * g @ g.T
        R = shampoo_beta * R + (1 - shampoo_beta) * g.T @ g
        if index % period == 0:
            begun = L, R
            order_l = (q_l.T @ L @ q_l).diagonal().argsort(descending=True)
            order_r = (q_r.T @ R @ q_r).diagonal().argsort(descending=True)
        if index == 0:
            q_l, q_r = torch.linalg.eigh(L)[1].flip(1), torch.linalg.eigh(R)[1].flip(1)
        elif index == refreshed_at(index, period, late):
            v = v[order_l][:, order_r]
            q_l = torch.linalg.qr(begun[0] @ q_l[:, order_l])[0]
            q_r = torch.linalg.qr(begun[1] @ q_r[:, order_r])[0]
        m = betas[0] * m + (1 - betas[0]) * g
        turned = q_l.T @ g @ q_r
        v = betas[1] * v + (1 - betas[1]) * turned**2
        mean = q_l.T @ m @ q_r / (1 - betas[0] ** t)
        adam = mean / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        w = w - lr * weight_decay * w - lr * (q_l @ adam @ q_r.T)
    return w


def refreshed_at(index: int, period: int, late: int | None) -> int:
    """Returns the step of this period in which a refresh is used: its first, or, from the third refresh on, `late`
    steps later."""
    begin = index // period * period
    return begin if late is None or index < 2 * period else begin + late


def normuon(
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    row_beta: float,
    size: float,
) -> torch.Tensor:
    """NorMuon (Li et al. 2025, algorithm 1), with the look ahead and the length of the authors' normuon.py.

    Args:
        size: the size of an orthogonal matrix.
    """
    w = weight.double()
    m, v = torch.zeros_like(w), torch.zeros(w.size(0), 1).double()
    for grad in grads:
        g = grad.double()
        m = momentum * m + (1 - momentum) * g
        o = orthogonalised(momentum * m + (1 - momentum) * g)
        v = row_beta * v + (1 - row_beta) * (o**2).mean(1, keepdim=True)
        even = o / v.sqrt()
        w = w - lr * weight_decay * w - lr * size * even * o.norm() / even.norm()
    return w


def orthogonalised(matrix: torch.Tensor, coefficients: str = "quintic") -> torch.Tensor:
    """Five steps of Newton-Schulz (Jordan et al. 2024), each by what it does to singular values; NVIDIA's numbers."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for a, b, c in islice(cycle(_COEFFICIENT_SETS[coefficients]), 5):
        s = a * s + b * s**3 + c * s**5
    whole: torch.Tensor = u @ s.diag() @ v
    return whole


def unpacked(state: Mapping[str, torch.Tensor | int], key: str, side: int) -> torch.Tensor:
    """Unpacks a factor or root of a matrix's state as a square."""
    packed = state[key]
    assert isinstance(packed, torch.Tensor)
    return unpack(packed, packed.new_empty(side, side))


def states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor | int]]:
    """Every entry of every matrix's state."""
    for state in optimizer.state.values():
        yield from state.items()


def _power(factor: torch.Tensor, power: float, eps: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(factor)
    root: torch.Tensor = vectors @ torch.diag((values + eps * values.max()) ** power) @ vectors.T
    return root
