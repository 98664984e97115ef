"""Measurements of what ranks compute alone: products, decompositions, memory, the model's passes, updates of matrices.

An update is timed as the engine runs it, except for the exchange: clip the gradient, step, check that the new weight is
finite, and write it in the model's precision. Each matrix has its own memory, and there are as many as the model has
layers, because in training each update finds the caches full of other matrices.
"""

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.calibrate.profile import Effort, Measurement, Quantity, Record, Recorder, measured_runs
from canzona_cli.config.schema import MomentumConfig, MuonConfig, RunConfig, Splitting
from canzona_cli.costs.update import COPY_EFFICIENCY, algorithm, label, peak_seconds, seconds
from canzona_cli.engine.build import optimizer_factory
from canzona_cli.engine.wire import Write, write_finite
from canzona_cli.megatron import model
from canzona_cli.megatron.optimizer import megatron_adam, megatron_muon, wrap_data_parallel
from canzona_cli.megatron.parallel import World, gather
from canzona_cli.model.matrices import Matrix, layer_shapes
from canzona_cli.optimizers.kronecker import SIDES, KroneckerOptimizer, pack, unpack
from canzona_cli.optimizers.matrix_optimizer import ProductPrecision, products

Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Values:
    """One member's measurements, as it sends them to the others."""

    values: tuple[float, ...]


LEAST, MOST = 3, 400
"""Repetitions of a measurement; fewer only where three would take four times the budget."""
_SAMPLE_S = 1e-3
"""Several calls of anything quicker make one sample."""


