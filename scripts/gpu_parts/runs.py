"""Runs `canzona` commands as processes and reads their run directories."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.records.breakdown import Breakdown, load_breakdown
from canzona_cli.records.codec import read_lines
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import StepMetrics
from gpu_parts.losses import Curve
from gpu_parts.outcome import Setup
from gpu_parts.traces import Event


class Failed(Exception):
    """The error of a failed command; the message has its name, exit code and last lines of output."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has finished."""

    files: RunFiles

    @property
    def losses(self) -> Curve:
        return {line.step: line.loss if line.loss is not None else float("nan") for line in self._lines()}

    @property
    def grad_norms(self) -> Curve:
        return {line.step: line.grad_norm if line.grad_norm is not None else float("nan") for line in self._lines()}

    @property
    def fallbacks(self) -> int:
        """The number of updates that were doubted in the run."""
        return self._lines()[-1].fallbacks

    @property
    def breakdown(self) -> Breakdown:
        return load_breakdown(self.files.root)

    def trace(self, rank: int = 0) -> list[Event]:
        """Reads the events of torch's profiler."""
        events: list[Event] = json.loads(self.files.rank_profile(rank).read_text(encoding="utf-8"))["traceEvents"]
        return events

    def _lines(self) -> list[StepMetrics]:
        return read_lines(self.files.metrics, StepMetrics)[0]


def train(setup: Setup, runs: Mapping[str, tuple[str, ...]]) -> dict[str, Run]:
    """Trains several runs at the same time; returns them by name.

    Args:
        runs: the overrides of each run, by name.

    Raises:
        Failed: a run failed. The error names the first of the failed runs.
    """
    started = {
        name: start(setup, name, "train", *overrides, f"run.dir={setup.folder / name}")
        for name, overrides in runs.items()
    }
    for name, process in started.items():
        finish(setup, name, process)
    return {name: run(setup, name) for name in runs}


def run(setup: Setup, name: str) -> Run:
    """Returns a run of an earlier part.

    Raises:
        Failed: the earlier part did not finish the run.
    """
    files = RunFiles(setup.folder / name)
    if not files.metrics.is_file():
        raise Failed(f"needs the run `{name}`, which an earlier part did not finish")
    return Run(files=files)


def start(setup: Setup, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a command whose output is written to `<name>.log`."""
    print(f"canzona {' '.join(arguments)}", flush=True)
    with _log(setup, name).open("wb") as log:
        command = [sys.executable, "-W", "ignore", "-m", "canzona_cli.cli.app", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(setup: Setup, name: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until a command ends.

    Raises:
        Failed: its exit code is not 0.
    """
    code = process.wait()
    if code:
        lines = [line.strip() for line in _log(setup, name).read_text(errors="replace").splitlines() if line.strip()]
        raise Failed(f"`{name}` ended with code {code}: {' '.join(lines[-8:])}")


def _log(setup: Setup, name: str) -> Path:
    return setup.folder / f"{name}.log"


def on_device(setup: Setup, *, gpus: int = 1, fused: bool = False) -> tuple[str, ...]:
    """Returns the overrides that put a run on the checked device.

    The GPU's memory replaces the profile's. On a CPU, micro-batches have one sequence, so that the run rounds in other
    places than the CPU run that it is compared with, as a GPU would.
    """
    if setup.device == "cpu":
        return (f"gpus={gpus}", "train.micro_batch_size=1")
    memory = (f"cluster.memory_gib={setup.memory_gib:.1f}",) if setup.memory_gib else ()
    return (f"gpus={gpus}", f"cluster={setup.profile}", f"cluster.transformer_engine={str(fused).lower()}", *memory)
