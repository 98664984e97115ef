"""Facts of this machine that need no library."""

import os
import shutil
import socket
import subprocess
from pathlib import Path


def cores() -> int:
    """Cores this process may use; a container or Slurm may have given it fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def clock_name() -> str:
    """Equal on ranks that share one monotonic clock: those of a machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


def tool_output(tool: str, *arguments: str, timeout_s: float = 5.0) -> str | None:
    """Standard output of a command-line tool; None when it is missing, fails or hangs."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        done = subprocess.run((path, *arguments), capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def existing_folder(path: Path) -> Path:
    """The path, or the nearest of its parents that exists: where it would be created.
    It may be a file, in the way."""
    return next(place for place in (path, *path.parents) if os.path.exists(place))
