"""Rates of products, decompositions and memory, and what a launch takes."""

from collections.abc import Callable
from functools import partial

import torch

from canzona_cli.calibrate.effort import Effort
from canzona_cli.calibrate.measurement import Measurement, Quantity, Recorder
from canzona_cli.calibrate.team import Team
from canzona_cli.optimizers.matrix_optimizer import ProductPrecision, products
from canzona_cli.planner.cost import MEMORY_EFFICIENCY

_CPU_SIZES = (64, 128, 256, 512, 1024, 2048)
_GPU_SIZES = (*_CPU_SIZES, 4096, 8192)
_LARGE_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Of a buffer that no cache holds."""
_LAUNCHES = 200


def measure_arithmetic(team: Team, effort: Effort, recorder: Recorder) -> None:
    """Team only."""
    on_gpu = team.device.type == "cuda"
    for size in _GPU_SIZES if on_gpu else _CPU_SIZES:
        factors = (torch.randn(size, size, device=team.device).bfloat16() for _ in range(3))
        _rate(team, effort, recorder, "matmul_tflops", 2.0 * size**3, partial(_mm, *factors), size)
    size = 4096 if on_gpu else 1024
    x, y, z = (torch.randn(size, size, device=team.device) for _ in range(3))
    precisions: list[tuple[Quantity, ProductPrecision]] = [("fp32_tflops", "fp32")]
    if on_gpu:
        precisions.append(("tf32_tflops", "tf32"))
    for quantity, precision in precisions:
        with products(precision):
            _rate(team, effort, recorder, quantity, 2.0 * size**3, lambda: _mm(x, y, z))
    # FLOPs as `planner.cost.Work` counts them.
    _rate(team, effort, recorder, "qr_tflops", 8 / 3 * size**3, lambda: _discard(torch.linalg.qr(x)))
    size //= 2 if on_gpu else 1
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
    """A copy between buffers that no cache holds, over what elementwise kernels are taken to reach. Team only."""
    elements = _LARGE_BYTES[team.device.type] // 4
    source, target = (torch.ones(elements, device=team.device) for _ in range(2))
    moved = 2 * source.nbytes
    samples = team.samples(lambda: _discard(target.copy_(source)), effort.item_s)
    values = [moved / seconds / MEMORY_EFFICIENCY / 1e9 for seconds in samples]
    recorder.add(Measurement.of("memory_gb_per_s", values))


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
    """What was computed is of no interest."""
