"""Measures work without communication: matmuls, decompositions, memory bandwidth, forward and backward
passes, and matrix updates.

An update is timed as the engine runs it, excluding the exchange: clip the gradient, step, check that the new
weight is finite, and write the weight in the model's precision. The matrices of all layers are updated one
after another, because in training each update finds the caches full of other matrices.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.bench.calibrate.collectives import LEAST_SAMPLES, Team, Work, clock, repeat, time_calls, wait
from canzona_cli.bench.calibrate.profile import Effort, Measurement, Quantity, Record, Recorder, measured_runs
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.update import (
    COLUMN_S,
    COPY_EFFICIENCY,
    EIGH_PASSES,
    algorithm_of,
    label,
    period_seconds,
    seconds,
)
from canzona_cli.core.engine.build import optimizer_factory
from canzona_cli.core.engine.wire import Write, join_writes, write_finite
from canzona_cli.core.megatron import model
from canzona_cli.core.megatron.optimizer import megatron_adam, megatron_muon, wrap_data_parallel
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.families import layer_kinds
from canzona_cli.core.model.matrices import Matrix, layer_shapes
from canzona_cli.core.optimizers.kronecker import SIDES, KroneckerOptimizer, pack, unpack
from canzona_cli.core.optimizers.matrix_optimizer import MatmulPrecision, matmul_precision
from canzona_cli.core.setup import MomentumConfig, MuonConfig, Splitting


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes to measure on one type of device."""

    matmuls: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """The sides of the matrices in bf16 matmuls."""
    exact: int = 1024
    """The side of the matrices in fp32 matmuls and QR decompositions."""
    symmetric: int = 1024
    """The side of the matrices in eigendecompositions."""
    copied_bytes: int = 128 << 20
    """The size in bytes of the buffer that is copied; it is too large for any cache."""
    precisions: tuple[tuple[Quantity, MatmulPrecision], ...] = (("fp32_tflops", "fp32"),)
    """The precisions in which matmuls of fp32 matrices are measured, each with the name of its result."""


SIZES = {
    "cpu": Sizes(),
    "cuda": Sizes(
        matmuls=(*Sizes().matmuls, 4096, 8192),
        exact=4096,
        symmetric=2048,
        copied_bytes=1 << 30,
        precisions=(("fp32_tflops", "fp32"), ("tf32_tflops", "tf32")),
    ),
}
"""The sizes by type of device."""
_LAUNCHES = 200
_MODEL_BUDGET = 12
"""The time budget for forward and backward passes, as a multiple of `Effort.item_s`. It is large, because
every predicted step time depends on these passes."""


def measure_arithmetic(team: Team, effort: Effort, recorder: Recorder) -> None:
    """Measures the rates of matmuls and decompositions, and the time of a launch. All members have to call
    this."""

    def rate(quantity: Quantity, flops: float, work: Work, *key: int, latency_s: float = 0.0) -> None:
        """Measures and records the rate, in TFLOP/s, of work with `flops` FLOPs.

        Args:
            latency_s: the seconds that the cost model adds to the work's FLOPs; at most half of a sample is
                attributed to them.
        """
        samples = team.samples(work, effort.item_s)
        values = [flops / (sample - min(latency_s, sample / 2)) / 1e12 for sample in samples]
        recorder.add(Measurement.of(quantity, values, *key))

    sizes = SIZES[team.device.type]
    for size in sizes.matmuls:
        factors = (torch.randn(size, size, device=team.device).bfloat16() for _ in range(3))
        rate("matmul_tflops", 2.0 * size**3, partial(_mm, *factors), size)
    size = sizes.exact
    x, y, z = (torch.randn(size, size, device=team.device) for _ in range(3))
    for quantity, precision in sizes.precisions:
        with matmul_precision(precision):
            rate(quantity, 2.0 * size**3, lambda: _mm(x, y, z))
    # The numbers of FLOPs are those of `optimizers.facts.Work`.
    column_s = COLUMN_S["cuda" if team.device.type == "cuda" else "cpu"]
    rate("qr_tflops", 8 / 3 * size**3, lambda: _discard(torch.linalg.qr(x)), latency_s=size * column_s)
    side = sizes.symmetric
    symmetric = x[:side, :side] @ x[:side, :side].mT
    latency_s = EIGH_PASSES * side * column_s
    rate("eigh_tflops", 9.0 * side**3, lambda: _discard(torch.linalg.eigh(symmetric)), latency_s=latency_s)
    small = torch.randn(4, 4, device=team.device)
    result = torch.empty_like(small)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            torch.mm(small, small, out=result)

    samples = [1e6 * seconds / _LAUNCHES for seconds in team.samples(launches, effort.item_s)]
    recorder.add(Measurement.of("launch_us", samples))


