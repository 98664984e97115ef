"""Follows the files the workers write and passes each new line to the view of the run."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from canzona_cli.launch.view import TrainView
from canzona_cli.run.events import describe
from canzona_cli.run.files import RunFiles


class JsonLines:
    """The JSON objects added to a growing file since the last look. A line counts once it has its newline.

    Args:
        only_new: leave out what is in the file already, which an earlier attempt wrote.
    """

    def __init__(self, path: Path, *, only_new: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if only_new and path.exists() else 0
        self._partial = b""

    def read(self) -> list[dict[str, object]]:
        """New objects in their order; none while the file does not exist. Lines that are no objects are skipped."""
        try:
            if self._path.stat().st_size == self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._partial = (self._partial + new).split(b"\n")
        return [value for line in lines if (value := _object(line)) is not None]


class Monitor:
    """Feeds a view from a run directory; remembers the newest numbers for the result file."""

    def __init__(self, files: RunFiles, view: TrainView) -> None:
        self.last_step: Mapping[str, object] = {}
        self.last_validation: Mapping[str, object] = {}
        self._view = view
        self._stage: object = None
        self._sources: tuple[tuple[JsonLines, Callable[[dict[str, object]], None]], ...] = (
            (JsonLines(files.events, only_new=True), self._event),
            (JsonLines(files.metrics, only_new=True), self._step),
            (JsonLines(files.validation, only_new=True), self._validation),
        )

    @property
    def training(self) -> bool:
        """Whether the workers have got as far as training, so that a stop has something to keep."""
        return self._stage in ("train", "validate", "save", "finish") or bool(self.last_step or self.last_validation)

    def poll(self) -> None:
        """Pass on what is new, in the order it was written: three `stat` calls when nothing is.

        A view that can no longer write, because its pipe or terminal has gone, does not end the run.
        """
        new = [(record, receive) for source, receive in self._sources for record in source.read()]
        for record, receive in sorted(new, key=lambda item: _time(item[0])):
            with suppress(OSError, SystemExit):  # SystemExit is how rich reports a closed pipe
                receive(record)

    def _event(self, record: dict[str, object]) -> None:
        # Workers started by hand announce a stage that the launcher, if there is one, has announced before them.
        if record.get("event") == "stage":
            if record.get("stage") != self._stage:
                self._stage = record.get("stage")
                self._view.stage(record)
        elif (note := describe(record)) is not None:
            self._view.note(note)

    def _step(self, record: dict[str, object]) -> None:
        self.last_step = record
        self._view.step(record)

    def _validation(self, record: dict[str, object]) -> None:
        self.last_validation = record
        self._view.validation(record)


def _time(record: Mapping[str, object]) -> float:
    time = record.get("time")
    return time if isinstance(time, int | float) else 0.0


def _object(line: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
