"""Decompositions and inverse roots of symmetric factors that never take a run down: a failure falls back and
is reported."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigh(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, ascending, and eigenvectors.

    Raises:
        LinAlgError: No convergence, or a result that is not finite.
    """
    values, vectors = torch.linalg.eigh(symmetric)
    _require_finite(values, vectors)
    return values, vectors


def rounding(terms: int) -> float:
    """Bounds the error of a sum of products in fp32, over its largest terms: errors grow like the root of
    their number (Higham & Mary 2019, doi:10.1137/18M1226312)."""
    return math.sqrt(terms) * torch.finfo(torch.float32).eps


def eigenbasis(symmetric: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of a positive semi-definite matrix, the largest eigenvalue's first,
    largest elements positive.

    Eigenvectors of what is rounding are anything orthogonal to the others, and the next rounding makes them
    anything else. In their place is what Householder's reflections, which bring the others to the first unit
    vectors, make of the last ones: that changes as little as the others do.

    Raises:
        LinAlgError: As `eigh`.
    """
    values, vectors = eigh(symmetric)
    rank = int((values > rounding(len(values)) * values[-1]).sum())
    basis = vectors.flip(-1)[:, :rank]
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    rest = torch.linalg.qr(basis, mode="complete").Q[:, rank:] if rank < len(values) else basis[:, :0]
    return torch.cat([torch.where(largest < 0, -basis, basis), rest], dim=1)


def orthonormal(matrix: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Q of a QR decomposition whose R has a positive diagonal: a column turns as little as it must.

    Of a column that is rounding, once what it shares with the columns before is gone, nothing says where it
    points. Such a column is that of `previous`, made orthogonal to all others. The host reads once.

    Args:
        matrix, previous: (..., side, side).

    Raises:
        LinAlgError: As `eigh`.
    """
    basis, sizes = _qr(matrix)
    known = sizes > rounding(sizes.size(-1)) * sizes.amax(-1, keepdim=True)
    settled = known.all(-1)
    finite, all_settled = torch.stack([basis.isfinite().all(), settled.all()]).tolist()
    if not finite:
        raise LinAlgError("the result is not finite")
    if all_settled:
        return basis
    first = known.to(torch.int8).argsort(descending=True, stable=True)[..., None, :].expand_as(basis)
    mixed = torch.where(known[..., None, :], basis, previous.to(basis.dtype)).gather(-1, first)
    return torch.where(settled[..., None, None], basis, torch.empty_like(basis).scatter_(-1, first, _qr(mixed)[0]))


def _qr(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q, and the diagonal of R, made positive."""
    basis, triangle = torch.linalg.qr(matrix)
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal[..., None, :] < 0, -basis, basis), diagonal.abs()


def with_fallback(
    compute: Callable[[torch.Tensor], torch.Tensor],
    matrix: torch.Tensor,
    what: str,
    report: Callable[[str], None],
) -> torch.Tensor | None:
    """`compute(matrix)`, in fp64 if fp32 fails; None if that fails too.

    Args:
        compute: Raises LinAlgError when it fails.
        matrix: fp32.
        what: Names the decomposition to `report`.
        report: Told of either failure.
    """
    try:
        return compute(matrix)
    except LinAlgError as error:
        single = _line(error)
    try:
        result = compute(matrix.double()).to(matrix.dtype)
    except LinAlgError as error:
        report(f"{what} failed in fp32 ({single}) and in fp64 ({_line(error)}); the previous one is kept")
        return None
    report(f"{what} failed in fp32 ({single}); it was computed in fp64")
    return result


def _require_finite(*tensors: torch.Tensor) -> None:
    if not bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all()):
        raise LinAlgError("the result is not finite")


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


Order = Literal[2, 4]
"""The order of a root: the inverse square root, or the inverse fourth root."""

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
"""(a, b, c) of q(m) = a + b m + c m^2. Each but the last brings m^(1/order) q(m) as near to its largest
value, 1, as it can for all m from the least there is by then, or that is worth it, up to 1 (fitted by linear
programming, as Amsel et al. 2025, arXiv:2505.16932, do for the sign). From 1e-7 on they end within 0.035 of
1. The last is Taylor's."""
_LEFT = 0.05
"""Root mean square of the eigenvalues' distances from 1 ahead of the last step,
above which it has not converged."""


def damping(side: int, eps: float) -> float:
    """Computes what is added to eigenvalues, as a share of the largest: `eps`, and the noise of the sums they
    come from.

    Without that a factor of few gradients, whose rank is too low, would multiply noise by the inverse root of
    almost nothing.
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
    """Computes the inverse roots of a stack (count, side, side) by a coupled Newton iteration, and which of
    them converged, (count,).

    X becomes the root while M = X^order factor becomes the identity (Guo & Higham 2006,
    doi:10.1137/050643374; in Shampoo: Anil et al. 2020, arXiv:2002.09018), with polynomials of degree 2 whose
    fast growth of small eigenvalues takes 7 or 8 steps where Newton's own takes 20. What is noise in fp32 is
    damped, so conditions stay below 1e7. Errors are those of `eigh` in fp32 or less. The host reads nothing.
    """
    side = factors.size(-1)
    largest = _largest(factors)
    # In this order, untransposed: what rounding makes of symmetry stays small so, and grows where a product
    # is of B^T.
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
    """Largest eigenvalues of a stack, (count, 1), from below:
    ten steps of the power method from longest columns."""
    longest = torch.linalg.vector_norm(factors, dim=-2).argmax(-1)
    vector = factors.take_along_dim(longest[:, None, None], -1)
    for _ in range(10):
        length = torch.linalg.vector_norm(vector, dim=(-2, -1), keepdim=True)
        vector = factors @ vector.div_(length.masked_fill_(length == 0, 1))
    largest: torch.Tensor = torch.linalg.vector_norm(vector, dim=-2)
    return largest