class Team:
    """The first `size` ranks of the job; the others wait without using a processor.

    They meet over gloo even where the measured collectives are NCCL's: a gloo rank sleeps while it waits.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Collective: every rank of the job calls it."""
        self.rank, self.size, self.device = rank, size, device
        self.member = rank < size
        self._group = dist.new_group(list(range(size)), backend="gloo", timeout=datetime.timedelta(minutes=10))

    def meet(self) -> None:
        if self.size > 1:
            dist.barrier(group=joined(self._group))

    def gather(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        """The values of all members in rank order, on all members."""
        return [theirs.values for theirs in gather(_Values(values=tuple(values)), group=joined(self._group))]

    def decide(self, value: float) -> float:
        """The largest of all members' values, so that all make the same choice."""
        return max(theirs for (theirs,) in self.gather([value]))

    def samples(self, work: Work, budget_s: float) -> list[float]:
        """Seconds of one call of `work` while all members run it at the same time;
        the samples of all of them."""
        self.meet()
        return [sample for of_rank in self.gather(repeat(work, self.device, budget_s)) for sample in of_rank]


def joined(group: dist.ProcessGroup | int) -> dist.ProcessGroup:
    """The result of `new_group` on a rank that is a member; on other ranks it is a number."""
    assert isinstance(group, dist.ProcessGroup), "not a member"
    return group


def repeat(work: Work, device: torch.device, budget_s: float) -> list[float]:
    """Seconds of one call, as many samples as the budget allows, after one call that does not count."""
    first = timed(work, device)
    calls = max(1, round(_SAMPLE_S / max(timed(work, device), 1e-7))) if first < _SAMPLE_S else 1
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        samples.append(timed(work, device, calls))
        spent = time.perf_counter() - begin
        if len(samples) >= MOST or spent > 4 * budget_s or (spent > budget_s and len(samples) >= LEAST):
            return samples


def timed(work: Work, device: torch.device, calls: int = 1) -> float:
    """Seconds of one call, the mean of `calls` in a row, by `clock`."""
    wait(device)
    begin = clock(device)
    for _ in range(calls):
        work()
    wait(device)
    return (clock(device) - begin) / calls


def clock(device: torch.device) -> float:
    """Seconds since whenever: the wall clock's, or of a CPU rank's only thread the processor's.

    Of ranks that take turns on a core each sleeps while others run, for longer than most of what is measured
    takes: its wall clock shows either nothing of that or all. Its processor time is what it takes of a core,
    with the caches that the others leave it, and without what other programs take.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that are measured; sides of square matrices."""

    products: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """The sides of bf16 products."""
    exact: int = 1024
    """The side of fp32 products and of QR decompositions."""
    symmetric: int = 1024
    """The side of eigendecompositions."""
    copied_bytes: int = 128 << 20
    """Bytes of a buffer too large for any cache."""
    precisions: tuple[tuple[Quantity, ProductPrecision], ...] = (("fp32_tflops", "fp32"),)
    """The precisions of fp32 products."""


SIZES = {
    "cpu": Sizes(),
    "cuda": Sizes(
        products=(*Sizes().products, 4096, 8192),
        exact=4096,
        symmetric=2048,
        copied_bytes=1 << 30,
        precisions=(("fp32_tflops", "fp32"), ("tf32_tflops", "tf32")),
    ),
}
"""The sizes by type of device."""
_LAUNCHES = 200
_MODEL_BUDGET = 12
"""Items' worth of time for forward and backward: every prediction of a step is scaled by these two numbers."""


def measure_arithmetic(team: Team, effort: Effort, recorder: Recorder) -> None:
    """Team only."""
    sizes = SIZES[team.device.type]
    for size in sizes.products:
        factors = (torch.randn(size, size, device=team.device).bfloat16() for _ in range(3))
        _rate(team, effort, recorder, "matmul_tflops", 2.0 * size**3, partial(_mm, *factors), size)
    size = sizes.exact
    x, y, z = (torch.randn(size, size, device=team.device) for _ in range(3))
    for quantity, precision in sizes.precisions:
        with products(precision):
            _rate(team, effort, recorder, quantity, 2.0 * size**3, lambda: _mm(x, y, z))
    # FLOPs as `optimizers.facts.Work` counts them.
    _rate(team, effort, recorder, "qr_tflops", 8 / 3 * size**3, lambda: _discard(torch.linalg.qr(x)))
    size = sizes.symmetric
    symmetric = x[:size, :size] @ x[:size, :size].mT
    _rate(team, effort, recorder, "eigh_tflops", 9.0 * size**3, lambda: _discard(torch.linalg.eigh(symmetric)))
    small = torch.randn(4, 4, device=team.device)
    result = torch.empty_like(small)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            torch.mm(small, small, out=result)

    samples = [1e6 * seconds / _LAUNCHES for seconds in team.samples(launches, effort.item_s)]
    recorder.add(Measurement.of("launch_us", samples))


def measure_memory(team: Team, effort: Effort, recorder: Recorder) -> None:
    """Time a copy between buffers too large for any cache, over the share of the bandwidth that copies reach.
    Team only."""
    elements = SIZES[team.device.type].copied_bytes // 4
    source, target = (torch.ones(elements, device=team.device) for _ in range(2))
    moved = 2 * source.nbytes
    samples = team.samples(lambda: _discard(target.copy_(source)), effort.item_s)
    values = [moved / seconds / COPY_EFFICIENCY / 1e9 for seconds in samples]
    recorder.add(Measurement.of("memory_gb_per_s", values))


def measure_model(team: Team, config: RunConfig, world: World, effort: Effort, recorder: Recorder) -> None:
    """Time micro-batches of random tokens through the recipe's model, shortened to a few layers. Collective.

    On all ranks at once: ranks that take turns on a core find caches, and the processor's own of
    instructions, full of each other's.

    Of two sizes: what a pass takes however small it is, and what more of it takes, are two numbers. Gradients
    are added to Megatron's buffers and nothing is sent.

    Args:
        config: `profile.shortened`.
    """
    [wrapped] = wrap_data_parallel(model.build_model(config, world), config, world)
    sizes = (1, max(2, world.layout.micro_batch_size))
    for size in sizes:
        samples = _passes(team, config, wrapped, size, _MODEL_BUDGET / len(sizes) * effort.item_s)
        recorder.add(Measurement.of("forward", [forward for forward, _ in samples], size))
        recorder.add(Measurement.of("backward", [backward for _, backward in samples], size))


def _passes(
    team: Team, config: RunConfig, wrapped: DistributedDataParallel, size: int, budget_s: float
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of micro-batches of `size` sequences,
    on all members at the same time."""
    shape = (size, config.train.seq_length)
    tokens, labels = (torch.randint(config.model.vocab_size, shape, device=team.device) for _ in range(2))
    positions = torch.arange(config.train.seq_length, device=team.device).expand(shape)

    def step() -> tuple[float, float]:
        wait(team.device)
        begin = clock(team.device)
        loss = wrapped(tokens, positions, None, labels=labels).float().mean()
        wait(team.device)
        between = clock(team.device)
        loss.backward()
        wait(team.device)
        return between - begin, clock(team.device) - between

    with wrapped.no_sync():
        step()
        team.meet()
        samples: list[tuple[float, float]] = []
        begin = time.perf_counter()
        while len(samples) < LEAST or time.perf_counter() - begin < budget_s:
            samples.append(step())
    forward, backward = (
        [sample for theirs in team.gather(mine) for sample in theirs] for mine in zip(*samples, strict=True)
    )
    return list(zip(forward, backward, strict=True))


def _rate(
    team: Team,
    effort: Effort,
    recorder: Recorder,
    quantity: Quantity,
    flops: float,
    work: Work,
    *key: int,
) -> None:
    samples = team.samples(work, effort.item_s)
    recorder.add(Measurement.of(quantity, [flops / sample / 1e12 for sample in samples], *key))


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _discard(_: object) -> None:
    """Ignore the result."""


SPLITTINGS: tuple[Splitting, ...] = ("qkv", "split")
ADAMW_ELEMENTS = 4 << 20
_BYTES_AT_ONCE = {"cpu": 256 << 20, "cuda": 8 << 30}
"""The most bytes for all matrices of one shape that are updated in turn, with gradients and state."""
_CLIP = 0.999
_NEVER = 1 << 40
"""Steps between refreshes, so that none happens by itself."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of one algorithm."""

    config: RunConfig
    label: str

    @property
    def ours(self) -> bool:
        """False for Megatron's own."""
        return not self.label.startswith("megatron/")


def variants(config: RunConfig) -> Iterator[Variant]:
    """Ours of every measured optimizer, and Megatron's Muon."""
    for run in measured_runs(config):
        name = label(algorithm(run))
        yield Variant(config=run, label=name)
        if isinstance(run.optimizer, MuonConfig) and run.optimizer.form == "standard" and not run.optimizer.stack:
            yield Variant(config=run, label=f"megatron/{name}")


def shapes(config: RunConfig) -> list[tuple[int, int]]:
    """(rows, columns) of the recipe's matrices, smallest first."""
    shapes_of_all = {shape for splitting in SPLITTINGS for shape in layer_shapes(config.model, splitting)}
    return sorted(shapes_of_all, key=lambda shape: (max(shape), shape[0] * shape[1]))


def measure_updates(
    team: Team, config: RunConfig, effort: Effort, recorder: Recorder, elapsed: Callable[[], float]
) -> None:
    """Every variant with every shape, quick ones first; slow ones are left to the cost model. Team only.

    Args:
        elapsed: seconds since the calibration began.
    """
    items = [(expected(variant, *shape), variant, shape) for variant in variants(config) for shape in shapes(config)]
    for cost_s, variant, (rows, cols) in sorted(items, key=lambda item: item[0]):
        late = max(0.0, elapsed() + cost_s - effort.end_s) if cost_s > 1.0 else 0.0
        if cost_s > effort.largest_item_s or team.decide(late) > 0.0:
            late_by = f"measuring it would take about {cost_s:.0f} s"
            recorder.report(Record(skipped=(f"{variant.label} of {rows} x {cols}: {late_by}",)))
            continue
        samples = update_samples(team, variant, rows, cols, effort.item_s)
        recorder.add(Measurement.of("updates", samples, variant.label, rows, cols))


def measure_adamw(team: Team, config: RunConfig, effort: Effort, recorder: Recorder) -> None:
    """Nanoseconds of an element: AdamW on a flat fp32 shard,
    and its copy into the model's weights. Team only."""
    shard = torch.nn.Parameter(torch.randn(ADAMW_ELEMENTS, device=team.device))
    shard.grad = torch.randn_like(shard)
    weight = torch.empty(ADAMW_ELEMENTS, dtype=_dtype(config), device=team.device)
    optimizer = megatron_adam([shard], config.optimizer)

    def step() -> None:
        optimizer.step()
        weight.copy_(shard.detach())

    samples = team.samples(step, effort.item_s)
    recorder.add(Measurement.of("adamw_ns", [1e9 * sample / ADAMW_ELEMENTS for sample in samples]))


def expected(variant: Variant, rows: int, cols: int) -> float:
    """Seconds that measuring it will roughly take, by the cost model: refreshes dominate,
    including the first one."""
    how, cluster = algorithm(variant.config), replace(variant.config.cluster, measured_updates=())
    if isinstance(variant.config.optimizer, MomentumConfig):
        return 8 * seconds(how, rows, cols, cluster)
    return 3 * peak_seconds(how, rows, cols, cluster)


def update_samples(team: Team, variant: Variant, rows: int, cols: int, budget_s: float) -> list[float]:
    """Seconds of one update of one (rows, columns) matrix, of all members;
    for SOAP and Shampoo the mean over a period.

    The samples of such a mean are those of plain steps, each weighted with the median of the refreshes.
    """
    group = Group(variant, rows, cols, team.device)
    optimizer = group.optimizer
    if not isinstance(optimizer, KroneckerOptimizer):
        return [sample / group.count for sample in team.samples(group.update, budget_s)]
    period = optimizer.precondition_frequency
    optimizer.precondition_frequency = _NEVER
    team.meet()
    group.update()
    plain = [sample / group.count for sample in team.samples(group.update, budget_s)]
    group.fill_factors(optimizer)
    optimizer.precondition_frequency = 1
    team.meet()
    mine = [timed(group.update, team.device)]
    if mine[0] < budget_s:
        mine = repeat(group.update, team.device, budget_s)
    renewed = sorted(sample / group.count for each in team.gather(mine) for sample in each)
    refresh = renewed[len(renewed) // 2]
    return [((period - 1) * sample + refresh) / period for sample in plain]


class Group:
    """Matrices of one shape with their gradients, optimizer and model weights."""

    def __init__(self, variant: Variant, rows: int, cols: int, device: torch.device) -> None:
        self.count = _count(variant, rows, cols, device)
        self._ours, self._device = variant.ours, device
        self._masters = [torch.nn.Parameter(0.02 * torch.randn(rows, cols, device=device)) for _ in range(self.count)]
        for master in self._masters:
            master.grad = torch.randn_like(master)
        dtype = _dtype(variant.config)
        self._weights = [torch.empty(rows, cols, dtype=dtype, device=device) for _ in range(self.count)]
        self._finite = torch.ones(self.count, device=device)
        rounded = torch.empty_like(self._weights[0])
        self._writes = [
            Write(target=weight, source=master.detach(), rounded=rounded)
            for master, weight in zip(self._masters, self._weights, strict=True)
        ]
        self.optimizer: torch.optim.Optimizer
        if self._ours:
            matrices = [_matrix(layer, rows, cols) for layer in range(self.count)]
            self.optimizer = optimizer_factory(variant.config, [matrices])(matrices, self._masters)
        else:
            assert isinstance(variant.config.optimizer, MuonConfig)
            precision = variant.config.train.precision
            self.optimizer = megatron_muon(self._masters, variant.config.optimizer, precision)

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
        for place, master in enumerate(self._masters):
            torch.sum(master.detach(), dim=(0, 1), out=self._finite[place])
        write_finite(list(enumerate(self._writes)), self._finite, on_host=self._device.type == "cpu")

    def fill_factors(self, optimizer: KroneckerOptimizer) -> None:
        """Make all eigenvalues distinct: factors of few gradients are mostly zero,
        and decompose too quickly."""
        for master in self._masters:
            for side in SIDES:
                factor = optimizer.state[master].get(side)
                if isinstance(factor, torch.Tensor):
                    length = master.size(SIDES.index(side))
                    square = unpack(factor, factor.new_empty(length, length))
                    diagonal = square.diagonal()
                    diagonal.add_(torch.rand_like(diagonal) * diagonal.mean())
                    pack(square, factor)


def _count(variant: Variant, rows: int, cols: int, device: torch.device) -> int:
    """Counts the matrices to update: one for each layer, or as many as memory allows;
    one where each takes long."""
    squares = 0 if isinstance(variant.config.optimizer, MomentumConfig) else rows * rows + cols * cols
    if squares and max(rows, cols) > 1024:
        return 1
    bytes_each = 18 * rows * cols + 12 * squares
    return max(1, min(variant.config.model.num_layers, _BYTES_AT_ONCE[device.type] // bytes_each))


def _matrix(layer: int, rows: int, cols: int) -> Matrix:
    """Returns a matrix of a kind that every layer has."""
    name, parameter = f"layers.{layer}.other", f"decoder.layers.{layer}.weight"
    place = {"index": layer, "layer": layer, "unit": layer, "stage": 0}
    return Matrix(name=name, kind="other", rows=rows, cols=cols, shard_dim=None, parameter=parameter, **place)


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32
