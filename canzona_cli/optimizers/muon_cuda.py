"""Muon's passes over a matrix on CUDA: operations on whole tensors that wait for nothing."""

import torch

from .matrix_optimizer import Workspace


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
) -> torch.Tensor:
    """Does what `muon_cpu.direction` does.

    Returns:
        The norm that it had: () in fp64, on the device.
    """
    average.lerp_(grad, weight)
    target = average if ahead is None else torch.lerp(grad, average, momentum, out=ahead)
    # In fp64, whose range has the square and the inverse of every fp32 number: no pass for the largest
    # element. `vector_norm` would copy it to fp64 first: 16 bytes an element more, and the memory for it.
    before: torch.Tensor = torch._foreach_norm([target], 2, dtype=torch.float64)[0]
    factor = before.clamp_min(1e-300).reciprocal_().view(1, 1)
    torch.mul(target, factor if norm == 1 else factor.mul_(norm), out=out)
    return before


def set_rates(rates: torch.Tensor, lr: float, weight_decay: float) -> None:
    """Puts on the device what changes from step to step: (3,) the factor of the decay,
    the learning rate, the decay."""
    rates[0].fill_(1 - lr * weight_decay)
    rates[1].fill_(lr)
    rates[2].fill_(lr * weight_decay)


def move(
    p: torch.Tensor,
    x: torch.Tensor,
    rates: torch.Tensor,
    weight_decay: float,
    size: float,
    trusted: torch.Tensor | None,
) -> None:
    """p <- (1 - lr weight_decay) p - lr size x; where an `x` in fp32 is not `trusted`, p only decays."""
    decay, rate, lost = rates
    if trusted is not None and x.dtype is torch.float32 and size:
        # One pass: p - lr size (x + weight_decay / size p), or p - lr weight_decay p; the other does nothing.
        good = trusted.float()
        _descend(p, x, rate * size, weight_decay / size, but_where=1 - good)
        _descend(p, p, lost, 0.0, but_where=good)
        return
    p.mul_(decay).addcmul_(x, rate, value=-size)


def _descend(p: torch.Tensor, x: torch.Tensor, rate: torch.Tensor, decay: float, *, but_where: torch.Tensor) -> None:
    """p <- p - rate (x + decay p), element by element, unless `but_where` is 1,
    which is asked on the device."""
    torch._fused_sgd_(
        [p], [x], [], weight_decay=decay, momentum=0.0, lr=rate, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, found_inf=but_where,
    )  # fmt: skip
