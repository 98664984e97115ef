"""A run's timelines as a Chrome trace, which Perfetto and chrome://tracing open:
measured and planned, rank by rank.

A rank is a process. Its `compute` track holds the phases of its steps, one after another; transfers in flight
have tracks of their own, one more wherever two of a kind overlap. Ranks of one machine share a clock. Between
machines, steps are laid over each other by their ends, which come after a sum over all ranks (the loss): the
end of one rank is never earlier than the last rank's contribution, so ends are equal but for the latency of
that sum. Planned ranks are processes behind the measured ones; their step begins with the first measured one.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from canzona_cli.config.schema import Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.breakdown import Prediction, load_prediction, streams_of
from canzona_cli.run.codec import load_if_sound
from canzona_cli.run.files import RunFiles, write_text_atomic
from canzona_cli.run.phases import COMMUNICATION, PHASES, STREAMS, Interval
from canzona_cli.run.records import RankTimeline, load_timelines

_TIDS = 100
"""Track numbers that one process may use; they are different in every process,
as threads of a machine are."""


def write_trace(run_dir: Path, target: Path) -> int:
    """Draw a run's timelines into `target`; returns how many ranks it shows as measured.

    Raises:
        ConfigError: the run has no timelines, they are damaged, or `target` cannot be written.
    """
    files = RunFiles(run_dir)
    ranks = load_timelines(files)
    if not ranks:
        reason = "there are no timelines in it"
        fix = "a run writes them when training ends; give the directory of one that got there"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix))
    try:
        planned = load_prediction(run_dir)
    except ConfigError:
        planned = None
    layout = load_if_sound(files.layout, Layout)
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"run": str(run_dir.absolute()), "clock": "microseconds from the first step shown"},
        "traceEvents": list(trace_events(ranks, planned, layout)),
    }
    try:
        write_text_atomic(target, json.dumps(trace) + "\n")
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(key="--trace", value=target, reason=reason, fix="name another file")) from None
    return len(ranks)


def trace_events(
    ranks: Sequence[RankTimeline], planned: Prediction | None, layout: Layout | None
) -> Iterator[dict[str, object]]:
    """The trace's events: names of processes and tracks, then what happened; microseconds."""
    shifts = clock_shifts(ranks)
    origin = min(step.start_s + shifts[rank.clock] for rank in ranks for step in rank.steps)
    for rank in ranks:
        shift = shifts[rank.clock] - origin
        place = f" ({place_of(rank.rank, layout)})" if layout is not None else ""
        process = _Process(number=rank.rank + 1, name=f"rank {rank.rank}{place}", order=rank.rank)
        yield from process.names()
        steps = [Interval(name=f"step {s.number}", start_s=s.start_s, end_s=s.end_s) for s in rank.steps]
        yield from process.track("step", steps, shift, "step")
        phases = [phase for step in rank.steps for phase in step.phases]
        yield from process.track("compute", phases, shift, "phase")
        transfers = [transfer for step in rank.steps for transfer in step.transfers]
        for kind in dict.fromkeys((*COMMUNICATION, *(transfer.name for transfer in transfers))):
            of_kind = [transfer for transfer in transfers if transfer.name == kind]
            name = f"{PHASES[kind].name} in flight" if kind in PHASES else kind
            yield from process.tracks(name, of_kind, shift, "transfer")
    if planned is None:
        return
    behind = max(rank.rank for rank in ranks) + 1
    for rank_number, streams in groupby(streams_of(planned.events), key=lambda stream: stream[0]):
        process = _Process(
            number=behind + rank_number + 1,
            name=f"planned: rank {rank_number} ({planned.strategy}, profile {planned.profile})",
            order=behind + rank_number,
        )
        yield from process.names()
        for _, stream, intervals in streams:
            yield from process.tracks(STREAMS[stream], intervals, 0.0, "planned")


def lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Spread intervals over as few tracks as it takes that none overlap on a track."""
    rows: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda one: (one.start_s, one.end_s)):
        free = next((lane for lane in rows if lane[-1].end_s <= interval.start_s), None)
        if free is None:
            rows.append([interval])
        else:
            free.append(interval)
    return rows


class _Process:
    """A process of the trace; its tracks are numbered as they come."""

    def __init__(self, *, number: int, name: str, order: int) -> None:
        self._number, self._name, self._order, self._tracks = number, name, order, 0

    def names(self) -> Iterator[dict[str, object]]:
        yield self._meta("process_name", {"name": self._name})
        yield self._meta("process_sort_index", {"sort_index": self._order})

    def track(
        self, name: str, intervals: Sequence[Interval], shift_s: float, category: str
    ) -> Iterator[dict[str, object]]:
        """Nothing for a track without intervals."""
        if not intervals:
            return
        self._tracks += 1
        tid = self._number * _TIDS + self._tracks
        yield self._meta("thread_name", {"name": name}, tid)
        yield self._meta("thread_sort_index", {"sort_index": self._tracks}, tid)
        for interval in intervals:
            yield {
                "name": interval.name,
                "cat": category,
                "ph": "X",
                "pid": self._number,
                "tid": tid,
                "ts": 1e6 * (interval.start_s + shift_s),
                "dur": 1e6 * max(0.0, interval.end_s - interval.start_s),
            }

    def tracks(
        self, name: str, intervals: Iterable[Interval], shift_s: float, category: str
    ) -> Iterator[dict[str, object]]:
        """Distributes intervals over as many tracks as overlap."""
        for number, lane in enumerate(lanes(intervals), 1):
            yield from self.track(name if number == 1 else f"{name} {number}", lane, shift_s, category)

    def _meta(self, kind: str, arguments: Mapping[str, object], tid: int = 0) -> dict[str, object]:
        return {"name": kind, "ph": "M", "pid": self._number, "tid": tid, "args": dict(arguments)}


def clock_shifts(ranks: Sequence[RankTimeline]) -> dict[str, float]:
    """Seconds to add to each clock so that the ends of steps fall together; nothing for rank 0's."""
    ends: dict[str, dict[int, list[float]]] = {}
    for rank in ranks:
        for step in rank.steps:
            ends.setdefault(rank.clock, {}).setdefault(step.number, []).append(step.end_s)
    reference = ends[ranks[0].clock]
    shifts = {}
    for clock, steps in ends.items():
        apart = [
            statistics.mean(reference[number]) - statistics.mean(steps[number])
            for number in steps
            if number in reference
        ]
        shifts[clock] = statistics.mean(apart) if apart and clock != ranks[0].clock else 0.0
    return shifts


def place_of(rank: int, layout: Layout) -> str:
    """`TP 1, DP 0`: tp innermost, then cp, dp and pp, as Megatron numbers ranks."""
    places, rest = [], rank
    for name, size in (("TP", layout.tp), ("CP", layout.cp), ("DP", layout.dp), ("PP", layout.pp)):
        if size > 1:
            places.append(f"{name} {rest % size}")
        rest //= size
    return ", ".join(places) or "alone"
