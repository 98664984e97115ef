"""Views, which watch a run: the launcher reads the run directory's files and passes each new record to one of these."""

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_cli.run.records import Note, RunStatus, StageEvent, StepMetrics, ValidationLoss


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The part of a resumed run that is done."""

    step: int
    """The checkpoint's, which the run goes on from."""
    origin: str
    """The place of that checkpoint, for people: its name, or the path of another run's."""
    metrics: Sequence[StepMetrics] = ()
    """The metrics up to that step."""
    validations: Sequence[ValidationLoss] = ()


class TrainView:
    """Receives a run's records in the order they were written, and shows nothing: a view overrides what it shows.

    No method raises because of a record: a missing or non-finite number is shown as such.
    """

    def progress(self, what: str, fraction: float) -> None:
        """Show a part of the preparation that takes long, `fraction` (0 to 1) of it done; fits `ensure_corpus`."""

    def stage(self, event: StageEvent) -> None:
        """A stage begins; the one before ends with it."""

    def step(self, metrics: StepMetrics) -> None:
        """A step was logged."""

    def validation(self, validation: ValidationLoss) -> None:
        """The model was validated."""

    def note(self, note: Note) -> None:
        """Something happened that is worth a line: a checkpoint, a straggler, a warning."""

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        """Leave the last frame, restore the terminal and say how it ended. Calling it again does nothing."""
