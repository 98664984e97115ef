"""`python -m canzona_cli.trackers.follow RUN NAME STEP`: a process that hands a run's records to one tracker.

The launcher starts it beside torchrun and closes its input when the run has ended. Ranks know nothing of it:
the files are the queue, however slow the tracker is, and whatever it does, no step waits. A tracker that
fails is tried again, ever more rarely; its name of the run, and how far it is, stand in the run directory, so
that the next launch goes on with the same curve.
"""

import math
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import cast

from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import TrackerName
from canzona_cli.config.secrets import redacted
from canzona_cli.config.settings import leaves
from canzona_cli.run.codec import JsonLines, load_if_sound, save
from canzona_cli.run.files import RunFiles, try_append_json_line
from canzona_cli.run.records import Incident, Level, RunResult, TrackerState
from canzona_cli.run.words import clean, plural
from canzona_cli.trackers.tracker import TRACKERS, Point, Tracked, Tracker

_LOOK_S = 1.0
_SAMPLE = "sample"
_MOST_POINTS = 50
"""Handed over at once: MLflow takes a thousand values."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a tracker that failed is tried again; doubled each time."""


class Follower:
    """One tracker of one run, from wherever it was.

    Args:
        start: the step behind which this launch begins: later ones that the tracker has are done again.
    """

    def __init__(self, files: RunFiles, name: TrackerName, *, start: int = 0) -> None:
        self._files, self._name = files, name
        self._records = {
            "": JsonLines(files.metrics),
            "validation_": JsonLines(files.validation),
            _SAMPLE: JsonLines(files.events),
        }
        """The records by the prefix of a file's values; of events, samples of text alone."""
        self._state = load_if_sound(files.tracker(name), TrackerState) or TrackerState()
        begin = {kind: min(self._state.taken.get(kind, -1), start) for kind in self._records}
        self._state = replace(self._state, taken=begin)
        self._waiting = deque((kind, point) for kind, point in self._read() if point.step > begin[kind])
        self._tracker: Tracker | None = None
        self._failures = 0
        """The number of failures since it last worked."""
        self._not_before = 0.0

    def look(self, *, last: bool = False) -> None:
        """Hand over what is new.

        Args:
            last: also where the tracker has just failed.
        """
        self._waiting.extend(self._read())
        if time.monotonic() < self._not_before and not last:
            return
        try:
            if self._tracker is None:
                self._tracker = self._open()
            while self._waiting:
                some = [*islice(self._waiting, _MOST_POINTS)]
                self._tracker.add([point for _, point in some])
                for kind, point in some:
                    self._waiting.popleft()
                    self._state = replace(self._state, taken={**self._state.taken, kind: point.step})
                self._remember()
        except Exception as error:  # whatever a plug-in or the network raises is not worth a run
            self._failed(error)
        else:
            if self._failures:
                self._tell(f"{self._name} takes metrics again; none are lost", "info")
            self._failures = 0

    def finish(self) -> None:
        """The run has ended."""
        self.look(last=True)
        result = load_if_sound(self._files.result, RunResult)
        try:
            if self._tracker is not None:
                self._tracker.close(None if result is None else result.status)
        except Exception as error:
            self._failed(error)
        if self._waiting:
            lost = plural(len(self._waiting), "line")
            self._tell(f"{lost} of the run's records did not reach {self._name}", "warning")

    def _open(self) -> Tracker:
        run = Tracked(
            run_dir=self._files.root,
            settings=dict(leaves(asdict(load_resolved(self._files.config)))),
            id=self._state.id,
            first_step=max(self._state.taken.values()) + 1,
        )
        tracker = TRACKERS[self._name](run)
        self._state = replace(self._state, id=tracker.id)
        self._remember()
        return tracker

    def _read(self) -> Iterator[tuple[str, Point]]:
        for kind, lines in self._records.items():
            for line in lines.read():
                step, when = line.pop("step", None), line.pop("time", None)
                if isinstance(step, int) and (kind != _SAMPLE or line.get("event") == _SAMPLE):
                    values = {} if kind == _SAMPLE else dict(_numbers(line, kind))
                    texts = {_SAMPLE: f"{line.get('prompt')}{line.get('text')}"} if kind == _SAMPLE else {}
                    moment = float(when) if isinstance(when, int | float) else time.time()
                    yield kind, Point(step=step, time=moment, values=values, texts=texts)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._not_before = time.monotonic() + min(_FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S)
        if self._failures == 1:
            why = redacted(clean(f"{type(error).__name__}: {error}"))[:300]
            self._tell(f"{self._name} takes no metrics ({why}); training continues, and it is tried again", "warning")
        if self._tracker is not None:
            with suppress(Exception):
                self._tracker.close(None)
            self._tracker = None

    def _remember(self) -> None:
        with suppress(OSError):  # on a full disk: then a later launch hands some points over twice
            self._files.trackers.mkdir(exist_ok=True)
            save(self._files.tracker(self._name), self._state)

    def _tell(self, text: str, level: Level) -> None:
        print(text, file=sys.stderr, flush=True)
        incident = Incident(time=time.time(), event="tracker", detail=text, level=level)
        try_append_json_line(self._files.events, incident.line())


def _numbers(line: Mapping[str, object], before: str) -> Iterator[tuple[str, float]]:
    """Every finite number of a line, by its name; of a mapping in it, by both names."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{before}{name}", float(value)


def follow(run_dir: Path, name: TrackerName, start: int) -> None:
    """Follows a run until this process's input is closed."""
    follower = Follower(RunFiles(run_dir), name, start=start)
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        follower.look()
    follower.finish()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), cast(TrackerName, sys.argv[2]), int(sys.argv[3]))
