"""A step of many kernels as one launch: captured as a CUDA graph, and replayed."""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)


class Replayed:
    """Runs one step again and again: as it is, captured when it meets the memory it met before, replayed ever after.

    A graph is its kernels on their memory, with the numbers the host gave them. So a step must take what changes
    from device memory, and `key` has to be different where anything else is: addresses, numbers, sizes of scratch.
    While the key changes steps run as they are, which is what a replay is compared with. Nothing waits for the GPU,
    but for the capture itself: once for a step that keeps its memory.

    A step that cannot be captured, as one that reads back from the GPU, is run as it is from then on, and that is said.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Hashable = None
        self._refused = False

    def run(self, step: Callable[[], None], key: Callable[[], Hashable]) -> None:
        """Args:
        step: Enqueues kernels on the current stream. Called twice it must do the same again.
        key: What must be as it was for the graph to be good, state that the first step makes included.
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
