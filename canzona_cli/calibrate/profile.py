"""A cluster profile, made of the measurements of a calibration. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import get_args

from canzona_cli.calibrate.measurement import Measurement, Quantity, Record, parts
from canzona_cli.cluster.machine import profile_mismatches
from canzona_cli.config.schema import (
    STANDARD_ONLY,
    AdamWConfig,
    ClusterConfig,
    Form,
    KroneckerConfig,
    Layout,
    MomentumConfig,
    MuonConfig,
    NewtonSchulzConfig,
    OptimizerConfig,
    RunConfig,
    ShampooConfig,
    SoapConfig,
)
from canzona_cli.costs.links import EFFICIENCY
from canzona_cli.costs.model import stage_time
from canzona_cli.run.machine import cores

MODEL_LAYERS = 2


def shortened(config: RunConfig) -> RunConfig:
    """The run that forward and backward are measured on: a few layers, and AdamW's plain buffers."""
    return replace(
        config,
        model=replace(config.model, num_layers=min(MODEL_LAYERS, config.model.num_layers)),
        optimizer=AdamWConfig(name="adamw", lr=config.optimizer.lr),
    )


def measured_runs(config: RunConfig) -> tuple[RunConfig, ...]:
    """The run under each optimizer that is measured: Muon, SOAP, Shampoo and the recipe's own, with its
    settings; what has forms in each of them, and what can be stacked both one by one and stacked."""
    settings, lr = config.optimizer, config.optimizer.lr
    usual = (MuonConfig(name="muon", lr=lr), SoapConfig(name="soap", lr=lr), ShampooConfig(name="shampoo", lr=lr))
    chosen: dict[str, OptimizerConfig] = {optimizer.name: optimizer for optimizer in usual}
    if isinstance(settings, NewtonSchulzConfig | KroneckerConfig):
        chosen[settings.name] = settings
    return tuple(
        replace(config, optimizer=each)
        for optimizer in chosen.values()
        for each in (
            [
                replace(optimizer, form=form, stack=stack)
                for form in get_args(Form)
                if form == "standard" or optimizer.coefficients not in STANDARD_ONLY
                for stack in (False, True)
            ]
            if isinstance(optimizer, MomentumConfig)
            else [optimizer]
        )
    )


def profile_of(
    config: RunConfig,
    layout: Layout,
    record: Record,
    *,
    name: str,
    facts: Mapping[str, str | int | float],
) -> ClusterConfig:
    """The base profile of `config` with every measured value in place.

    Rows of the base's own tables stay where this calibration has none, provided the base was measured on this
    machine.
    """
    base = config.cluster
    known = {m.quantity: m.spread.median for m in record.measurements if not m.key}
    from_base = (
        base if base.calibrated and not profile_mismatches(base) else replace(base, measured_updates=(), collectives=())
    )
    here = {} if record.facts is None else asdict(record.facts)
    bf16_in_fp32 = here.pop("bf16_in_fp32", base.bf16_in_fp32)
    # Each under the name of its field; forward and backward become factors below.
    others = ("forward", "backward", "grouped_collectives")
    measured = {name: significant(value) for name, value in known.items() if name not in others}
    products = tuple((int(m.key[0]), significant(m.spread.median)) for m in _those(record, "matmul_tflops"))
    if not products or "arithmetic" not in record.done:
        products = base.matmul_tflops  # large sizes come last: half a table would make products look slow
    profile = replace(
        base,
        name=name,
        matmul_tflops=products,
        bf16_in_fp32=bf16_in_fp32,
        measured_updates=_updates(from_base, record),
        collectives=_collectives(from_base, record),
        grouped_collectives=bool(known.get("grouped_collectives", base.grouped_collectives)),
        step_factors={},
        crowding=1.0,
        cores=cores() if base.device == "cpu" else base.cores,
        measured_on={**facts, **here},
        not_measured=tuple(part for part in parts(config.gpus) if part not in record.done),
        nodes=None,
        **measured,  # type: ignore[arg-type]
    )
    if products != base.matmul_tflops:
        profile = with_peak(profile)
    profile = _with_link(profile, record)
    fitted = _with_factors(replace(config, cluster=profile), layout, record)
    return with_peak(fitted) if "forward" in (m.quantity for m in record.measurements) else fitted


