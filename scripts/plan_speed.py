#!/usr/bin/env python3
"""Time and memory of whole `canzona plan` processes, from 8 to 16,384 GPUs, as Markdown.

    python scripts/plan_speed.py [--runs 3] [--recipe qwen3-32b]

Start-up alone is the first row. A run's time is the best of several, so that a busy machine does not count; modules are
compiled before, as those of an installed package are. The last column shows how the time beyond start-up grows:
near-linear in matrices x ranks means that it stays level or falls.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

GPUS = (8, 64, 256, 1024, 4096, 16384)
LIMITS = {256: 1.0, 1024: 2.0, 16384: 20.0}
"""Seconds a whole process may take."""
MEMORY_LIMIT_MIB = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    said: str


def run(compiled: str, *arguments: str) -> Run:
    """`canzona ARGUMENTS` in a process of its own, its peak memory included.

    Args:
        compiled: folder of the bytecode that one run leaves to the next.
    """
    command = [sys.executable, "-m", "canzona_cli.app", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return Run(wall_s=wall, cpu_s=usage.ru_utime + usage.ru_stime, peak_mib=usage.ru_maxrss / 1024, said=said)


def best(runs: int, compiled: str, *arguments: str) -> Run:
    """The fastest of several."""
    return min((run(compiled, *arguments) for _ in range(runs)), key=lambda found: found.wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recipe", default="qwen3-32b")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        sys.exit("over the limit" if table(given.recipe, given.runs, compiled) else 0)


def table(recipe: str, runs: int, compiled: str) -> bool:
    """Measure and print; whether a limit is passed."""
    validate = ("validate", "recipe=tiny")
    plans = {gpus: ("plan", f"recipe={recipe}", f"gpus={gpus}", "--dry-run", "--json") for gpus in GPUS}
    for arguments in (validate, plans[GPUS[0]]):  # these compile all that the others import
        run(compiled, *arguments)
    print(f"{recipe}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    columns = "GPUs | layout | matrices x ranks | wall | limit | processor | planning | peak memory"
    print(f"| {columns} | planning / (matrices x ranks) |")
    print("|---|---|---|---|---|---|---|---|---|")
    start = best(runs, compiled, *validate)
    print(
        f"| start-up (`validate`) | | | {start.wall_s:.2f} s | | {start.cpu_s:.2f} s | | {start.peak_mib:.0f} MiB | |"
    )
    failed = False
    for gpus, arguments in plans.items():
        found = best(runs, compiled, *arguments)
        said = json.loads(found.said)
        mesh, limit = said["layout"], LIMITS.get(gpus)
        work = said["matrices"] * gpus
        failed |= limit is not None and found.wall_s > limit
        failed |= found.peak_mib > MEMORY_LIMIT_MIB
        print(
            f"| {gpus:,} | TP{mesh['tp']} PP{mesh['pp']} DP{mesh['dp']} | {work:,} | **{found.wall_s:.2f} s** | "
            f"{'' if limit is None else f'{limit:g} s'} | {found.cpu_s:.2f} s | {said['planning_s']:.2f} s | "
            f"{found.peak_mib:.0f} MiB | {1e9 * said['planning_s'] / work:.0f} ns |",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    main()
