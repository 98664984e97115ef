"""The cost of updating one matrix: the seconds that its update takes on a hardware profile. The work of an
update is in the facts about its optimizer (`optimizers.facts`).

An update runs on one stream, so its kernels do not overlap, and their times add up. On a GPU the host
launches later kernels while earlier ones run (`UpdateTime`). If the profile has a measurement of exactly this
update, the measurement is used instead.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from canzona_cli.core.model.matrices import Matrix, Shape
from canzona_cli.core.optimizers.facts import Algorithm, Form, Rule, Work, known_optimizers
from canzona_cli.core.optimizers.muon_facts import MUON_AROUND, matmul_bytes
from canzona_cli.core.phases import Phase
from canzona_cli.core.setup import (
    ClusterConfig,
    CustomConfig,
    Device,
    KroneckerConfig,
    MomentumConfig,
    OptimizerConfig,
    Precision,
    RootMethod,
    Setup,
    ShampooConfig,
)

Implementation = Literal["canzona", "megatron"]
"""The code that runs an update."""
Unit = Literal["fp8", "bf16", "tf32", "fp32"]
"""The number format of a matmul."""

COPY_EFFICIENCY = 0.9
"""The share of the memory bandwidth that a plain copy reaches: 3.0 of an H100's 3.35 TB/s."""
MEMORY_EFFICIENCY: Mapping[Device, float] = MappingProxyType({"cpu": COPY_EFFICIENCY, "cuda": 0.72})
"""The share of the memory bandwidth that elementwise kernels with several operands and types reach: 2.4 TB/s
on an H100, an estimate between the 3.0 of a copy and the 2.0 to 2.3 of torch.compile's and Liger's norms
(QuACK, Dao-AILab, 2025-07)."""
COLUMN_S: Mapping[Device, float] = MappingProxyType({"cpu": 0.0, "cuda": 4e-6})
"""The seconds that a decomposition takes for each column besides its FLOPs, because columns follow one
another: 4 us with torch.linalg.qr of fp32 squares of 256 to 4096 (FlagGems pull request 5586)."""
EIGH_PASSES = 2
"""The number of times that an eigendecomposition goes through the columns: on the way to the tridiagonal form
and back. A derived 11.7 ms for side 1024 (DASH, Shampoo on H100s) is all that is known."""
FP8_RATE, FP8_SUSTAINED = 2.0, 1.9
"""The rate of FP8 matmuls relative to bf16 ones of the same size, and the sustained rate under the power limit relative
to that of bf16: the peaks of Hopper and Blackwell differ by 2; 1,350 TFLOP/s was chosen for an H100 with the first FP8
series of scripts/published.yaml in sight."""
ADAMW_BYTES = {True: 30, False: 86}
"""The bytes of AdamW's memory traffic per element. With Transformer Engine's fused kernel (True): gradient 4
read, master and both moments 4 read and 4 written each, bf16 weight 2 written. With torch's foreach passes
(False): decay 8, first moment 12, second 8 + 12, root 8, correction 8, eps 8, weight 16, and 6 to copy the
weight."""
MEGATRON_BYTES = {"bf16": 28, "fp32": 12}
"""The bytes of memory traffic per element that Megatron's Muon (emerging-optimizers 0.3) causes in addition
to canzona's. Megatron's passes are: decay 8, momentum 12, Nesterov 12, norm 4 and division 8, scaling twice
16, weight 12 and its copy 4 + w; casts to and from bf16 6 each."""
GRAM_GAIN, GRAM_MIN_SIDE = 0.98, 128
"""The conditions under which form auto chooses the Gram form: the largest ratio of its time to the standard
form's, and the smallest length of the short side. In smaller matrices, rounding errors average out over fewer
elements."""
STACK_GAIN = 0.95
"""The threshold for stacking by default: the largest ratio of the time per matrix in a stack to the time of a
matrix alone."""
STACK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""The limit on the bytes of stacked matrices' iterates and squares. With `optimizer.stack=true` a stack of
two matrices may exceed it."""
PRICED_STACK = 4
"""The largest number of matrices in a stack that the cost model assumes, because a host may have fewer
matrices of one shape than fit. Hosts do have more experts than this: in the largest stacks that fit, the
experts of Qwen3-30B-A3B would be a fifth cheaper according to the model, but this has not been measured."""


COST_DIGITS = 9
"""The significant digits of a cost. A logarithm's last bit depends on the processor, but plans must not."""
ROUNDING = 1e-9
"""The relative tolerance for sums of the same numbers in a different order."""


