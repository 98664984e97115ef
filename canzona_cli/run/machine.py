"""Facts of this machine that need no library."""

import os
import socket
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
