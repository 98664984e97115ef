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
    Such a column is that of `previous`, made orthogonal to all others. The host reads once.

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
