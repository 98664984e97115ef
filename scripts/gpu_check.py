#!/usr/bin/env python3
"""The first hour on a machine with GPUs, in under ten minutes on one of them: what works, what falls short, and why.

    make gpu-check                                         # everything, into gpu-check.json
    make gpu-check WHEELS=folder                           # beside the machine's own torch, without network
    python scripts/gpu_check.py --only step updates --sizes qwen3-8b
    python scripts/gpu_check.py --device cpu --sizes qwen3-tiny       # every part on CPU ranks: that it works at all

Parts come in the order of what they are worth, each in a process of its own with a limit, so that neither a crash nor a
hang costs the others. The file is written anew after each. Without a GPU that torch can use, it ends with code 3.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from gpu_parts.outcome import Found, Outcome, Setup, content, table

from canzona_cli.cluster.machine import GpuInfo, gpu_inventory
from canzona_cli.config.schema import Device
from canzona_cli.errors import EnvironmentProblem, Problem, WorkerCrashed
from canzona_cli.report.errors import show_failure

SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
LEAST_S = 10.0
"""With less time left, a part is not begun."""
SLOWER = 5
"""Times that a CPU may take longer than a GPU."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question to the machine."""

    limit_s: float
    gpus: int = 1
    needs: str | None = None
    """The part whose runs it goes on from or compares with."""


PARTS = {
    "demo": Part(limit_s=120),
    "train": Part(limit_s=120, needs="demo"),
    "step": Part(limit_s=90),
    "checkpoint": Part(limit_s=45, needs="train"),
    "te": Part(limit_s=60, needs="train"),
    "updates": Part(limit_s=150),
    "tp2": Part(limit_s=60, gpus=2, needs="train"),
    "dp2": Part(limit_s=60, gpus=2, needs="train"),
    "overlap": Part(limit_s=90, gpus=2),
    "pp2": Part(limit_s=60, gpus=2, needs="train"),
    "cp2": Part(limit_s=60, gpus=2, needs="train"),
    "calibrate": Part(limit_s=120),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parts = f"and what they need: {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=parts)
    parser.add_argument("--minutes", type=float, help="for all parts; 10 with one GPU, else 20")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="RECIPE", help="whose matrices are updated")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for the samples of one number")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        if given.part is not None:
            answer(Setup.read(given.work), given.part, 60 * given.minutes)
        else:
            gpus = require(given.device)
            with tempfile.TemporaryDirectory(prefix="canzona-gpu-check-") as work:
                setup = Setup(
                    device=given.device,
                    name=gpus[0].name,
                    memory_gib=gpus[0].memory_bytes / 2**30,
                    gpus=len(gpus),
                    sizes=tuple(given.sizes),
                    budget_s=given.budget,
                    work=work,
                )
                check(setup, given.only, 60 * (given.minutes or (10 if len(gpus) == 1 else 20)), given.out)
    except Exception as error:
        sys.exit(show_failure(error))


def require(device: Device) -> tuple[GpuInfo, ...]:
    """The GPUs; on a CPU, two that stand for its ranks."""
    if device == "cpu":
        return (GpuInfo(name="cpu", memory_bytes=0),) * 2
    gpus = gpu_inventory()
    if gpus:
        import torch

        if torch.cuda.is_available():
            return gpus
    seen = f"torch cannot use the {gpus[0].name} that is here" if gpus else "no GPU is visible here"
    fix = "run it where `canzona doctor` finds a GPU; --device cpu has every part run on this machine's CPU"
    raise EnvironmentProblem(Problem(key="gpu-check", reason=f"{seen}: nothing was checked", fix=fix))


def check(setup: Setup, names: Sequence[str], seconds: float, out: Path) -> None:
    """Every part of `names`, those that they need, also behind one that failed.

    Raises:
        WorkerCrashed: parts fell short.
    """
    setup.save()
    about = {name: metadata.version(name) for name in ("torch", "megatron-core")}
    end = time.monotonic() + seconds
    found: list[Found] = []
    wanted = set(names)
    while missing := {need for name in wanted if (need := PARTS[name].needs) is not None} - wanted:
        wanted |= missing
    for name in (name for name in PARTS if name in wanted):
        print(f"\n{name}", flush=True)
        begun = time.monotonic()
        patience = 1 if setup.device == "cuda" else SLOWER
        outcome = examine(setup, name, min(patience * PARTS[name].limit_s, end - begun))
        found.append(Found(part=name, seconds=time.monotonic() - begun, outcome=outcome))
        out.write_text(content(setup, about, found) + "\n", encoding="utf-8")
    print(f"\n{table(found)}\n\nwritten to {out}")
    short = [one for one in found if one.outcome.status == "short"]
    if short:
        raise WorkerCrashed(*(Problem(key=one.part, reason=f"it falls short: {one.outcome.said}") for one in short))


def examine(setup: Setup, name: str, limit_s: float) -> Outcome:
    """Have a process of its own answer; it and all that it started are ended at the limit."""
    part = PARTS[name]
    if setup.gpus < part.gpus:
        return Outcome(status="not run", said=f"it takes {part.gpus} GPUs, and there is one")
    if limit_s < LEAST_S:
        return Outcome(status="not run", said="the time was up")
    command = [sys.executable, "-W", "ignore", __file__, "--part", name, "--work", setup.work]
    process = subprocess.Popen([*command, "--minutes", str(limit_s / 60)], start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return Outcome(status="short", said=f"it did not end within {limit_s:.0f} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code or not setup.result(name).is_file():
        return Outcome(status="short", said=f"its process ended with code {code} and no answer; see above")
    return Outcome(**json.loads(setup.result(name).read_text(encoding="utf-8")))


def answer(setup: Setup, name: str, seconds: float) -> None:
    """In the process of a part: leave its outcome for the one that started it."""
    from gpu_parts import one_gpu, two_gpus
    from gpu_parts.runs import Failed

    def updates(setup: Setup) -> Outcome:
        from gpu_parts.updates import updates

        return updates(setup, 0.8 * seconds)  # the rest is for starting and for the last one

    parts: Mapping[str, Callable[[Setup], Outcome]] = {
        "demo": one_gpu.demo,
        "train": one_gpu.train_part,
        "step": one_gpu.step,
        "checkpoint": one_gpu.checkpoint,
        "te": one_gpu.fused,
        "calibrate": one_gpu.calibrate,
        "updates": updates,
        "overlap": two_gpus.overlap,
        **{f"{axis}2": partial(two_gpus.split, axis=axis) for axis in ("tp", "dp", "pp", "cp")},
    }
    try:
        outcome = parts[name](setup)
    except Failed as failed:
        outcome = Outcome(status="short", said=str(failed))
    setup.result(name).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main()
