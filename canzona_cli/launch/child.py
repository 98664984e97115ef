"""Processes that the launcher starts on its own machine: they die with it, and all that they have started with them."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from canzona_cli.run import orphan


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command that the kernel kills when the launcher dies.

    Args:
        environment: beside this process's own.
        log: what it says is appended here.
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
    """Kill a process and all below it, if it has not ended. Some have sessions of their own, so that its process group
    would not be enough."""
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
