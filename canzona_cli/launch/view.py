"""Shows a run while it trains: a monitor reads what the workers append to the run directory, and passes each
record to a view."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from canzona_cli.records.codec import JsonLines, record_of
from canzona_cli.records.files import RunFiles, try_append_json_line
from canzona_cli.records.records import (
    Incident,
    Note,
    RunStatus,
    StageEvent,
    StepMetrics,
    ValidationLoss,
    describe,
    event_of,
)


@dataclass(frozen=True, kw_only=True)
class EarlierSteps:
    """The steps of a resumed run that earlier launches have completed."""

    step: int
    """The step of the checkpoint that the run resumes from."""
    origin: str
    """The checkpoint as shown to the user: its name, or the path of another run's checkpoint."""
    samples: int | None = None
    """The number of samples of the whole run; None if all its steps have the same batch."""
    metrics: Sequence[StepMetrics] = ()
    """The metrics of the logged steps up to `step`."""
    validations: Sequence[ValidationLoss] = ()


class TrainView:
    """A view that receives a run's records in the order in which they were written. This base class shows
    nothing.

    No method raises because of a record: missing and non-finite numbers are shown as such.
    """

    def progress(self, what: str, fraction: float) -> None:
        """Shows the progress of `what`, a long part of the preparation; `fraction` is from 0 to 1."""

    def stage(self, event: StageEvent) -> None:
        """Shows that a stage begins, which ends the stage before it."""

    def step(self, metrics: StepMetrics) -> None:
        """Shows a logged step."""

    def validation(self, validation: ValidationLoss) -> None:
        """Shows a validation."""

    def note(self, note: Note) -> None:
        """Shows an event that is worth a line: a checkpoint, a straggler, a warning."""

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        """Leaves the last frame, restores the terminal and prints how the run ended. A second call does
        nothing."""


class Monitor:
    """A reader of a run directory that passes records to a view, and keeps the newest numbers for the result
    file."""

    def __init__(self, files: RunFiles, view: TrainView) -> None:
        self.last_step: StepMetrics | None = None
        self.last_validation: ValidationLoss | None = None
        self._files, self._view = files, view
        self._stage: object = None
        self._sources: tuple[tuple[JsonLines, Callable[[dict[str, object]], None]], ...] = (
            (JsonLines(files.events, only_new=True), self._event),
            (JsonLines(files.metrics, only_new=True), self._step),
            (JsonLines(files.validation, only_new=True), self._validation),
        )

    @property
    def training(self) -> bool:
        """True once the workers are training, so that a stop has something to save."""
        newest = self.last_step or self.last_validation
        return newest is not None or self._stage in ("train", "validate", "save", "finish")

    def poll(self) -> None:
        """Passes new records to the view, in the order in which they were written. Without new records, this
        costs three `stat` calls.

        Lines that are not valid records are skipped.
        """
        new = [(record, receive) for source, receive in self._sources for record in source.read()]
        for record, receive in sorted(new, key=lambda item: _time(item[0])):
            self._show(partial(receive, record))

    def close(self, status: RunStatus, message: str) -> None:
        """Tells the view that the run has ended. Call this after `result.json` was written."""
        self._show(partial(self._view.close, status, message))

    def _show(self, show: Callable[[], None]) -> None:
        """Calls the view. If the view raises, which is a bug in canzona, the run continues without a
        display."""
        try:
            show()
        except Exception as error:
            self._view = TrainView()
            detail = f"the run can no longer be shown: {type(error).__name__}: {error}"
            try_append_json_line(self._files.events, Incident(time=time.time(), event="view", detail=detail).line())

    def _event(self, line: dict[str, object]) -> None:
        event = event_of(line)
        if isinstance(event, StageEvent):
            # The launcher and its workers announce the same first stage, because workers can also be started
            # by hand.
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
