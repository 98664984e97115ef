"""Inverse roots of symmetric positive semi-definite matrices: by eigenvalues, or by products alone."""

from collections.abc import Mapping
from typing import Literal

import torch

from .decompositions import eigh, rounding

Order = Literal[2, 4]
"""Of a root: the inverse square root, or the inverse fourth root."""
RootMethod = Literal["eigh", "newton"]

_STEPS: Mapping[Order, tuple[tuple[float, float, float], ...]] = {
    4: (
        *((2.16123, -4.21885, 3.05762),) * 4,
        (2.05324, -3.31559, 2.26235),
        (1.60472, -1.05767, 0.452948),
        (1.40625, -0.5625, 0.15625),
    ),
    2: (
        *((3.85554, -9.55248, 6.69694),) * 5,
        (3.24649, -5.89993, 3.65345),
        (2.15368, -1.87293, 0.719247),
        (1.875, -1.25, 0.375),
    ),
}
"""(a, b, c) of q(m) = a + b m + c m^2. Each but the last brings m^(1/order) q(m) as near to its largest value, 1, as it
can for all m from the least there is by then, or that is worth it, up to 1 (fitted by linear programming, as Amsel et
al. 2025, arXiv:2505.16932, do for the sign). From 1e-7 on they end within 0.035 of 1. The last is Taylor's."""
_LEFT = 0.05
"""Root mean square of the eigenvalues' distances from 1 ahead of the last step, above which it has not converged."""


def damping(side: int, eps: float) -> float:
    """What is added to eigenvalues, of the largest: `eps`, and what is noise in the sums they come from.

    Without that a factor of few gradients, whose rank is too low, would multiply noise by the inverse root of almost
    nothing.
    """
    return rounding(side) + eps


def by_eigenvalues(factor: torch.Tensor, order: Order, eps: float) -> torch.Tensor:
    """(factor + damping)^(-1/order) of (..., side, side); of zeros, the identity.

    Raises:
        LinAlgError: As `eigh`.
    """
    values, vectors = eigh(factor)
    largest = values[..., -1:]
    damped = values.clamp_min(0) + damping(values.size(-1), eps) * largest
    scaled = torch.where(largest > 0, damped, torch.ones_like(damped)).pow(-1 / order)
    return (vectors * scaled[..., None, :]) @ vectors.mT


def by_newton(factors: torch.Tensor, order: Order, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a stack (count, side, side) by a coupled Newton iteration, and which of them converged, (count,).

    X becomes the root while M = X^order factor becomes the identity (Guo & Higham 2006, doi:10.1137/050643374; in
    Shampoo: Anil et al. 2020, arXiv:2002.09018), with polynomials of degree 2 whose fast growth of small eigenvalues
    takes 7 or 8 steps where Newton's own takes 20. What is noise in fp32 is damped, so conditions stay below 1e7.
    Errors are those of `eigh` in fp32 or less. The host reads nothing.
    """
    side = factors.size(-1)
    largest = _largest(factors)
    # In this order, untransposed: what rounding makes of symmetry stays small so, and grows where a product is of B^T.
    m = factors.clone()
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping(side, eps) * largest)
    # No eigenvalue is above either.
    size = torch.minimum(torch.linalg.matrix_norm(m), torch.linalg.matrix_norm(m, 1))[:, None, None]
    zero = size == 0
    m.div_(size.masked_fill_(zero, 1))
    diagonal.add_(zero[:, 0])
    x, left = None, torch.zeros_like(largest)
    steps = _STEPS[order]
    for number, (a, b, c) in enumerate(steps):
        q = torch.baddbmm(m, m, m, beta=b, alpha=c)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        x = q if x is None else x @ q
        if number + 1 < len(steps):
            for _ in range(2 if order == 4 else 1):
                q = q @ q
            m = q @ m
        if number + 2 == len(steps):
            left = (m - torch.eye(side, dtype=m.dtype, device=m.device)).square_().sum((-2, -1)).div_(side).sqrt_()
    assert x is not None
    return x.mul_(size.pow(-1 / order)), left <= _LEFT


def _largest(factors: torch.Tensor) -> torch.Tensor:
    """Largest eigenvalues of a stack, (count, 1), from below: ten steps of the power method from longest columns."""
    longest = torch.linalg.vector_norm(factors, dim=-2).argmax(-1)
    vector = factors.take_along_dim(longest[:, None, None], -1)
    for _ in range(10):
        length = torch.linalg.vector_norm(vector, dim=(-2, -1), keepdim=True)
        vector = factors @ vector.div_(length.masked_fill_(length == 0, 1))
    largest: torch.Tensor = torch.linalg.vector_norm(vector, dim=-2)
    return largest
