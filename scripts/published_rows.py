"""Published step times of AdamW, which others measured, and the simulator's predictions for the same layouts.

The published times are in `published.yaml` in this folder. `make published` prints them with the predictions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import fill, resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.costs.update import (
    PRICED_STACK,
    UpdateTime,
    adamw_seconds,
    duration,
    matmul_seconds,
    summed,
    update_time,
)
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.optimizers.facts import Algorithm, Form, Work
from canzona_cli.core.optimizers.muon_facts import iteration_work, matmul_bytes
from canzona_cli.core.reading import LARGEST_YAML, Damaged, Unreadable, parse, parse_yaml, read_plain
from canzona_cli.core.setup import ClusterConfig, Dispatcher, Fp8Recipe, Layout
from canzona_cli.core.setup.execution import with_strategy
from canzona_cli.core.simulate.predict import simulate_run
from canzona_cli.core.simulate.search import candidates

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


Precision = Literal["bf16", "fp8"]
ROWS = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a published model; the fields are settings of `recipes/model`."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    gated: bool = True
    tied_embeddings: bool
    num_experts: int | None = None
    experts_per_token: int | None = None

    @property
    def settings(self) -> dict[str, int | bool]:
        """The values that are set, by setting."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Series:
    """The published step times of a model in one layout, on one or more numbers of GPUs."""

    name: str
    model: str
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int = 1
    dispatcher: Dispatcher | None = None
    micro_batch_size: int
    seq_length: int
    batch_per_gpu: float | None = None
    """The sequences per step and GPU; null if `global_batch_size` is set."""
    global_batch_size: int | None = None
    precision: Precision
    fp8_recipe: Fp8Recipe = "delayed"
    """Transformer Engine's recipe, if `precision` is fp8."""
    cluster: dict[str, bool | float] = field(default_factory=dict)
    """The cluster settings in which the run differed from the profile, according to its published
    description."""
    profile: str = "h100-80g"
    recompute: Literal["none", "selective", "full"] = "none"
    also_recomputed: str | None = None
    """The parts that the run recomputed and canzona cannot recompute, so that predicted memory is too
    high."""
    step_s: dict[int, float]
    """The seconds of a step, by number of GPUs."""
    memory_bytes: dict[int, int] = field(default_factory=dict)
    """The peak memory that torch allocated on a GPU, by number of GPUs."""
    sequence_parallel: bool | None = None
    """False if the run had tensor but no sequence parallelism; null for canzona's choice."""
    fitted: bool = False
    """True if numbers of the profile, or costs of experts, are fitted to the series, so that its error is no
    test of them."""
    why_not_counted: str | None = None
    """The reason why the error of the series is in no summary; null if it is in one."""
    source: str
    date: object
    """The year, month or day of publication."""

    @property
    def publication(self) -> tuple[str, str]:
        """The publisher and the date. All times of one publication were measured with the same software."""
        return self.source.partition(",")[0], str(self.date)

    @property
    def layout(self) -> str:
        """The layout in tables: `TP 4 PP 4x5 CP 2 MBS 1`. Parallel sizes of 1 are omitted."""
        stages = f"PP {self.pp}" + (f"x{self.vpp}" if self.vpp > 1 else "")
        sizes = (f"TP {self.tp}", stages, f"CP {self.cp}", f"EP {self.ep}")
        return " ".join((*(size for size in sizes if not size.endswith(" 1")), f"MBS {self.micro_batch_size}"))

    def batch(self, gpus: int) -> int:
        """Returns the number of sequences in a step."""
        return self.global_batch_size or round((self.batch_per_gpu or 0.0) * gpus)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published figure that cannot be predicted, because its layout is unknown or impossible with
    canzona."""

    name: str
    figure: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """The contents of a file of published step times."""

    models: dict[str, Shape]
    series: tuple[Series, ...]
    kernels: tuple[Kernels, ...] = ()
    steps: tuple[StepRow, ...] = ()
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step time on one number of GPUs, and its prediction."""

    gpus: int
    measured_s: float
    predicted_s: float
    memory_bytes: int | None
    predicted_bytes: int

    @property
    def error(self) -> float:
        """The relative error of the predicted time; 0.1 is 10% too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.memory_bytes is None else self.predicted_bytes / self.memory_bytes - 1


@dataclass(frozen=True, kw_only=True)
class PredictedSeries:
    """A series and its predictions."""

    series: Series
    rows: tuple[Row, ...]
    experts: bool = False
    """True if the model has experts."""

    @property
    def error(self) -> float:
        """The mean error over the numbers of GPUs."""
        return math.fsum(row.error for row in self.rows) / len(self.rows)

    @property
    def drift(self) -> tuple[float, float]:
        """The relative growth of the step time from the fewest to the most GPUs, measured and predicted."""
        first, last = self.rows[0], self.rows[-1]
        return last.measured_s / first.measured_s - 1, last.predicted_s / first.predicted_s - 1


def load_published(path: Path = ROWS) -> Published:
    """Reads a file of published step times.

    Raises:
        ConfigError: the file cannot be read, a series is incomplete, or its model is not in the file.
    """
    try:
        published = parse(Published, parse_yaml(read_plain(path, most=LARGEST_YAML)))
    except (Unreadable, Damaged) as error:
        raise ConfigError(Problem(key="published", value=str(path), reason=f"{error}", fix="fix the file")) from None
    unknown = sorted({series.model for series in published.series} - published.models.keys())
    if unknown:
        raise ConfigError(
            Problem(key="model", value=unknown[0], reason="is not among the file's models", fix="add its shape")
        )
    return published


def run_of(series: Series, shape: Shape, gpus: int) -> tuple[RunConfig, Layout]:
    """Returns the run with AdamW that is simulated to predict a published step, and its layout. The run need
    not fit in memory by canzona's estimate.

    Raises:
        ConfigError: the layout is impossible.
    """
    overrides = {
        "recipe": "qwen3-8b",
        "optimizer": "adamw",
        "cluster": series.profile,
        "gpus": gpus,
        "parallel.tp": series.tp,
        "parallel.pp": series.pp,
        "parallel.vpp": series.vpp,
        "parallel.cp": series.cp,
        "parallel.ep": series.ep,
        "parallel.dispatcher": series.dispatcher,
        "parallel.sequence_parallel": series.sequence_parallel,
        "train.micro_batch_size": series.micro_batch_size,
        "train.global_batch_size": series.batch(gpus),
        "train.seq_length": series.seq_length,
        "train.recompute": series.recompute,
        "train.grad_reduce_dtype": "bf16",
        "train.fp8": series.fp8_recipe if series.precision == "fp8" else "none",
        **{f"model.{name}": value for name, value in shape.settings.items()},
        **{f"cluster.{name}": value for name, value in series.cluster.items()},
    }
    config = compose_run([f"{key}={override_text(value)}" for key, value in overrides.items()], training=False).config
    (candidate,) = candidates(config.setup)
    return fill(config, candidate.layout), candidate.layout


def compare(published: Published, profile: Mapping[str, float] | None = None) -> Iterator[PredictedSeries]:
    """Yields every series with its predictions.

    Args:
        profile: values that replace fields of the cluster profile (`ClusterConfig`).
    """
    for series in published.series:
        shape = published.models[series.model]
        rows = (_row(series, shape, gpus, profile or {}) for gpus in series.step_s)
        yield PredictedSeries(series=series, rows=tuple(rows), experts=shape.num_experts is not None)


def counted_series(
    compared: Sequence[PredictedSeries], *, fitted: bool = False, experts: bool = False, precision: Precision = "bf16"
) -> list[PredictedSeries]:
    """Returns the series whose errors are in one summary.

    Args:
        fitted: True for the series to which something is fitted; False for those that are a test.
        experts: True for the series of models with experts; False for all other series.
    """
    kind = (None, fitted, experts, precision)

    def kind_of(predicted: PredictedSeries) -> tuple[object, ...]:
        series = predicted.series
        return series.why_not_counted, series.fitted, predicted.experts, series.precision

    return [predicted for predicted in compared if kind_of(predicted) == kind]


def mean_absolute_error(compared: Sequence[PredictedSeries]) -> float:
    """Returns the mean of the absolute errors of all series; 0.1 is 10%."""
    return math.fsum(abs(predicted.error) for predicted in compared) / len(compared)


def compare_orders(compared: Sequence[PredictedSeries]) -> Iterator[tuple[PredictedSeries, PredictedSeries, bool]]:
    """Yields pairs of layouts of one model, each with True if the layout with the shorter measured time per
    sequence also has the shorter predicted time.

    A pair is yielded for each number of GPUs on which both layouts were measured, with the same sequence
    length and in the same publication. Software may differ more between publications than times differ
    between layouts.
    """
    for a, b in combinations(compared, 2):
        if _conditions(a.series) != _conditions(b.series) or a.series.layout == b.series.layout:
            continue
        by_gpus = {row.gpus: row for row in b.rows}
        for row in a.rows:
            if row.gpus in by_gpus:
                other = by_gpus[row.gpus]
                batches = a.series.batch(row.gpus), b.series.batch(row.gpus)
                measured = row.measured_s / batches[0] < other.measured_s / batches[1]
                predicted = row.predicted_s / batches[0] < other.predicted_s / batches[1]
                yield a, b, measured == predicted


def _conditions(series: Series) -> tuple[object, ...]:
    """Returns the conditions of a series. Layouts can be compared only under equal conditions."""
    return series.model, series.precision, series.seq_length, series.publication


def _row(series: Series, shape: Shape, gpus: int, profile: Mapping[str, float]) -> Row:
    config, layout = run_of(series, shape, gpus)
    cluster: ClusterConfig = replace(config.cluster, **profile)  # type: ignore[arg-type]
    config = replace(config, cluster=cluster)
    return Row(
        gpus=gpus,
        measured_s=series.step_s[gpus],
        predicted_s=simulate_run(config.setup, layout, None).iteration_s,
        memory_bytes=series.memory_bytes.get(gpus),
        predicted_bytes=estimate(config.setup, layout).total,
    )
