"""Runs `canzona` commands as processes, and reads what runs leave: losses, compared with those of another run, and
traces of torch's profiler.

A bf16 run differs from the same run in fp32 by its rounding errors. The CPU runs the steps in both precisions, which
gives the size of these errors. A GPU rounds as often as the CPU but in other places, so its run has about the same
distance from the fp32 run in another direction: the two bf16 runs differ by at most twice this distance. Because twenty
steps are a small sample, another factor of two is allowed. A relative difference below half a unit in the last place of
bf16 is always accepted, because logits are rounded to bf16.

Of a trace, only events from the first to the last phase of the breakdown count; phases are user annotations in it. The
host also waits for the GPU when the profiler starts and stops, which is not part of a step.
"""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from canzona_cli.records.breakdown import Breakdown, load_breakdown
from canzona_cli.records.codec import read_lines
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import StepMetrics
from gpu_parts.outcome import Setup

FACTOR: Final = 4.0
FP8_APART: Final = 0.03
"""The largest accepted relative distance of a loss with FP8 matmuls from that with bf16 ones, which a tensor scaled
wrongly exceeds. In published training both agree within a run's noise (Micikevicius et al. 2022, arXiv 2209.05433)."""
HALF_UNIT: Final = 2.0**-9
"""Half a unit in the last place, relative to the value: bf16 has eight bits of significand."""

Curve = Mapping[int, float]
"""The loss or the gradient norm, by step."""
Event = Mapping[str, object]
Span = tuple[float, float]

WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""The calls in which the host waits for the GPU; `item` and copies to pageable memory use the first."""
COLLECTIVES: Final = ("AllReduce", "ReduceScatter", "AllGather", "SendRecv", "Broadcast", "Reduce")
"""The collectives as they appear in the names of NCCL's kernels; the first one that a name contains counts."""


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


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The largest distance between two curves, and the largest accepted distance."""

    distance: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.distance <= self.bound

    def __str__(self) -> str:
        return f"{self.distance:.2g} apart (limit {self.bound:.2g})"


def compare_curves(checked: Curve, expected: Curve, exact: Curve, *, steps: int | None = None) -> Distance:
    """Compares two bf16 curves over the steps that `checked` has.

    Args:
        checked: the curve of the device.
        expected: the curve of the CPU in bf16.
        exact: the curve of the CPU in fp32.
        steps: the number of steps to compare, from the first; None for all.
    """
    compared = sorted(checked)[:steps]
    rounding = max(abs(expected[step] - exact[step]) for step in compared)
    least = HALF_UNIT * max(abs(expected[step]) for step in compared)
    distances = [abs(checked[step] - expected[step]) for step in compared]
    finite = all(map(math.isfinite, distances))  # max() may skip a NaN
    return Distance(distance=max(distances) if finite else math.inf, bound=max(FACTOR * rounding, least))


def fp8_distance(checked: Curve, bf16: Curve) -> Distance:
    """Compares the losses of a run with FP8 matmuls with those of a bf16 run of the same steps."""
    relative = [abs(checked[step] / bf16[step] - 1) for step in sorted(checked)]
    return Distance(distance=max(relative) if all(map(math.isfinite, relative)) else math.inf, bound=FP8_APART)


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The counts and times of a trace, added up over its steps."""

    kernels: int
    """The number of kernels on the GPU, including NCCL's."""
    waits: Mapping[str, int]
    """The number of the host's waits, by call."""
    collectives: Mapping[str, int]
    """The number of NCCL's kernels, by collective."""
    collective_s: float
    """The seconds in which an NCCL kernel runs."""
    hidden: float | None
    """The share of `collective_s` in which another kernel runs as well; None without NCCL kernels."""


def read_steps(events: Sequence[Event]) -> StepTrace:
    """Summarises the trace of one or more steps; all counts are 0 without a GPU."""
    phases = [_span(event) for event in events if event.get("cat") == "user_annotation"]
    start_us, end_us = min((begin for begin, _ in phases), default=0.0), max((end for _, end in phases), default=0.0)
    inside = [event for event in events if event.get("ph") == "X" and start_us <= _span(event)[0] <= end_us]
    kernels = [(str(event["name"]), _span(event)) for event in inside if event.get("cat") == "kernel"]
    nccl = [(name, span) for name, span in kernels if "nccl" in name.lower()]
    communicating_us = _length(span for _, span in nccl)
    computing_us = _length(span for name, span in kernels if "nccl" not in name.lower())
    hidden_us = communicating_us + computing_us - _length(span for _, span in kernels)
    return StepTrace(
        kernels=len(kernels),
        waits=Counter(str(event["name"]) for event in inside if event["name"] in WAITS),
        collectives=Counter(_kind(name) for name, _ in nccl),
        collective_s=communicating_us * 1e-6,
        hidden=hidden_us / communicating_us if nccl else None,
    )


def _kind(kernel: str) -> str:
    return next((kind for kind in COLLECTIVES if kind in kernel), "other")


def _span(event: Event) -> Span:
    """Returns the start and the end of an event, in microseconds."""
    begin, lasted = event.get("ts", 0.0), event.get("dur", 0.0)
    assert isinstance(begin, int | float)
    assert isinstance(lasted, int | float)
    return begin, begin + lasted


def _length(spans: Iterable[Span]) -> float:
    """Returns the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
