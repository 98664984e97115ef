"""Decompositions of symmetric factors that never take a run down: a failure falls back and is reported."""

import math
from collections.abc import Callable

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
    """What a sum of products in fp32 may be off by, over its largest terms: errors grow like the root of their number
    (Higham & Mary 2019, doi:10.1137/18M1226312)."""
    return math.sqrt(terms) * torch.finfo(torch.float32).eps


def eigenbasis(symmetric: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of a positive semi-definite matrix, the largest eigenvalue's first, largest elements positive.

    Eigenvectors of what is rounding are anything orthogonal to the others, and the next rounding makes them anything
    else. In their place is what Householder's reflections, which bring the others to the first unit vectors, make of
    the last ones: that changes as little as the others do.

    Raises:
        LinAlgError: As `eigh`.
    """
    values, vectors = eigh(symmetric)
    rank = int((values > rounding(len(values)) * values[-1]).sum())
    found = vectors.flip(-1)[:, :rank]
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))
    rest = torch.linalg.qr(found, mode="complete").Q[:, rank:] if rank < len(values) else found[:, :0]
    return torch.cat([torch.where(largest < 0, -found, found), rest], dim=1)


def orthonormal(matrix: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Q of a QR decomposition whose R has a positive diagonal: a column turns as little as it must.

    Of a column that is rounding, once what it shares with the columns before is gone, nothing says where it points.
    Such a column is that of `previous`, made orthogonal to all others.

    Raises:
        LinAlgError: As `eigh`.
    """
    basis, sizes = _qr(matrix)
    _require_finite(basis)
    known = sizes > rounding(len(sizes)) * sizes.max()
    if not bool(known.all()):
        first = known.argsort(descending=True, stable=True)
        basis[:, first] = _qr(torch.where(known, basis, previous.to(basis.dtype))[:, first])[0]
    return basis


def _qr(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q, and the diagonal of R, made positive."""
    basis, triangle = torch.linalg.qr(matrix)
    diagonal = triangle.diagonal()
    return torch.where(diagonal < 0, -basis, basis), diagonal.abs()


def inverse_root(factor: torch.Tensor, power: float, eps: float) -> torch.Tensor:
    """factor ** -power of a symmetric positive semi-definite matrix.

    Eigenvalues below `rounding` of the sums they come from are noise, and are raised to that, times the largest.
    Otherwise a factor of few gradients, whose rank is too low, would multiply noise by the inverse root of almost
    nothing. `eps` times the largest is added to all. A factor of zeros gives the identity.

    Raises:
        LinAlgError: As `eigh`.
    """
    values, vectors = eigh(factor)
    largest = values[-1:]
    damped = torch.maximum(values, rounding(len(values)) * largest) + eps * largest
    scaled = torch.where(largest > 0, damped, torch.ones_like(damped)).pow(-power)
    return (vectors * scaled) @ vectors.mT


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
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise LinAlgError("the result is not finite")


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
