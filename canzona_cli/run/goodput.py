"""How much of a run's time went into steps that count, over all launches in its directory; and how often to save."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from canzona_cli.run.codec import JsonLines, read_lines
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import (
    FIRST_STAGE,
    Event,
    StageEvent,
    StepMetrics,
    ValidationLoss,
    event_of,
)

Record = StepMetrics | ValidationLoss | Event


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time went from the first record of the first launch to the last one of the last; seconds."""

    wall_s: float
    kept_s: float
    """In steps whose result the run still has."""
    redone_s: float
    """In steps behind the checkpoint that a later launch went on from."""
    between_s: float
    """Between two launches: nobody had started the run again, or it waited in a queue."""

    @property
    def share(self) -> float:
        """0 to 1: of the time, what went into kept steps."""
        return self.kept_s / self.wall_s

    @property
    def other_s(self) -> float:
        """Starting, loading, validating, waiting for saves."""
        return max(0.0, self.wall_s - self.kept_s - self.redone_s - self.between_s)

    def as_json(self) -> dict[str, float]:
        return {"share": self.share, **vars(self), "other_s": self.other_s}


def goodput_of(files: RunFiles, events: Sequence[Event]) -> Goodput | None:
    """From the records of all launches; None before a step is logged.

    Args:
        events: of every launch in the directory.
    """
    kept, redone = read_lines(files.metrics, StepMetrics)[0], []
    records: list[Record] = [*kept, *events]
    for folder in _launches(files):
        lost = read_lines(folder.metrics, StepMetrics)[0]
        redone.append(_seconds(lost))
        records += lost
    for folder in (files, *_launches(files)):
        records += read_lines(folder.validation, ValidationLoss)[0]
    moments = [record.time for record in records if record.time is not None]
    trained_s = time_in_launches(records)
    if not kept or trained_s is None or (wall_s := max(moments) - min(moments)) <= 0:
        return None
    return Goodput(
        wall_s=wall_s, kept_s=_seconds(kept), redone_s=math.fsum(redone), between_s=max(0.0, wall_s - trained_s)
    )


def time_in_launches(records: Sequence[Record]) -> float | None:
    """Seconds from the first to the last record of every launch; what lies between launches is no training."""
    moments = sorted(
        (record.time, isinstance(record, StageEvent) and record.stage == FIRST_STAGE)
        for record in records
        if record.time is not None
    )
    if not moments:
        return None
    # A launch and its first rank both say that workers start.
    return math.fsum(then - now for (now, started), (then, starts) in pairwise(moments) if started or not starts)


def earlier_events(files: RunFiles) -> list[Event]:
    """Of all launches in the directory before the newest one."""
    return [event for folder in _launches(files) for event in events_of(folder)]


def events_of(files: RunFiles) -> list[Event]:
    """Of the newest launch in the directory."""
    return [event for line in JsonLines(files.events).read() if (event := event_of(line)) is not None]


def _launches(files: RunFiles) -> list[RunFiles]:
    """What was put away of the earlier launches, oldest first."""
    try:
        found = [path for path in files.attempts.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    return [RunFiles(path) for path in sorted(found, key=lambda path: int(path.name))]


def _seconds(lines: Sequence[StepMetrics]) -> float:
    """In the steps that these lines stand for: a line is the last of those since the one before."""
    gaps = [line.step - before.step for before, line in pairwise(lines)]
    steps = [min(gaps, default=1), *gaps][: len(lines)]
    return math.fsum(count * (line.step_s or 0.0) for count, line in zip(steps, lines, strict=True))
