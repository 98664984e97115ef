"""CUDA graphs of steps that are repeated many times.

Each graph has its own memory pool and its own stream, and one matmul runs on that stream before the capture.
All three are needed from torch 2.11, the oldest version that canzona supports, to 2.14. In these versions
cuBLAS has a workspace for each stream, which the first matmul on that stream allocates:

- A workspace allocated during a capture is part of that graph's pool. The pool is then never freed, and torch
  2.11 fails an assertion when something else is captured into it.
- torch 2.12 to 2.14 free the workspace when a graph of that stream is deleted, even if other graphs were
  captured on the same stream (pytorch#193402).

From torch 2.15 on, a workspace lives only as long as its matmul.
"""

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import torch

_log = logging.getLogger(__name__)

STREAMS = 32
"""The number of different streams that torch hands out before it reuses them."""


class Replayed:
    """A step that is run repeatedly: kernel by kernel in the first call. The next call with the same key
    captures it as a CUDA graph, which that call and further calls with that key replay.

    A graph contains its kernels with their memory addresses and the numbers that the host passed. So a step
    must read from device memory the values that change between replays. Its key must contain everything else
    that may change: addresses, host numbers, sizes of scratch. While the key changes, steps run kernel by
    kernel. Neither capture nor replay waits for the GPU or releases cached memory.

    If a step cannot be captured, for example because it reads back from the GPU, it runs kernel by kernel,
    and nothing else is captured in this process; `refusal` says why.
    """

    refusal: ClassVar[str] = ""
    """The reason why this process captures no more graphs; empty if no capture has failed."""
    _living: ClassVar["WeakSet[Replayed]"] = WeakSet()

    def __init__(self) -> None:
        self.captures = 0
        """The number of graphs captured so far."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._stream: torch.cuda.Stream | None = None
        Replayed._living.add(self)

    def run(self, step: Callable[[], object], key: Callable[[], Hashable]) -> None:
        """Runs, captures or replays the step.

        Args:
            step: A function that enqueues kernels on the current stream, the same kernels in every call with
                the same key.
            key: A function that returns everything that must be unchanged for a graph to be valid, including
                state that the first step creates.
        """
        new_key = key()
        if new_key != self._key:
            self._graph = None
            step()
            self._key = key()
            return
        if self._graph is None and not Replayed.refusal:
            try:
                self._graph = self._capture(step)
                self.captures += 1
            except RuntimeError as error:  # a capture only records kernels, so none has run
                reason = str(error).partition("\n")[0]
                Replayed.refusal = f"torch {torch.__version__} cannot capture a CUDA graph: {reason}"
                _log.warning("updates run kernel by kernel: %s", Replayed.refusal)
        if self._graph is None:
            step()
        else:
            self._graph.replay()

    def _capture(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures the step. Unlike `torch.cuda.graph`, it does not first wait for the device and release all
        cached memory, which would take up to a second to map again."""
        if self._stream is None:
            self._stream = _free_stream([other._stream for other in Replayed._living])
        current_stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(current_stream)  # a graph before this one may still be using its workspace
        with torch.cuda.stream(self._stream):
            square = torch.ones(16, 16, dtype=torch.bfloat16, device=current_stream.device)
            torch.mm(square, square)
            try:
                # NCCL's watchdog polls events from another thread, which the mode "global" would forbid.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                step()
                graph.capture_end()
            except RuntimeError:
                _abandon(graph, pool)
                raise
        current_stream.wait_stream(self._stream)
        return graph


def try_out(device: torch.device) -> str:
    """Captures and replays a small matmul twice, the second time after the first graph has been deleted.

    Returns:
        The reason why this process cannot use CUDA graphs; empty if both replays gave the right result.
    """
    x = torch.eye(16, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        product, replayed = torch.zeros_like(x), Replayed()
        for _ in range(3):
            product.zero_()
            replayed.run(partial(torch.mm, x, x, out=product), lambda: 0)
        if not torch.equal(product, x):
            Replayed.refusal = f"torch {torch.__version__} replays a CUDA graph with a wrong result"
    return Replayed.refusal


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed, kept alive because torch 2.11 still asks them later which allocations are
theirs."""


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Ends a failed capture or, if that fails too, its part in the allocator. Otherwise the allocator of
    torch 2.11 would assume forever that a capture is in progress (pytorch#180395), and not free memory that
    several streams have used."""
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # raised if the allocator's capture has already ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    _abandoned.append(graph)


def _free_stream(taken: list[torch.cuda.Stream | None]) -> torch.cuda.Stream:
    """Returns a stream that is not in `taken`."""
    for _ in range(STREAMS):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if stream not in taken:
            return stream
    raise RuntimeError(f"each of the {STREAMS} streams already has a graph")
