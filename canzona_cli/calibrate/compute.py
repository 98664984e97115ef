"""Rates of products, decompositions and memory, the cost of a launch, and the model's own forward and
backward; and the ranks that measure at the same time, with the clock they use."""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.calibrate.measurement import Effort, Measurement, Quantity, Recorder
from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.update import COPY_EFFICIENCY
from canzona_cli.megatron import model, optimizer
from canzona_cli.megatron.parallel import World, gather
from canzona_cli.optimizers.matrix_optimizer import ProductPrecision, products


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

    def samples(self, work: Callable[[], None], budget_s: float) -> list[float]:
        """Seconds of one call of `work` while all members run it at the same time;
        the samples of all of them."""
        self.meet()
        return [sample for of_rank in self.gather(repeat(work, self.device, budget_s)) for sample in of_rank]


def joined(group: dist.ProcessGroup | int) -> dist.ProcessGroup:
    """The result of `new_group` on a rank that is a member; on other ranks it is a number."""
    assert isinstance(group, dist.ProcessGroup), "not a member"
    return group


def repeat(work: Callable[[], None], device: torch.device, budget_s: float) -> list[float]:
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


def timed(work: Callable[[], None], device: torch.device, calls: int = 1) -> float:
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

    products: tuple[int, ...]
    """The sides of bf16 products."""
    exact: int
    """The side of fp32 products and of QR decompositions."""
    symmetric: int
    """The side of eigendecompositions."""
    copied_bytes: int
    """Bytes of a buffer too large for any cache."""
    precisions: tuple[tuple[Quantity, ProductPrecision], ...]
    """The precisions of fp32 products."""


_SMALL = (64, 128, 256, 512, 1024, 2048)
SIZES = {
    "cpu": Sizes(
        products=_SMALL, exact=1024, symmetric=1024, copied_bytes=128 << 20, precisions=(("fp32_tflops", "fp32"),)
    ),
    "cuda": Sizes(
        products=(*_SMALL, 4096, 8192),
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
    [wrapped] = optimizer.wrap_data_parallel(model.build_model(config, world), config, world)
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
    work: Callable[[], None],
    *key: int,
) -> None:
    samples = team.samples(work, effort.item_s)
    recorder.add(Measurement.of(quantity, [flops / seconds / 1e12 for seconds in samples], *key))


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _discard(_: object) -> None:
    """Ignore the result."""
