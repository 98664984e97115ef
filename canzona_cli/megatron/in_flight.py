"""When asynchronous collectives complete, without making anybody wait for them."""

import os
import time
from typing import Protocol

import torch

from canzona_cli.megatron.timers import CudaClock, Span

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The variable that says how many hardware queues the streams of a process are spread over."""


class Waitable(Protocol):
    """An asynchronous collective: a `torch.distributed.Work`, or Megatron's coalesced handle of several."""

    def wait(self) -> object: ...


class HostWatcher:
    """Ends a span when the collective behind a handle completes.

    For gloo, whose threads say when a collective is done; no polling is needed.

    A reduce-scatter says nothing before it is waited for. Its span ends with that wait, an upper bound.
    """

    def watch(self, span: Span, handle: Waitable) -> None:
        works: list[torch.distributed.Work] = list(getattr(handle, "works", [handle]))
        missing = len(works)
        if missing == 0:
            span.end = span.start

        def landed(_: object) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0 and span.end is None:
                span.end = time.perf_counter()

        for work in works:
            try:
                work.get_future().add_done_callback(landed)
            except RuntimeError:  # this kind of collective has no future
                return

    def waited(self, span: Span) -> None:
        """The training thread had to wait for the collective and has just gone on."""
        if span.end is None:
            span.end = time.perf_counter()


class CudaWatcher:
    """For NCCL: a stream of its own waits for the collective and records an event; the host goes on.

    With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue, and this wait would hold up every launch
    behind it: computing would stand still until each collective has ended. There, a span ends where the computing
    stream itself waits for the collective, an upper bound.
    """

    def __init__(self) -> None:
        self.waits = os.environ.get(CONNECTIONS) != "1"
        """Whether it may; else spans are upper bounds."""
        self._clock = CudaClock()
        self._stream = torch.cuda.Stream() if self.waits else None  # type: ignore[no-untyped-call]

    def watch(self, span: Span, handle: Waitable) -> None:
        if not getattr(handle, "works", True):
            span.end = span.start  # nothing travels
        elif self._stream is not None:
            with torch.cuda.stream(self._stream):
                handle.wait()
                span.end = self._clock.now()

    def waited(self, span: Span) -> None:
        """The current stream has been told to wait for the collective."""
        if span.end is None:
            span.end = self._clock.now()


Watcher = HostWatcher | CudaWatcher


def watcher_for(device: torch.device) -> Watcher:
    """The one for the device's communication library."""
    return CudaWatcher() if device.type == "cuda" else HostWatcher()
