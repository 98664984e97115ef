"""When asynchronous collectives complete, without making anybody wait for them."""

import queue
import threading
import time
from typing import Protocol

import torch

from canzona_cli.megatron.timers import Span

_POLL_S = 1e-3


class Waitable(Protocol):
    """An asynchronous collective: a `torch.distributed.Work`, or Megatron's coalesced handle of several."""

    def wait(self) -> object: ...


class Watcher(Protocol):
    """Ends a span when the collective behind a handle completes."""

    def watch(self, span: Span, handle: Waitable) -> None: ...

    def waited(self, span: Span) -> None:
        """The training thread had to wait for the collective and has just gone on."""


def watcher_for(device: torch.device) -> Watcher:
    """The one for the device's communication library."""
    return CudaWatcher() if device.type == "cuda" else HostWatcher()


class HostWatcher:
    """For gloo: one thread looks every millisecond while something is in flight.

    That millisecond is the resolution of the totals. gloo's reduce-scatter never reports completion before it is
    waited for; its span ends with that wait, an upper bound.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Span, list[torch.distributed.Work]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="collective-watcher", daemon=True).start()

    def watch(self, span: Span, handle: Waitable) -> None:
        self._queue.put((span, list(getattr(handle, "works", [handle]))))

    def waited(self, span: Span) -> None:
        span.end = time.perf_counter()

    def _run(self) -> None:
        flying: list[tuple[Span, list[torch.distributed.Work]]] = []
        while True:
            while not flying or not self._queue.empty():
                flying.append(self._queue.get())
            time.sleep(_POLL_S)
            for span, works in flying:
                if all(work.is_completed() for work in works) and span.end is None:
                    span.end = time.perf_counter()
            flying = [(span, works) for span, works in flying if span.end is None]


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
