"""Times the phases of a step without waiting for the device.

The timer keeps a stack of phases and takes a timestamp at every change of phase. On CUDA a timestamp is an
event on the current stream, which is read one step later, when the device has reached it; on a CPU it is the
host's clock. Every moment of a step belongs to exactly one phase, so the phases of a step add up to its time.
The timer also has totals: the seconds for which each kind of communication was in flight, overlapped or not.
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from canzona_cli.core.phases import Interval, Phase, StepTimeline, TotalPhase

TOTAL_OF: dict[str, TotalPhase] = {
    "grad_reduce": "grad_reduce_total",
    "exchange": "exchange_total",
    "param_gather": "param_gather_total",
}
"""The name of the total for each phase in which the step waits for communication."""


@dataclass(frozen=True)
class StepTiming:
    """The time that one step took on this rank."""

    number: int
    """The number of the step in the run."""
    step_s: float
    """The seconds that the step took."""
    phases: dict[str, float]
    """The seconds in each phase, and the totals of communication, which overlap with the phases."""
    waited_s: float = 0.0
    """The seconds that the host waited for other ranks within data, forward and backward."""

    @property
    def own_s(self) -> float:
        """The seconds that this rank needed for data, forward and backward, excluding waits for other ranks.
        The work is the same on every rank of a pipeline stage. On GPUs, waits within a tensor-parallel group
        are included, because the host does not see them."""
        return sum(self.phases.get(phase, 0.0) for phase in EVEN_PHASES) - self.waited_s


EVEN_PHASES: tuple[Phase, ...] = ("data", "forward", "backward")
"""The phases in which all ranks of a pipeline stage have the same work. In other phases, a plan may
distribute work unevenly."""

KEPT_STEPS = 2
"""The number of most recent steps whose timestamps are kept."""


@dataclass
class Span:
    """The interval in which one transfer is in flight, as timestamps of a clock."""

    name: TotalPhase
    start: object
    end: object | None = None
    """The timestamp of the end; None while the transfer is in flight."""


@dataclass(kw_only=True)
class _Step:
    """The timestamps of one step. On CUDA the device may not have reached them yet."""

    number: int
    marks: list[tuple[object, str]]
    """The changes of phase, each with its timestamp and the new phase."""
    spans: list[Span] = field(default_factory=list)
    end: object | None = None
    moment: tuple[object, float] | None = None
    """A recent timestamp and the host's clock at that time; None if no such pair was known at the end of the
    step."""
    waited_s: float = 0.0
    """The seconds that the host waited for other ranks, as in `StepTiming`."""


class HostClock:
    """The clock of a device that works synchronously: timestamps are the host's time."""

    moment: tuple[object, float] | None = (0.0, 0.0)
    """A timestamp, and the host's clock at that time."""

    def now(self) -> object:
        return time.perf_counter()

    def wait_for(self, stamp: object) -> None:
        """Does nothing, because the time of a timestamp is known when it is taken."""

    def elapsed(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


class CudaClock:
    """The clock of a CUDA device: timestamps are events on the current stream. The time between two events is
    known once the device has reached both."""

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
            # The host resumes when the device reaches the event, so this pair relates the device's time to
            # the host's.
            self.moment = stamp, time.perf_counter()

    def elapsed(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3


class PhaseTimer:
    """A timer that divides each step into phases that do not overlap. Outside of steps, calls are allowed but
    measure nothing."""

    def __init__(self, device: torch.device) -> None:
        self._clock: HostClock | CudaClock = CudaClock() if device.type == "cuda" else HostClock()
        self.device = device
        self._stack: list[Phase] = []
        self._step: _Step | None = None
        self._unread: _Step | None = None
        """The last complete step, whose times have not been read yet."""
        self._timings: list[StepTiming] = []
        self._steps_begun = 0
        self._profiler_ranges: list[torch.profiler.record_function] | None = None
        self._kept_steps: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self.on_change: Callable[[Phase], None] | None = None
        """A function that is called with the new phase at every change of phase, also outside of steps."""

    @property
    def newest(self) -> StepTiming | None:
        """The timing of the latest step whose times have been read, which is the step before the last; None
        if no step's times have been read yet."""
        return self._timings[-1] if self._timings else None

    @property
    def current(self) -> Phase:
        """The innermost current phase; `other` outside of all phases."""
        return self._stack[-1] if self._stack else "other"

    def number_from(self, step: int) -> None:
        """Gives the next step the number `step`. Without this call, steps are numbered from 1."""
        self._steps_begun = step - 1

    def begin_step(self) -> None:
        """Starts a step. Until `end_step`, time is attributed to the phase that is `current`."""
        self._steps_begun += 1
        self._step = _Step(number=self._steps_begun, marks=[(self._clock.now(), self.current)])

    def end_step(self) -> None:
        """Ends the step, and reads the times of the step before it, whose events the device has reached and
        whose transfers are complete."""
        assert self._step is not None
        self._step.end, self._step.moment = self._clock.now(), self._clock.moment
        self._read()
        self._unread, self._step = self._step, None
        self._kept_steps.append(self._unread)

    def timings(self) -> list[StepTiming]:
        """Returns the timings of all steps so far. Waits for the device, so call it between steps or after
        training."""
        self._wait_for_all()
        self._read()
        return self._timings

    def timelines(self) -> list[StepTimeline]:
        """Returns the timelines of the most recent steps. Waits for the device, so call it between steps or after
        training."""
        self._wait_for_all()
        # An idle device reaches a timestamp as soon as it is taken, so the timestamp corresponds to the
        # host's clock.
        idle_moment = self._clock.now(), time.perf_counter()
        self._wait_for_all()
        return [self._timeline(step, step.moment or idle_moment) for step in self._kept_steps]

    def annotate(self, on: bool) -> None:
        """Starts or stops naming the phases in traces of torch's profiler. May only be called between
        steps."""
        self._profiler_ranges = [] if on else None

    def push(self, phase: Phase) -> None:
        """Enters a phase, until the matching `pop`."""
        self._stack.append(phase)
        self._mark()
        if self._profiler_ranges is not None:
            self._profiler_ranges.append(torch.profiler.record_function(f"canzona: {phase}"))
            self._profiler_ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        """Leaves the innermost phase."""
        if self._profiler_ranges:
            self._profiler_ranges.pop().__exit__(None, None, None)
        self._stack.pop()
        self._mark()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Attributes the time of the block to a phase."""
        self.push(name)
        try:
            yield
        finally:
            self.pop()

    def waited(self, seconds: float) -> None:
        """Records that the host has just waited `seconds` for other ranks; ignored outside of data, forward
        and backward."""
        if self._step is not None and self.current in EVEN_PHASES:
            self._step.waited_s += seconds

    def fetch(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Starts to copy `values`, a flat tensor, to the host. During a step, canzona reads from the device
        only through this method, apart from decompositions and the repair of failed updates; Megatron also
        reads how many tokens each expert gets (`instrument`).

        Returns:
            A function that waits for the copy and returns the values. It does not wait for work that the
            device does after the copy, so it takes no time if the host has already waited for such work.
        """
        copy = values.to("cpu", non_blocking=True)
        copied = self._clock.now()

        def wait() -> list[float]:
            self._clock.wait_for(copied)
            numbers: list[float] = copy.tolist()
            return numbers

        return wait

    def read(self, values: torch.Tensor) -> list[float]:
        """Returns the elements of `values`, a flat tensor. The host waits for the device."""
        return self.fetch(values)()

    def now(self) -> object:
        """Takes a timestamp of the device's clock."""
        return self._clock.now()

    def span(self, name: TotalPhase, start: object, end: object | None = None) -> Span:
        """Records a transfer that started at `start`. If its end is not known yet, the caller sets the span's
        `end` later."""
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
        origin, _ = step.marks[0]
        stamp, host_s = moment
        start_s = host_s + self._clock.elapsed(stamp, origin)

        def interval(name: str, start: object, end: object) -> Interval:
            return Interval(
                name=name,
                start_s=start_s + self._clock.elapsed(origin, start),
                end_s=start_s + self._clock.elapsed(origin, end),
            )

        ends = [*(when for when, _ in step.marks[1:]), step.end]
        phases = [interval(name, start, end) for (start, name), end in zip(step.marks, ends, strict=True)]
        ended_spans = [span for span in step.spans if span.end is not None]
        transfers = [interval(span.name.removesuffix("_total"), span.start, span.end) for span in ended_spans]
        return StepTimeline(
            number=step.number,
            start_s=start_s,
            end_s=start_s + self._clock.elapsed(origin, step.end),
            phases=tuple(phase for phase in phases if phase.end_s > phase.start_s),
            transfers=tuple(sorted(transfers, key=lambda transfer: transfer.start_s)),
        )

    def _read(self) -> None:
        """Computes the timing of the last complete step from its timestamps, if that has not been done
        yet."""
        step, self._unread = self._unread, None
        if step is None:
            return
        phases: dict[str, float] = defaultdict(float)
        origin = step.marks[0][0]
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        spans = [(span.name, span.start, span.end) for span in step.spans if span.end is not None]
        for (start, phase), (end, _) in zip(step.marks, [*step.marks[1:], (step.end, "")], strict=True):
            phases[phase] += self._clock.elapsed(start, end)
            if phase in TOTAL_OF:
                # The time that the step waits for communication, including launches, is part of the total.
                spans.append((TOTAL_OF[phase], start, end))
        for name, start, end in spans:
            intervals[name].append((self._clock.elapsed(origin, start), self._clock.elapsed(origin, end)))
        phases |= {name: _union_length(covered) for name, covered in intervals.items()}
        step_s = self._clock.elapsed(origin, step.end)
        self._timings.append(StepTiming(number=step.number, step_s=step_s, phases=phases, waited_s=step.waited_s))


def _union_length(intervals: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, so that simultaneous transfers are counted once."""
    length, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return length


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable that sets the number of hardware queues for the streams of a process."""


class Waitable(Protocol):
    """A handle for an asynchronous collective: a `torch.distributed.Work`, or a handle for several."""

    def wait(self) -> object: ...


class HostWatcher:
    """A watcher for gloo, whose threads report when the collectives of a handle are complete. The watcher
    then ends the span.

    A reduce-scatter does not report its completion. Its span ends when the step has waited for it, so its
    time in flight is an upper bound.
    """

    def watch(self, span: Span, handle: Waitable) -> None:
        works: list[torch.distributed.Work] = list(getattr(handle, "works", [handle]))
        incomplete = len(works)
        if incomplete == 0:
            span.end = span.start

        def end_span(_: object) -> None:
            nonlocal incomplete
            incomplete -= 1
            if incomplete == 0 and span.end is None:
                span.end = time.perf_counter()

        for work in works:
            try:
                work.get_future().add_done_callback(end_span)
            except RuntimeError:  # this kind of collective does not provide a future
                return

    def waited(self, span: Span) -> None:
        """Ends the span now if it has not ended yet; the training thread has just waited for the
        collective."""
        if span.end is None:
            span.end = time.perf_counter()


class CudaWatcher:
    """A watcher for NCCL: a separate stream waits for the collectives of a handle and records an event, which
    ends the span. The host does not wait.

    With CUDA_DEVICE_MAX_CONNECTIONS=1, all streams share one hardware queue, and this wait would delay every
    later launch until the collective is complete. In that case a span ends where the computing stream waits
    for the collective, so its time in flight is an upper bound."""

    def __init__(self) -> None:
        self.waits = os.environ.get(CONNECTIONS) != "1"
        """True if a separate stream waits for collectives; otherwise spans are upper bounds."""
        self._clock = CudaClock()
        self._stream = torch.cuda.Stream() if self.waits else None  # type: ignore[no-untyped-call]

    def watch(self, span: Span, handle: Waitable) -> None:
        if not getattr(handle, "works", True):
            span.end = span.start  # nothing is communicated
        elif self._stream is not None:
            with torch.cuda.stream(self._stream):
                handle.wait()
                span.end = self._clock.now()

    def waited(self, span: Span) -> None:
        """Ends the span now if it has not ended yet; the current stream has just waited for the
        collective."""
        if span.end is None:
            span.end = self._clock.now()


Watcher = HostWatcher | CudaWatcher


def watcher_for(device: torch.device) -> Watcher:
    """Returns the watcher for the device's communication library: NCCL's for CUDA, gloo's otherwise."""
    return CudaWatcher() if device.type == "cuda" else HostWatcher()
