"""Converts signals to requests to stop a run, and watches the saves that are in progress.

With SIGTERM, SIGUSR1 or SIGUSR2, a batch system announces that it will take the machine away: the run is
preempted, and is expected to be started again. SIGINT (Ctrl-C) and SIGHUP (a closed terminal) come from the
user: the run is interrupted. The run is saved in both cases.
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
from canzona_cli.core.errors import CheckpointInvalid
from canzona_cli.launch.outcome import Outcome, interrupted_outcome, unsaved_outcome
from canzona_cli.records.files import RunFiles, StopReason

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTING = (signal.SIGINT, signal.SIGHUP)


class Preempted(KeyboardInterrupt):
    """The exception for a signal of a batch system that arrives before there are workers to stop."""


@dataclass
class Requests:
    """The requests to stop that a launcher has received by signals."""

    reason: StopReason | None = None
    """The reason to stop, from the first signal; None if there has been none."""
    first_signal_s: float = 0.0
    """The time of the first signal, in seconds of the monotonic clock."""
    interrupts: int = 0
    """The number of times that Ctrl-C was pressed. Other signals are not counted, because they may be sent
    twice for a single request: batch systems repeat theirs, and SIGHUP comes from both the kernel and the
    shell."""
    raising: bool = False
    """True while there are no workers that could be asked to stop. The next signal then raises `Preempted` or
    KeyboardInterrupt in the launcher."""

    def add(self, number: int, _frame: FrameType | None) -> None:
        """Records a signal. This is a handler for `handle_signals`."""
        if self.reason is None:
            self.reason = "preempted" if number in _PREEMPTING else "interrupted"
            self.first_signal_s = time.monotonic()
        self.interrupts += number == signal.SIGINT
        if self.raising:
            self.raising = False  # a further signal must not interrupt the clean-up
            raise Preempted if self.reason == "preempted" else KeyboardInterrupt


class SaveWatch:
    """A watch over the checkpoints that the workers are writing."""

    def __init__(self, files: RunFiles) -> None:
        self._root = files.checkpoints
        self._sizes: dict[str, int] = {}
        self.last_progress = 0.0
        """The time of the last progress, in seconds of the monotonic clock; 0 if there was none."""

    def is_saving(self) -> bool:
        """Returns True if there is an unfinished checkpoint now, and updates `last_progress` if its size has
        changed."""
        try:
            names = [path.name for path in self._root.iterdir()]
        except OSError:
            return False
        partial = [name for name in names if (hidden := hidden_name(name)) and hidden[1] == "partial"]
        sizes = {name: bytes_written(self._root / name) for name in partial}
        if sizes != self._sizes:
            self._sizes, self.last_progress = sizes, time.monotonic()
        return bool(sizes)


def checkpoint_to_resume(files: RunFiles, *, thorough: bool = True) -> str | None:
    """Returns the name of the newest checkpoint, from which a new launch in this directory would resume; None
    if there is none or it is damaged.

    Args:
        thorough: True also hashes the files; False checks only the manifest and the sizes of the files.
    """
    newest = CheckpointStore(files.checkpoints).latest()
    if newest is None or not newest.usable:
        return None
    try:
        return newest.name if not thorough or not verify(newest.path)[1] else None
    except CheckpointInvalid:
        return None


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None], *, to_the_end: bool = False) -> Iterator[None]:
    """Routes signals that stop a run to `handler` inside the block. Ignored signals stay ignored, as nohup
    and `&` intend.

    Args:
        to_the_end: True ignores the signals after the block, so that they cannot change the exit code of a
            process that is about to end.
    """
    handlers = {number: signal.getsignal(number) for number in (*_PREEMPTING, *_INTERRUPTING)}
    for number, previous in handlers.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, signal.SIG_IGN if to_the_end else previous)


def stop_outcome(message: str, reason: StopReason, files: RunFiles | None) -> Outcome:
    """Returns the outcome of a run that was stopped while it had no workers.

    Args:
        files: the files of the run directory; None if there is no directory yet.
    """
    if reason == "interrupted":
        return interrupted_outcome(message)
    return unsaved_outcome(message, None if files is None else checkpoint_to_resume(files))


def early_stop_outcome(files: RunFiles | None, error: KeyboardInterrupt) -> Outcome:
    """Returns the outcome of a run that was asked to stop before its workers started."""
    reason: StopReason = "preempted" if isinstance(error, Preempted) else "interrupted"
    return stop_outcome("stopped before training began", reason, files)
