#!/usr/bin/env python3
"""Measures time and memory of `canzona plan` processes for 8 to 16,384 GPUs, and prints them as Markdown.

    python scripts/plan_speed.py [--runs 3] [--recipe qwen3-32b]

The first row is only the start of Python and canzona. Times are the best of several runs, to exclude other load.
Modules are compiled first, as in an installed package. The last column is planning time per matrix and rank: it does
not grow if planning time is at most linear in matrices x ranks. Exits 1 if a limit is exceeded.
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
"""The limits in seconds for a process, by number of GPUs."""
MEMORY_LIMIT_MIB = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """The resources and the output of a process."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    output: str


def run(compiled: str, *arguments: str) -> Run:
    """Runs `canzona ARGUMENTS` in a process and measures it.

    Args:
        compiled: the folder for bytecode, which all runs share.
    """
    command = [sys.executable, "-m", "canzona_cli.app", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return Run(wall_s=wall, cpu_s=usage.ru_utime + usage.ru_stime, peak_mib=usage.ru_maxrss / 1024, output=output)


def best(runs: int, compiled: str, *arguments: str) -> Run:
    """Runs a command several times; returns the fastest run."""
    return min((run(compiled, *arguments) for _ in range(runs)), key=lambda measured: measured.wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recipe", default="qwen3-32b")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        sys.exit("over the limit" if table(given.recipe, given.runs, compiled) else 0)


def table(recipe: str, runs: int, compiled: str) -> bool:
    """Measures all plans and prints the table; returns True if a limit is exceeded."""
    validate = ("validate", "recipe=tiny")
    plans = {gpus: ("plan", f"recipe={recipe}", f"gpus={gpus}", "--dry-run", "--json") for gpus in GPUS}
    for arguments in (validate, plans[GPUS[0]]):  # compile all modules that the measured runs import
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
        fastest = best(runs, compiled, *arguments)
        plan = json.loads(fastest.output)
        mesh, limit = plan["layout"], LIMITS.get(gpus)
        work = plan["matrices"] * gpus
        failed |= limit is not None and fastest.wall_s > limit
        failed |= fastest.peak_mib > MEMORY_LIMIT_MIB
        print(
            f"| {gpus:,} | TP{mesh['tp']} PP{mesh['pp']} DP{mesh['dp']} | {work:,} | **{fastest.wall_s:.2f} s** | "
            f"{'' if limit is None else f'{limit:g} s'} | {fastest.cpu_s:.2f} s | {plan['planning_s']:.2f} s | "
            f"{fastest.peak_mib:.0f} MiB | {1e9 * plan['planning_s'] / work:.0f} ns |",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    main()
