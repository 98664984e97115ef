"""Step times that others have measured and published, and what the simulator says of the same layouts.

The rows are in `published.yaml` beside this file. `make published` prints them with their predictions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from canzona_cli.cluster.search import candidates, fill
from canzona_cli.config.compose import compose_run
from canzona_cli.config.reading import LARGEST_YAML, Unreadable, parse_yaml, read_plain
from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.costs.memory import estimate
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.codec import Damaged, parse
from canzona_cli.simulate.predict import simulate_run

ROWS = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A published model, in the words of `recipes/model`."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    tied_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class Series:
    """One layout of one model, measured on several numbers of GPUs."""

    name: str
    model: str
    tp: int
    pp: int
    vpp: int
    cp: int
    micro_batch_size: int
    seq_length: int
    batch_per_gpu: float | None = None
    """Sequences of a step over GPUs; null where `global_batch_size` is given."""
    global_batch_size: int | None = None
    precision: Literal["bf16", "fp8"]
    cluster: dict[str, bool | float] = field(default_factory=dict)
    """Settings of the cluster profile that the run's own description asks for."""
    profile: str = "h100-80g"
    recompute: Literal["none", "selective", "full"] = "none"
    step_s: dict[int, float]
    """Seconds of a step by number of GPUs."""
    memory_bytes: dict[int, int] = field(default_factory=dict)
    """Peak of what torch allocated on a GPU, by number of GPUs."""
    why_not_fitted: str | None = None
    source: str
    date: object
    """Year, month or day of publication."""

    @property
    def predicted(self) -> bool:
        """True where canzona trains in this precision."""
        return self.precision == "bf16"

    @property
    def layout(self) -> str:
        stages = f"PP {self.pp}" + (f"x{self.vpp}" if self.vpp > 1 else "")
        sizes = (f"TP {self.tp}", stages, f"CP {self.cp}")
        return " ".join((*(size for size in sizes if not size.endswith(" 1")), f"MBS {self.micro_batch_size}"))

    def batch(self, gpus: int) -> int:
        """Sequences of a step."""
        return self.global_batch_size or round((self.batch_per_gpu or 0.0) * gpus)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published figure whose layout is unknown."""

    name: str
    figure: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """The whole file."""

    models: dict[str, Shape]
    series: tuple[Series, ...]
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step and its prediction."""

    gpus: int
    measured_s: float
    predicted_s: float
    memory_bytes: int | None
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.memory_bytes is None else self.predicted_bytes / self.memory_bytes - 1


@dataclass(frozen=True, kw_only=True)
class PredictedSeries:
    """A series beside its predictions."""

    series: Series
    rows: tuple[Row, ...]

    @property
    def error(self) -> float:
        """The mean over its numbers of GPUs."""
        return math.fsum(row.error for row in self.rows) / len(self.rows)

    @property
    def drift(self) -> tuple[float, float]:
        """Returns how much longer a step takes on the most GPUs than on the fewest: measured, predicted."""
        first, last = self.rows[0], self.rows[-1]
        return last.measured_s / first.measured_s - 1, last.predicted_s / first.predicted_s - 1


def load_published(path: Path = ROWS) -> Published:
    """Reads a file of rows.

    Raises:
        ConfigError: it cannot be read, or a row is incomplete.
    """
    try:
        published = parse(Published, parse_yaml(read_plain(path, most=LARGEST_YAML)))
    except (Unreadable, Damaged) as error:
        raise ConfigError(Problem(key="published", value=str(path), reason=f"{error}", fix="mend the row")) from None
    unknown = sorted({series.model for series in published.series} - published.models.keys())
    if unknown:
        raise ConfigError(
            Problem(key="model", value=unknown[0], reason="is not among the file's models", fix="add its shape")
        )
    return published


def run_of(series: Series, shape: Shape, gpus: int) -> tuple[RunConfig, Layout]:
    """The run that a published step is predicted as: AdamW in its layout,
    whether or not it fits by our estimate.

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
        "train.micro_batch_size": series.micro_batch_size,
        "train.global_batch_size": series.batch(gpus),
        "train.seq_length": series.seq_length,
        "train.recompute": series.recompute,
        "train.grad_reduce_dtype": "bf16",
        **{f"model.{name}": value for name, value in asdict(shape).items()},
        **{f"cluster.{name}": value for name, value in series.cluster.items()},
    }
    config = compose_run([f"{key}={_written(value)}" for key, value in overrides.items()]).config
    (candidate,) = candidates(config)
    return fill(config, candidate.layout), candidate.layout


def compare(published: Published, profile: Mapping[str, float] | None = None) -> Iterator[PredictedSeries]:
    """Predicts every series that canzona could run.

    Args:
        profile: numbers to use instead of the cluster profile's own (`ClusterConfig`).
    """
    for series in published.series:
        if series.predicted:
            rows = (_row(series, published.models[series.model], gpus, profile or {}) for gpus in series.step_s)
            yield PredictedSeries(series=series, rows=tuple(rows))


def fitted(compared: Sequence[PredictedSeries]) -> list[PredictedSeries]:
    """The series that the fit and its figures count."""
    return [one for one in compared if one.series.why_not_fitted is None]


def mean_absolute_error(compared: Sequence[PredictedSeries]) -> float:
    """The mean absolute error by layout, as a share."""
    return math.fsum(abs(one.error) for one in compared) / len(compared)


def orders(compared: Sequence[PredictedSeries]) -> Iterator[tuple[PredictedSeries, PredictedSeries, bool]]:
    """Pairs of different layouts of one model, and whether the quicker one,
    per sequence and GPU, is predicted so.

    Only of one publication and only on numbers of GPUs that both were measured on.
    """
    for a, b in combinations(compared, 2):
        alike = (a.series.model, a.series.seq_length) == (b.series.model, b.series.seq_length)
        if not alike or a.series.layout == b.series.layout:
            continue
        there = {row.gpus: row for row in b.rows}
        for row in a.rows:
            if row.gpus in there:
                other = there[row.gpus]
                batches = a.series.batch(row.gpus), b.series.batch(row.gpus)
                measured = row.measured_s / batches[0] < other.measured_s / batches[1]
                predicted = row.predicted_s / batches[0] < other.predicted_s / batches[1]
                yield a, b, measured == predicted


def _row(series: Series, shape: Shape, gpus: int, profile: Mapping[str, float]) -> Row:
    config, layout = run_of(series, shape, gpus)
    cluster: ClusterConfig = replace(config.cluster, **profile)  # type: ignore[arg-type]
    config = replace(config, cluster=cluster)
    return Row(
        gpus=gpus,
        measured_s=series.step_s[gpus],
        predicted_s=simulate_run(config, layout, None).iteration_s,
        memory_bytes=series.memory_bytes.get(gpus),
        predicted_bytes=estimate(config, layout).total,
    )


def _written(value: object) -> str:
    """A value as an override has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
