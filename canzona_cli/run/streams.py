"""Standard output and error of the command and of its ranks, on which writing never fails.

A terminal that was closed, a pipe without a reader, a full disk: each makes printing fail, at any line, in
our code and in that of libraries. It is met here, once. What cannot be written is dropped, the command goes
on to its end, and only then is it said that somebody did not get what was printed; of a run that trains, not
even then (`unattended`).
"""

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, ClassVar, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PATIENCE_S: Final = 5.0
"""Seconds that a run waits for a reader that has stopped reading: a pager, a terminal stopped by Ctrl-S."""
_GONE: Final = (errno.EPIPE, errno.EIO)
"""The reader has seen what it wanted, or its terminal was closed."""


class _Stream(io.FileIO):
    """A file descriptor; what cannot be written to it is lost, and writing says that all is well."""

    patience_s: ClassVar[float | None] = None
    """Seconds to wait until it can be written to; None: for ever."""
    lost: ClassVar[OSError | None] = None
    """The error of the first loss."""
    _stuck = False
    before: TextIO | None = None
    """The object that wrote to it until now. It stays: when it goes, it may close the descriptor, and the
    next file that is opened would be the output."""

    def write(self, data: "ReadableBuffer", /) -> int:
        text, done = memoryview(data).cast("B"), 0
        try:
            # No more at once than what never blocks where there is room at all.
            while done < len(text) and self._has_room():
                done += super().write(text[done : done + select.PIPE_BUF]) or 0
        except OSError as error:
            _Stream.lost = _Stream.lost or error
        return len(text)

    def _has_room(self) -> bool:
        """Wait for a reader, though not again for one who did not come back."""
        wait_s = 0.0 if self._stuck and self.patience_s is not None else self.patience_s
        self._stuck = not select.select([], [self], [], wait_s)[1]
        return not self._stuck


def guard() -> None:
    """Have everything this process prints from now on written so."""
    for descriptor in range(3):  # a stream that is closed would be the next file that is opened
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _guarded(sys.stdout, 1), _guarded(sys.stderr, 2)


def unattended() -> None:
    """A run begins, which goes on whether anybody reads what it prints or not, and ends as it ends."""
    _Stream.patience_s = _PATIENCE_S


def unheard() -> OSError | None:
    """Returns why output was lost, where that counts: not where nobody reads any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    lost = _Stream.lost
    return None if lost is None or lost.errno in _GONE or _Stream.patience_s is not None else lost


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    encoding = "utf-8"
    at_once = False
    if stream is not None:
        try:
            if stream.fileno() != descriptor:
                return stream
        except (OSError, ValueError):  # no file: whoever put it there looks after it
            return stream
        encoding, at_once = stream.encoding, getattr(stream, "write_through", False)
    raw = _Stream(descriptor, "w", closefd=False)
    raw.before = stream
    by_line = descriptor == 2 or raw.isatty()
    # A file name that is not text is shown by its escapes; a terminal without Unicode gets question marks for
    # pictures.
    errors = "backslashreplace" if encoding.lower().startswith("utf") else "replace"
    buffer = raw if at_once else io.BufferedWriter(raw)  # What a rank says is written before it may die.
    return io.TextIOWrapper(buffer, encoding, errors, line_buffering=by_line, write_through=at_once)