def measure_memory(team: Team, effort: Effort, recorder: Recorder) -> None:
    """Measures memory bandwidth by a copy between buffers that are too large for any cache.

    The measured rate is divided by `COPY_EFFICIENCY`, the share of the bandwidth that a copy reaches. All
    members have to call this.
    """
    elements = SIZES[team.device.type].copied_bytes // 4
    source, target = (torch.ones(elements, device=team.device) for _ in range(2))
    moved = 2 * source.nbytes
    samples = team.samples(lambda: _discard(target.copy_(source)), effort.item_s)
    values = [moved / seconds / COPY_EFFICIENCY / 1e9 for seconds in samples]
    recorder.add(Measurement.of("memory_gb_per_s", values))


def measure_model(team: Team, config: RunConfig, world: World, effort: Effort, recorder: Recorder) -> None:
    """Measures forward and backward of the recipe's model, shortened to a few layers, with random tokens. All
    ranks have to call this.

    All ranks measure at the same time, because ranks that share a core evict each other's data and
    instructions from its caches. Two micro-batch sizes separate the fixed time of a pass from the time per
    token. Gradients are added to Megatron's buffers, without communication.

    Args:
        config: the result of `profile.shorten`.
    """
    [wrapped] = wrap_data_parallel(model.build_model(config.setup, world), config.setup, world)
    sizes = (1, max(2, world.layout.micro_batch_size))
    for size in sizes:
        samples = _measure_passes(team, config, wrapped, size, _MODEL_BUDGET / len(sizes) * effort.item_s)
        recorder.add(Measurement.of("forward", [forward for forward, _ in samples], size))
        recorder.add(Measurement.of("backward", [backward for _, backward in samples], size))


def _measure_passes(
    team: Team, config: RunConfig, wrapped: DistributedDataParallel, size: int, budget_s: float
) -> list[tuple[float, float]]:
    """Measures (forward, backward) seconds of micro-batches of `size` sequences while all members run them;
    returns the samples of all members."""
    shape = (size, config.train.seq_length)
    tokens, labels = (torch.randint(config.model.vocab_size, shape, device=team.device) for _ in range(2))
    positions = torch.arange(config.train.seq_length, device=team.device).expand(shape)

    def step() -> tuple[float, float]:
        wait(team.device)
        begin = clock(team.device)
        loss = wrapped(tokens, positions, None, labels=labels).float().mean()
        wait(team.device)
        middle = clock(team.device)
        loss.backward()
        wait(team.device)
        return middle - begin, clock(team.device) - middle

    with wrapped.no_sync():
        step()
        team.meet()
        samples: list[tuple[float, float]] = []
        begin = time.perf_counter()
        while len(samples) < LEAST_SAMPLES or time.perf_counter() - begin < budget_s:
            samples.append(step())
    by_direction = (chain.from_iterable(team.gather(times)) for times in zip(*samples, strict=True))
    return list(zip(*by_direction, strict=True))


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _discard(_: object) -> None:
    """Ignores a value, so that a lambda can call a function and return None."""


SPLITTINGS: tuple[Splitting, ...] = ("qkv", "split")
ADAMW_ELEMENTS = 4 << 20
_BYTES_AT_ONCE = {"cpu": 256 << 20, "cuda": 8 << 30}
"""The limit on the bytes of all matrices in a `Group`, with gradients and state, by type of device."""
_CLIP = 0.999
_NEVER = 1 << 40
"""A number of steps between refreshes that is so large that no refresh happens."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An implementation of an optimizer's algorithm, and the configuration of a run to measure it with."""

    config: RunConfig
    label: str

    @property
    def ours(self) -> bool:
        """True for canzona's implementation; False for Megatron's."""
        return not self.label.startswith("megatron/")


def variants(config: RunConfig) -> Iterator[Variant]:
    """Yields canzona's implementation of every measured optimizer, and Megatron's Muon."""
    for run in measured_runs(config):
        name = label(algorithm_of(run.setup))
        yield Variant(config=run, label=name)
        if isinstance(run.optimizer, MuonConfig) and run.optimizer.form == "standard" and not run.optimizer.stack:
            yield Variant(config=run, label=f"megatron/{name}")


def shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Returns the (rows, columns) of the recipe's matrices in all `SPLITTINGS`, smallest first."""
    kinds = layer_kinds(config.model)
    shapes_of_all = {shape for splitting in SPLITTINGS for kind in kinds for shape in layer_shapes(kind, splitting)}
    return sorted(shapes_of_all, key=lambda shape: (max(shape), shape[0] * shape[1]))


