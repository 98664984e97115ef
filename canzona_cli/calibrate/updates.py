"""Seconds of one update, by algorithm and shape, as the engine runs them; and AdamW's by element.

What is timed is what the engine does for a matrix beside exchanging it: clip the gradient, step, look whether the new
weight is finite, and write it in the model's precision. Every matrix has memory of its own, as many of them as a model
has layers, for in training each update finds the caches full of other matrices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from canzona_cli.calibrate.effort import Effort
from canzona_cli.calibrate.measurement import Measurement, Recorder
from canzona_cli.calibrate.team import Team, repeat, timed
from canzona_cli.config.schema import (
    MuonConfig,
    OptimizerConfig,
    RunConfig,
    ShampooConfig,
    SoapConfig,
    Splitting,
)
from canzona_cli.engine.factory import optimizer_factory
from canzona_cli.megatron.standalone import megatron_adam, megatron_muon
from canzona_cli.model.matrices import layer_shapes
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.kronecker import SIDES, KroneckerOptimizer
from canzona_cli.planner.cost import algorithm, label, peak_seconds, seconds

SPLITTINGS: tuple[Splitting, ...] = ("qkv", "split")
ADAMW_ELEMENTS = 4 << 20
_BYTES_AT_ONCE = {"cpu": 256 << 20, "cuda": 8 << 30}
"""Of all matrices of one shape that are updated in turns, with gradients and state."""
_CLIP = 0.999
_NEVER = 1 << 40
"""Steps between refreshes, so that none comes by itself."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation of one algorithm."""

    config: RunConfig
    label: str
    kind: Literal["ours", "megatron"] = "ours"


def ways(config: RunConfig) -> Iterator[Way]:
    """Muon, one by one and stacked, Megatron's Muon, SOAP and Shampoo; the recipe's own settings where it has any."""
    muon = _settings(config, MuonConfig(name="muon", lr=config.optimizer.lr))
    assert isinstance(muon, MuonConfig)
    for stack in (False, True):
        run = replace(config, optimizer=replace(muon, stack=stack))
        yield Way(config=run, label=label(algorithm(run)))
        if not stack:
            yield Way(config=run, label=f"megatron/{label(algorithm(run))}", kind="megatron")
    for other in (
        SoapConfig(name="soap", lr=config.optimizer.lr),
        ShampooConfig(name="shampoo", lr=config.optimizer.lr),
    ):
        run = replace(config, optimizer=_settings(config, other))
        yield Way(config=run, label=label(algorithm(run)))


def shapes(config: RunConfig) -> list[tuple[int, int]]:
    """(rows, columns) of the recipe's matrices, smallest first."""
    found = {shape for splitting in SPLITTINGS for shape in layer_shapes(config.model, splitting)}
    return sorted(found, key=lambda shape: (max(shape), shape[0] * shape[1]))


def measure_updates(
    team: Team, config: RunConfig, effort: Effort, recorder: Recorder, elapsed: Callable[[], float]
) -> None:
    """Every way with every shape, the quick ones first; what would take too long is left to the cost model. Team only.

    Args:
        elapsed: seconds since the calibration began.
    """
    items = [(expected(way, *shape), way, shape) for way in ways(config) for shape in shapes(config)]
    for cost_s, way, (rows, cols) in sorted(items, key=lambda item: item[0]):
        late = max(0.0, elapsed() + cost_s - effort.end_s) if cost_s > 1.0 else 0.0
        if cost_s > effort.largest_item_s or team.decide(late) > 0.0:
            recorder.skipped(f"{way.label} of {rows} x {cols}: measuring it would take about {cost_s:.0f} s")
            continue
        samples = update_samples(team, way, rows, cols, effort.item_s)
        recorder.add(Measurement.of("updates", samples, way.label, rows, cols))


def measure_adamw(team: Team, config: RunConfig, effort: Effort, recorder: Recorder) -> None:
    """Nanoseconds of an element: AdamW on a flat fp32 shard, and its copy into the model's weights. Team only."""
    shard = torch.nn.Parameter(torch.randn(ADAMW_ELEMENTS, device=team.device))
    shard.grad = torch.randn_like(shard)
    weight = torch.empty(ADAMW_ELEMENTS, dtype=_dtype(config), device=team.device)
    optimizer = megatron_adam([shard], config.optimizer)

    def step() -> None:
        optimizer.step()
        weight.copy_(shard.detach())

    samples = team.samples(step, effort.item_s)
    recorder.add(Measurement.of("adamw_ns", [1e9 * sample / ADAMW_ELEMENTS for sample in samples]))


