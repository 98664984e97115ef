"""Muon's elementwise passes over a matrix, or a run of matrices, on CUDA: whole-tensor operations that never
synchronise with the host."""

import torch

from .matrix_optimizer import Workspace
from .muon_facts import Blend


def direction(
    average: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, blend: Blend, workspace: Workspace
) -> torch.Tensor:
    """Updates the momentum and writes the matrices to orthogonalise into `out`, as `muon_cpu.direction` does.

    Returns:
        The Frobenius norm of each direction before scaling: () for one matrix, (count,) for a run; in fp64,
        on the device.
    """
    average.lerp_(grad, blend.weight)
    target = average
    if blend.nesterov:
        target = torch.lerp(grad, average, blend.momentum, out=workspace.like("muon_direction", average))
    # fp64 represents the square and the inverse of every fp32 number, so there is no need for a pass that
    # finds the largest element. `vector_norm` would first copy the tensor to fp64, which takes memory and 16
    # more bytes of traffic per element.
    matrices = target.unbind() if target.ndim > 2 else [target]
    norms = torch._foreach_norm(matrices, 2, dtype=torch.float64)
    before: torch.Tensor = torch.stack(norms) if target.ndim > 2 else norms[0]
    factor = before.clamp_min(1e-300).reciprocal_().view(*before.shape, 1, 1)
    torch.mul(target, factor if blend.norm == 1 else factor.mul_(blend.norm), out=out)
    return before


def move(
    p: torch.Tensor,
    x: torch.Tensor,
    rates: torch.Tensor,
    weight_decay: float,
    factor: float,
    trusted: torch.Tensor | None,
) -> None:
    """Computes p <- (1 - lr weight_decay) p - lr factor x in place. If `x` is not trusted, p only decays: an
    fp32 `x` is skipped here, and the caller has filled any other with 0.

    Args:
        p, x: (rows, cols) for one matrix, (count, rows, cols) for a run.
        rates: 1 - lr weight_decay, lr, and lr weight_decay on the device: (3,).
        weight_decay: the weight decay of `rates`, as a Python number.
        factor: the scale of the update, which depends on the shape.
        trusted: () bool on the device, for one matrix; None means trusted.
    """
    decay, rate, decay_rate = rates
    if trusted is not None and x.dtype is torch.float32 and factor:
        # Only one of the two kernels changes p: to p - lr factor (x + weight_decay / factor p) if trusted,
        # otherwise to p - lr weight_decay p.
        flag = trusted.float()
        _descend(p, x, rate * factor, weight_decay / factor, skip=1 - flag)
        _descend(p, p, decay_rate, 0.0, skip=flag)
        return
    p.mul_(decay).addcmul_(x, rate, value=-factor)


def _descend(p: torch.Tensor, x: torch.Tensor, rate: torch.Tensor, decay: float, *, skip: torch.Tensor) -> None:
    """Computes p <- p - rate (x + decay p) in place, unless `skip` is 1. The device reads `rate` and `skip`,
    so the host does not wait."""
    torch._fused_sgd_(
        [p], [x], [], weight_decay=decay, momentum=0.0, lr=rate, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, found_inf=skip,
    )  # fmt: skip
