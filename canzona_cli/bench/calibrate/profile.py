"""The measurements that the ranks of a calibration report, and the cluster profile made from them. Does not
import torch."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from canzona_cli.bench.results import BenchResult, StrategyBench
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.links import EFFICIENCY
from canzona_cli.core.costs.machine import profile_mismatches
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.host import cores
from canzona_cli.core.phases import Phase
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import (
    AdamWConfig,
    ClusterConfig,
    Device,
    FastPath,
    Form,
    KroneckerConfig,
    Layout,
    MomentumConfig,
    MuonConfig,
    OptimizerConfig,
    ShampooConfig,
    SoapConfig,
)
from canzona_cli.records.codec import read_lines
from canzona_cli.records.files import RunFiles, append_json_line, write_json_atomic
from canzona_cli.records.statistics import Quartiles
from canzona_cli.records.words import layout_code

Part = Literal["arithmetic", "memory", "adamw", "collectives", "model", "updates"]
"""The parts of a calibration, in the order of measurement. A part that was not measured comes from the base
profile."""
Quantity = Literal[
    "matmul_tflops",
    "fp32_tflops",
    "tf32_tflops",
    "qr_tflops",
    "eigh_tflops",
    "launch_us",
    "memory_gb_per_s",
    "adamw_ns",
    "updates",
    "collectives",
    "grouped_collectives",
    "forward",
    "backward",
]
"""The measured quantities. Updates, collectives, forward and backward are in seconds. All others are fields
of the profile and have the units of these fields; grouped_collectives is 1 or 0."""

PART_NAMES: dict[Part, str] = {
    "arithmetic": "matmuls, decompositions, launches",
    "memory": "memory bandwidth",
    "adamw": "AdamW",
    "collectives": "collectives",
    "model": "forward and backward",
    "updates": "matrix updates",
}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The time budgets of a calibration. Each measurement is repeated until its budget is spent."""

    item_s: float = 0.3
    """The budget in seconds for each matmul, decomposition, collective size and update shape."""
    largest_item_s: float = 40.0
    """The maximum expected seconds of an update's measurement. Updates that would take longer are left to the
    cost model."""
    end_s: float = 70.0
    """The deadline in seconds after the start. A measurement of an update that would probably end later is
    skipped, unless it takes less than a second."""
    sizes: tuple[int, ...] = (8, 64 << 10, 1 << 20, 8 << 20)
    """The sizes of collectives, in bytes."""
    large: int | None = 32 << 20
    """A further size of collectives in bytes, measured if it is quick enough; None for no further size."""

    def for_device(self, device: Device) -> "Effort":
        """Returns the effort with the sizes of collectives for a type of device. On GPUs, they reach the
        buckets of the largest models."""
        return self if device == "cpu" else replace(self, sizes=GPU_SIZES, large=None)


GPU_SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30)
FULL = Effort()
QUICK = Effort(item_s=0.08, largest_item_s=1.5, end_s=30.0, sizes=(8, 64 << 10, 1 << 20), large=None)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The instructions that ranks read in addition to the configuration and the layout."""

    effort: Effort
    workers: int
    """The number of ranks that compute at the same time."""

    def write(self, files: RunFiles) -> None:
        write_json_atomic(files.root / "orders.json", asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Orders":
        return parse(cls, (files.root / "orders.json").read_bytes())


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A number that was measured repeatedly."""

    quantity: Quantity
    key: tuple[str | int, ...] = ()
    """The row in the quantity's table: (n,) for matmul_tflops, (label, rows, columns) for updates, (kind,
    ranks, bytes) for collectives, (sequences,) for forward and backward; empty for quantities without a
    table."""
    spread: Quartiles
    repetitions: int
    """The number of samples of all ranks that measured; for a collective, the number of times it was measured
    on all of them together."""
    busy: float = 0.0
    """The number of processor cores that a collective kept busy."""

    @classmethod
    def of(cls, quantity: Quantity, values: Sequence[float], *key: str | int, busy: float = 0.0) -> "Measurement":
        return cls(quantity=quantity, key=key, spread=Quartiles.of(values), repetitions=len(values), busy=busy)

    @property
    def name(self) -> str:
        """The name in messages."""
        if self.quantity == "collectives":
            return f"{self.key[0]} of {self.key[2]:,} bytes among {self.key[1]} ranks"
        if self.quantity == "updates":
            return f"{self.key[0]} {self.key[1]} x {self.key[2]}"
        return f"bf16 matmul {self.key[0]}" if self.quantity == "matmul_tflops" else self.quantity


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a calibration that its ranks report."""

    torch: str
    backend: str
    threads: int
    """The number of threads of a rank."""
    workers: int
    """The number of ranks that computed at the same time."""
    bf16_in_fp32: bool
    """The value for `ClusterConfig.bf16_in_fp32`."""


@dataclass(frozen=True, kw_only=True)
class FastPathCheck:
    """The comparison of a fast path with its reference on a GPU."""

    path: FastPath
    agrees: bool
    summary: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a calibration so far."""

    measurements: tuple[Measurement, ...] = ()
    done: tuple[Part, ...] = ()
    """The parts that are complete."""
    skipped: tuple[str, ...] = ()
    """The updates that are left to the cost model, each with the reason."""
    facts: Facts | None = None
    fast_paths: tuple[FastPathCheck, ...] = ()


