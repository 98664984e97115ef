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


def eigenbasis(symmetric: torch.Tensor) -> torch.Tensor:
    """Eigenvectors, the largest eigenvalue's first.

    Raises:
        LinAlgError: As `eigh`.
    """
    return eigh(symmetric)[1].flip(-1)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Q of a QR decomposition.

    Raises:
        LinAlgError: As `eigh`.
    """
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    _require_finite(basis)
    return basis


def inverse_root(factor: torch.Tensor, power: float, eps: float) -> torch.Tensor:
    """factor ** -power of a symmetric positive semi-definite matrix.

    Eigenvalues below the rounding of the sums they come from are noise, and are raised to sqrt(n) epsilon times the
    largest (rounding errors of n terms grow like sqrt(n): Higham & Mary 2019, doi:10.1137/18M1226312). Otherwise a
    factor of few gradients, whose rank is too low, would multiply noise by the inverse root of almost nothing.
    `eps` times the largest is added to all. A factor of zeros gives the identity.

    Raises:
        LinAlgError: As `eigh`.
    """
    values, vectors = eigh(factor)
    largest = values[-1:]
    noise = math.sqrt(factor.size(0)) * torch.finfo(torch.float32).eps
    damped = torch.maximum(values, noise * largest) + eps * largest
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
