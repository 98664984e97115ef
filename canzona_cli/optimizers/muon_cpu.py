"""Muon's passes over a matrix on a CPU: by blocks of rows that stay in cache,
with norms that the host reads."""

import math

import torch

from .matrix_optimizer import Workspace
from .muon_facts import BLOCK

SAFE_NORMS = 2.0**-40, 2.0**60
"""Norms between which the squares of all elements that count, and their sum, are normal fp32 numbers."""
SAFE_FACTORS = 2.0**-100, 2.0**100
"""Norms whose inverse is a normal fp32 number by far."""


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
    """Updates the momentum and writes what is to be orthogonalised into `out`.

    Args:
        average: The momentum, (rows, cols), to which the gradient adds with `weight`.
        grad: (rows, cols).
        out: (rows, cols), of any type.
        ahead: Scratch for Nesterov's look ahead, (rows, cols); None: the momentum itself is orthogonalised.
        norm: The norm that `out` gets, unless it is 0.
        workspace: Scratch for a block of rows.

    Returns:
        The norm that it had.
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
    # The factor could ride in the first product, but oneDNN compiles a kernel for every new alpha.
    inverse = norm / math.ldexp(before, -exponent) if before else 0.0
    for block, low in zip(_blocks(target), _blocks(out), strict=True):
        scaled = _shifted(block, -exponent, workspace) if exponent else block
        low.copy_(torch.mul(scaled, inverse, out=workspace.like("muon_block", block)))
    return before


def move(p: torch.Tensor, x: torch.Tensor, lr: float, weight_decay: float, size: float, workspace: Workspace) -> None:
    """p <- (1 - lr weight_decay) p - lr size x."""
    decay, alpha = 1 - lr * weight_decay, -lr * size
    for weight, block in zip(_blocks(p), _blocks(x), strict=True):
        if block.dtype != weight.dtype:
            block = workspace.get("muon_block", block.shape, p.dtype, p.device).copy_(block)
        weight.mul_(decay).add_(block, alpha=alpha)


def _norm(block: torch.Tensor, workspace: Workspace) -> float:
    """Computes the Frobenius norm of elements of any size."""
    norm = float(torch.linalg.vector_norm(block))
    if SAFE_NORMS[0] < norm < SAFE_NORMS[1]:
        return norm
    largest = float(torch.linalg.vector_norm(block, torch.inf))
    if not largest or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    return math.ldexp(float(torch.linalg.vector_norm(_shifted(block, -exponent, workspace))), exponent)


def _shifted(block: torch.Tensor, exponent: int, workspace: Workspace) -> torch.Tensor:
    """Multiplies `block` into scratch by 2^exponent, which itself may be no fp32 number."""
    half = exponent // 2
    scaled = torch.mul(block, 2.0**half, out=workspace.like("muon_block", block))
    return scaled.mul_(2.0 ** (exponent - half))


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cuts rows into blocks of about BLOCK elements; the same rows for tensors of the same shape."""
    return matrix.split(max(1, BLOCK // matrix.size(1)))  # type: ignore[no-untyped-call,no-any-return]
