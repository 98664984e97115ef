"""Starts child processes that are killed if the launcher dies, kills processes with their descendants, and calls a
command of the user's when a run ends, for example to send a message.

That command is in an environment variable, not in a setting: a recipe from somebody else must not execute
anything, and the addresses of chat services are secrets, which settings must not contain.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from canzona_cli.config.schema import TrackerName
from canzona_cli.launch.outcome import Outcome
from canzona_cli.records import protection
from canzona_cli.records.codec import record_dict
from canzona_cli.records.files import RunFiles

ON_END: Final = "CANZONA_ON_END"
LIMIT_S = 30.0
"""The seconds that the command at the end of a run may take."""
PATIENCE_S = 30.0
"""The seconds that the trackers have, after a run ends, to send the remaining records."""


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a command that is killed when the launcher dies.

    Args:
        environment: variables to add to the environment of this process.
        log: the file to which the output is appended.
        stdin: as for `subprocess.Popen`.

    Raises:
        OSError: the command cannot be started, or its log cannot be written.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(Path(protection.__file__)), str(os.getpid()), *command],
            env={**os.environ, **environment},
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C in the terminal only reaches the launcher
        )


def kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kills a process and all its descendants; does nothing if the process has ended. Some descendants are
    in other sessions, so killing the process group would not be enough."""
    if child.poll() is None:
        processes: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # the process may end meanwhile
            ancestor = psutil.Process(child.pid)
            ancestor.suspend()  # so that no child is started between listing and killing
            processes = [*ancestor.children(recursive=True), ancestor]
        for process in processes:
            kill(process)
        child.wait()
        psutil.wait_procs(processes[:-1], timeout=10)


def kill(process: psutil.Process) -> None:
    """Kills a process if it still exists."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


@contextmanager
def run_trackers(
    files: RunFiles,
    trackers: Sequence[TrackerName],
    *,
    start: int,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Runs the trackers during the block, and up to `PATIENCE_S` longer.

    A tracker cannot affect the run. If a tracker cannot be started or does not finish in time, that is only
    reported.

    Args:
        start: the step from which this launch resumed; 0 in a new run.
        environment: the workers' variables, added to those of this process; trackers read their keys from
            them.
        say: a function that prints a message for the user at once.
    """
    started: dict[TrackerName, subprocess.Popen[bytes]] = {}
    for name in dict.fromkeys(trackers):
        try:
            started[name] = _start_tracker(files, name, start, environment)
        except OSError as error:
            say(f"{name} cannot be started ({error.strerror}); training continues without it")
    try:
        yield
    finally:
        for process in started.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline_s = time.monotonic() + PATIENCE_S
        for name, process in started.items():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{name} has not received everything after {PATIENCE_S:.0f} s: the rest is only in metrics.jsonl")
            finally:
                kill_tree(process)


def _start_tracker(
    files: RunFiles, name: TrackerName, start: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "canzona_cli.training.trackers", str(files.root), name, str(start)]
    return start_child(command, environment=environment, log=files.tracker_log(name), stdin=subprocess.PIPE)


def alert(
    outcome: Outcome,
    run_dir: Path | None,
    *,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Calls the command with the outcome as one line of JSON on its standard input. The fields are those of
    `result.json`, and `run_dir`. A failure of the command is only reported.

    Args:
        run_dir: the run directory; None if the run ended before it had one.
        say: a function that prints a message for the user at once.
    """
    content = {**record_dict(outcome.result), "run_dir": run_dir}
    try:
        problem = _execute(shlex.split(environment.get(ON_END, "")), json.dumps(content, default=str), limit_s)
    except (OSError, ValueError) as error:  # ValueError: a quote is not closed
        problem = f"cannot be executed ({getattr(error, 'strerror', None) or error})"
    if problem:  # without the command's words, because they may contain a secret
        say(f"warning: the command in {ON_END} {problem}; the run's exit code stays {outcome.exit_code}")


def _execute(words: list[str], line: str, limit_s: float) -> str:
    """Executes the command; returns what went wrong, empty if nothing did or there is no command."""
    if not words:
        return ""
    # Only the input is a pipe, so a process that the command leaves behind cannot block this one.
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        process.communicate(f"{line}\n".encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:.0f} s and was stopped"
    finally:
        kill_tree(process)
    return f"ended with code {process.returncode}" if process.returncode else ""