def measure_updates(
    team: Team, config: RunConfig, effort: Effort, recorder: Recorder, elapsed: Callable[[], float]
) -> None:
    """Measures every variant's update of every shape, fast updates first. All members have to call this.

    Updates that would take too long to measure are left to the cost model and recorded as skipped.

    Args:
        elapsed: a function that returns the seconds since the calibration started.
    """
    items = [
        (expected_seconds(variant, *shape), variant, shape) for variant in variants(config) for shape in shapes(config)
    ]
    for cost_s, variant, (rows, cols) in sorted(items, key=lambda item: item[0]):
        late_s = max(0.0, elapsed() + cost_s - effort.end_s) if cost_s > 1.0 else 0.0
        if cost_s > effort.largest_item_s or team.decide(late_s) > 0.0:
            reason = f"measuring it would take about {cost_s:.0f} s"
            recorder.report(Record(skipped=(f"{variant.label} of {rows} x {cols}: {reason}",)))
            continue
        samples = update_samples(team, variant, rows, cols, effort.item_s)
        recorder.add(Measurement.of("updates", samples, variant.label, rows, cols))


def measure_adamw(team: Team, config: RunConfig, effort: Effort, recorder: Recorder) -> None:
    """Measures AdamW's nanoseconds per element: the update of a flat fp32 shard and the copy into the model's
    weights. All members have to call this."""
    shard = torch.nn.Parameter(torch.randn(ADAMW_ELEMENTS, device=team.device))
    shard.grad = torch.randn_like(shard)
    weight = torch.empty(ADAMW_ELEMENTS, dtype=_dtype(config), device=team.device)
    optimizer = megatron_adam([shard], config.optimizer)

    def step() -> None:
        optimizer.step()
        weight.copy_(shard.detach())

    samples = team.samples(step, effort.item_s)
    recorder.add(Measurement.of("adamw_ns", [1e9 * sample / ADAMW_ELEMENTS for sample in samples]))


def expected_seconds(variant: Variant, rows: int, cols: int) -> float:
    """Returns the approximate seconds that the measurement of an update takes, by the cost model.

    For SOAP and Shampoo, this is the time of three refresh periods if refreshes are spread over all steps,
    otherwise of three refresh steps, which take far longer than other steps.
    """
    update, cluster = algorithm_of(variant.config.setup), replace(variant.config.cluster, measured_updates=())
    if isinstance(variant.config.optimizer, MomentumConfig):
        return 8 * seconds(update, rows, cols, cluster)
    steps = period_seconds(update, rows, cols, cluster)
    return 3 * (sum(steps) if update.spread else max(steps))


