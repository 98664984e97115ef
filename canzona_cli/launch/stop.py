"""Requests to stop a run: what each signal means, and whether a save is still in progress.

SIGTERM, SIGUSR1 and SIGUSR2 are how a batch system announces that it will take the machine away: the run is
preempted, and whoever started it will start it again. SIGINT (Ctrl-C) and SIGHUP come from a person: the run
is interrupted. Both save it.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from canzona_cli.checkpoint.commit import bytes_written
from canzona_cli.checkpoint.manifest import hidden_name
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.errors import CheckpointInvalid
from canzona_cli.launch.outcome import Outcome, interrupted, unsaved
from canzona_cli.run.files import RunFiles, StopReason

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTING = (signal.SIGINT, signal.SIGHUP)


class Preempted(KeyboardInterrupt):
    """A signal of a batch system that came before there were workers to stop."""


@dataclass
class Requests:
    """The requests that a launcher got by signals."""

    reason: StopReason | None = None
    """The reason to stop, from the first signal; None if there has been none."""
    first: float = 0.0
    """The time of the first one, seconds of the monotonic clock."""
    interrupts: int = 0
    """The number of times a person pressed Ctrl-C: twice means a hurry. Batch systems repeat signals, and so
    does the closing of a terminal: its shell passes on the SIGHUP that the kernel sends to all."""
    raising: bool = False
    """True to end at once what the launcher does, by `Preempted` or KeyboardInterrupt: while there are no
    workers yet who could be asked."""

    def add(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = "preempted" if number in _PREEMPTING else "interrupted"
            self.first = time.monotonic()
        self.interrupts += number == signal.SIGINT
        if self.raising:
            self.raising = False  # what it leads to is not to be interrupted in its turn
            raise Preempted if self.reason == "preempted" else KeyboardInterrupt


class SaveWatch:
    """A watch on the workers' saves: whether they write a checkpoint, and when they last made progress."""

    def __init__(self, files: RunFiles) -> None:
        self._root = files.checkpoints
        self._seen: dict[str, int] = {}
        self.moved = 0.0
        """The time of its last progress, seconds of the monotonic clock; 0 for never."""

    def look(self) -> bool:
        """Returns True if there is an unfinished checkpoint now."""
        try:
            names = [path.name for path in self._root.iterdir()]
        except OSError:
            return False
        partial = [name for name in names if (hidden := hidden_name(name)) and hidden[1] == "partial"]
        seen = {name: bytes_written(self._root / name) for name in partial}
        if seen != self._seen:
            self._seen, self.moved = seen, time.monotonic()
        return bool(seen)


def sound_checkpoint(files: RunFiles, *, thorough: bool = True) -> str | None:
    """Returns the name of the checkpoint that a new start in this directory would resume from;
    None if there is none.

    Args:
        thorough: hash all of it; else only its manifest and the sizes of its files are looked at.
    """
    newest = CheckpointStore(files.checkpoints).latest()
    if newest is None or not newest.sound:
        return None
    try:
        return newest.name if not thorough or not verify(newest.path)[1] else None
    except CheckpointInvalid:
        return None


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *, to_the_end: bool = False) -> Iterator[None]:
    """Route all these signals to `handler`. One that is ignored stays ignored:
    nohup and `&` ask for it that way.

    Args:
        to_the_end: True if what follows the block is the end of this process, in the way that is known by
            then: from there on they are ignored, so that none of them changes how it ends.
    """
    before = {number: signal.getsignal(number) for number in (*_PREEMPTING, *_INTERRUPTING)}
    for number, previous in before.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_IGN if to_the_end else previous)


def before_workers(files: RunFiles | None, error: KeyboardInterrupt) -> Outcome:
    """Returns the outcome of a run that was asked to stop before its workers started.

    Args:
        files: the files of the run directory; None where there is none yet.
    """
    message = "stopped before training began"
    if not isinstance(error, Preempted):
        return interrupted(message)
    return unsaved(message, None if files is None else sound_checkpoint(files))
