"""Replaces standard output and standard error with streams that never raise.

A closed terminal, a pipe without a reader or a full disk can make any print fail, in canzona's code and in
libraries. These streams drop the text that cannot be written, and the command continues. Before it exits, the
command reports the loss, unless the reader has exited or the command is a training run.
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
"""The seconds that a training run waits for a reader that has stopped reading: a pager, or a terminal stopped
by Ctrl-S."""
_GONE: Final = (errno.EPIPE, errno.EIO)
"""The error numbers of a reader that has exited or whose terminal was closed."""


class _Stream(io.FileIO):
    """A file descriptor whose `write` always reports success. Data that cannot be written is dropped."""

    patience_s: ClassVar[float | None] = None
    """The seconds to wait until the descriptor is writable; None waits forever."""
    lost: ClassVar[OSError | None] = None
    """The first error that made a stream drop data; None if nothing was dropped."""
    _stuck = False
    replaced: TextIO | None = None
    """The stream object that was replaced. It is kept alive because its finalizer may close the descriptor,
    whose number the next opened file would then get."""

    def write(self, data: "ReadableBuffer", /) -> int:
        octets = memoryview(data).cast("B")
        written = 0
        try:
            # A write of up to PIPE_BUF bytes does not block once the descriptor is writable.
            while written < len(octets) and self._has_room():
                written += super().write(octets[written : written + select.PIPE_BUF]) or 0
        except OSError as error:
            _Stream.lost = _Stream.lost or error
        return len(octets)

    def _has_room(self) -> bool:
        """Waits up to `patience_s` for the reader to take data; returns False on timeout. After a timeout,
        later calls return at once until the reader takes data again."""
        wait_s = 0.0 if self._stuck and self.patience_s is not None else self.patience_s
        self._stuck = not select.select([], [self], [], wait_s)[1]
        return not self._stuck


def guard() -> None:
    """Replaces sys.stdout and sys.stderr with streams that never raise."""
    for descriptor in range(3):  # the next opened file would get the number of a closed descriptor
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _wrap(sys.stdout, 1), _wrap(sys.stderr, 2)


def mark_training_run() -> None:
    """Marks this process as a training run: a lost reader delays it by `_PATIENCE_S` at most and never
    changes its exit code."""
    _Stream.patience_s = _PATIENCE_S


def lost_output_error() -> OSError | None:
    """Flushes standard output and error; returns the error that first caused output to be lost.

    Returns None if nothing was lost, the reader has exited, or this is a training run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    lost = _Stream.lost
    return None if lost is None or lost.errno in _GONE or _Stream.patience_s is not None else lost


def _wrap(stream: TextIO | None, descriptor: int) -> TextIO:
    """Returns a stream that writes to `descriptor` and never raises; returns `stream` unchanged if it does not
    write to `descriptor`, as a test's capture does not."""
    encoding = "utf-8"
    unbuffered = False
    if stream is not None:
        try:
            if stream.fileno() != descriptor:
                return stream
        except (OSError, ValueError):  # not backed by a file
            return stream
        encoding, unbuffered = stream.encoding, getattr(stream, "write_through", False)
    raw = _Stream(descriptor, "w", closefd=False)
    raw.replaced = stream
    by_line = descriptor == 2 or raw.isatty()
    # In UTF encodings, file names that are not valid text are shown with escapes. Other encodings show `?`
    # for characters that they lack.
    errors = "backslashreplace" if encoding.lower().startswith("utf") else "replace"
    # An unbuffered stream stays unbuffered, so that a rank's output is written before the rank may die.
    buffer = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding, errors, line_buffering=by_line, write_through=unbuffered)
