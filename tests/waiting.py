"""Waiting for what will happen. How long it takes depends on how busy the machine is: only a hang is a failure."""

import subprocess
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 600.0
"""Longer than anything a test waits for, however busy the machine, and shorter than pytest's own limit for a test."""
_LOOK_S: Final = 0.02


def wait_until(
    condition: Callable[[], object], what: str, *processes: subprocess.Popen[str] | subprocess.Popen[bytes]
) -> None:
    """Return once the condition holds.

    Args:
        what: is waited for.
        processes: that it takes; when all of them have ended before, nothing is waited for any longer.

    Raises:
        AssertionError: with what the processes printed, all of them killed.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        ended = bool(processes) and all(process.poll() is not None for process in processes)
        if (ended and not condition()) or time.monotonic() > deadline:
            for process in processes:
                process.kill()
            said = "\n---\n".join(str(process.communicate()[0]) for process in processes)
            raise AssertionError(f"never saw {what}; what was printed:\n{said}")
        time.sleep(_LOOK_S)