class Recorder:
    """The writer of a rank's measurements. Rank 0 writes each number before it measures the next; other ranks
    write nothing."""

    def __init__(self, files: RunFiles, *, writes: bool) -> None:
        self._path, self._writes = _record_path(files), writes

    def add(self, measurement: Measurement) -> None:
        self.report(Record(measurements=(measurement,)))

    def report(self, record: Record) -> None:
        """Appends results to the record; does nothing on ranks other than 0."""
        if self._writes:
            append_json_line(self._path, asdict(record))


def read_record(files: RunFiles) -> Record:
    """Reads the complete lines of the record that rank 0 has written so far."""
    lines, _ = read_lines(_record_path(files), Record)
    return Record(
        measurements=tuple(measurement for line in lines for measurement in line.measurements),
        done=tuple(part for line in lines for part in line.done),
        skipped=tuple(update for line in lines for update in line.skipped),
        facts=next((line.facts for line in lines if line.facts is not None), None),
        fast_paths=tuple(check for line in lines for check in line.fast_paths),
    )


def _record_path(files: RunFiles) -> Path:
    return files.root / "measured.jsonl"


def parts(ranks: int) -> Iterator[Part]:
    """Yields the parts of a calibration on `ranks` ranks; a single rank has no collectives."""
    yield from (part for part in get_args(Part) if part != "collectives" or ranks > 1)


MODEL_LAYERS = 2


def shorten(config: RunConfig) -> RunConfig:
    """Returns the run whose forward and backward passes are measured. It has only a few layers, and AdamW,
    which uses Megatron's buffers. If only some layers have experts, all of these have."""
    return replace(
        config,
        model=replace(config.model, num_layers=min(MODEL_LAYERS, config.model.num_layers), moe_layer_freq=1),
        optimizer=AdamWConfig(name="adamw", lr=config.optimizer.lr),
    )


def measured_runs(config: RunConfig) -> tuple[RunConfig, ...]:
    """Returns copies of the run with the optimizers to measure: Muon, SOAP, Shampoo, and the recipe's
    optimizer with its settings, unless that is AdamW or a user's own. Muon and its variants have a copy for
    each form that their coefficients allow, with and without stacking of matrices.
    """
    settings, lr = config.optimizer, config.optimizer.lr
    defaults = (MuonConfig(name="muon", lr=lr), SoapConfig(name="soap", lr=lr), ShampooConfig(name="shampoo", lr=lr))
    by_name: dict[str, OptimizerConfig] = {optimizer.name: optimizer for optimizer in defaults}
    if isinstance(settings, MomentumConfig | KroneckerConfig):
        by_name[settings.name] = settings
    optimizers: list[OptimizerConfig] = []
    for optimizer in by_name.values():
        if not isinstance(optimizer, MomentumConfig):
            optimizers.append(optimizer)
            continue
        optimizers += [replace(optimizer, form=form, stack=stack) for form in get_args(Form) for stack in (False, True)]
    return tuple(replace(config, optimizer=optimizer) for optimizer in optimizers)


