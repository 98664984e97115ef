"""Protects the processes of a run in three ways, with the standard library only, because this file also runs as a
script.

- **Streams.** `guard` replaces standard output and standard error with streams that never raise. A closed terminal, a
  pipe without a reader or a full disk can make any print fail, in canzona's code and in libraries. These streams drop
  the text that cannot be written, and the command continues. Before it exits, the command reports the loss, unless
  the reader has exited or the command is a training run.
- **Watchdog.** If a rank makes no progress for too long, it writes the Python stacks of all its threads to its log
  and exits. Every change of phase counts as progress. The ranks of a run are stuck together, so all of them write
  their stacks at about the same time, except for a rank that cannot run at all (stopped, swapped out, or stuck in
  native code that keeps Python's lock); torchrun kills it once another rank has exited.
- **Parents.** No process outlives the launcher: the kernel kills agent and workers when their parent dies. `python
  protection.py LAUNCHER_PID COMMAND...` asks the kernel for this and then executes COMMAND in the same process;
  workers call `die_with_parent()` first.
"""

import ctypes
import errno
import faulthandler
import io
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TextIO

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


HANG_VARIABLE: Final = "CANZONA_HANG_TIMEOUT_S"
"""The environment variable with which the launcher sets the limit of the workers. Without it there is none."""
HANG_PATIENCE: Final = 3
"""The factor by which `run.hang_timeout_s` is multiplied during the first step, which may compile, and outside of
steps."""
HANG_MARK: Final = "canzona: no progress for"
"""The beginning of the line before the stacks of a rank that hangs."""
Stage = Literal["start workers", "build model", "build data", "load", "train", "validate", "save", "finish"]
"""The stages that a rank goes through, as named in events.jsonl."""
_LONGEST_GAP: Final = 5
"""The most intervals between checks that one check adds. Without this limit, a machine or a job that was suspended
would look like a hang. A rank also waits as long before it exits, so that ranks that are stuck together write their
stacks before torchrun ends them."""


class Watchdog:
    """The watchdog of this process."""

    def __init__(self) -> None:
        self._calls = self._steps = 0
        self._in_steps = self._ended = False
        if limit_s := float(os.environ.get(HANG_VARIABLE, 0)):
            threading.Thread(target=self._watch, args=(limit_s,), name="watchdog", daemon=True).start()

    def stage(self, name: Stage) -> None:
        """Records that the rank enters a stage."""
        self._in_steps = name in ("train", "validate")
        self.progress()

    def step(self) -> None:
        """Records that the rank begins a step."""
        self._steps += 1
        self.progress()

    def progress(self) -> None:
        """Records progress within a long operation."""
        self._calls += 1

    def end(self) -> None:
        """Stops the watchdog."""
        self._ended = True

    def _watch(self, limit_s: float) -> None:
        interval_s = min(1.0, limit_s / 10)
        silent_s, seen, checked = 0.0, 0, time.monotonic()
        while not self._ended:
            time.sleep(interval_s)
            passed_s, checked = time.monotonic() - checked, time.monotonic()
            passed_s = min(passed_s, _LONGEST_GAP * interval_s)
            silent_s = silent_s + passed_s if seen == self._calls else 0.0
            seen = self._calls
            is_patient = self._steps <= 1 or not self._in_steps
            if silent_s > limit_s * (HANG_PATIENCE if is_patient else 1) and not self._ended:
                os.write(2, f"{HANG_MARK} {silent_s:.0f} s\n".encode())
                faulthandler.dump_traceback(file=2)
                time.sleep(_LONGEST_GAP * interval_s)
                os._exit(1)


_PR_SET_PDEATHSIG = 1
AGENT_VARIABLE = "CANZONA_AGENT_PID"
LAUNCHER_VARIABLE = "CANZONA_LAUNCHER_PID"
_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


def die_with_parent() -> None:
    """Makes this worker end as soon as the torchrun agent that started it dies, for any reason.

    Call this before the slow imports. It does nothing if canzona's launcher did not start the agent: somebody
    who runs torchrun by hand may want it to continue in the background.
    """
    agent = os.environ.get(AGENT_VARIABLE)
    if agent is None:
        return
    if sys.platform == "linux":
        _ask_kernel(int(agent))
    else:
        watched = (int(agent), int(os.environ[LAUNCHER_VARIABLE]))
        threading.Thread(target=_watch, args=watched, name="parent-watch", daemon=True).start()


def _ask_kernel(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the request, so the signal will never come
        os._exit(1)


def _watch(agent: int, launcher: int) -> None:
    """Checks every second whether agent and launcher are alive, and exits if not. Replaces prctl on systems that
    do not have it (macOS)."""
    while os.getppid() == agent:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            break
        time.sleep(1)
    os._exit(1)


def _become(launcher: int, command: list[str]) -> None:
    # A batch system signals every process of a job. torchrun would then kill its workers in the middle of a
    # step, or die, but stopping is the launcher's and the workers' decision. Ignored signals stay ignored
    # across exec, unless the program installs handlers. torchrun does so only for the signals in
    # PET_SIGNALS_TO_HANDLE.
    for signum in _LAUNCHER_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        _ask_kernel(launcher)
    variables = {AGENT_VARIABLE: str(os.getpid()), LAUNCHER_VARIABLE: str(launcher), "PET_SIGNALS_TO_HANDLE": "SIGQUIT"}
    environment = os.environ | variables
    os.execvpe(command[0], command, environment)  # keeps the process id and the request to the kernel


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
