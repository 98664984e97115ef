"""Rates of products, decompositions and memory, the cost of a launch, and the model's own forward and backward."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.calibrate.measurement import Effort, Measurement, Quantity, Recorder
from canzona_cli.calibrate.team import LEAST, Team, clock, wait
from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron import model, optimizer
from canzona_cli.megatron.parallel import World
from canzona_cli.optimizers.matrix_optimizer import ProductPrecision, products
from canzona_cli.planner.cost import COPY_EFFICIENCY


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of what is measured; sides of square matrices."""

    products: tuple[int, ...]
    """In bf16."""
    exact: int
    """Of products in fp32 and of QR decompositions."""
    symmetric: int
    """Of eigendecompositions."""
    copied_bytes: int
    """Of a buffer too large for any cache."""
    precisions: tuple[tuple[Quantity, ProductPrecision], ...]
    """Of fp32 products."""


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
"""By the type of a device."""
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
    # FLOPs as `planner.work.Work` counts them.
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
    """Time a copy between buffers too large for any cache, over the share of the bandwidth that copies reach. Team
    only."""
    elements = SIZES[team.device.type].copied_bytes // 4
    source, target = (torch.ones(elements, device=team.device) for _ in range(2))
    moved = 2 * source.nbytes
    samples = team.samples(lambda: _discard(target.copy_(source)), effort.item_s)
    values = [moved / seconds / COPY_EFFICIENCY / 1e9 for seconds in samples]
    recorder.add(Measurement.of("memory_gb_per_s", values))


def measure_model(team: Team, config: RunConfig, world: World, effort: Effort, recorder: Recorder) -> None:
    """Time micro-batches of random tokens through the recipe's model, shortened to a few layers. Collective.

    On all ranks at once: ranks that take turns on a core find caches, and the processor's own of instructions, full of
    each other's.

    Of two sizes: what a pass takes however small it is, and what more of it takes, are two numbers. Gradients are added
    to Megatron's buffers and nothing is sent.

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
    """Seconds of forward and backward of micro-batches of `size` sequences, on all members at the same time."""
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
        [sample for theirs in team.gather(own) for sample in theirs] for own in zip(*samples, strict=True)
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
