#!/usr/bin/env python3
"""Checks canzona on a machine with GPUs, in under ten minutes on one GPU: prints which parts pass, and compares
measured with simulated values.

    canzona doctor --gpu-check FILE.json                   # everything, also from an installed wheel
    make gpu-check                                         # the same from the sources, into gpu-check.json
    make gpu-check WHEELS=folder                           # with the machine's own torch, without network
    python scripts/gpu_check.py --only step calibrate
    python scripts/gpu_check.py --device cpu               # runs every part on CPU ranks, as a smoke test

The most important parts come first. Each part runs in its own process with a time limit, so a crash or a hang does not
stop the other parts; a part that is stopped keeps its results so far. The file is rewritten after each part. Exits 3 if
torch cannot use a GPU.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from gpu_parts.outcome import Outcome, PartResult, Setup, content, table, verified

from canzona_cli.cli.views.errors import show_failure
from canzona_cli.core.costs.gpus import GpuInfo, gpu_inventory
from canzona_cli.core.errors import EnvironmentProblem, Problem, WorkerCrashed
from canzona_cli.core.setup import Device

LEAST_S = 10.0
"""The remaining seconds below which no further part is started."""
SLOWER = 5
"""The factor on the time limits of all parts on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check."""

    limit_s: float
    gpus: int = 1
    needs: str | None = None
    """The part whose runs this part continues or compares with."""


PARTS = {
    "demo": Part(limit_s=120),
    "train": Part(limit_s=120, needs="demo"),
    "step": Part(limit_s=100),
    "checkpoint": Part(limit_s=75, needs="train"),
    "doubts": Part(limit_s=120),
    "tp2": Part(limit_s=60, gpus=2, needs="train"),
    "dp2": Part(limit_s=60, gpus=2, needs="train"),
    "shared": Part(limit_s=90, gpus=2, needs="train"),
    "overlap": Part(limit_s=90, gpus=2),
    "pp2": Part(limit_s=60, gpus=2, needs="train"),
    "cp2": Part(limit_s=60, gpus=2, needs="train"),
    "te": Part(limit_s=60, needs="train"),
    "experts": Part(limit_s=150),
    "calibrate": Part(limit_s=120),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parts = f"run only these parts and the parts they need; of {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=parts)
    parser.add_argument("--minutes", type=float, help="limit for all parts; default: 10 with one GPU, otherwise 20")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        if given.part is not None:
            answer(Setup.read(given.work), given.part)
        else:
            gpus = require(given.device)
            with tempfile.TemporaryDirectory(prefix="canzona-gpu-check-") as work:
                setup = Setup(
                    device=given.device,
                    name=gpus[0].name,
                    memory_gib=gpus[0].memory_bytes / 2**30,
                    gpus=len(gpus),
                    work=work,
                )
                check(setup, given.only, 60 * (given.minutes or (10 if len(gpus) == 1 else 20)), given.out)
    except Exception as error:
        sys.exit(show_failure(error))


def require(device: Device) -> tuple[GpuInfo, ...]:
    """Returns the GPUs of this machine, or two stand-ins for the device cpu.

    Raises:
        EnvironmentProblem: torch cannot use a GPU.
    """
    if device == "cpu":
        return (GpuInfo(name="cpu", memory_bytes=0),) * 2
    gpus = gpu_inventory()
    if gpus:
        import torch

        if torch.cuda.is_available():
            return gpus
    reason = f"torch cannot use this machine's {gpus[0].name}" if gpus else "this machine has no visible GPU"
    on_cpu = f"{sys.executable} {Path(__file__).resolve()} --device cpu"
    fix = f"run this where `canzona doctor` finds a GPU; every part runs on this machine's CPU with: {on_cpu}"
    raise EnvironmentProblem(Problem(key="gpu-check", reason=f"{reason}: nothing was checked", fix=fix))


def check(setup: Setup, names: Sequence[str], seconds: float, out: Path) -> None:
    """Runs the named parts and the parts that they need, and continues after a failed part.

    Raises:
        WorkerCrashed: at least one part fell short. The error names all of these parts.
    """
    setup.save()
    end = time.monotonic() + seconds
    results: list[PartResult] = []
    needed = set(names)
    while missing := {need for name in needed if (need := PARTS[name].needs) is not None} - needed:
        needed |= missing
    for name in (name for name in PARTS if name in needed):
        print(f"\n{name}", flush=True)
        begun = time.monotonic()
        patience = 1 if setup.device == "cuda" else SLOWER
        outcome = examine(setup, name, min(patience * PARTS[name].limit_s, end - begun))
        results.append(PartResult(part=name, seconds=time.monotonic() - begun, outcome=outcome))
        out.write_text(content(setup, versions(), results) + "\n", encoding="utf-8")
    print(f"\n{table(results)}\n\nwritten to {out}")
    if paths := verified(setup, results):
        line = f"verified: [{', '.join(paths)}]"
        print(f"These GPUs have verified fast paths. A copy of the cluster profile with this line uses them: {line}")
    short = [result for result in results if result.outcome.status == "short"]
    if short:
        raise WorkerCrashed(*(Problem(key=part.part, reason=f"falls short: {part.outcome.summary}") for part in short))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages on which results depend."""
    packages = ("canzona", "torch", "triton", "megatron-core", "emerging-optimizers", "transformer-engine")
    known = {"python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            known[package] = metadata.version(package)
    return known


def examine(setup: Setup, name: str, limit_s: float) -> Outcome:
    """Runs a part in a separate process; at the limit, kills the process and its children."""
    part = PARTS[name]
    if setup.gpus < part.gpus:
        return Outcome(status="not run", summary=f"needs {part.gpus} GPUs, but this machine has one")
    if limit_s < LEAST_S:
        return Outcome(status="not run", summary="no time was left")
    command = [sys.executable, "-W", "ignore", __file__, "--part", name, "--work", setup.work]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
        ending = f"its process ended with code {code}; see above" if code else ""
    except subprocess.TimeoutExpired:
        ending = f"stopped after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not setup.result(name).is_file():
        return Outcome(status="short", summary=ending or "its process wrote no outcome")
    outcome = Outcome.read(setup.result(name))
    if ending:
        return replace(outcome, status="short", summary=f"{ending}; so far: {outcome.summary}")
    return outcome


def answer(setup: Setup, name: str) -> None:
    """Runs a part in this process, and writes its outcome for the process that started this process."""
    from gpu_parts.runs import Failed

    try:
        outcome = part_called(name)(setup)
    except Failed as failed:
        outcome = Outcome(status="short", summary=str(failed))
    setup.keep(name, outcome)


def part_called(name: str) -> Callable[[Setup], Outcome]:
    """Returns the function of a part. Its module is imported here, because it takes as long as a short run."""
    from gpu_parts import parts

    functions: Mapping[str, Callable[[Setup], Outcome]] = {
        "demo": parts.demo,
        "train": parts.train_part,
        "step": parts.step,
        "checkpoint": parts.checkpoint,
        "doubts": parts.doubts,
        "te": parts.fused,
        "experts": parts.experts,
        "calibrate": parts.calibrate,
        "shared": parts.shared,
        "overlap": parts.overlap,
        **{f"{axis}2": partial(parts.split, axis=axis) for axis in ("tp", "dp", "pp", "cp")},
    }
    return functions[name]


if __name__ == "__main__":
    main()