class UpdateTime(NamedTuple):
    """The time of an update, or the sum of several updates' times."""

    device_s: float
    """The seconds for which kernels run; on a CPU, which runs what it launches, all seconds."""
    host_s: float = 0.0
    """The seconds for which the host launches kernels, while earlier kernels run; 0 if a graph replays them."""

    @property
    def alone_s(self) -> float:
        """The seconds until both are done, if nothing else is updated before or after."""
        return self.device_s if self.device_s >= self.host_s else self.host_s


def summed(times: Iterable[UpdateTime]) -> UpdateTime:
    """Adds up the times of a rank's updates. The rank is done after `alone_s` of the sum, so the launches of
    small matrices are hidden while large ones are updated."""
    return UpdateTime(*map(math.fsum, zip(UpdateTime(0.0), *times, strict=True)))


@lru_cache(maxsize=64)
def algorithm_of(setup: Setup) -> Algorithm:
    """Returns the settings of a run's optimizer on which update costs depend."""
    algorithm = _algorithm(setup.optimizer, setup.train.precision)
    if isinstance(setup.optimizer, MomentumConfig):
        cluster, graph = setup.cluster, setup.optimizer.graph
        on_gpu = cluster.device == "cuda" and implementation(setup) == "canzona"
        replayed = on_gpu and (cluster.may_choose("graphs") if graph == "auto" else graph)
        return replace(algorithm, graph=replayed, fused=cluster.may_choose("fused"))
    if implementation(setup) == "megatron":
        algorithm = replace(algorithm, spread=False)
    if not isinstance(setup.optimizer, ShampooConfig):
        return algorithm
    return replace(algorithm, roots=_fastest_roots(algorithm, setup.cluster))


def _fastest_roots(algorithm: Algorithm, cluster: ClusterConfig) -> RootMethod:
    """Returns the root method that the cost model predicts to be fastest on the cluster's devices. Methods are
    compared for sides of 1024 (or `max_preconditioner_dim`, if smaller) only, because the ranking hardly depends on
    the size."""
    side = min(1024, algorithm.max_preconditioner_dim)
    methods: tuple[RootMethod, ...] = get_args(RootMethod)
    return min(methods, key=lambda roots: _modelled(replace(algorithm, roots=roots), side, side, cluster)[0].alone_s)


@lru_cache(maxsize=64)
def _algorithm(optimizer: OptimizerConfig, precision: Precision) -> Algorithm:
    """Returns the part of `algorithm_of` that depends only on the optimizer's settings and the precision."""
    if isinstance(optimizer, CustomConfig):
        like = optimizer.cost_like
        return Algorithm(name=like, custom=True, precision=precision)
    algorithm = Algorithm(name=optimizer.name)
    if isinstance(optimizer, MomentumConfig):
        steps, form = optimizer.ns_steps, optimizer.form
        algorithm = replace(algorithm, ns_steps=steps, precision=precision, form=form, stack=optimizer.stack)
    if isinstance(optimizer, KroneckerConfig):
        period, longest = optimizer.precondition_frequency, optimizer.max_preconditioner_dim
        spread = optimizer.stagger and period > 1
        algorithm = replace(algorithm, refresh_period=period, spread=spread, max_preconditioner_dim=longest)
    return algorithm


def implementation(setup: Setup) -> Implementation:
    """Returns the code that executes the updates of a run."""
    return "canzona" if setup.execution.ours else "megatron"


