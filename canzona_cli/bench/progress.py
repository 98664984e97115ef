"""How far a bench's sitting is, in lines: a live display would take the processor from what is measured."""

from collections.abc import Callable, Mapping
from pathlib import Path

from canzona_cli.launch.view import Earlier, RunStatus
from canzona_cli.planner.obtain import Obtained
from canzona_cli.run.events import Note


class RoundLines:
    """Says each round once it is over. Implements `canzona_cli.launch.view.TrainView`.

    Args:
        say: receives each line.
        sitting: what to call this sitting: `sitting 2 of 3`.
        turns: in one round.
    """

    def __init__(self, say: Callable[[str], None], sitting: str, turns: int) -> None:
        self._say, self._sitting, self._turns, self._seen = say, sitting, turns, 0

    def header(
        self,
        *,
        run_dir: Path,
        corpus: Mapping[str, object] | None = None,
        plan: Obtained | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        """Nothing: the command says what is about to run."""

    def progress(self, what: str, fraction: float) -> None:
        """Nothing: data are prepared before."""

    def validation(self, record: Mapping[str, object]) -> None:
        """Nothing: a bench does not validate."""

    def stage(self, event: Mapping[str, object]) -> None:
        if event.get("stage") == "train":
            self._say(f"{self._sitting}: {event.get('detail')}")
        elif event.get("stage") == "build model":
            self._say(f"{self._sitting}: building models")

    def step(self, metrics: Mapping[str, object]) -> None:
        self._seen += 1
        if self._seen % self._turns == 0:
            self._say(f"{self._sitting}: round {metrics.get('round')} of {metrics.get('rounds')}")

    def note(self, note: Note) -> None:
        self._say(f"{self._sitting}: {note.text}")

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        """Nothing: the results, or the error, follow."""
