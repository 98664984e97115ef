"""Seconds of one update, by algorithm and shape, as the engine runs it; and AdamW's time for one element.

The timed work is what the engine does for a matrix, except for exchanging it: clip the gradient, step, check
that the new weight is finite, and write it in the model's precision. Each matrix has its own memory, and
there are as many as the model has layers, because in training each update finds the caches full of other
matrices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from canzona_cli.calibrate.compute import Team, repeat, timed
from canzona_cli.calibrate.measurement import Effort, Measurement, Recorder
from canzona_cli.calibrate.profile import measured_runs
from canzona_cli.config.schema import MomentumConfig, MuonConfig, RunConfig, Splitting
from canzona_cli.costs.update import algorithm, label, peak_seconds, seconds
from canzona_cli.engine.build import optimizer_factory
from canzona_cli.engine.wire import Write, write_finite
from canzona_cli.megatron.optimizer import megatron_adam, megatron_muon
from canzona_cli.model.matrices import Matrix, layer_shapes
from canzona_cli.optimizers.kronecker import SIDES, KroneckerOptimizer, pack, unpack

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
    kind: Literal["ours", "megatron"] = "ours"


def variants(config: RunConfig) -> Iterator[Variant]:
    """Ours of every measured optimizer, and Megatron's Muon."""
    for run in measured_runs(config):
        name = label(algorithm(run))
        yield Variant(config=run, label=name)
        if isinstance(run.optimizer, MuonConfig) and run.optimizer.form == "standard" and not run.optimizer.stack:
            yield Variant(config=run, label=f"megatron/{name}", kind="megatron")


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
            recorder.skipped(f"{variant.label} of {rows} x {cols}: measuring it would take about {cost_s:.0f} s")
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
        self._masters = [torch.nn.Parameter(0.02 * torch.randn(rows, cols, device=device)) for _ in range(self.count)]
        for master in self._masters:
            master.grad = torch.randn_like(master)
        self._weights = [
            torch.empty(rows, cols, dtype=_dtype(variant.config), device=device) for _ in range(self.count)
        ]
        self._finite = torch.ones(self.count, device=device)
        self._ours = variant.kind == "ours"
        self._device = device
        rounded = torch.empty_like(self._weights[0])
        self._writes = [
            Write(target=weight, source=master.detach(), rounded=rounded)
            for master, weight in zip(self._masters, self._weights, strict=True)
        ]
        self.optimizer = self._make(variant, rows, cols)

    @torch.no_grad()
    def update(self) -> None:
        if self._ours:
            for master in self._masters:
                assert master.grad is not None
                master.grad.mul_(_CLIP)
        self.optimizer.step()
        if not self._ours:
            for write in self._writes:
                write.target.copy_(write.source)
            return
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

    def _make(self, variant: Variant, rows: int, cols: int) -> torch.optim.Optimizer:
        if variant.kind == "megatron":
            assert isinstance(variant.config.optimizer, MuonConfig)
            return megatron_muon(self._masters, variant.config.optimizer, variant.config.train.precision)
        matrices = _matrices(self.count, rows, cols)
        return optimizer_factory(variant.config, [matrices])(matrices, self._masters)


def _count(variant: Variant, rows: int, cols: int, device: torch.device) -> int:
    """Counts the matrices to update: one for each layer, or as many as memory allows;
    one where each takes long."""
    if not isinstance(variant.config.optimizer, MomentumConfig) and max(rows, cols) > 1024:
        return 1
    squares = 0 if isinstance(variant.config.optimizer, MomentumConfig) else rows * rows + cols * cols
    bytes_each = 18 * rows * cols + 12 * squares
    return max(1, min(variant.config.model.num_layers, _BYTES_AT_ONCE[device.type] // bytes_each))


def _matrices(count: int, rows: int, cols: int) -> list[Matrix]:
    """Matrices of the same kind in successive layers."""
    return [
        Matrix(
            index=layer,
            name=f"layers.{layer}.other",
            kind="other",
            layer=layer,
            stage=0,
            rows=rows,
            cols=cols,
            shard_dim=None,
            parameter=f"decoder.layers.{layer}.weight",
            unit=layer,
        )
        for layer in range(count)
    ]


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32