def profile_of(
    config: RunConfig, layout: Layout, record: Record, *, name: str, facts: Mapping[str, str | int | float]
) -> ClusterConfig:
    """Returns the base profile of `config`, updated with the measured values.

    Rows of `measured_updates` and `collectives` that this calibration did not measure are kept if the base
    was calibrated on this machine, and dropped otherwise. So are fast paths in `verified`, which are also kept
    if the base was not calibrated: then the user wrote them. `matmul_tflops` is replaced only if all its sizes
    were measured.

    Args:
        name: the profile's name.
        facts: entries of `measured_on`, in addition to those that the ranks report.
    """
    base = config.cluster
    medians = {m.quantity: m.spread.median for m in record.measurements if not m.key}
    same_machine = base.calibrated and not profile_mismatches(base)
    tables = base if same_machine else replace(base, measured_updates=(), collectives=(), verified=())
    rank_facts = {} if record.facts is None else asdict(record.facts)
    bf16_in_fp32 = rank_facts.pop("bf16_in_fp32", base.bf16_in_fp32)
    # The other quantities have the name of their field. Forward and backward become factors below.
    not_fields = ("forward", "backward", "grouped_collectives")
    measured = {name: significant(value) for name, value in medians.items() if name not in not_fields}
    matmul_rates = _of_quantity(record, "matmul_tflops")
    matmuls = tuple((int(m.key[0]), significant(m.spread.median)) for m in matmul_rates)
    if not matmuls or "arithmetic" not in record.done:
        # Large sizes are measured last, so a partial table would have only the low rates of small ones.
        matmuls = base.matmul_tflops
    missing = [part for part in parts(config.gpus) if part not in record.done]
    profile = replace(
        base,
        name=name,
        matmul_tflops=matmuls,
        bf16_in_fp32=bf16_in_fp32,
        measured_updates=_updates(tables, record),
        collectives=_collectives(tables, record),
        verified=verified_paths(tables if base.calibrated else base, record),
        grouped_collectives=bool(medians.get("grouped_collectives", base.grouped_collectives)),
        step_factors={},
        cores=cores() if base.device == "cpu" else base.cores,
        measured_on={**facts, **rank_facts, **({"not_measured": " ".join(missing)} if missing else {})},
        nodes=None,
        **measured,  # type: ignore[arg-type]
    )
    if matmuls != base.matmul_tflops:
        profile = with_peak(profile)
    profile = _with_link(profile, record)
    profile = _with_factors(replace(config, cluster=profile), layout, record)
    return with_peak(profile) if "forward" in (m.quantity for m in record.measurements) else profile


def verified_paths(base: ClusterConfig, record: Record) -> tuple[FastPath, ...]:
    """Returns the fast paths that agreed with their references; those that were not compared are as in `base`."""
    agreed = {check.path: check.agrees for check in record.fast_paths}
    return tuple(path for path in get_args(FastPath) if agreed.get(path, path in base.verified))


def with_peak(profile: ClusterConfig) -> ClusterConfig:
    """Returns the profile with a measured peak rate (`bf16_tflops`) for CPU ranks; GPU profiles are not
    changed.

    No datasheet lists the peak of a processor for a number of threads, so the rate of the fastest matmul is
    used. If the factor of forward or backward is below 1, passes ran faster than the matmuls alone. The rate
    is then divided by the smaller factor, so that no pass exceeds the peak.
    """
    if profile.device != "cpu":
        return profile
    fastest = max((rate for _, rate in profile.matmul_tflops), default=profile.bf16_tflops)
    lowest_factor = min(1.0, *profile.pass_factors)
    return replace(profile, bf16_tflops=significant(fastest / lowest_factor))


def _of_quantity(record: Record, quantity: Quantity) -> Iterable[Measurement]:
    return (m for m in record.measurements if m.quantity == quantity)


def _updates(base: ClusterConfig, record: Record) -> tuple[tuple[str, int, int, float], ...]:
    table = {entry[:3]: entry[3] for entry in base.measured_updates}
    for m in _of_quantity(record, "updates"):
        label, rows, cols = m.key
        table[str(label), int(rows), int(cols)] = significant(m.spread.median)
    return tuple((*key, seconds) for key, seconds in sorted(table.items()))


def _collectives(base: ClusterConfig, record: Record) -> tuple[tuple[str, int, float, float, float], ...]:
    table = {entry[:3]: entry[3:] for entry in base.collectives}
    for m in _of_quantity(record, "collectives"):
        kind, ranks, size = m.key
        table[str(kind), int(ranks), float(size)] = (significant(m.spread.median), round(m.busy, 2))
    return tuple((*key, *seconds_and_cores) for key, seconds_and_cores in sorted(table.items()))


def _with_link(profile: ClusterConfig, record: Record) -> ClusterConfig:
    """Returns the profile with intra-node latency and bandwidth from the measured all-to-alls of two ranks.
    These values are used for kinds of collectives without a measurement."""
    pairs = sorted(
        (int(m.key[2]), m.spread.median)
        for m in _of_quantity(record, "collectives")
        if (m.key[0], m.key[1]) == ("all_to_all", 2)
    )
    if len(pairs) < 2 or pairs[-1][1] <= pairs[0][1]:
        return profile
    (_, latency_s), (size, seconds) = pairs[0], pairs[-1]
    rate = size / (seconds - latency_s) / EFFICIENCY["machine"] / 1e9
    return replace(profile, intra_node_latency_us=significant(1e6 * latency_s), intra_node_gb_per_s=significant(rate))


_DIRECTIONS: tuple[Quantity, Quantity] = ("forward", "backward")


