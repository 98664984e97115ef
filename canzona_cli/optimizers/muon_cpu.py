"""Muon's elementwise passes over a matrix, or a run of matrices, on a CPU. They run over blocks that stay in
cache: some rows of a large matrix, or several small matrices. Norms are Python floats."""

import math

import torch

from .matrix_optimizer import Workspace
from .muon_facts import BLOCK, Blend

SAFE_NORMS = 2.0**-40, 2.0**60
"""The range of norms in which the sum of squares, and the squares of all elements that matter, are normal
fp32 numbers."""
SAFE_FACTORS = 2.0**-100, 2.0**100
"""The range of norms whose inverse is safely a normal fp32 number."""


def direction(
    average: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, blend: Blend, workspace: Workspace
) -> float | list[float]:
    """Updates the momentum and writes the matrices to orthogonalise into `out`.

    Args:
        average: The momentum, (rows, cols) of one matrix or (count, rows, cols) of a run, updated in place:
            average += blend.weight (grad - average).
        grad: The gradient, of the same shape.
        out: Receives the matrices to orthogonalise, in the same shape and any dtype.
        workspace: Scratch for Nesterov's direction and for a block.

    Returns:
        The Frobenius norm of the direction before scaling; for a run, a list with the norm of each matrix.
    """
    if average.ndim == 2:
        return _direction(average, grad, out, blend, workspace)
    norms: list[float] = []
    for mean, new, low in zip(_stacks(average), _stacks(grad), _stacks(out), strict=True):
        if len(mean) == 1:
            norms.append(_direction(mean[0], new[0], low[0], blend, workspace))
            continue
        mean.lerp_(new, blend.weight)
        target = mean
        if blend.nesterov:
            target = torch.lerp(new, mean, blend.momentum, out=workspace.like("muon_direction", mean))
        norms += _scale_each(target, low, blend.norm, workspace)
    return norms


def _direction(
    average: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, blend: Blend, workspace: Workspace
) -> float:
    """Computes `direction` for one matrix (rows, cols)."""
    target = workspace.like("muon_direction", average) if blend.nesterov else average
    square = 0.0
    for mean, new, block in zip(_blocks(average), _blocks(grad), _blocks(target), strict=True):
        mean.lerp_(new, blend.weight)
        if blend.nesterov:
            torch.lerp(new, mean, blend.momentum, out=block)
        square += _norm(block, workspace) ** 2
    before = math.sqrt(square)
    _scale(target, before, blend.norm, out, workspace)
    return before


def _scale(target: torch.Tensor, before: float, norm: float, out: torch.Tensor, workspace: Workspace) -> None:
    """Writes `target` (rows, cols), whose norm is `before`, into `out`, scaled to `norm`."""
    exponent = 0 if SAFE_FACTORS[0] < before < SAFE_FACTORS[1] or not math.isfinite(before) else math.frexp(before)[1]
    # Scaled here rather than by the first matmul's alpha, because oneDNN compiles a kernel for every new
    # alpha.
    inverse = norm / math.ldexp(before, -exponent) if before else 0.0
    for block, low in zip(_blocks(target), _blocks(out), strict=True):
        scaled = _shifted(block, -exponent, workspace) if exponent else block
        low.copy_(torch.mul(scaled, inverse, out=workspace.like("muon_block", block)))


def _scale_each(targets: torch.Tensor, out: torch.Tensor, norm: float, workspace: Workspace) -> list[float]:
    """Writes small matrices (count, rows, cols) into `out`, each scaled to `norm`, and returns their norms
    before scaling."""
    norms: list[float] = torch.linalg.vector_norm(targets, dim=(1, 2)).tolist()
    if all(SAFE_NORMS[0] < before < SAFE_NORMS[1] for before in norms):
        inverses = targets.new_tensor([norm / before for before in norms]).view(-1, 1, 1)
        out.copy_(torch.mul(targets, inverses, out=workspace.like("muon_block", targets)))
        return norms
    norms = [_norm(target, workspace) for target in targets]
    for target, before, low in zip(targets, norms, out, strict=True):
        _scale(target, before, norm, low, workspace)
    return norms


def move(p: torch.Tensor, x: torch.Tensor, lr: float, weight_decay: float, size: float, workspace: Workspace) -> None:
    """Computes p <- (1 - lr weight_decay) p - lr size x in place, block by block, for one matrix or a run."""
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


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns views of blocks of about BLOCK elements: rows of a matrix, or several matrices of a run.
    Tensors of the same shape are cut in the same way."""
    if tensor.ndim == 2:
        return tensor.split(max(1, BLOCK // tensor.size(1)))  # type: ignore[no-untyped-call,no-any-return]
    stacks = _stacks(tensor)
    return tuple(block for stack in stacks for block in ((stack,) if len(stack) > 1 else _blocks(stack[0])))


def _stacks(run: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cuts a run (count, rows, cols) into stacks of as many matrices as fit in a block, at least one."""
    return run.split(max(1, BLOCK // run[0].numel()))  # type: ignore[no-untyped-call,no-any-return]
