"""Muon's passes over a matrix on CUDA: operations on whole tensors that wait for nothing,
and a graph of them."""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

from .matrix_optimizer import Workspace

_log = logging.getLogger(__name__)


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


class Replayed:
    """Runs one step again and again: as it is, captured when it meets the memory it met before,
    replayed ever after.

    A graph is its kernels on their memory, with the numbers the host gave them. So a step must take what
    changes from device memory, and `key` has to be different where anything else is: addresses, numbers,
    sizes of scratch. While the key changes steps run as they are, which is what a replay is compared with.
    Nothing waits for the GPU, but for the capture itself: once for a step that keeps its memory.

    A step that cannot be captured, as one that reads back from the GPU, is run as it is from then on, and
    that is said.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._refused = False

    def run(self, step: Callable[[], None], key: Callable[[], Hashable]) -> None:
        """Args:
        step: Enqueues kernels on the current stream. Called twice it must do the same again. key: The values
        that must be as they were for the graph to be good, state that the first step makes included.
        """
        now = key()
        if self._refused or now != self._key:
            self._graph = None
            step()
            self._key = key()
            return
        if self._graph is None:
            try:
                self._graph = _captured(step)
            except RuntimeError as error:  # nothing of it has run
                self._refused = True
                reason = str(error).partition("\n")[0]
                _log.warning("updates run kernel by kernel, for they cannot be captured as a graph: %s", reason)
                step()
                return
        self._graph.replay()


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own all the time, which "global" forbids.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        step()
    return graph


@cache
def _pool() -> Any:
    """Memory for what steps make for a moment; one for all graphs, which run one after another."""
    return torch.cuda.graph_pool_handle()
