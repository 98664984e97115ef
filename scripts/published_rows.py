"""Published step times of AdamW, which others measured, and the simulator's predictions for the same layouts.

The published times are in `published.yaml` in this folder. `make published` prints them with the predictions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from optimizer_rows import Kernels, StepRow

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.reading import LARGEST_YAML, Damaged, Unreadable, parse, parse_yaml, read_plain
from canzona_cli.core.setup import ClusterConfig, Dispatcher, Layout
from canzona_cli.core.simulate.predict import simulate_run
from canzona_cli.core.simulate.search import candidates

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
    gpt2: tuple[str, ...] = ()
    tied_embeddings: bool
    num_experts: int | None = None
    experts_per_token: int | None = None

    @property
    def settings(self) -> dict[str, int | bool | tuple[str, ...]]:
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
        "train.fp8": "delayed" if series.precision == "fp8" else "none",
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
