"""Measures every optimizer's update of every matrix shape of Qwen3, and compares it with matrix products on the device.

Updates are timed as in `canzona calibrate`: after one warm-up call, samples are taken until a budget is spent; for SOAP
and Shampoo, a sample is the mean over a refresh period. The rate of an update is the FLOPs that plans count, divided by
the median time. It is compared with the measured rate of a product of two square matrices that has the mean volume of
the update's products and the same precision: bf16 for Muon, TF32 for the other optimizers (fp32 on a CPU). torch's
profiler counts launches: kernels and copies on a GPU, operations on a CPU. Quick updates are measured first; the
outcome has the number of updates for which no time was left.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final

import torch

from canzona_cli.bench.calibrate.compute import Group, Variant, expected_seconds, shapes, update_samples, variants
from canzona_cli.bench.calibrate.timing import Team
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.update import algorithm_of, flops, work
from canzona_cli.core.optimizers.matrix_optimizer import matmul_precision
from canzona_cli.records.statistics import Quartiles
from gpu_parts.alone import lone_team
from gpu_parts.outcome import Outcome, Setup

LARGE: Final = 1024
"""The smallest shorter side of a large matrix. Updates of large matrices must reach `SHARE` of a product's rate."""
SHARE: Final = 0.6
"""The smallest accepted median of `Update.share`. Plans predict that products take 18.5 ms of 23.7 ms of updates."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The measured update of a matrix shape by an algorithm."""

    algorithm: str
    rows: int
    cols: int
    size: str
    """The recipe of the first model that has the shape."""
    seconds: Quartiles
    tflops: float
    precision: str
    """The precision of the update's products, and of the product with which the update is compared."""
    side: int
    """The side of the square matrices in the product with which the update is compared."""
    product_tflops: float
    share: float
    """The ratio of the update's rate to the product's."""
    launches: float
    """The number of launches of one update."""


def updates(setup: Setup, seconds: float) -> Outcome:
    """Measures as many updates as fit into `seconds`."""
    items = updates_of(setup.sizes)
    measured: list[Update] = []
    until = time.monotonic() + seconds
    with lone_team(setup) as team:
        for variant, size, shape in items:
            if time.monotonic() + expected_seconds(variant, *shape) > until:
                break
            measured.append(measure(team, variant, size, shape, setup.budget_s))
            show(measured[-1])
            setup.keep("updates", summarise(measured, left=len(items) - len(measured)))
    return summarise(measured, left=len(items) - len(measured))


def updates_of(sizes: Sequence[str]) -> list[tuple[Variant, str, tuple[int, int]]]:
    """Returns the (variant, recipe, shape) of canzona's update for every optimizer and shape, quick updates first."""
    items: dict[tuple[str, int, int], tuple[Variant, str, tuple[int, int]]] = {}
    for size in sizes:
        config = compose_run([f"recipe={size}"]).config
        for variant in (variant for variant in variants(config) if variant.ours):
            for shape in shapes(config):
                items.setdefault((variant.label, *shape), (variant, size, shape))
    return sorted(items.values(), key=lambda item: expected_seconds(item[0], *item[2]))


def summarise(measured: Sequence[Update], *, left: int) -> Outcome:
    """Returns the outcome: a summary of Muon's updates of large matrices, and the numbers of all updates.

    Args:
        left: the number of updates for which no time was left.
    """
    more = f"; no time was left for {left} more" if left else ""
    if not measured:
        return Outcome(status="not run", summary=f"nothing was measured{more}")
    muon = [update for update in measured if update.algorithm.startswith("muon")]
    shares = [update.share for update in muon if min(update.rows, update.cols) >= LARGE]
    summary = f"{len(measured)} updates{more}"
    if shares:
        typical = statistics.median(shares)
        summary += f"; Muon of large matrices at {typical:.0%} of a product's rate (lowest {min(shares):.0%})"
    fine = not shares or statistics.median(shares) >= SHARE
    numbers = {"updates": [asdict(update) for update in measured]}
    return Outcome(status="pass" if fine else "short", summary=summary, numbers=numbers)


def measure(team: Team, variant: Variant, size: str, shape: tuple[int, int], budget_s: float) -> Update:
    """Measures an update, and the product with which it is compared."""
    rows, cols = shape
    side, precision = comparable_product(variant, rows, cols, team.device)
    against = product_tflops(team, side, precision, budget_s)
    times = Quartiles.of(update_samples(team, variant, rows, cols, budget_s))
    tflops = flops(algorithm_of(variant.config.setup), rows, cols) / times.median / 1e12
    group = Group(variant, rows, cols, team.device)
    return Update(
        algorithm=variant.label, rows=rows, cols=cols, size=size, seconds=times, tflops=tflops,
        precision=precision, side=side, product_tflops=against, share=tflops / against,
        launches=launches(group.update, team.device) / group.count,
    )  # fmt: skip


def launches(work: Callable[[], None], device: torch.device) -> int:
    """Returns the number of launches of `work()`, after a warm-up call."""
    work()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = profile.events() or ()
    if device.type == "cuda":
        return sum(event.device_type == torch._C._autograd.DeviceType.CUDA for event in events)
    return sum(not event.cpu_children for event in events)


def comparable_product(variant: Variant, rows: int, cols: int, device: torch.device) -> tuple[int, str]:
    """Returns the side and the precision of the square product with the mean volume of an update's products."""
    algorithm = algorithm_of(variant.config.setup)
    parts = work(algorithm, rows, cols)[0].matmuls
    volume = sum(n * m * k * p for n, m, k, p in parts) / sum(n for n, *_ in parts)
    precision = (
        algorithm.precision
        if algorithm.name == "muon"
        else "tf32"
        if algorithm.tf32 and device.type == "cuda"
        else "fp32"
    )
    return max(64, 64 * round(volume ** (1 / 3) / 64)), precision


@cache
def product_tflops(team: Team, side: int, precision: str, budget_s: float) -> float:
    """Measures the rate of a square product of random numbers, in TFLOP/s. Products of constants would use less power,
    which allows higher clocks."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b, out = (torch.randn(side, side, device=team.device).to(dtype) for _ in range(3))

    def multiply() -> None:
        torch.mm(a, b, out=out)

    with matmul_precision("tf32" if precision == "tf32" else "fp32"):
        return 2 * side**3 / Quartiles.of(team.samples(multiply, budget_s)).median / 1e12


def show(update: Update) -> None:
    print(
        f"{update.algorithm:26} {f'{update.rows} x {update.cols}':>13} {update.size:>11} "
        f"{update.seconds.median * 1e3:9.3f} ms {update.seconds.relative:7.1%} {update.tflops:8.3g} TFLOP/s  "
        f"{update.share:4.0%} of {update.side} squared's {update.product_tflops:.3g} in {update.precision}, "
        f"{update.launches:.0f} launches",
        flush=True,
    )