def update_samples(team: Team, variant: Variant, rows: int, cols: int, budget_s: float) -> list[float]:
    """Measures the seconds of one update of one (rows, columns) matrix; returns the samples of all members.

    For SOAP and Shampoo, a sample is the mean over a refresh period. If refreshes are not spread over all
    steps, a sample is the mean of a measured step without a refresh and the median of the measured steps with
    a refresh, weighted by how often each occurs.
    """
    group = Group(variant, rows, cols, team.device)
    optimizer = group.optimizer
    if not isinstance(optimizer, KroneckerOptimizer):
        return [sample / group.count for sample in team.samples(group.update, budget_s)]
    period = optimizer.precondition_frequency
    if optimizer.spread:
        team.meet()
        group.update()
        group.fill_factors(optimizer)
        group.begin_period(optimizer)
        samples = team.samples(lambda: group.updates(period), budget_s)
        return [sample / group.count / period for sample in samples]
    optimizer.precondition_frequency = _NEVER
    team.meet()
    group.update()
    without_refresh_s = [sample / group.count for sample in team.samples(group.update, budget_s)]
    group.fill_factors(optimizer)
    optimizer.precondition_frequency = 1
    team.meet()
    samples = [time_calls(group.update, team.device)]
    if samples[0] < budget_s:
        samples = repeat(group.update, team.device, budget_s)
    refreshes_s = sorted(sample / group.count for sample in chain.from_iterable(team.gather(samples)))
    refresh_s = refreshes_s[len(refreshes_s) // 2]
    return [((period - 1) * sample + refresh_s) / period for sample in without_refresh_s]


class Group:
    """The matrices of one shape, with their gradients, optimizer and model weights."""

    def __init__(self, variant: Variant, rows: int, cols: int, device: torch.device) -> None:
        self.count = _group_size(variant, rows, cols, device)
        self._ours, self._device = variant.ours, device
        self._masters, gradients, self._weights, rounded = self._memory(variant, rows, cols)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        self._finite = torch.ones(self.count, device=device)
        self._writes = join_writes(
            [
                (index, Write(target=weight, source=master.detach(), rounded=scratch))
                for index, (master, weight, scratch) in enumerate(
                    zip(self._masters, self._weights, rounded, strict=True)
                )
            ]
        )
        self.optimizer: torch.optim.Optimizer
        if self._ours:
            matrices = [_matrix(layer, rows, cols) for layer in range(self.count)]
            self.optimizer = optimizer_factory(variant.config.setup)(matrices, self._masters)
        else:
            assert isinstance(variant.config.optimizer, MuonConfig)
            precision = variant.config.train.precision
            self.optimizer = megatron_muon(self._masters, variant.config.optimizer, precision)

    def _memory(
        self, variant: Variant, rows: int, cols: int
    ) -> tuple[list[torch.nn.Parameter], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Allocates masters, gradients, weights and scratch for rounding. If updates are stacked, the tensors
        of each kind are evenly spaced in one block, as for experts; otherwise every tensor has a separate
        block."""
        optimizer, dtype = variant.config.optimizer, _dtype(variant.config)
        stacked = isinstance(optimizer, MomentumConfig) and bool(optimizer.stack)
        sizes = [self.count] if stacked else [1] * self.count
        blocks = [0.02 * torch.randn(size, rows, cols, device=self._device) for size in sizes]
        masters = [torch.nn.Parameter(master) for block in blocks for master in block]
        gradients = [gradient for block in blocks for gradient in torch.randn_like(block)]
        weights = [weight for block in blocks for weight in torch.empty_like(block, dtype=dtype)]
        if stacked:
            return masters, gradients, weights, list(torch.empty_like(blocks[0], dtype=dtype))
        return masters, gradients, weights, [torch.empty_like(weights[0])] * self.count

    @torch.no_grad()
    def update(self) -> None:
        """Updates every matrix once."""
        if not self._ours:
            self.optimizer.step()
            for write in self._writes:
                write.target.copy_(write.source)
            return
        for master in self._masters:
            assert master.grad is not None
            master.grad.mul_(_CLIP)
        self.optimizer.step()
        for write in self._writes:
            torch.sum(write.source, dim=(1, 2), out=self._finite[write.flags])
        write_finite(self._writes, self._finite, on_host=self._device.type == "cpu")

    def updates(self, count: int) -> None:
        """Updates every matrix `count` times."""
        for _ in range(count):
            self.update()

    def begin_period(self, optimizer: KroneckerOptimizer) -> None:
        """Makes the next update the first of a refresh period."""
        for master in self._masters:
            optimizer.state[master]["step"] = 2 * optimizer.precondition_frequency

    def fill_factors(self, optimizer: KroneckerOptimizer) -> None:
        """Adds random numbers to the diagonals of the factors, so that all eigenvalues are distinct. Factors
        of only a few gradients have low rank and decompose faster than factors in training.
        """
        for master in self._masters:
            for side in SIDES:
                factor = optimizer.state[master].get(side)
                if isinstance(factor, torch.Tensor):
                    length = master.size(SIDES.index(side))
                    square = unpack(factor, factor.new_empty(length, length))
                    diagonal = square.diagonal()
                    diagonal.add_(torch.rand_like(diagonal) * diagonal.mean())
                    pack(square, factor)


def _group_size(variant: Variant, rows: int, cols: int, device: torch.device) -> int:
    """Returns the number of matrices in a group: one per layer, but no more than fit in `_BYTES_AT_ONCE`; 1
    for large matrices with SOAP and Shampoo, whose updates take long."""
    squares = 0 if isinstance(variant.config.optimizer, MomentumConfig) else rows * rows + cols * cols
    if squares and max(rows, cols) > 1024:
        return 1
    bytes_each = 18 * rows * cols + 12 * squares
    return max(1, min(variant.config.model.num_layers, _BYTES_AT_ONCE[device.type] // bytes_each))


def _matrix(layer: int, rows: int, cols: int) -> Matrix:
    """Returns the description of a matrix of a layer that tensor parallelism does not cut."""
    name, parameter = f"layers.{layer}.other", f"decoder.layers.{layer}.weight"
    numbers = {"index": layer, "layer": layer, "unit": layer, "stage": 0}
    return Matrix(name=name, kind="other", rows=rows, cols=cols, shard_dim=None, parameter=parameter, **numbers)


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32
