"""When asynchronous collectives complete, without making anybody wait for them."""

import time
from typing import Protocol

import torch

from canzona_cli.megatron.timers import Span


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
    """For NCCL: a stream of its own waits for the collective and records an event; the host goes on."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def watch(self, span: Span, handle: Waitable) -> None:
        with torch.cuda.stream(self._stream):
            handle.wait()
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        span.end = event

    def waited(self, span: Span) -> None: ...


Watcher = HostWatcher | CudaWatcher


def watcher_for(device: torch.device) -> Watcher:
    """The one for the device's communication library."""
    return CudaWatcher() if device.type == "cuda" else HostWatcher()
