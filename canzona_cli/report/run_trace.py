"""The measured and planned timelines of a run as a Chrome trace, for Perfetto and chrome://tracing.

Each rank is a process of the trace. Its `compute` track shows the phases of the steps. Each kind of transfer
in flight has its own track, and more tracks where transfers of the same kind overlap.

Ranks on the same machine share a clock. The clocks of different machines are aligned at the ends of steps: a
step ends after an all-reduce of the loss over all ranks, so all ranks end a step at the same time, up to the
latency of that collective. Planned ranks are processes listed after the measured ones; the planned step
starts at the time of the first measured step.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from canzona_cli.config.schema import Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.breakdown import Prediction, streams_of
from canzona_cli.run.codec import load_if_valid
from canzona_cli.run.files import RunFiles, write_text_atomic
from canzona_cli.run.phases import COMMUNICATION, PHASES, STREAMS, Interval
from canzona_cli.run.records import RankTimeline, load_timelines

_TIDS = 100
"""The number of track IDs reserved for each process. IDs must be unique in the whole trace, not only in a
process."""


def write_trace(run_dir: Path, target: Path) -> int:
    """Writes a run's timelines to `target` as a trace; returns the number of measured ranks.

    Raises:
        ConfigError: the run has no timelines, they are damaged, or `target` cannot be written.
    """
    files = RunFiles(run_dir)
    ranks = load_timelines(files)
    if not ranks:
        reason = "has no timelines"
        fix = "give the directory of a run that finished training: timelines are written when training ends"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=fix))
    planned = load_if_valid(files.predicted, Prediction)
    layout = load_if_valid(files.layout, Layout)
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"run": str(run_dir.absolute()), "clock": "microseconds from the first step shown"},
        "traceEvents": list(trace_events(ranks, planned, layout)),
    }
    try:
        write_text_atomic(target, json.dumps(trace) + "\n")
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(key="--trace", value=target, reason=reason, fix="choose another file")) from None
    return len(ranks)


def trace_events(
    ranks: Sequence[RankTimeline], planned: Prediction | None, layout: Layout | None
) -> Iterator[dict[str, object]]:
    """Yields the events of the trace: the names of processes and tracks, and the intervals, in microseconds.

    Args:
        planned: the plan's prediction, shown after the measured ranks; None to show none.
        layout: the layout that gives the coordinates in the ranks' names; None if it is unknown.
    """
    shifts = clock_shifts(ranks)
    origin_s = min(step.start_s + shifts[rank.clock] for rank in ranks for step in rank.steps)
    for rank in ranks:
        shift_s = shifts[rank.clock] - origin_s
        coordinates = f" ({place_of(rank.rank, layout)})" if layout is not None else ""
        process = _Process(number=rank.rank + 1, name=f"rank {rank.rank}{coordinates}", order=rank.rank)
        yield from process.names()
        steps = [Interval(name=f"step {s.number}", start_s=s.start_s, end_s=s.end_s) for s in rank.steps]
        yield from process.track("step", steps, shift_s, "step")
        phases = [phase for step in rank.steps for phase in step.phases]
        yield from process.track("compute", phases, shift_s, "phase")
        transfers = [transfer for step in rank.steps for transfer in step.transfers]
        for kind in dict.fromkeys((*COMMUNICATION, *(transfer.name for transfer in transfers))):
            transfers_of_kind = [transfer for transfer in transfers if transfer.name == kind]
            name = f"{PHASES[kind].name} in flight" if kind in PHASES else kind
            yield from process.tracks(name, transfers_of_kind, shift_s, "transfer")
    if planned is None:
        return
    planned_offset = max(rank.rank for rank in ranks) + 1
    for rank_number, streams in groupby(streams_of(planned.events), key=lambda stream: stream[0]):
        process = _Process(
            number=planned_offset + rank_number + 1,
            name=f"planned: rank {rank_number} ({planned.strategy}, profile {planned.profile})",
            order=planned_offset + rank_number,
        )
        yield from process.names()
        for _, stream, intervals in streams:
            yield from process.tracks(STREAMS[stream], intervals, 0.0, "planned")


def lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Distributes intervals over as few tracks as possible, so that the intervals of a track do not
    overlap."""
    rows: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda part: (part.start_s, part.end_s)):
        free = next((lane for lane in rows if lane[-1].end_s <= interval.start_s), None)
        if free is None:
            rows.append([interval])
        else:
            free.append(interval)
    return rows


class _Process:
    """A process of the trace; its tracks are numbered in the order in which they are added."""

    def __init__(self, *, number: int, name: str, order: int) -> None:
        self._number, self._name, self._order = number, name, order
        self._tracks = 0

    def names(self) -> Iterator[dict[str, object]]:
        yield self._meta("process_name", {"name": self._name})
        yield self._meta("process_sort_index", {"sort_index": self._order})

    def track(
        self, name: str, intervals: Sequence[Interval], shift_s: float, category: str
    ) -> Iterator[dict[str, object]]:
        """Yields the events of one track; nothing if there are no intervals."""
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
        """Yields the events of intervals that may overlap, on as many tracks as needed."""
        for number, lane in enumerate(lanes(intervals), 1):
            yield from self.track(name if number == 1 else f"{name} {number}", lane, shift_s, category)

    def _meta(self, kind: str, arguments: Mapping[str, object], tid: int = 0) -> dict[str, object]:
        return {"name": kind, "ph": "M", "pid": self._number, "tid": tid, "args": dict(arguments)}


def clock_shifts(ranks: Sequence[RankTimeline]) -> dict[str, float]:
    """Returns the seconds to add to each clock so that the ends of steps coincide: 0 for the first rank's
    clock, and for clocks that have no step in common with it."""
    ends: dict[str, dict[int, list[float]]] = {}
    for rank in ranks:
        for step in rank.steps:
            ends.setdefault(rank.clock, {}).setdefault(step.number, []).append(step.end_s)
    reference = ends[ranks[0].clock]
    shifts = {}
    for clock, steps in ends.items():
        offsets = [
            statistics.mean(reference[number]) - statistics.mean(steps[number])
            for number in steps
            if number in reference
        ]
        shifts[clock] = statistics.mean(offsets) if offsets and clock != ranks[0].clock else 0.0
    return shifts


def place_of(rank: int, layout: Layout) -> str:
    """Returns a rank's coordinates, such as `TP 1, DP 0`; `alone` for the only rank. TP varies fastest, then
    CP, DP and PP, as in Megatron."""
    coordinates, rest = [], rank
    for name, size in (("TP", layout.tp), ("CP", layout.cp), ("DP", layout.dp), ("PP", layout.pp)):
        if size > 1:
            coordinates.append(f"{name} {rest % size}")
        rest //= size
    return ", ".join(coordinates) or "alone"
