"""Decompositions and inverse roots of symmetric factors. A failure does not stop a run: it leads to a
fallback and is reported."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from .matrix_optimizer import matrix_norm

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigh(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the eigenvalues (..., side), ascending, and the eigenvectors (..., side, side) in their
    columns.

    Raises:
        LinAlgError: The decomposition did not converge, or the result is not finite.
    """
    values, vectors = torch.linalg.eigh(symmetric)
    if not bool(values.isfinite().all() & vectors.isfinite().all()):
        raise LinAlgError("the result is not finite")
    return values, vectors


def rounding(terms: int) -> float:
    """Returns the expected relative rounding error of a sum of `terms` products in fp32. It grows with the
    square root of their number (Higham & Mary 2019, doi:10.1137/18M1226312)."""
    return math.sqrt(terms) * torch.finfo(torch.float32).eps


def eigenbasis(symmetric: torch.Tensor) -> torch.Tensor:
    """Returns the eigenvectors of a positive semi-definite matrix (side, side) in the columns of a matrix,
    the largest eigenvalue first. In each eigenvector, the element of the largest magnitude is positive.

    Eigenvectors whose eigenvalue is below the rounding error are an arbitrary basis of the remaining space,
    and tiny changes of the matrix change them completely. They are replaced by the columns that a complete QR
    decomposition appends to the other eigenvectors. These columns change only as much as the other
    eigenvectors do.

    Raises:
        LinAlgError: As for `eigh`.
    """
    values, vectors = eigh(symmetric)
    rank = int((values > rounding(len(values)) * values[-1]).sum())
    basis = vectors.flip(-1)[:, :rank]
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    appended = torch.linalg.qr(basis, mode="complete").Q[:, rank:] if rank < len(values) else basis[:, :0]
    return torch.cat([torch.where(largest < 0, -basis, basis), appended], dim=1)


