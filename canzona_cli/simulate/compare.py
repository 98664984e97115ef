"""A plan next to its alternatives: every strategy on the same layout,
and the same run planned with other settings.

A `Study` is everything `canzona plan` says about a plan, as one value: the reports only lay it out.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from canzona_cli.config.execution import PLANNED, AnyStrategy, with_strategy
from canzona_cli.config.schema import (
    Form,
    KroneckerConfig,
    Layout,
    MomentumConfig,
    RunConfig,
)
from canzona_cli.costs.buffers import bucket_elements
from canzona_cli.costs.memory import capacity, estimate
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.make import make_plan, plan_unbounded
from canzona_cli.planner.measures import Balance, Communication, balance, communication, kinds
from canzona_cli.planner.memory import PlanMemory, plan_memory
from canzona_cli.planner.order import Refreshes, by_rank, refreshes
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import GATHERED_AHEAD
from canzona_cli.run import phases
from canzona_cli.simulate.predict import Outlook, layerwise, outlook, simulate_plan, simulate_strategy, with_cores
from canzona_cli.simulate.step import StrategyResult

STRATEGIES = (phases.STRATEGIES[-1], *phases.STRATEGIES[:-1])
"""The yardstick is shown first."""
Comparison = Literal["strategies", "alpha", "form"]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
FORMS: tuple[Literal["auto"] | Form, ...] = ("standard", "gram", "auto")
VERSION = 3
"""The version of what `--json` prints; additions keep it."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One strategy on the same model, layout and batch."""

    result: StrategyResult
    memory_bytes: int
    """The bytes on the fullest rank; a strategy that does not fit is simulated all the same, but nothing is
    compared with it."""
    fits: bool
    loads: tuple[float, ...] | None
    """Seconds of update per cell of the slowest stage, where the strategy has a grid."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The run planned with other settings."""

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
    """The plans that `--compare` alpha or form tried."""

    @property
    def strategy(self) -> str:
        """The planned one."""
        return self.plan.subject.settings.strategy

    @property
    def mapped(self) -> tuple[str, str, str]:
        """The strategies whose loads are drawn beside each other."""
        return "canzona", "paper" if self.strategy == "paper" else "asc", "layerwise"

    @property
    def planned(self) -> Compared:
        return self.strategies[self.strategy]

    def result(self, strategy: str) -> StrategyResult:
        return self.strategies[strategy].result

    def optimizer_speedup(self, over: str) -> float | None:
        """Returns how many times shorter the planned strategy's optimizer step is than that of `over`; None
        unless that fits into memory in this layout."""
        return self._ratio(over, self.strategy, lambda result: result.optimizer_s)

    def iteration_speedup(self, over: str) -> float | None:
        """Returns the same of the whole iteration."""
        return self._ratio(over, self.strategy, lambda result: result.iteration_s)

    def overhead(self, of: str) -> float | None:
        """Returns how much longer the iteration of a strategy is than AdamW's in this layout; 0.01 is one per
        cent. None unless both fit into memory."""
        ratio = self._ratio(of, "adamw", lambda result: result.iteration_s)
        return None if ratio is None else ratio - 1

    def _ratio(self, of: str, to: str, seconds: Callable[[StrategyResult], float]) -> float | None:
        if not (self.strategies[of].fits and self.strategies[to].fits):
            return None
        return seconds(self.result(of)) / seconds(self.result(to))

    @property
    def outlook(self) -> Outlook:
        """The planned iteration over the whole run."""
        return outlook(self.config, self.layout, self.planned.result.iteration_s)

    @cached_property
    def refreshes(self) -> Refreshes | None:
        """The refreshes of the planned strategy, with an optimizer that has any."""
        plan, chosen = self.plan, self.config.optimizer
        if not isinstance(chosen, KroneckerConfig):
            return None
        return refreshes(self.config, chosen, by_rank(plan.matrices, plan.assignment.cells))

    def figures(self, strategy: str) -> dict[str, object]:
        """A strategy's row of `--json`."""
        compared = self.strategies[strategy]
        return {
            "iteration_s": compared.result.iteration_s,
            "optimizer_s": compared.result.optimizer_s,
            "overhead_over_adamw": self.overhead(strategy),
            "memory_bytes": compared.memory_bytes,
            "fits": compared.fits,
        }

    def as_json(self) -> dict[str, object]:
        """Returns what `--json` prints."""
        mesh, buffers, others = self.plan.subject.layout, self.memory.buffers, ("sc", "layerwise", "asc", "paper")
        balanced = {name: value for name, value in vars(self.balance).items() if name != "slowest"}
        return {
            "version": VERSION,
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
            "updates": [asdict(kind) for kind in kinds(self.config, self.plan)],
            "load_balance": {**balanced, "gap": self.balance.gap, "slowest_rank": self.balance.slowest.rank},
            "memory": {
                "per_gpu_bytes": {**self.memory.parts, "total": self.memory.total},
                "worst_rank": self.memory.worst.rank,
                "worst_place": asdict(self.memory.worst),
                "capacity_bytes": self.memory.capacity,
                "exchange_buffer_bytes": buffers.exchange,
                "update_scratch_bytes": buffers.gradients,
                "optimizer_scratch_bytes": buffers.workspace,
                "reduction_scratch_bytes": buffers.reduction,
                "gathering_scratch_bytes": buffers.gathering,
            },
            "refresh_steps_s": None if self.refreshes is None else list(self.refreshes.steps_s),
            "communication": asdict(self.communication),
            "outlook": asdict(self.outlook),
            "strategies": {
                name: {**self.figures(name), "phases": dict(compared.result.phases)}
                for name, compared in self.strategies.items()
            },
            "speedup": {
                **{f"optimizer_vs_{over}": self.optimizer_speedup(over) for over in others},
                **{f"iteration_vs_{over}": self.iteration_speedup(over) for over in others},
                "overhead_over_adamw": self.overhead(self.strategy),
            },
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


def with_shapes(config: RunConfig, shapes: ModelShapes) -> RunConfig:
    """`config` under the name of the user's own shapes,
    with a model like them for memory and forward and backward."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", shapes.name).strip("-._") or "shapes"
    return replace(config, name=name, model=shapes.stand_in(config.model))


def study_run(
    config: RunConfig, layout: Layout, compare: Comparison | None = None, shapes: ModelShapes | None = None
) -> Study:
    """Plan and simulate a run.

    Args:
        config: resolved (`cluster.fit.resolve`), of a strategy that is planned (`planner.plannable`).
        layout: its resolved layout.
        compare: the further comparisons; strategies are always compared.
        shapes: the user's own, planned instead of `config.model`; `config` is `with_shapes` of them.

    Raises:
        ConfigError: the engine settings are impossible, or forms are compared of an optimizer that has none.
        DoesNotFit: no plan fits the profile's memory.
    """
    start = time.perf_counter()
    plan = make_plan(config, layout, shapes)
    plans: dict[AnyStrategy, Plan] = {
        name: plan if name == config.engine.strategy else plan_unbounded(with_strategy(config, name), layout, shapes)
        for name in PLANNED
    }
    measured = balance(plan)
    strategies: dict[str, Compared] = {
        name: _compared(with_cores(config), layout, plans, name, measured.slowest.stage) for name in STRATEGIES
    }
    return Study(
        config=config,
        layout=layout,
        plan=plan,
        balance=measured,
        communication=communication(config, layout, plan),
        memory=plan_memory(config, layout, plan),
        strategies=MappingProxyType(strategies),
        assumptions=assumptions(),
        variants=tuple(_variants(config, layout, shapes, plan, compare)),
        planning_s=time.perf_counter() - start,
    )


def _compared(
    config: RunConfig, layout: Layout, plans: Mapping[AnyStrategy, Plan], strategy: AnyStrategy, stage: int
) -> Compared:
    loads: Sequence[float] | None = None
    if strategy in plans:
        plan_of = plans[strategy]
        result, memory = simulate_plan(config, layout, plan_of), plan_memory(config, layout, plan_of).total
        loads = plan_of.loads(stage)
    else:
        plan = plans[config.engine.strategy]
        result = simulate_strategy(config, layout, strategy, plan.matrices)
        memory = estimate(with_strategy(config, strategy), layout).total
        if strategy == "layerwise":
            mesh = plan.subject.layout
            assignment, _ = layerwise(plan.matrices, layout, bucket_elements(config, layout))
            owners = assignment.loads(plan.matrices, plan.costs, stage, mesh.owners, 1)
            loads = [load for load in owners for _ in range(mesh.tp)]  # every TP rank repeats its owner's updates
    return Compared(
        result=result,
        memory_bytes=memory,
        fits=memory <= capacity(config),
        loads=None if loads is None else tuple(loads),
    )


def _variants(
    config: RunConfig, layout: Layout, shapes: ModelShapes | None, plan: Plan, compare: Comparison | None
) -> Iterator[Variant]:
    engine, optimizer = config.engine, config.optimizer
    runs: dict[str, RunConfig] = {}
    if compare == "alpha":
        runs = {f"alpha {alpha:g}": replace(config, engine=replace(engine, alpha=alpha)) for alpha in ALPHAS}
    elif compare == "form":
        if not isinstance(optimizer, MomentumConfig):
            reason = f"optimizer={optimizer.name} does not iterate by Newton-Schulz"
            raise ConfigError(Problem(key="--compare", value="form", reason=reason, fix="use optimizer=muon"))
        runs = {form: replace(config, optimizer=replace(optimizer, form=form)) for form in FORMS}
    for name, run in runs.items():
        tried = plan if run == config else plan_unbounded(run, layout, shapes)
        yield Variant(
            name=name,
            balance=balance(tried),
            communication=communication(run, layout, tried),
            memory_bytes=plan_memory(run, layout, tried).total,
            result=simulate_plan(with_cores(run), layout, tried),
        )


def assumptions() -> tuple[str, ...]:
    """Lists what the simulated times rest on, one sentence each."""
    return (
        "Achieved rates and bandwidths are the cluster profile's; large collectives reach 80% of the link inside a "
        "machine and 90% between machines, each hop adds the profile's latency.",
        "Every rank has a device of its own, or an even share of the machine's cores where the profile counts them. "
        "Forward and backward go at the pace of the slowest GPU that cluster.speed_spread expects among so many; "
        "updates at the same pace on all. No jitter, no data loading, no host-bound launches but what a calibration "
        "found of them in forward and backward, and cluster.pass_us for each pass through a model chunk.",
        "Data-parallel collectives take cluster.collective_units of a GPU from forward and backward under them; "
        "everything else that overlaps runs at full speed on both sides.",
        "Transfers at the same time on one rank's link share it evenly; the network between machines has full "
        "bisection bandwidth.",
        "Where a bucket's gradients travel all-to-all, each owner adds the copies up before the next bucket travels.",
        "Rings and per-owner chains send each byte once through every rank; a chain fills with a latency and a "
        "chunk of 512 KiB a channel on each of them, under the one before as far as its owner follows that one's; an "
        "all-to-all takes as long as its busiest sender or receiver.",
        "Tensor-parallel collectives of forward and backward are not hidden, but with cluster.tp_overlap all but one "
        "piece of them is, as far as their product is long enough.",
        "Gradients are reduced per bucket under the last micro-batch's backward. AdamW and layerwise gather parameters "
        "one bucket ahead of the next forward, or whole model chunks ahead where a stage has several, as Megatron-LM "
        "0.19 does (strategies with a plan: below).",
        "The pipeline schedule is 1F1B, interleaved where a stage has several model chunks. What a stage sends travels "
        "once the next one asks for it, a pass ahead, and it waits until that is there, but for backward transfers "
        "between model chunks while both directions take turns.",
        "Gradients of an owner's first two micro-groups set out before their norm, unless those have shared matrices.",
        "Strategies with a plan update AdamW's parameters before the matrices, and gather those of a stage's first "
        f"model chunk under the matrix updates. Of the other buckets {GATHERED_AHEAD} are gathered at a time: the "
        "first ones from the last update on, while gradients are set to zero for the next step.",
        "Matrices are split the same way under every strategy; layerwise and sc repeat updates on every "
        "tensor-parallel rank after a synchronous gather in fp32. Megatron's own orthogonalise in standard form and "
        "full products, those with a plan as optimizer.form and cluster.symmetric_factor say: optimizer.form=standard "
        "compares the same arithmetic.",
        "Two micro-groups are in flight; gradients travel in engine.exchange_dtype, weights in the model's type. Of "
        "shared matrices squares travel, in the narrower of both to their hosts, which add them up one by one.",
        "Shampoo and SOAP: all updates are stretched alike to what the steps of a refresh period take on average, each "
        "as long as on its slowest rank.",
        "Gradients are clipped in every step.",
        "Memory: scratch that optimizers keep counts as lasting; communicators' buffers are within the profile's "
        "reserved_gib, 0.25 GiB for each that data goes through.",
    )
