"""CUDA graphs of a step that is made again and again.

Each graph has a memory pool and a stream of its own, and one product is made on that stream before the capture.
torch 2.11, the oldest that canzona admits, to 2.14 need all three. There cuBLAS has a workspace for each stream,
made by the first product on it:

- made during a capture, it lies in that graph's pool, which then is never freed, and which torch 2.11 fails an
  assertion on when something else is captured into it;
- torch 2.12 to 2.14 free it when a graph of that stream is dropped, also for other graphs that were captured there
  (pytorch#193402).

From 2.15 on a workspace lives as long as its product.
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
"""The streams that torch hands out in turns."""


class Replayed:
    """Runs one step again and again: as it is, captured when it meets the memory it met before,
    replayed ever after.

    A graph is its kernels on their memory, with the numbers the host gave them. So a step must take what
    changes from device memory, and `key` has to be different where anything else is: addresses, numbers,
    sizes of scratch. While the key changes steps run as they are, which is what a replay is compared with.
    Nothing waits for the GPU, and the allocator keeps what it has.

    A step that cannot be captured, as one that reads back from the GPU, runs as it is. It is the last of its
    process to be tried: `refusal` then says why.
    """

    refusal: ClassVar[str] = ""
    """The reason why nothing more is captured in this process; empty while nothing failed."""
    _living: ClassVar["WeakSet[Replayed]"] = WeakSet()

    def __init__(self) -> None:
        self.captures = 0
        """Graphs captured so far."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._stream: torch.cuda.Stream | None = None
        Replayed._living.add(self)

    def run(self, step: Callable[[], object], key: Callable[[], Hashable]) -> None:
        """Args:
        step: Enqueues kernels on the current stream. Called twice it must do the same again.
        key: The values that must be as they were for the graph to be good, state that the first step makes
            included.
        """
        now = key()
        if now != self._key:
            self._graph = None
            step()
            self._key = key()
            return
        if self._graph is None and not Replayed.refusal:
            try:
                self._graph = self._captured(step)
                self.captures += 1
            except RuntimeError as error:  # nothing of it has run
                reason = str(error).partition("\n")[0]
                Replayed.refusal = f"torch {torch.__version__} captures no graph: {reason}"
                _log.warning("updates run kernel by kernel: %s", Replayed.refusal)
        if self._graph is None:
            step()
        else:
            self._graph.replay()

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures without what `torch.cuda.graph` does first: waiting for the device, and giving back all cached
        memory, which takes up to a second to map again."""
        if self._stream is None:
            self._stream = _free_stream([other._stream for other in Replayed._living])
        before, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        self._stream.wait_stream(before)  # a graph before this one may still be using its workspace
        with torch.cuda.stream(self._stream):
            square = torch.ones(16, 16, dtype=torch.bfloat16, device=before.device)
            torch.mm(square, square)
            try:
                # NCCL's watchdog asks for events in a thread of its own all the time, which "global" forbids.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                step()
                graph.capture_end()
            except RuntimeError:
                _abandon(graph, pool)
                raise
        before.wait_stream(self._stream)
        return graph


def try_out(device: torch.device) -> str:
    """Captures and replays a small product, and once more when that graph is gone.

    Returns:
        The reason why this process captures nothing; empty if both went well.
    """
    x = torch.eye(16, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        product, replayed = torch.zeros_like(x), Replayed()
        for _ in range(3):
            product.zero_()
            replayed.run(partial(torch.mm, x, x, out=product), lambda: 0)
        if not torch.equal(product, x):
            Replayed.refusal = f"torch {torch.__version__} replays something other than what it captured"
    return Replayed.refusal


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: torch 2.11 goes on asking them which allocations are theirs."""


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Ends a capture that failed. If that fails too, the allocator of torch 2.11 would believe for ever that a capture
    is under way (pytorch#180395), and no longer free memory that several streams have used."""
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # raised where the allocator knows already
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    _abandoned.append(graph)


def _free_stream(taken: list[torch.cuda.Stream | None]) -> torch.cuda.Stream:
    for _ in range(STREAMS):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if stream not in taken:
            return stream
    raise RuntimeError(f"each of the {STREAMS} streams already has a graph")