def with_peak(profile: ClusterConfig) -> ClusterConfig:
    """A CPU rank's peak as what was measured of it: its fastest product,
    or what passes come to that were faster.

    No datasheet has the peak of this many threads on this processor, so it is a measurement like those that
    would be judged by it, each of another moment of a machine that may be faster in the next one. A product
    of a pass is said to take its factor times as long as by itself: at the peak over the smallest factor no
    pass is beyond it.
    """
    if profile.device != "cpu":
        return profile
    fastest = max((rate for _, rate in profile.matmul_tflops), default=profile.bf16_tflops)
    least = min(1.0, profile.forward_factor, profile.backward_factor)
    return replace(profile, bf16_tflops=significant(fastest / least))


def _those(record: Record, quantity: Quantity) -> Iterable[Measurement]:
    return (m for m in record.measurements if m.quantity == quantity)


def _updates(base: ClusterConfig, record: Record) -> tuple[tuple[str, int, int, float], ...]:
    rows = {entry[:3]: entry[3] for entry in base.measured_updates}
    for m in _those(record, "updates"):
        label, height, width = m.key
        rows[str(label), int(height), int(width)] = significant(m.spread.median)
    return tuple((*key, seconds) for key, seconds in sorted(rows.items()))


def _collectives(base: ClusterConfig, record: Record) -> tuple[tuple[str, int, float, float, float], ...]:
    rows = {entry[:3]: entry[3:] for entry in base.collectives}
    for m in _those(record, "collectives"):
        kind, ranks, size = m.key
        rows[str(kind), int(ranks), float(size)] = (significant(m.spread.median), round(m.busy, 2))
    return tuple((*key, *seconds) for key, seconds in sorted(rows.items()))


def _with_link(profile: ClusterConfig, record: Record) -> ClusterConfig:
    """Latency and bandwidth inside the machine, from all-to-all of two ranks:
    for sizes and kinds without a row."""
    pairs = sorted(
        (int(m.key[2]), m.spread.median)
        for m in _those(record, "collectives")
        if (m.key[0], m.key[1]) == ("all_to_all", 2)
    )
    if len(pairs) < 2 or pairs[-1][1] <= pairs[0][1]:
        return profile
    (_, latency_s), (size, seconds) = pairs[0], pairs[-1]
    rate = size / (seconds - latency_s) / EFFICIENCY["machine"] / 1e9
    return replace(profile, intra_node_latency_us=significant(1e6 * latency_s), intra_node_gb_per_s=significant(rate))


def _with_factors(config: RunConfig, layout: Layout, record: Record) -> ClusterConfig:
    """Measured forward and backward over what the cost model predicts on this profile, and what it leaves
    unexplained however many sequences there are."""
    plain = replace(config.cluster, forward_factor=1.0, backward_factor=1.0, forward_module_us=0.0)
    # What is measured has no schedule around it.
    short = replace(shortened(config), cluster=replace(plain, backward_module_us=0.0, pass_us=0.0))
    changes: dict[str, float] = {}
    for direction in ("forward", "backward"):
        points, modules = [], 1
        for m in _those(record, direction):
            size = int(m.key[0])
            stage = stage_time(short, replace(layout, micro_batch_size=size, global_batch_size=size * layout.dp), 0)
            points.append((getattr(stage, f"{direction}_s"), m.spread.median))
            modules = len(stage.modules)
        if points:
            factor, rest_s = _line(sorted(points))
            changes[f"{direction}_factor"] = significant(factor)
            changes[f"{direction}_module_us"] = significant(1e6 * rest_s / modules)
    return replace(config.cluster, **changes)  # type: ignore[arg-type]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, intercept) through the first and the last point; none below zero."""
    (least, quick), (most, slow) = points[0], points[-1]
    slope = (slow - quick) / (most - least) if most > least else 0.0
    if not 0 < slope <= slow / most:  # noise: without an intercept
        slope = slow / most
    return slope, max(0.0, slow - slope * most)


def significant(value: float) -> float:
    """Rounded to four significant digits; more would only look exact."""
    return float(f"{value:.4g}")
