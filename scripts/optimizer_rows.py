"""Published times of matrix optimizers, which others measured, and what the cost model says of them: kernels and
updates of listed shapes, and whole optimizer steps in a layout.

The rows are in `published.yaml` in this folder. `make published` prints them with the predictions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.update import (
    PRICED_STACK,
    UpdateTime,
    adamw_seconds,
    duration,
    matmul_seconds,
    summed,
    update_time,
)
from canzona_cli.core.optimizers.facts import Algorithm, Form, Work
from canzona_cli.core.optimizers.muon_facts import iteration_work, matmul_bytes
from canzona_cli.core.setup import ClusterConfig
from canzona_cli.core.setup.execution import with_strategy
from canzona_cli.core.simulate.predict import simulate_run

Operation = Literal["newton_schulz", "matmul", "qr", "eigh", "adamw", "soap"]
Matrices = tuple[int, int, int]
"""(count, rows, cols) of equal matrices."""


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A measured time of one or more matrices."""

    matrices: tuple[Matrices, ...]
    """The matrices that were measured together. For matmul, (count, m, k) is a product of (m, k) by its
    transpose; for adamw, count is the number of elements in millions."""
    ms: float
    steps: int = 5
    """The number of Newton-Schulz steps."""
    fitted: bool = False
    """True if a number of the cost model is fitted to this row."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Times that were measured under the same conditions."""

    name: str
    operation: Operation
    profile: str
    gpu: str
    precision: Literal["bf16", "fp16", "fp32"]
    form: Form = "standard"
    batched: bool = False
    """True if equal matrices were multiplied in batched matmuls."""
    normalised: bool = False
    """True if the norm of the matrices, and the division by it, were measured too."""
    launches: int | None = None
    """The number of kernels that the measured code launches for each matrix; null: as many as canzona."""
    cluster: dict[str, bool | float] = field(default_factory=dict)
    """Cluster settings in which the measurement differed from the profile."""
    why_not_counted: str | None = None
    rows: tuple[KernelRow, ...]
    source: str
    date: object


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A measured step with a matrix optimizer and one with AdamW, in the same layout."""

    name: str
    gpu: str
    """The measured GPUs, and how they differ from the simulated run."""
    overrides: tuple[str, ...]
    """The settings of the simulated run, including its strategy."""
    added_ms: float
    """The milliseconds by which the matrix optimizer made a step longer than AdamW's."""
    added_share: float
    """The same, relative to the measured step with AdamW."""
    why_not_counted: str | None = None
    source: str
    date: object


@dataclass(frozen=True, kw_only=True)
class PricedRow:
    """A measured time and its prediction."""

    name: str
    gpu: str
    what: str
    measured_ms: float
    predicted_ms: float
    fitted: bool
    why_not_counted: str | None
    source: str
    note: str = ""

    @property
    def error(self) -> float:
        """The relative error of the predicted time; 0.1 is 10% too long."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def counted(self) -> bool:
        """True if the error is one of those that summaries are made of."""
        return not self.fitted and self.why_not_counted is None


def price_rows(kernels: Sequence[Kernels], steps: Sequence[StepRow]) -> Iterator[PricedRow]:
    """Yields every row with its prediction."""
    for group in kernels:
        cluster = _profile(group.profile, group.cluster)
        for row in group.rows:
            yield PricedRow(
                name=group.name,
                gpu=group.gpu,
                what=_described(group, row),
                measured_ms=row.ms,
                predicted_ms=1e3 * _kernel_seconds(group, row, cluster),
                fitted=row.fitted,
                why_not_counted=group.why_not_counted,
                source=f"{group.source}, {group.date}",
            )
    for step in steps:
        yield _price_step(step)


def summary(rows: Sequence[PricedRow]) -> tuple[float, float, float]:
    """Returns the mean absolute error of rows, and the range of their errors."""
    errors = [row.error for row in rows]
    return math.fsum(map(abs, errors)) / len(errors), min(errors), max(errors)


def _profile(name: str, changes: Mapping[str, bool | float]) -> ClusterConfig:
    settings = [f"cluster.{key}={str(value).lower()}" for key, value in changes.items()]
    return compose_run(["recipe=qwen3-8b", f"cluster={name}", *settings], training=False).config.cluster


def _described(group: Kernels, row: KernelRow) -> str:
    if group.operation == "adamw":
        return f"{row.matrices[0][0]:,} M elements"
    sides = ", ".join(f"{f'{count} x ' if count > 1 else ''}{m} x {n}" for count, m, n in row.matrices)
    return f"{sides}, {row.steps} steps" if group.operation == "newton_schulz" and row.steps != 5 else sides


def _kernel_seconds(group: Kernels, row: KernelRow, cluster: ClusterConfig) -> float:
    return summed(_time(group, row, *matrices, cluster) for matrices in row.matrices).alone_s


def _time(group: Kernels, row: KernelRow, count: int, m: int, n: int, cluster: ClusterConfig) -> UpdateTime:
    """Returns the time of `count` matrices (m, n)."""
    stacked = min(PRICED_STACK, count) if group.batched else 1
    match group.operation:
        case "adamw":
            return UpdateTime(adamw_seconds(1e6 * count, cluster))
        case "matmul":
            return UpdateTime(count / stacked * matmul_seconds(cluster, stacked * m, n, m, "bf16"))
        case "soap":
            each = update_time(Algorithm(name="soap", refresh_period=1), m, n, cluster, "megatron")
        case "qr":
            each = duration(Work(qr=((m, n),)), "fp32", cluster)
        case "eigh":
            each = duration(Work(eigh=(m,)), "fp32", cluster)
        case "newton_schulz":
            work = _newton_schulz(group, row.steps, m, n)
            # A batch launches every kernel once.
            work = replace(work, launches=work.launches / (count if group.batched else 1))
            each = duration(work, "bf16", cluster, stacked)
    return UpdateTime(count * each.device_s, count * each.host_s)


def _newton_schulz(group: Kernels, steps: int, m: int, n: int) -> Work:
    algorithm = Algorithm(name="muon", form=group.form, ns_steps=steps)
    work = iteration_work(algorithm, m, n)
    traffic = (8 + matmul_bytes(algorithm)) * m * n if group.normalised else 0  # as in `muon_facts`
    return replace(work, traffic=work.traffic + traffic, launches=group.launches or work.launches)


def _price_step(step: StepRow) -> PricedRow:
    config, layout = resolve(compose_run(list(step.overrides), training=False).config)
    theirs, adamw = (
        simulate_run(with_strategy(config.setup, strategy), layout, None)
        for strategy in (config.engine.strategy, "adamw")
    )
    added_s = theirs.iteration_s - adamw.iteration_s
    return PricedRow(
        name=step.name,
        gpu=step.gpu,
        what=f"added to AdamW's step; optimizer {1e3 * theirs.optimizer_s:.0f} ms instead of "
        f"{1e3 * adamw.optimizer_s:.0f}",
        measured_ms=step.added_ms,
        predicted_ms=1e3 * added_s,
        fitted=False,
        why_not_counted=step.why_not_counted,
        source=f"{step.source}, {step.date}",
        note=f"measured {step.added_share:+.1%}, simulated {added_s / adamw.iteration_s:+.1%} of AdamW's step",
    )