@lru_cache(maxsize=1024)
def stack_of(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> int:
    """Returns the maximum number of (rows, cols) matrices that a host updates together in batched matmuls; 1
    if it updates them one by one.

    The number depends only on the algorithm, the shape and the profile. If `optimizer.stack` is auto,
    matrices are stacked if this is faster by `STACK_GAIN` in the profile's measurements or, on GPUs without
    measurements, in the model. On CPUs without measurements, matrices are not stacked: batched matmuls are
    not always faster there, but strips of large matmuls (`optimizers.newton_schulz`) always are.
    """
    if not RULES[algorithm.name].orthogonal or algorithm.custom or algorithm.stack is False:
        return 1
    fitting = _fitting(algorithm, rows, cols, cluster)
    if algorithm.stack is True:
        return max(2, fitting)
    algorithm = replace(algorithm, form=form_of(algorithm, rows, cols, cluster))
    single, stacked = replace(algorithm, stack=False), replace(algorithm, stack=True)
    single_s, stacked_s = _measured(single, rows, cols, cluster), _measured(stacked, rows, cols, cluster)
    if single_s is None or stacked_s is None:
        if cluster.device == "cpu":
            return 1
        single_s, stacked_s = (_modelled(variant, rows, cols, cluster)[0].alone_s for variant in (single, stacked))
    return fitting if fitting > 1 and stacked_s <= STACK_GAIN * single_s else 1


def _fitting(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> int:
    """Returns the number of matrices whose iterates and squares fit in `STACK_BYTES`."""
    m, n = sorted((rows, cols))
    return STACK_BYTES[cluster.device] // (2 * matmul_bytes(algorithm) * (m * n + m * m))


def label(algorithm: Algorithm) -> str:
    """Returns the name under which a profile has measurements of an algorithm, such as muon/gram/5,
    muon/standard/5/stacked, soap/spread, shampoo/newton/spread or custom."""
    if algorithm.custom:
        return "custom"
    if RULES[algorithm.name].orthogonal:
        return f"{algorithm.name}/{algorithm.form}/{algorithm.ns_steps}{'/stacked' if algorithm.stack else ''}"
    roots = "" if algorithm.roots == "eigh" else f"/{algorithm.roots}"
    spread = "/spread" if algorithm.spread else ""
    return f"{algorithm.name}{roots}{spread}"


def seconds(
    algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig, implementation: Implementation = "canzona"
) -> float:
    """Returns the mean seconds of one update on one device that updates nothing else (`update_time`)."""
    return update_time(algorithm, rows, cols, cluster, implementation).alone_s


def update_time(
    algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig, implementation: Implementation = "canzona"
) -> UpdateTime:
    """Returns the mean time of one update, in the form and stacking chosen for its shape.

    Args:
        implementation: megatron for the update that Megatron's strategies execute, which is in standard form
            and does not use stacking or graphs. The profile may have separate measurements
            of it.
    """
    if implementation == "megatron":
        algorithm = replace(algorithm, form="standard", stack=False, graph=False, spread=False)
        for prefix in ("megatron/", ""):
            if (measured_s := _measured(algorithm, rows, cols, cluster, prefix)) is not None:
                return UpdateTime(measured_s)
        return _modelled(algorithm, rows, cols, cluster, implementation)[0]
    return _time(_with_choices(algorithm, rows, cols, cluster), rows, cols, cluster)


@lru_cache(maxsize=1024)
def form_of(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> Form:
    """Returns the form in which a (rows, cols) matrix is orthogonalised. `auto` chooses the Gram form if it
    may be chosen on this cluster (`ClusterConfig.may_choose`), is accurate enough (`gram_holds`) and faster by
    `GRAM_GAIN`, and the matrix is large enough (`GRAM_MIN_SIDE`).

    The form depends only on the algorithm, the shape and the profile, so a matrix has the same form on every
    rank.
    """
    if algorithm.form != "auto":
        return algorithm.form
    if not (cluster.may_choose("gram") and gram_holds(algorithm, cluster)):
        return "standard"
    # The size of automatic stacks depends on the form, so forms are compared without automatic stacks.
    unstacked = replace(algorithm, stack=algorithm.stack is True)
    standard_s = _time(replace(unstacked, form="standard"), rows, cols, cluster).alone_s
    gram_s = _time(replace(unstacked, form="gram"), rows, cols, cluster).alone_s
    return "gram" if min(rows, cols) >= GRAM_MIN_SIDE and gram_s <= GRAM_GAIN * standard_s else "standard"


def gram_holds(algorithm: Algorithm, cluster: ClusterConfig) -> bool:
    """Returns True if the Gram form is accurate enough for the momenta of real training, on this device and
    in this precision.

    It is not accurate enough with bf16 matmuls, which bf16 runs use on CPUs with bf16 instructions: the check
    of the result rejected all of qwen3-tiny's 28 momenta in the first 30 steps and half of them after 300,
    and rejected matrices are recomputed in standard form. Bf16 runs on GPUs, and on CPUs without bf16
    instructions, use fp16 matmuls (`optimizers.gram_form.gram_dtype`), with which the check rejected none.
    """
    return algorithm.precision != "bf16" or cluster.device == "cuda" or cluster.bf16_in_fp32


def gram_scale(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> float:
    """Returns the seconds of a hosted Gram-form update (measured, if the profile has a measurement) relative
    to the modelled seconds."""
    algorithm = replace(algorithm, form="gram", stack=False)
    return _time(algorithm, rows, cols, cluster).alone_s / _modelled(algorithm, rows, cols, cluster)[0].alone_s


@lru_cache(maxsize=4096)
def rounded(seconds: float) -> float:
    """Rounds to `COST_DIGITS` significant digits."""
    return float(f"{seconds:.{COST_DIGITS - 1}e}")


_shape = attrgetter("shape")


def update_costs(setup: Setup, members: Sequence[Matrix]) -> tuple[float, ...]:
    """Returns the seconds of each matrix's update alone, rounded to `COST_DIGITS` significant digits. Plans
    add them up; simulations add up `update_times`, and are at most as long."""
    costs = {shape: rounded(time.alone_s) for shape, time in _times_of_shapes(setup, members).items()}
    return tuple(map(costs.__getitem__, map(_shape, members)))


def update_times(setup: Setup, members: Sequence[Matrix]) -> tuple[UpdateTime, ...]:
    """Returns the time of each matrix's update."""
    times = _times_of_shapes(setup, members)
    return tuple(map(times.__getitem__, map(_shape, members)))


def _times_of_shapes(setup: Setup, members: Sequence[Matrix]) -> Mapping[Shape, UpdateTime]:
    """Returns the time of an update by shape. There are few shapes, even with many thousands of experts."""
    algorithm, implemented = algorithm_of(setup), implementation(setup)
    shapes: set[Shape] = set(map(_shape, members))
    return {shape: update_time(algorithm, *shape, setup.cluster, implemented) for shape in shapes}


def period_seconds(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> tuple[float, ...]:
    """Returns the seconds of an update in each step of a refresh period. Their mean is measured or modelled;
    their proportions are always modelled."""
    algorithm = _with_choices(algorithm, rows, cols, cluster)
    mean, steps_s = _modelled(algorithm, rows, cols, cluster)
    mean_s = _time(algorithm, rows, cols, cluster).alone_s
    return tuple(step_s / mean.alone_s * mean_s for step_s in steps_s)


def adamw_seconds(elements: float, cluster: ClusterConfig) -> float:
    """Returns the seconds that AdamW takes to update `elements` elements on one device; without a measurement,
    from memory traffic alone."""
    if cluster.adamw_ns is not None:
        return elements * cluster.adamw_ns * 1e-9
    return elements * ADAMW_BYTES[cluster.fused_layers] / memory_rate(cluster)


def step_factor(setup: Setup, phase: Phase) -> float:
    """Returns the ratio of a phase's measured time in whole training steps to the time of its parts in
    isolation; 1 if the profile has no measurement.

    In a training step caches are cold, memory is newly allocated and ranks arrive at different times. A loop
    over one operation does not show this.
    """
    factors = setup.cluster.step_factors
    general = factors.get(phase, 1.0)
    return factors.get(f"megatron/{phase}", general) if implementation(setup) == "megatron" else general


def memory_rate(cluster: ClusterConfig) -> float:
    """Returns the bytes per second that elementwise kernels move."""
    return MEMORY_EFFICIENCY[cluster.device] * cluster.memory_gb_per_s * 1e9


def matmul_rate(cluster: ClusterConfig, size: float, unit: Unit) -> float:
    """Returns the FLOP/s that a matmul of (size, size) matrices reaches.

    In bf16, the rate comes from the profile's table. It is linear in log(size) between two sizes,
    proportional to the size below the smallest (a small matmul leaves units idle), constant above the
    largest, and limited by the sustained rate under the power limit. In FP8 both are multiplied
    (`FP8_RATE`, `FP8_SUSTAINED`). In fp32 and TF32, the rate is the same
    for all sizes.
    """
    if unit in ("tf32", "fp32"):
        fp32 = cluster.fp32_tflops or cluster.bf16_tflops / 16
        return 1e12 * (fp32 if unit == "fp32" else cluster.tf32_tflops or fp32)
    faster, sustained = (FP8_RATE, FP8_SUSTAINED) if unit == "fp8" else (1.0, 1.0)
    limit = sustained * (cluster.sustained_tflops or math.inf)
    return 1e12 * min(faster * _interpolated(rates(cluster), size), limit)


def rates(cluster: ClusterConfig) -> tuple[tuple[int, float], ...]:
    """Returns (size, TFLOP/s) pairs of bf16 matmuls, ascending by size. A profile without a table gets an
    estimate: a third of the peak at 1024, two thirds from 4096 on."""
    peak = cluster.bf16_tflops
    return cluster.matmul_tflops or ((1024, peak / 3), (4096, peak * 2 / 3))


def _interpolated(table: tuple[tuple[int, float], ...], size: float) -> float:
    """Returns the TFLOP/s at `size` from a table of (size, TFLOP/s) pairs, ascending by size."""
    place = bisect_right(table, size, key=lambda entry: entry[0])
    if place == 0:
        return table[0][1] * size / table[0][0]
    if place == len(table):
        return table[-1][1]
    (low, low_rate), (high, high_rate) = table[place - 1], table[place]
    return low_rate + (high_rate - low_rate) * math.log(size / low) / math.log(high / low)


def matmul_seconds(cluster: ClusterConfig, m: float, k: float, n: float, unit: Unit) -> float:
    """Returns the seconds of an (m, k) by (k, n) matmul, at the rate of a square matmul of the same
    volume."""
    volume = m * k * n
    return 2.0 * volume / matmul_rate(cluster, volume ** (1 / 3), unit)


def _with_choices(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> Algorithm:
    """Returns the algorithm with the form and the stacking that are chosen for (rows, cols) matrices."""
    form, stack = form_of(algorithm, rows, cols, cluster), stack_of(algorithm, rows, cols, cluster) > 1
    return replace(algorithm, form=form, stack=stack)


def _time(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig) -> UpdateTime:
    """Returns the mean time of one update in the algorithm's form and stacking: the measured seconds; without
    them, the measured seconds of the other form, scaled by the model; without either, the modelled time."""
    if (measured_s := _measured(algorithm, rows, cols, cluster)) is not None:
        return UpdateTime(measured_s)
    modelled = _modelled(algorithm, rows, cols, cluster)[0]
    for form in get_args(Form) if RULES[algorithm.name].orthogonal else ():
        other = replace(algorithm, form=form)
        if (measured_other_s := _measured(other, rows, cols, cluster)) is not None:
            other_s = _modelled(other, rows, cols, cluster)[0].alone_s
            return UpdateTime(measured_other_s * modelled.alone_s / other_s)
    return modelled


def _modelled(
    algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig, implementation: Implementation = "canzona"
) -> tuple[UpdateTime, tuple[float, ...]]:
    """Returns the modelled time of one update on average, and the seconds of the update alone in each step of
    a refresh period. With refreshes, the average is that of the steps alone."""
    if algorithm.name == "adamw":
        adamw_s = adamw_seconds(rows * cols, cluster)
        return UpdateTime(adamw_s), (adamw_s,)
    every, parts = work(algorithm, rows, cols)
    if implementation == "megatron":
        every = replace(every, traffic=every.traffic + MEGATRON_BYTES[algorithm.precision] * rows * cols)
    stacked = 1
    if algorithm.stack is True:
        stacked = min(PRICED_STACK, max(2, _fitting(algorithm, rows, cols, cluster)))
    step = duration(every, _unit(algorithm), cluster, stacked, replayed=algorithm.graph)
    refreshes = [duration(part, "fp32", cluster, stacked) for part in parts]
    if not refreshes:
        return step, (step.alone_s,)
    steps_s = [summed((step, refresh)).alone_s for refresh in refreshes]
    steps_s += [step.alone_s] * (algorithm.refresh_period - len(refreshes))
    return UpdateTime(math.fsum(steps_s) / len(steps_s)), tuple(steps_s)


def _measured(algorithm: Algorithm, rows: int, cols: int, cluster: ClusterConfig, prefix: str = "") -> float | None:
    """Returns the profile's measured seconds of one update; None if it has no measurement of exactly this
    update."""
    if not cluster.measured_updates:
        return None
    key = (prefix + label(algorithm), rows, cols)
    return next((entry[3] for entry in cluster.measured_updates if entry[:3] == key), None)


def _unit(algorithm: Algorithm) -> Unit:
    """Returns the number format of an update's matmuls."""
    return "tf32" if RULES[algorithm.name].preconditioned else algorithm.precision


def duration(work: Work, unit: Unit, cluster: ClusterConfig, stacked: int = 1, *, replayed: bool = False) -> UpdateTime:
    """Returns the time of a matrix's work if it is updated in a stack of `stacked` matrices.

    A batched matmul runs at the rate of a single matmul of the same volume and needs one launch. Symmetric
    kernels are used only in bf16 and only for matrices that are not stacked. On a GPU every kernel takes
    `graph_launch_us` besides its work, but no more than its launch.

    Args:
        replayed: True if a CUDA graph replays the kernels, so that the host launches none of them.
    """

    def matmul(m: int, k: int, n: int) -> float:
        return matmul_seconds(cluster, stacked * m, k, n, unit) / stacked

    unstacked_launches = min(work.launches, MUON_AROUND)  # not fewer in a stack
    launches = unstacked_launches + (work.launches - unstacked_launches) / stacked
    fp32_rate, column_s = matmul_rate(cluster, 1.0, "fp32"), COLUMN_S[cluster.device]
    qr_rate = (cluster.qr_tflops * 1e12) if cluster.qr_tflops else fp32_rate / 4
    eigh_rate = (cluster.eigh_tflops * 1e12) if cluster.eigh_tflops else fp32_rate / 25
    device_s = (
        sum(count * matmul(m, k, n) for count, m, k, n in work.matmuls)
        + sum(count * matmul(m, k, m) for count, m, k in work.symmetric)
        + work.qr_flops / qr_rate
        + sum(column_s * n for _, n in work.qr)
        + sum(9.0 * n**3 / eigh_rate + EIGH_PASSES * column_s * n for n in work.eigh)
        + work.traffic / memory_rate(cluster)
    )
    host_s = launches * cluster.launch_us * 1e-6
    if cluster.device == "cpu":
        return UpdateTime(device_s + host_s)
    device_s += min(host_s, launches * cluster.graph_launch_us * 1e-6)
    return UpdateTime(device_s, 0.0 if replayed else host_s)


RULES: Mapping[str, Rule] = {name: facts.rule for name, facts in known_optimizers().items()}


@lru_cache(maxsize=4096)
def work(algorithm: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    """Returns the work that every update of a (rows, cols) matrix needs, and the additional work of each part
    of a refresh."""
    return RULES[algorithm.name].work(algorithm, rows, cols)


def flops(algorithm: Algorithm, rows: int, cols: int) -> float:
    """Returns the mean FLOPs of one update of a (rows, cols) matrix. A multiply-add counts as two, and the
    FLOPs of a refresh are divided by its period.

    With m = min(rows, cols), n = max(rows, cols), r = rows, c = cols, and k the length of a side:
    - muon, normuon, Newton-Schulz (Jordan et al. 2024), s steps: standard s (4 m^2 n + 2 m^3) for X X', A A
      and B X; Gram form, see `muon_facts`: 8 m^2 n + 28 m^3 for s = 5. Form auto counts the form with fewer
      FLOPs;
    - shampoo: statistics and both roots applied 4 r^2 c + 4 r c^2; a refresh takes, for each side, an
      eigendecomposition and a product, 9 k^3 + 2 k^3, or the matmuls of a Newton iteration, 62 k^3 (58 k^3
      if only one side has a root);
    - soap: statistics, projection and its inverse 6 r^2 c + 6 r c^2; a refresh takes, for each side, one
      matmul for both the estimated eigenvalues and the power iteration, 2 k^3, and a QR, 8/3 k^3 (about
      4 k^3 if the refresh is spread over the period, because each part is projected on the earlier
      columns); rotating the first moment to the new bases takes 4 r^2 c + 4 r c^2;
    - adamw: 15 per element.

    A side longer than `max_preconditioner_dim` is not preconditioned, so the terms of its preconditioner are
    0.
    """

    def of_form(form: Form) -> float:
        step, parts = work(replace(algorithm, form=form), rows, cols)
        return step.flops + sum(part.flops for part in parts) / algorithm.refresh_period

    return min(map(of_form, get_args(Form) if algorithm.form == "auto" else (algorithm.form,)))
