"""Phase timing that does not disturb what it times.

The timer keeps a stack of phases and one timestamp per change of phase; nothing waits for the device. On CUDA
a timestamp is an event on the current stream, read a step later when it has long passed; on the CPU it is the
clock. Every moment of a step belongs to exactly one phase, so the in-step phases add up to the step. Beside
them stand totals: how long communication of one kind was in flight, hidden or not.
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from canzona_cli.run.phases import Interval, Phase, StepTimeline, TotalPhase

TOTAL_OF: dict[str, TotalPhase] = {
    "grad_reduce": "grad_reduce_total",
    "exchange": "exchange_total",
    "param_gather": "param_gather_total",
}


@dataclass(frozen=True)
class StepTiming:
    """Seconds one step spent in each phase on this rank, and the totals that overlap them."""

    step_s: float
    phases: dict[str, float]
    waited_s: float = 0.0
    """Seconds of data, forward and backward in which the host waited for other ranks."""

    @property
    def own_s(self) -> float:
        """The seconds that this rank itself needed for data, forward and backward, which are the same work on
        every rank of a pipeline stage. On GPUs the waits inside a tensor-parallel group are in it: only the
        device knows them."""
        return sum(self.phases.get(phase, 0.0) for phase in EVEN_PHASES) - self.waited_s


EVEN_PHASES: tuple[Phase, ...] = ("data", "forward", "backward")
"""Phases in which every rank of a pipeline stage has the same to do;
a plan may share out the rest unevenly."""

KEPT_STEPS = 2
"""The number of the last steps that keep their timestamps unless others are asked for.
They are taken anyway."""


@dataclass
class Span:
    """One transfer in flight."""

    name: TotalPhase
    start: object
    end: object | None = None
    """The end; None while it is in flight."""


@dataclass(kw_only=True)
class _Step:
    """The timestamps of one step; on CUDA they may still lie in the device's future."""

    number: int
    marks: list[tuple[object, str]]
    """Each change of phase: when, and to what."""
    spans: list[Span] = field(default_factory=list)
    end: object | None = None
    moment: tuple[object, float] | None = None
    """A timestamp near the step and the host's clock at it, where one was known at the step's end."""
    waited_s: float = 0.0
    """The seconds that it waited, as in `StepTiming`."""


