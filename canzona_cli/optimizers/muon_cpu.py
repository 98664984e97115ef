"""Muon's elementwise passes over a matrix on a CPU. They run over blocks of rows that stay in cache, and
norms are Python floats."""

import math

import torch

from .matrix_optimizer import Workspace
from .muon_facts import BLOCK

SAFE_NORMS = 2.0**-40, 2.0**60
"""The range of norms in which the squares of all elements that matter, and their sum, are normal fp32
numbers."""
SAFE_FACTORS = 2.0**-100, 2.0**100
"""The range of norms whose inverse is safely a normal fp32 number."""


def direction(
    average: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    *,
    momentum: float,
    weight: float,
    ahead: torch.Tensor | None,
    norm: float,
    workspace: Workspace,
) -> float:
    """Updates the momentum and writes the matrix to orthogonalise into `out`.

    Args:
        average: The momentum (rows, cols), updated in place: average += weight (grad - average).
        grad: The gradient (rows, cols).
        out: (rows, cols), of any dtype.
        momentum: With Nesterov, the share of the momentum in the direction; 1 - momentum is the gradient's.
        weight: The share of the gradient in the new momentum.
        ahead: Scratch for Nesterov's direction (rows, cols); None: the momentum itself is orthogonalised.
        norm: The Frobenius norm of `out` afterwards; a direction of zeros stays zero.
        workspace: Scratch for a block of rows.

    Returns:
        The Frobenius norm of the direction before scaling.
    """
    target = average if ahead is None else ahead
    square = 0.0
    for mean, new, block in zip(_blocks(average), _blocks(grad), _blocks(target), strict=True):
        mean.lerp_(new, weight)
        if ahead is not None:
            torch.lerp(new, mean, momentum, out=block)
        square += _norm(block, workspace) ** 2
    before = math.sqrt(square)
    exponent = 0 if SAFE_FACTORS[0] < before < SAFE_FACTORS[1] or not math.isfinite(before) else math.frexp(before)[1]
    # Scaling here rather than by the first product's alpha, because oneDNN compiles a kernel for every new
    # alpha.
    inverse = norm / math.ldexp(before, -exponent) if before else 0.0
    for block, low in zip(_blocks(target), _blocks(out), strict=True):
        scaled = _shifted(block, -exponent, workspace) if exponent else block
        low.copy_(torch.mul(scaled, inverse, out=workspace.like("muon_block", block)))
    return before


def move(p: torch.Tensor, x: torch.Tensor, lr: float, weight_decay: float, size: float, workspace: Workspace) -> None:
    """Computes p <- (1 - lr weight_decay) p - lr size x in place, block by block."""
    decay, alpha = 1 - lr * weight_decay, -lr * size
    for weight, block in zip(_blocks(p), _blocks(x), strict=True):
        if block.dtype != weight.dtype:
            block = workspace.get("muon_block", block.shape, p.dtype, p.device).copy_(block)
        weight.mul_(decay).add_(block, alpha=alpha)


def _norm(block: torch.Tensor, workspace: Workspace) -> float:
    """Returns the Frobenius norm of a block, without overflow or underflow of the squares."""
    norm = float(torch.linalg.vector_norm(block))
    if SAFE_NORMS[0] < norm < SAFE_NORMS[1]:
        return norm
    largest = float(torch.linalg.vector_norm(block, torch.inf))
    if not largest or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    return math.ldexp(float(torch.linalg.vector_norm(_shifted(block, -exponent, workspace))), exponent)


def _shifted(block: torch.Tensor, exponent: int, workspace: Workspace) -> torch.Tensor:
    """Returns `block` times 2^exponent, in scratch. 2^exponent may be outside fp32's range, so it is applied
    in two factors."""
    half = exponent // 2
    scaled = torch.mul(block, 2.0**half, out=workspace.like("muon_block", block))
    return scaled.mul_(2.0 ** (exponent - half))


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns views of blocks of rows of about BLOCK elements; tensors of the same shape are cut at the same
    rows."""
    return matrix.split(max(1, BLOCK // matrix.size(1)))  # type: ignore[no-untyped-call,no-any-return]
