"""What watches a run: the launcher reads the run directory's files and tells a view of every record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from canzona_cli.planner.plan_file import Obtained
from canzona_cli.run.events import Note

RunStatus = Literal["done", "failed", "interrupted", "preempted"]


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What a resumed run did before."""

    step: int
    """The checkpoint's, which the run goes on from."""
    origin: str
    """Where that checkpoint is, for people: its name, or the path of another run's."""
    metrics: Sequence[Mapping[str, object]] = field(default_factory=tuple)
    """Lines of metrics.jsonl up to that step."""
    validations: Sequence[Mapping[str, object]] = field(default_factory=tuple)


class TrainView:
    """Receives a run's records in the order they were written; every mapping is one JSON line of the run directory.

    Shows nothing by itself: a view overrides the methods for what it shows. No method raises because of a record: a
    missing or non-finite number is shown as such.
    """

    def header(
        self,
        *,
        run_dir: Path,
        corpus: Mapping[str, object] | None = None,
        plan: Obtained | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        """Say what is about to run.

        Args:
            corpus: corpus.json's content (`tokenizer`, `tokens`, `documents`, ...).
            plan: what the run executes; None for a run that executes none.
            earlier: what it goes on from; None for a run that starts at its first step.
        """

    def progress(self, what: str, fraction: float) -> None:
        """Show a part of the preparation that takes long, `fraction` (0 to 1) of it done; fits `ensure_corpus`."""

    def stage(self, event: Mapping[str, object]) -> None:
        """One line of events.jsonl: `stage`, `detail`, `time`. The previous stage ends with it."""

    def step(self, metrics: Mapping[str, object]) -> None:
        """One line of metrics.jsonl."""

    def validation(self, record: Mapping[str, object]) -> None:
        """One line of validation.jsonl: `step`, `loss`."""

    def note(self, note: Note) -> None:
        """Something happened that is worth a line: a checkpoint, a straggler, a warning."""

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        """Leave the last frame, restore the terminal and say how it ended. Calling it again does nothing."""
