"""Reads facts about this machine, with the standard library only."""

import os
import shutil
import socket
import subprocess
from pathlib import Path


def cores() -> int:
    """Returns the number of cores that this process may use; a container or Slurm may allow fewer than the
    machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def machine_name() -> str:
    """Returns the name of this machine: Slurm's name in a Slurm step, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def tool_output(tool: str, *arguments: str, timeout_s: float = 5.0) -> str | None:
    """Runs a command-line tool and returns its standard output; None if it is missing, fails or exceeds
    `timeout_s`."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        process = subprocess.run((path, *arguments), capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout


def existing_folder(path: Path) -> Path:
    """Returns `path` if it exists, which may then be a file, otherwise its nearest existing parent."""
    return next(candidate for candidate in (path, *path.parents) if os.path.exists(candidate))
