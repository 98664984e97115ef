"""Processes that the launcher starts on its own machine. They die with it,
and so does everything that they started."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from canzona_cli.config.schema import TrackerName
from canzona_cli.run import orphan
from canzona_cli.run.files import RunFiles

PATIENCE_S = 30.0
"""Seconds that all trackers together get, once a run has ended, to take what is left."""


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command that the kernel kills when the launcher dies.

    Args:
        environment: beside this process's own.
        log: the file that its output is appended to.
        stdin: as for `subprocess.Popen`.

    Raises:
        OSError: it cannot be started, or its log not be written.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(Path(orphan.__file__)), str(os.getpid()), *command],
            env={**os.environ, **environment},
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
        )


def kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, if it has not ended. Some have sessions of their own, so that its
    process group would not be enough."""
    if child.poll() is None:
        processes = list[psutil.Process]()
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            family = psutil.Process(child.pid)
            family.suspend()  # it must not start another process between the listing and the killing
            processes = [*family.children(recursive=True), family]
        for process in processes:
            kill(process)
        child.wait()
        psutil.wait_procs(processes[:-1], timeout=10)


def kill(process: psutil.Process) -> None:
    """Kill one process, if it is still there."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


@contextmanager
def tracked(
    files: RunFiles,
    trackers: Sequence[TrackerName],
    *,
    start: int,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Have the trackers follow the run for as long as the block lasts, and shortly after it.

    A tracker can do nothing to the run: one that cannot even be started, or is not done in time, is only
    reported.

    Args:
        start: the step after which this launch begins.
        environment: the environment of the workers, beside this process's own; trackers find their keys
            there.
        say: tells the user something at once.
    """
    started: dict[TrackerName, subprocess.Popen[bytes]] = {}
    for name in dict.fromkeys(trackers):
        try:
            started[name] = _tracker(files, name, start, environment)
        except OSError as error:
            say(f"{name} cannot be started ({error.strerror}); training continues without it")
    try:
        yield
    finally:
        for process in started.values():
            if process.stdin is not None:
                process.stdin.close()
        until = time.monotonic() + PATIENCE_S
        for name, process in started.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{name} has not taken everything after {PATIENCE_S:.0f} s: the rest is in metrics.jsonl alone")
            finally:
                kill_tree(process)


def _tracker(files: RunFiles, name: TrackerName, start: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "canzona_cli.trackers.follow", str(files.root), name, str(start)]
    return start_child(command, environment=environment, log=files.tracker_log(name), stdin=subprocess.PIPE)
