"""Writing a run's records where the disk may fail: training goes on, and what is lost is counted and told."""

from collections.abc import Callable, Mapping
from pathlib import Path

from canzona_cli.run.files import append_json_line


class Lines:
    """Adds lines to .jsonl files; a line that cannot be written is counted instead.

    Args:
        tell: receives one sentence when a file can no longer be written, and one when it can again.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.lost: dict[str, int] = {}
        """Lines lost so far, by the name of their file."""
        self._tell = tell
        self._down: dict[str, int] = {}
        """Lines lost since a file could last be written."""

    def append(self, path: Path, value: Mapping[str, object]) -> None:
        name = path.name
        try:
            append_json_line(path, value)
        except OSError as error:
            self.lost[name] = self.lost.get(name, 0) + 1
            self._down[name] = self._down.get(name, 0) + 1
            if self._down[name] == 1:
                self._tell(f"{name} cannot be written ({_why(error)}); training continues, and its lines are lost")
        else:
            if (missing := self._down.pop(name, 0)) > 0:
                self._tell(f"{name} can be written again; {missing} of its lines are lost")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
