"""The result of `canzona bench`, measured and predicted, as values that reports lay out and `--json` writes. No torch.

Times are seconds. A turn is a few consecutive training steps of one strategy; its first step is not counted. A round is
one turn of every strategy of a sitting. A sitting is one process group in which strategies take turns on the same
batches; where not all fit into memory together there are several, each with the reference strategy in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Device, Layout
from canzona_cli.run.statistics import OverRanks, Quartiles, Speedup


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One strategy in one sitting."""

    iteration_s: tuple[float, ...]
    """By round: a whole training step of the slowest rank, mean over the turn's measured steps."""
    optimizer_s: tuple[float, ...]
    """By round: from reduced gradients to the next forward. Exchange, matrix update and AdamW's update are those of the
    slowest rank; norm and clip, and the wait for gathered parameters, those of the rank that reaches them last (the
    others wait for it there, which is not part of the optimizer step)."""
    processor_s: tuple[float, ...]
    """By round: processor time of all ranks together in one step; with more ranks than cores it shows the work."""
    phases: Mapping[str, OverRanks]
    """In-step phases and `_total`s, with the breakdown's names."""
    load_balance: float
    """Of matrix updates, max over mean of the ranks; 1.0 where there are none."""
    losses: tuple[float, ...]
    """By training step, warm-up included; every strategy saw the same batches."""
    tensor_bytes: tuple[int, ...]
    """By rank: buffers, masters, optimizer state, messages, scratch; no activations."""
    update_s: tuple[float, ...] = ()
    """By rank: seconds of matrix updates in one step, mean over the measured steps; empty if not recorded."""

    @property
    def means(self) -> dict[str, float]:
        """Seconds by phase, mean over ranks; phases that this strategy does not have are left out."""
        return {name: over_ranks.mean_s for name, over_ranks in self.phases.items()}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction of the same (`simulate.predict`)."""

    iteration_s: float
    optimizer_s: float
    phases: Mapping[str, float]
    """Mean over ranks."""
    load_balance: float
    tensor_bytes: int | None
    """What `Measured.tensor_bytes` counts, on the fullest rank; None where there is no plan."""
    memory_bytes: int
    """Of the fullest rank, activations included."""


@dataclass(frozen=True, kw_only=True)
class StrategyBench:
    """One strategy, measured and predicted."""

    measured: Measured
    predicted: Predicted
    sitting: int
    """Which sitting it was measured in, from 0."""
    arithmetic: str = ""
    """Strategies with equal values compute the same updates, so their losses must agree."""
    alone: bool = False
    """It did not fit into memory together with the reference, so they did not take turns."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One recipe and layout, all strategies."""

    VERSION: ClassVar[int] = 1

    recipe: str
    overrides: tuple[str, ...]
    optimizer: str
    layout: Layout
    device: Device
    profile: str
    """Name of the cluster profile the predictions rest on."""
    calibrated: bool
    machine: Mapping[str, str | int | float]
    """Processor, cores, torch, ranks, and the load average before the bench began."""
    rounds: int
    steps_per_turn: int
    warm_up_rounds: int
    reference: AnyStrategy
    """The others are compared with it: canzona where it ran, otherwise the first strategy."""
    strategies: Mapping[str, StrategyBench]
    references: tuple[Measured, ...]
    """The reference, by sitting. `strategies[reference]` is the first."""
    arithmetic: str = ""
    """Which forms of the update are compared, where Megatron's own take part and canzona has another one."""
    notes: tuple[str, ...] = ()
    """Choices made for the user: splitting, sittings, which strategies were left out and why."""

    def optimizer_speedup(self, strategy: str) -> Speedup:
        """How many times longer the optimizer step of `strategy` is than the reference's in the same sitting."""
        found = self.strategies[strategy]
        return Speedup.of(found.measured.optimizer_s, self.references[found.sitting].optimizer_s)

    def iteration_speedup(self, strategy: str) -> Speedup:
        """How many times longer its whole step is."""
        found = self.strategies[strategy]
        return Speedup.of(found.measured.iteration_s, self.references[found.sitting].iteration_s)

    def overhead(self, strategy: str) -> Speedup | None:
        """How many times as long as AdamW's its iteration is; None for AdamW itself and where AdamW was not measured.

        Strategies of different sittings are compared through the reference, which takes part in every sitting.
        """
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        mine, adamw = self.strategies[strategy], self.strategies["adamw"]
        if strategy == self.reference or mine.sitting == adamw.sitting:
            own = self.references[adamw.sitting] if strategy == self.reference else mine.measured
            return Speedup.of(own.iteration_s, adamw.measured.iteration_s)
        by_mine, by_adamw = self.iteration_speedup(strategy).ratio, self.iteration_speedup("adamw").ratio
        return Speedup(
            ratio=Quartiles(
                low=by_mine.low / by_adamw.median,
                median=by_mine.median / by_adamw.median,
                high=by_mine.high / by_adamw.median,
            ),
            distinct=not by_mine.overlaps(by_adamw),
        )

    def predicted_overhead(self, strategy: str) -> float | None:
        """By how much its predicted iteration is longer than AdamW's; 0.01 is one per cent."""
        if strategy == "adamw" or "adamw" not in self.strategies:
            return None
        mine, adamw = self.strategies[strategy], self.strategies["adamw"]
        return mine.predicted.iteration_s / adamw.predicted.iteration_s - 1

    def error(self, strategy: str) -> float:
        """Predicted over measured optimizer step, less 1: 0.1 is a prediction 10% too long."""
        found = self.strategies[strategy]
        return found.predicted.optimizer_s / Quartiles.of(found.measured.optimizer_s).median - 1

    def iteration_error(self, strategy: str) -> float:
        """The same for the whole step."""
        found = self.strategies[strategy]
        return found.predicted.iteration_s / Quartiles.of(found.measured.iteration_s).median - 1
