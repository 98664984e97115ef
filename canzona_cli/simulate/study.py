"""Everything `canzona plan` tells about a plan, as one value: the reports only lay it out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.measures import Balance, Communication
from canzona_cli.planner.memory import PlanMemory
from canzona_cli.planner.plan import Plan
from canzona_cli.run import phases
from canzona_cli.simulate.simulate import StrategyResult

STRATEGIES = (phases.STRATEGIES[-1], *phases.STRATEGIES[:-1])
"""The yardstick is shown first."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One strategy on the same model, layout and batch."""

    result: StrategyResult
    memory_bytes: int
    """Of the fullest rank; a strategy that does not fit is simulated all the same."""
    fits: bool
    loads: tuple[float, ...] | None
    """Seconds of update per cell of the slowest stage, where the strategy has a grid."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The same run planned with other settings."""

    name: str
    balance: Balance
    communication: Communication
    memory_bytes: int
    result: StrategyResult


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan, what it comes to, and what the alternatives do."""

    config: RunConfig
    layout: Layout
    plan: Plan
    balance: Balance
    communication: Communication
    memory: PlanMemory
    strategies: Mapping[str, Compared]
    assumptions: tuple[str, ...]
    planning_s: float
    variants: tuple[Variant, ...] = ()
    """What `--compare layouts` or `alpha` tried."""

    @property
    def strategy(self) -> str:
        """The planned one: canzona or asc."""
        return self.plan.subject.settings.strategy

    @property
    def planned(self) -> Compared:
        return self.strategies[self.strategy]

    def optimizer_speedup(self, over: str) -> float:
        """How many times shorter the planned strategy's optimizer step is than that of `over`."""
        return self.strategies[over].result.optimizer_s / self.planned.result.optimizer_s

    def iteration_speedup(self, over: str) -> float:
        """How many times shorter its whole iteration is."""
        return self.strategies[over].result.iteration_s / self.planned.result.iteration_s

    def overhead(self, of: str) -> float:
        """How much longer the iteration of a strategy is than AdamW's; 0.01 is one per cent."""
        return self.strategies[of].result.iteration_s / self.strategies["adamw"].result.iteration_s - 1

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        mesh, balance = self.plan.subject.layout, self.balance
        speedups = {
            f"{what}_vs_{over}": measure(over)
            for what, measure in (("optimizer", self.optimizer_speedup), ("iteration", self.iteration_speedup))
            for over in ("sc", "layerwise", "asc")
        }
        return {
            "plan_hash": self.plan.hash,
            "plan_version": self.plan.version,
            "recipe": self.config.name,
            "gpus": self.config.gpus,
            "cluster": self.config.cluster.name,
            "optimizer": self.config.optimizer.name,
            "layout": asdict(mesh),
            "settings": asdict(self.plan.subject.settings),
            "matrices": len(self.plan.matrices),
            "buckets": len(self.plan.buckets),
            "micro_groups": len(self.plan.groups),
            "load_balance": {
                "dp": balance.dp,
                "tp": balance.tp,
                "grid": balance.grid,
                "lower_bound": balance.lower_bound,
                "gap": balance.gap,
                "slowest_s": balance.slowest_s,
                "mean_s": balance.mean_s,
                "slowest_rank": balance.slowest.rank,
            },
            "memory": {
                "per_gpu_bytes": {**self.memory.parts, "total": self.memory.total},
                "worst_rank": self.memory.worst.rank,
                "worst_place": asdict(self.memory.worst),
                "capacity_bytes": self.memory.capacity,
                "exchange_buffer_bytes": self.memory.buffers.exchange,
                "update_scratch_bytes": self.memory.buffers.gradients,
                "reduction_scratch_bytes": self.memory.buffers.reduction,
            },
            "communication": asdict(self.communication),
            "strategies": {
                name: {
                    "iteration_s": compared.result.iteration_s,
                    "optimizer_s": compared.result.optimizer_s,
                    "optimizer_exposed_s": compared.result.optimizer_exposed_s,
                    "overhead_over_adamw": self.overhead(name),
                    "memory_bytes": compared.memory_bytes,
                    "fits": compared.fits,
                    "phases": dict(compared.result.phases),
                }
                for name, compared in self.strategies.items()
            },
            "speedup": {**speedups, "overhead_over_adamw": self.overhead(self.strategy)},
            "compared": [
                {
                    "name": variant.name,
                    "load_balance": variant.balance.grid,
                    "lower_bound": variant.balance.lower_bound,
                    "communication": asdict(variant.communication),
                    "memory_bytes": variant.memory_bytes,
                    "iteration_s": variant.result.iteration_s,
                    "optimizer_s": variant.result.optimizer_s,
                }
                for variant in self.variants
            ],
            "assumptions": list(self.assumptions),
            "planning_s": self.planning_s,
        }