def _with_factors(config: RunConfig, layout: Layout, record: Record) -> ClusterConfig:
    """Returns the profile of `config` with the factors and fixed times of forward and backward.

    Measured seconds are fitted by a linear function of predicted seconds, over micro-batch sizes. The factor
    is the slope; the fixed time of a module is the intercept divided by the number of modules.
    """
    short = replace(shorten(config), cluster=replace(config.cluster, pass_factors=(1.0, 1.0), module_us=(0.0, 0.0)))
    pass_factors, module_us = [*config.cluster.pass_factors], [*config.cluster.module_us]
    for index, direction in enumerate(_DIRECTIONS):
        points: list[tuple[float, float]] = []
        modules = 1
        for m in _of_quantity(record, direction):
            size = int(m.key[0])
            stage = stage_time(short, replace(layout, micro_batch_size=size, global_batch_size=size * layout.dp), 0)
            # A measured pass is not part of a pipeline schedule, so it does not include the cost of a pass in one.
            points.append((getattr(replace(stage, pass_s=0.0), f"{direction}_s"), m.spread.median))
            modules = len(stage.modules)
        if points:
            factor, intercept_s = _line(sorted(points))
            pass_factors[index] = significant(factor)
            module_us[index] = significant(1e6 * intercept_s / modules)
    return replace(config.cluster, pass_factors=(*pass_factors,), module_us=(*module_us,))  # type: ignore[arg-type]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the (slope, intercept) of the line through the first and the last point, neither negative."""
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    slope = (last_y - first_y) / (last_x - first_x) if last_x > first_x else 0.0
    if not 0 < slope <= last_y / last_x:  # caused by noise; use a line through the origin instead
        slope = last_y / last_x
    return slope, max(0.0, last_y - slope * last_x)


def significant(value: float) -> float:
    """Rounds a measured value to four significant digits."""
    return float(f"{value:.4g}")


def fit_to_steps(profile: ClusterConfig, results: Sequence[BenchResult]) -> ClusterConfig:
    """Returns the profile with the factors of complete steps, computed from the results of one or more
    benches."""
    computing_factor, phases = factors(results)
    scaled = ("pass_factors", "module_us")
    changes = {
        name: tuple(significant(value * computing_factor) for value in getattr(profile, name)) for name in scaled
    }
    layouts = ", ".join(dict.fromkeys(layout_code(result.layout) for result in results))
    measured_on = {**profile.measured_on, "fitted_on": layouts}
    changed = replace(profile, step_factors=phases, measured_on=measured_on, **changes)  # type: ignore[arg-type]
    return with_peak(changed)


def factors(results: Sequence[BenchResult]) -> tuple[float, dict[str, float]]:
    """Computes the ratios of measured to predicted time in complete steps.

    Forward and backward have one ratio. It comes from the data-parallel bench, in which these passes contain
    no collectives. It includes the waits for gradients and parameters, in which faster ranks wait for slower
    ranks, because the operating system gives ranks unequal shares of the cores.

    Args:
        results: the result of the data-parallel bench and, if there is one, of the tensor-parallel bench.

    Returns:
        The ratio for forward and backward, and the ratios for other phases by key of
        `ClusterConfig.step_factors`.
    """
    phases: dict[str, float] = {}
    # Keys with `megatron/` are for Megatron's own strategies: `sc` measures their matrix updates and
    # exchanges, `adamw` the rest.
    for prefix, updating, elementwise in (("", "canzona", "canzona"), ("megatron/", "sc", "adamw")):
        benched: dict[Phase, str] = {
            "matrix_update": updating,
            "exchange": updating,
            "norm_clip": elementwise,
            "adamw_update": elementwise,
        }
        for phase, strategy in benched.items():
            # Early ranks wait for late ranks in norm and clip, so only the shortest time contains no wait.
            over_ranks: Literal["min", "mean"] = "min" if phase == "norm_clip" else "mean"
            factor = _factor([result.strategies[strategy] for result in results], (phase,), over_ranks)
            if factor is not None:
                phases[f"{prefix}{phase}"] = factor
    computing_phases: tuple[Phase, ...] = ("forward", "backward", "grad_reduce", "param_gather")
    computing_factor = _factor(results[0].strategies.values(), computing_phases, "mean")
    assert computing_factor is not None
    return computing_factor, phases


def _factor(
    benches: Iterable[StrategyBench], phases: Sequence[Phase], over_ranks: Literal["min", "mean"]
) -> float | None:
    """Returns the ratio of measured to predicted time, summed over phases and benches; None if no bench has
    the phases.

    Args:
        over_ranks: the measured time to use, which is that of the fastest rank (min) or the mean over all
            ranks.
    """
    measured_s = predicted_s = 0.0
    for bench, phase in itertools.product(benches, phases):
        expected_s = bench.predicted.phases.get(phase, 0.0)
        seconds = bench.measured.phases.get(phase)
        if seconds is not None and expected_s > 0:
            measured_s += seconds.min_s if over_ranks == "min" else seconds.mean_s
            predicted_s += expected_s
    return significant(measured_s / predicted_s) if predicted_s > 0 and measured_s > 0 else None
