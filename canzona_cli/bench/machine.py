"""The machine a bench runs on, as its result names it. No torch."""

import os
import platform
from importlib import metadata
from pathlib import Path


def machine_facts(ranks: int) -> dict[str, str | int | float]:
    """Processor, cores this process may use, torch, and how busy the machine is at this moment (mean of a minute)."""
    facts: dict[str, str | int | float] = {
        "processor": _processor(),
        "cores": cores(),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "ranks": ranks,
    }
    if hasattr(os, "getloadavg"):
        facts["load_average"] = round(os.getloadavg()[0], 2)
    return facts


def cores() -> int:
    """That this process may use; a container or Slurm may have given it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
