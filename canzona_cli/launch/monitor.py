"""Follows the files the workers write and passes each new line to the view of the run."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from canzona_cli.launch.view import TrainView
from canzona_cli.run.codec import JsonLines, record_of
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import StageEvent, StepMetrics, ValidationLoss, describe, event_of


class Monitor:
    """Feeds a view from a run directory; remembers the newest numbers for the result file."""

    def __init__(self, files: RunFiles, view: TrainView) -> None:
        self.last_step: StepMetrics | None = None
        self.last_validation: ValidationLoss | None = None
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
        known = self.last_step or self.last_validation
        return known is not None or self._stage in ("train", "validate", "save", "finish")

    def poll(self) -> None:
        """Pass on what is new, in the order it was written: three `stat` calls when nothing is.

        Lines that are no records are skipped. A view that can no longer write, because its pipe or terminal has gone,
        does not end the run.
        """
        new = [(record, receive) for source, receive in self._sources for record in source.read()]
        for record, receive in sorted(new, key=lambda item: _time(item[0])):
            with suppress(OSError, SystemExit):  # SystemExit is how rich reports a closed pipe
                receive(record)

    def _event(self, line: dict[str, object]) -> None:
        event = event_of(line)
        if isinstance(event, StageEvent):
            # Workers started by hand announce a stage that the launcher, if there is one, has announced before them.
            if event.stage != self._stage:
                self._stage = event.stage
                self._view.stage(event)
        elif event is not None and (note := describe(event)) is not None:
            self._view.note(note)

    def _step(self, line: dict[str, object]) -> None:
        metrics = record_of(StepMetrics, line)
        if metrics is not None:
            self.last_step = metrics
            self._view.step(metrics)

    def _validation(self, line: dict[str, object]) -> None:
        validation = record_of(ValidationLoss, line)
        if validation is not None:
            self.last_validation = validation
            self._view.validation(validation)


def _time(record: Mapping[str, object]) -> float:
    time = record.get("time")
    return time if isinstance(time, int | float) else 0.0
