"""Starts a process for each tracker of a run beside its workers, and ends it when they have ended."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from canzona_cli.config.schema import TrackerName
from canzona_cli.launch.child import kill_tree, start_child
from canzona_cli.run.files import RunFiles

PATIENCE_S = 30.0
"""Seconds all trackers together get, once a run has ended, to take what is left."""


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

    A tracker can do nothing to the run: one that cannot even be started, or is not done in time, is only told.

    Args:
        start: the step behind which this launch begins.
        environment: of the workers, beside this process's own; trackers find their keys there.
        say: what the user must know at once.
    """
    started: dict[TrackerName, subprocess.Popen[bytes]] = {}
    for name in dict.fromkeys(trackers):
        try:
            started[name] = _start(files, name, start, environment)
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


def _start(files: RunFiles, name: TrackerName, start: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "canzona_cli.trackers.follow", str(files.root), name, str(start)]
    return start_child(command, environment=environment, log=files.tracker_log(name), stdin=subprocess.PIPE)