class HostClock:
    """Timestamps of a device without queues."""

    moment: tuple[object, float] | None = (0.0, 0.0)
    """A timestamp and the host's clock at it."""

    def now(self) -> object:
        return time.perf_counter()

    def wait_for(self, stamp: object) -> None:
        """Waits until `stamp` has passed on the device."""

    def elapsed(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


class CudaClock:
    """Timestamps as events on the current stream; their distance is known once both have passed."""

    def __init__(self) -> None:
        self.moment: tuple[object, float] | None = None

    def now(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait_for(self, stamp: object) -> None:
        assert isinstance(stamp, torch.cuda.Event)
        if not stamp.query():  # type: ignore[no-untyped-call]
            stamp.synchronize()
            # The host goes on at the very moment at which the event passes.
            self.moment = stamp, time.perf_counter()

    def elapsed(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3


class PhaseTimer:
    """Splits each step into exclusive phases. Outside a step every call is accepted and measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self._clock: HostClock | CudaClock = CudaClock() if device.type == "cuda" else HostClock()
        self.device = device
        self._stack: list[Phase] = []
        self._step: _Step | None = None
        self._closed: _Step | None = None
        self._timings: list[StepTiming] = []
        self._begun = 0
        self._ranges: list[torch.profiler.record_function] | None = None
        self._keep: tuple[int, int] | None = None
        self._kept: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self.on_change: Callable[[Phase], None] | None = None
        """Called with the phase that begins or goes on, outside of steps too."""
        self.on_wait: Callable[[bool], None] | None = None
        """Called when the host begins to wait for the device, and when it goes on."""

    @property
    def newest(self) -> StepTiming | None:
        """The newest step whose times are known: the one before the last."""
        return self._timings[-1] if self._timings else None

    @property
    def current(self) -> Phase:
        """The innermost phase."""
        return self._stack[-1] if self._stack else "other"

    def keep(self, first: int, last: int) -> None:
        """Let the timestamps of these steps (from 1) stay for `timelines`, in place of the last steps'."""
        self._keep, self._kept = (first, last), deque()

    def begin_step(self) -> None:
        """Start a step; until `end_step`, time belongs to the innermost phase, or to `other`."""
        self._begun += 1
        self._step = _Step(number=self._begun, marks=[(self._clock.now(), self.current)])

    def end_step(self) -> None:
        """Close the step. The one before it is read now: its events have passed,
        its transfers have landed."""
        assert self._step is not None
        self._step.end, self._step.moment = self._clock.now(), self._clock.moment
        self._read()
        self._closed, self._step = self._step, None
        if self._keep is None or self._keep[0] <= self._begun <= self._keep[1]:
            self._kept.append(self._closed)

    def timings(self) -> list[StepTiming]:
        """Returns all steps so far. Waits for the device, so call it after training."""
        self._wait_for_all()
        self._read()
        return self._timings

    def timelines(self) -> list[StepTimeline]:
        """Returns the steps that were recorded. Waits for the device, so call it after training."""
        self._wait_for_all()
        # On a device with nothing to do, now is now.
        idle = self._clock.now(), time.perf_counter()
        self._wait_for_all()
        return [self._timeline(step, step.moment or idle) for step in self._kept]

    def annotate(self, on: bool) -> None:
        """Name phases in a trace of torch's profiler from now on, or no longer. Between steps only."""
        self._ranges = [] if on else None

    def push(self, phase: Phase) -> None:
        self._stack.append(phase)
        self._mark()
        if self._ranges is not None:
            self._ranges.append(torch.profiler.record_function(f"canzona: {phase}"))
            self._ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        self._stack.pop()
        self._mark()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self.push(name)
        try:
            yield
        finally:
            self.pop()

    def waited(self, seconds: float) -> None:
        """Notes that the host has just waited for other ranks."""
        if self._step is not None and self.current in EVEN_PHASES:
            self._step.waited_s += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what makes the host wait for the device: until other ranks have come as far,
        it stays there."""
        if self.on_wait is not None:
            self.on_wait(True)
        try:
            yield
        finally:
            if self.on_wait is not None:
                self.on_wait(False)

    def fetch(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring `values` (flat) to the host: the one way in which a step reads from its device.

        Returns:
            What waits until they have come, and gives them. What the device does behind them is not waited
            for; so what is fetched early and asked for after a later wait costs none.
        """
        copy, landed = values.to("cpu", non_blocking=True), self._clock.now()

        def arrived() -> list[float]:
            with self.waiting():
                self._clock.wait_for(landed)
            numbers: list[float] = copy.tolist()
            return numbers

        return arrived

    def read(self, values: torch.Tensor) -> list[float]:
        """`values` (flat), now. The host waits."""
        return self.fetch(values)()

    def now(self) -> object:
        """Takes a timestamp of this device."""
        return self._clock.now()

    def span(self, name: TotalPhase, start: object, end: object | None = None) -> Span:
        """Records a transfer that began at `start`; set `.end` when it has landed if that is not known yet."""
        span = Span(name, start, end)
        if self._step is not None:
            self._step.spans.append(span)
        return span

    def _mark(self) -> None:
        if self._step is not None:
            self._step.marks.append((self._clock.now(), self.current))
        if self.on_change is not None:
            self.on_change(self.current)

    def _wait_for_all(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _timeline(self, step: _Step, moment: tuple[object, float]) -> StepTimeline:
        origin, (stamp, host_s) = step.marks[0][0], moment
        start_s = host_s + self._clock.elapsed(stamp, origin)

        def interval(name: str, start: object, end: object) -> Interval:
            return Interval(
                name=name,
                start_s=start_s + self._clock.elapsed(origin, start),
                end_s=start_s + self._clock.elapsed(origin, end),
            )

        ends = [*(when for when, _ in step.marks[1:]), step.end]
        phases = [interval(name, start, end) for (start, name), end in zip(step.marks, ends, strict=True)]
        landed = [span for span in step.spans if span.end is not None]
        transfers = [interval(span.name.removesuffix("_total"), span.start, span.end) for span in landed]
        return StepTimeline(
            number=step.number,
            start_s=start_s,
            end_s=start_s + self._clock.elapsed(origin, step.end),
            phases=tuple(phase for phase in phases if phase.end_s > phase.start_s),
            transfers=tuple(sorted(transfers, key=lambda transfer: transfer.start_s)),
        )

    def _read(self) -> None:
        step, self._closed = self._closed, None
        if step is None:
            return
        phases: dict[str, float] = defaultdict(float)
        origin = step.marks[0][0]
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        spans = [(span.name, span.start, span.end) for span in step.spans if span.end is not None]
        for (start, phase), (stop, _) in zip(step.marks, [*step.marks[1:], (step.end, "")], strict=True):
            phases[phase] += self._clock.elapsed(start, stop)
            if phase in TOTAL_OF:
                # What the step waits for is part of the whole, launching and book-keeping included.
                spans.append((TOTAL_OF[phase], start, stop))
        for name, start, end in spans:
            intervals[name].append((self._clock.elapsed(origin, start), self._clock.elapsed(origin, end)))
        phases |= {name: _covered(covered) for name, covered in intervals.items()}
        step_s = self._clock.elapsed(origin, step.end)
        self._timings.append(StepTiming(step_s=step_s, phases=phases, waited_s=step.waited_s))


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union: transfers that share the link at the same time count once."""
    length, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return length


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
        """Notes that the training thread had to wait for the collective and has just gone on."""
        if span.end is None:
            span.end = time.perf_counter()


class CudaWatcher:
    """A watcher for NCCL: a stream of its own waits for the collective and records an event; the host goes on.

    With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue, and this wait would hold up every
    launch behind it: computing would stand still until each collective has ended. There, a span ends where
    the computing stream itself waits for the collective, an upper bound.
    """

    def __init__(self) -> None:
        self.waits = os.environ.get(CONNECTIONS) != "1"
        """True where it may; else spans are upper bounds."""
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
        """Notes that the current stream has been told to wait for the collective."""
        if span.end is None:
            span.end = self._clock.now()


Watcher = HostWatcher | CudaWatcher


def watcher_for(device: torch.device) -> Watcher:
    """Picks the watcher for the device's communication library."""
    return CudaWatcher() if device.type == "cuda" else HostWatcher()
