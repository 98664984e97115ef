"""Writing a run's records where the disk may fail: training goes on, and what is lost is counted and told."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from canzona_cli.run.files import append_json_line

_LOG = logging.getLogger(__name__)


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


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class Board:
    """TensorBoard's files; given up for good at the first failure, of which its own thread's may come late.

    Args:
        tell: receives one sentence then.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._writer: _Writer | None = None
        self._attempt(lambda: self._open(folder))

    @property
    def broken(self) -> bool:
        """Whether nothing more will be written."""
        return self._writer is None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curves named by `values`."""

        def add() -> None:
            if self._writer is not None:
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)

        self._attempt(add)

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _open(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a plug-in's file system raises, it is not worth a run
            self._writer = None
            self._tell(f"TensorBoard's files cannot be written ({_why(error)}); training continues without them")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
