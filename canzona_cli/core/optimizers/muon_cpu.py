"""Muon's elementwise passes over a matrix, or a run of matrices, on a CPU. They run over blocks that stay in
cache: some rows of a large matrix, or several small matrices. Norms are Python floats."""

import math

import torch

from .matrix_optimizer import Workspace, matrix_norm
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
    for averages, grads, outs in zip(_stacks(average), _stacks(grad), _stacks(out), strict=True):
        if len(averages) == 1:
            norms.append(_direction(averages[0], grads[0], outs[0], blend, workspace))
            continue
        averages.lerp_(grads, blend.weight)
        targets = averages
        if blend.nesterov:
            targets = torch.lerp(grads, averages, blend.momentum, out=workspace.like("muon_direction", averages))
        norms += _scale_each(targets, outs, blend.norm, workspace)
    return norms


def _direction(
    average: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, blend: Blend, workspace: Workspace
) -> float:
    """Computes `direction` for one matrix (rows, cols)."""
    target = workspace.like("muon_direction", average) if blend.nesterov else average
    square = 0.0
    for average_rows, grad_rows, target_rows in zip(_blocks(average), _blocks(grad), _blocks(target), strict=True):
        average_rows.lerp_(grad_rows, blend.weight)
        if blend.nesterov:
            torch.lerp(grad_rows, average_rows, blend.momentum, out=target_rows)
        square += _norm(target_rows, workspace) ** 2
    old_norm = math.sqrt(square)
    _scale(target, old_norm, blend.norm, out, workspace)
    return old_norm


def _scale(target: torch.Tensor, old_norm: float, new_norm: float, out: torch.Tensor, workspace: Workspace) -> None:
    """Writes `target` (rows, cols), whose norm is `old_norm`, into `out`, scaled to `new_norm`."""
    exponent = 0
    if math.isfinite(old_norm) and not SAFE_FACTORS[0] < old_norm < SAFE_FACTORS[1]:
        exponent = math.frexp(old_norm)[1]
    # Scaled here rather than by the first matmul's alpha, because oneDNN compiles a kernel for every new
    # alpha.
    inverse = new_norm / math.ldexp(old_norm, -exponent) if old_norm else 0.0
    for block, out_block in zip(_blocks(target), _blocks(out), strict=True):
        scaled = _shifted(block, -exponent, workspace) if exponent else block
        out_block.copy_(torch.mul(scaled, inverse, out=workspace.like("muon_block", block)))


def _scale_each(targets: torch.Tensor, out: torch.Tensor, new_norm: float, workspace: Workspace) -> list[float]:
    """Writes small matrices (count, rows, cols) into `out`, each scaled to `new_norm`, and returns their
    norms before scaling."""
    norms: list[float] = matrix_norm(targets).tolist()
    if all(SAFE_NORMS[0] < old_norm < SAFE_NORMS[1] for old_norm in norms):
        inverses = targets.new_tensor([new_norm / old_norm for old_norm in norms]).view(-1, 1, 1)
        out.copy_(torch.mul(targets, inverses, out=workspace.like("muon_block", targets)))
        return norms
    norms = [_norm(target, workspace) for target in targets]
    for target, old_norm, out_matrix in zip(targets, norms, out, strict=True):
        _scale(target, old_norm, new_norm, out_matrix, workspace)
    return norms


def move(p: torch.Tensor, x: torch.Tensor, lr: float, weight_decay: float, factor: float, workspace: Workspace) -> None:
    """Computes p <- (1 - lr weight_decay) p - lr factor x in place, block by block, for one matrix or a run."""
    decay, alpha = 1 - lr * weight_decay, -lr * factor
    for weight, block in zip(_blocks(p), _blocks(x), strict=True):
        if block.dtype != weight.dtype:
            block = workspace.get("muon_block", block.shape, p.dtype, p.device).copy_(block)
        weight.mul_(decay).add_(block, alpha=alpha)


def _norm(block: torch.Tensor, workspace: Workspace) -> float:
    """Returns the Frobenius norm of a block, without overflow or underflow of the squares."""
    norm = float(matrix_norm(block))
    if SAFE_NORMS[0] < norm < SAFE_NORMS[1]:
        return norm
    largest = float(torch.linalg.vector_norm(block, torch.inf))
    if not largest or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    return math.ldexp(float(matrix_norm(_shifted(block, -exponent, workspace))), exponent)


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
