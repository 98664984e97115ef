"""The command that is attacked: all of `canzona`, in a fork of this process, on streams and in surroundings of the
attacker's choice."""

import fcntl
import os
import signal
import sys
import tempfile
import termios
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import canzona_cli.cli.app
from canzona_cli.records.files import RunFiles
from tests.cli.commands.support import importable
from tests.waiting import PATIENCE_S

FULL = "/dev/full"
TINY = ("recipe=qwen3-tiny", "gpus=1", "model.num_layers=1", "optimizer=adamw", "data.tokenizer=byte")
"""A run that is put together quickly."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The files behind descriptors 0, 1 and 2 of the command; None for a closed one."""

    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    terminal: bool = False
    """They are a terminal, and this is its session."""


@dataclass
class Victim:
    """A command on its way."""

    pid: int
    code: int | None = None
    """Exit code once it has ended; negative for the signal that ended it."""

    def signal(self, number: signal.Signals) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def until(self, condition: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for it.

        Raises:
            AssertionError: the command has ended before, or takes too long.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            meanwhile()
            assert not self.ended() or condition(), f"it ended with {self.code}"
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The exit code."""
        self.until(self.ended, meanwhile)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """If it still runs."""
        with suppress(ChildProcessError):
            if not self.ended():
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


Attack = Callable[..., Victim]
"""Starts a run of `TINY` in the fixture's directory: `streams`, overrides, and what `attacked` takes."""


def attacked(
    *arguments: str | Path,
    streams: Streams,
    cwd: Path,
    environment: Mapping[str, str | None] | None = None,
    before: Callable[[], None] = lambda: None,
) -> Victim:
    """Start `canzona ARGUMENTS`.

    Args:
        environment: added to the tests' own; None for a variable that is taken away.
        before: called in the command's process before anything else.
    """
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # numpy's threads are not ours
        pid = os.fork()
    if pid:
        return Victim(pid)
    code = 1
    try:
        become([str(argument) for argument in arguments], streams, cwd, environment or {}, before)
        canzona_cli.cli.app.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # What Python does at its end, where a stream that cannot be written changes the exit code.
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                code = 120
        os._exit(code)


def steps(files: RunFiles) -> int:
    """Done so far."""
    return files.metrics.read_text().count("\n") if files.metrics.exists() else 0


def become(
    argv: list[str],
    streams: Streams,
    cwd: Path,
    environment: Mapping[str, str | None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Make this process one that has been started with these words, streams and surroundings."""
    if streams.terminal:
        os.setsid()
        assert streams.stdin is not None
        fcntl.ioctl(streams.stdin, termios.TIOCSCTTY, 0)
    given = [None if fd is None else os.dup(fd) for fd in (streams.stdin, streams.stdout, streams.stderr)]
    for descriptor, source in enumerate(given):
        if source is not None:
            os.dup2(source, descriptor)
    os.closerange(3, 1024)
    for descriptor, source in enumerate(given):
        if source is None:
            os.close(descriptor)
    stdin, stdout, stderr = (
        None if source is None else open(descriptor, mode, closefd=False)  # noqa: SIM115
        for descriptor, (source, mode) in enumerate(zip(given, "rww", strict=True))
    )
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    wanted = {**os.environ, **importable(), "NO_COLOR": "1", "TERM": "xterm", **environment}
    os.environ.clear()
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    tempfile.tempdir = None
    sys.argv = ["canzona", *argv]
    before()