def orthonormalise(matrix: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Returns Q of the QR decomposition of `matrix` whose R has a positive diagonal, so that columns turn as
    little as possible.

    If only rounding errors of a column remain when its projection on the earlier columns is subtracted, its
    direction is not defined. It is replaced by the same column of `previous`, made orthogonal to all other
    columns. The host waits for the device once.

    Args:
        matrix, previous: (..., side, side).

    Raises:
        LinAlgError: The result is not finite.
    """
    basis, sizes = _qr(matrix)
    return _complete(basis, sizes > rounding(sizes.size(-1)) * sizes.amax(-1, keepdim=True), previous)


def _complete(basis: torch.Tensor, defined: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Returns `basis` with the columns that are not `defined` (..., side) replaced by those of `previous`,
    made orthogonal to all others. The host waits for the device once.

    Raises:
        LinAlgError: The basis is not finite.
    """
    complete = defined.all(-1)
    finite, all_complete = torch.stack([basis.isfinite().all(), complete.all()]).tolist()
    if not finite:
        raise LinAlgError("the result is not finite")
    if all_complete:
        return basis
    # QR makes each column orthogonal to the columns before it, so columns with a defined direction come
    # first.
    order = defined.to(torch.int8).argsort(descending=True, stable=True)[..., None, :].expand_as(basis)
    mixed = torch.where(defined[..., None, :], basis, previous.to(basis.dtype)).gather(-1, order)
    replaced = torch.empty_like(basis).scatter_(-1, order, _qr(mixed)[0])
    return torch.where(complete[..., None, None], basis, replaced)


def orthonormalise_panel(panel: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Orthonormalises a panel of columns, given that the columns before it are orthonormal. Unlike in
    `orthonormalise`, columns without a defined direction become zero, and the host does not wait for the
    device.

    The panel is projected twice (block Gram-Schmidt; Giraud et al. 2005, doi:10.1007/s00211-005-0615-4).
    After one projection, a column that almost depends on `before` consists mostly of rounding errors, which
    are not orthogonal to `before`.

    Args:
        panel: (side, width), part of a matrix whose longest column has norm 1.
        before: (side, columns before).
    """
    # The dtypes differ after a failure in fp32. Equal ones are not converted, because that leaks objects in
    # torch.
    if before.dtype != panel.dtype:
        before = before.to(panel.dtype)
    for _ in range(2 if before.numel() else 0):
        panel = panel - before @ (before.mT @ panel)
    basis, sizes = _qr(panel)
    return torch.where(sizes <= rounding(len(panel)), 0.0, basis)


def complete_basis(panels: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Returns the basis whose columns `orthonormalise_panel` has computed, with columns without a defined
    direction replaced as in `orthonormalise`. The host waits for the device once.

    Args:
        panels, previous: (side, side).

    Raises:
        LinAlgError: The result is not finite.
    """
    # The other columns are zero, or not orthonormalised because the period changed between two parts.
    return _complete(panels, (panels.square().sum(0) - 1).abs() < 1e-2, previous)


def _qr(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns Q and the diagonal of R, for the QR decomposition whose R has a positive diagonal."""
    basis, triangle = torch.linalg.qr(matrix)
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal[..., None, :] < 0, -basis, basis), diagonal.abs()


def compute_with_fallback(
    compute: Callable[[torch.Tensor], torch.Tensor],
    matrix: torch.Tensor,
    name: str,
    report: Callable[[str], None],
) -> torch.Tensor | None:
    """Returns `compute(matrix)`, computed in fp64 if that fails in fp32; None if it fails in both.

    Args:
        compute: A function that raises LinAlgError if it fails.
        matrix: fp32.
        name: The name of the decomposition in reports.
        report: Called with a message if `compute` failed in fp32, or in both precisions.
    """
    try:
        return compute(matrix)
    except LinAlgError as error:
        fp32_error = _first_line(error)
    try:
        result = compute(matrix.double()).to(matrix.dtype)
    except LinAlgError as error:
        report(f"{name} failed in fp32 ({fp32_error}) and in fp64 ({_first_line(error)}); the previous one is kept")
        return None
    report(f"{name} failed in fp32 ({fp32_error}); it was computed in fp64")
    return result


def _first_line(error: Exception) -> str:
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
"""The coefficients (a, b, c) of q(m) = a + b m + c m^2 for each step. All but the last are fitted by linear
programming (as Amsel et al. 2025, arXiv:2505.16932, do for the matrix sign) so that m^(1/order) q(m) is at
most 1, and as close to 1 as possible for all m between the smallest value left by the earlier steps and 1.
After them, eigenvalues of at least 1e-7 are within 0.035 of 1. The last step is the Taylor polynomial."""
_LARGEST_DISTANCE = 0.05
"""The limit on the root mean square distance of the eigenvalues from 1 before the last step; beyond it, the
iteration has not converged."""


def damping(side: int, eps: float) -> float:
    """Returns the term to add to a factor's eigenvalues, relative to the largest: `eps` plus the rounding
    error of the factor's elements, each of which is a sum.

    Without this term, a factor that averages few gradients, whose rank is low, would amplify rounding errors
    by the inverse root of a number close to zero.
    """
    return rounding(side) + eps


def roots_by_eigenvalues(factor: torch.Tensor, order: Order, eps: float) -> torch.Tensor:
    """Returns (factor + damping)^(-1/order) of factors (..., side, side), computed from their eigenvalues;
    the identity for a factor of zeros.

    Raises:
        LinAlgError: As for `eigh`.
    """
    values, vectors = eigh(factor)
    largest = values[..., -1:]
    damped = values.clamp_min(0) + damping(values.size(-1), eps) * largest
    scaled = torch.where(largest > 0, damped, torch.ones_like(damped)).pow(-1 / order)
    return (vectors * scaled[..., None, :]) @ vectors.mT


def roots_by_newton(factors: torch.Tensor, order: Order, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (factor + damping)^(-1/order) of factors (count, side, side) by a coupled Newton iteration.

    X converges to the root while M = X^order factor converges to the identity (Guo & Higham 2006,
    doi:10.1137/050643374; in Shampoo: Anil et al. 2020, arXiv:2002.09018). Polynomials of degree 2
    that are fitted to raise small eigenvalues fast need 7 or 8 steps; Newton's polynomial would need 20. The
    damping is at least fp32's rounding error, so condition numbers stay below 1e7. The error is at most that
    of `eigh` in fp32. The host does not wait for the device.

    Returns:
        The roots (count, side, side), and a bool for each root (count,), true if it converged.
    """
    m, size = newton_start(factors, eps)
    x, converged = None, None
    for step in range(newton_steps(order)):
        if step + 1 == newton_steps(order):
            converged = newton_converged(m)
        x, m = newton_step(step, order, x, m)
    assert x is not None
    assert converged is not None
    return x.mul_(size.pow(-1 / order)), converged


def newton_steps(order: Order) -> int:
    """Returns the number of steps of the iteration."""
    return len(_STEPS[order])


def newton_start(factors: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns M before the first step (count, side, side), and the scale by which the factors were divided
    (count, 1, 1). For a factor of zeros these are the identity and 1."""
    side = factors.size(-1)
    largest = _largest_eigenvalues(factors)
    # No step multiplies by a transpose, and the order of factors is fixed. Otherwise the matmuls would
    # amplify the asymmetry that rounding causes.
    m = factors.clone()
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping(side, eps) * largest)
    # Both norms are upper bounds on the eigenvalues.
    size = torch.minimum(matrix_norm(m), torch.linalg.matrix_norm(m, 1))[:, None, None]
    zero = size == 0
    m.div_(size.masked_fill_(zero, 1))
    diagonal.add_(zero[:, 0])
    return m, size


def newton_step(step: int, order: Order, x: torch.Tensor | None, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns X and M after a step, both (count, side, side). The last step does not update M, which is no
    longer needed.

    Args:
        x: X before the step; None before the first step, where X is the identity.
    """
    a, b, c = _STEPS[order][step]
    q = torch.baddbmm(m, m, m, beta=b, alpha=c)
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    x = q if x is None else x @ q
    if step + 1 == newton_steps(order):
        return x, m
    for _ in range(2 if order == 4 else 1):
        q = q @ q
    return x, q @ m


def newton_converged(m: torch.Tensor) -> torch.Tensor:
    """Returns a bool for each factor (count,), true if the iteration converges, given M before the last step
    (count, side, side)."""
    side = m.size(-1)
    distance = (m - torch.eye(side, dtype=m.dtype, device=m.device)).square_().sum((-2, -1)).div_(side).sqrt_()
    return distance <= _LARGEST_DISTANCE


def _largest_eigenvalues(factors: torch.Tensor) -> torch.Tensor:
    """Estimates the largest eigenvalue of each factor, (count, 1), from below, by ten steps of the power
    method that start from the longest columns."""
    longest = torch.linalg.vector_norm(factors, dim=-2).argmax(-1)
    vector = factors.take_along_dim(longest[:, None, None], -1)
    for _ in range(10):
        length = torch.linalg.vector_norm(vector, dim=(-2, -1), keepdim=True)
        vector = factors @ vector.div_(length.masked_fill_(length == 0, 1))
    largest: torch.Tensor = torch.linalg.vector_norm(vector, dim=-2)
    return largest