def expected(way: Way, rows: int, cols: int) -> float:
    """Seconds that measuring it will roughly take, by the cost model: refreshes dominate, the first one included."""
    how, cluster = algorithm(way.config), replace(way.config.cluster, measured_updates=())
    if isinstance(way.config.optimizer, MuonConfig):
        return 8 * seconds(how, rows, cols, cluster)
    return 3 * peak_seconds(how, rows, cols, cluster)


def update_samples(team: Team, way: Way, rows: int, cols: int, budget_s: float) -> list[float]:
    """Seconds of one update of one (rows, columns) matrix, of all members; SOAP and Shampoo as the mean over a period.

    The samples of such a mean are those of plain steps, each with the median of the refreshes weighed in.
    """
    group = _Group(way, rows, cols, team.device)
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
    own = [timed(group.update, team.device)]
    if own[0] < budget_s:
        own = repeat(group.update, team.device, budget_s)
    renewed = sorted(sample / group.count for each in team.gather(own) for sample in each)
    refresh = renewed[len(renewed) // 2]
    return [((period - 1) * sample + refresh) / period for sample in plain]


class _Group:
    """Matrices of one shape with their gradients, optimizer and model weights."""

    def __init__(self, way: Way, rows: int, cols: int, device: torch.device) -> None:
        self.count = _count(way, rows, cols, device)
        self._masters = [torch.nn.Parameter(0.02 * torch.randn(rows, cols, device=device)) for _ in range(self.count)]
        for master in self._masters:
            master.grad = torch.randn_like(master)
        self._weights = [torch.empty(rows, cols, dtype=_dtype(way.config), device=device) for _ in range(self.count)]
        self._finite = torch.ones(self.count, device=device)
        self._ours = way.kind == "ours"
        self._device = device
        self.optimizer = self._make(way, rows, cols)

    @torch.no_grad()
    def update(self) -> None:
        if self._ours:
            for master in self._masters:
                assert master.grad is not None
                master.grad.mul_(_CLIP)
        self.optimizer.step()
        for place, (master, weight) in enumerate(zip(self._masters, self._weights, strict=True)):
            if self._ours:
                torch.sum(master.detach(), dim=(0, 1), out=self._finite[place])
            weight.copy_(master.detach())

    def fill_factors(self, optimizer: KroneckerOptimizer) -> None:
        """Make all eigenvalues distinct: factors of a few gradients are mostly zero, and decompose too quickly."""
        for master in self._masters:
            for side in SIDES:
                factor = optimizer.state[master].get(side)
                if isinstance(factor, torch.Tensor):
                    diagonal = factor.diagonal()
                    diagonal.add_(torch.rand_like(diagonal) * diagonal.mean())

    def _make(self, way: Way, rows: int, cols: int) -> torch.optim.Optimizer:
        if way.kind == "megatron":
            assert isinstance(way.config.optimizer, MuonConfig)
            return megatron_muon(self._masters, way.config.optimizer, way.config.train.precision)
        matrices = _matrices(self.count, rows, cols)
        return optimizer_factory(way.config, matrices)(matrices, self._masters)


def _count(way: Way, rows: int, cols: int, device: torch.device) -> int:
    """As many as a model has layers, or memory for; one where each takes long."""
    if not isinstance(way.config.optimizer, MuonConfig) and max(rows, cols) > 1024:
        return 1
    squares = 0 if isinstance(way.config.optimizer, MuonConfig) else rows * rows + cols * cols
    bytes_each = 18 * rows * cols + 12 * squares
    return max(1, min(way.config.model.num_layers, _BYTES_AT_ONCE[device.type] // bytes_each))


def _matrices(count: int, rows: int, cols: int) -> list[Matrix]:
    """Of the same kind in successive layers."""
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


def _settings(config: RunConfig, usual: OptimizerConfig) -> OptimizerConfig:
    """The recipe's own where it is of that algorithm."""
    return config.optimizer if type(config.optimizer) is type(usual) else usual


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32
