"""Compares a plan with its alternatives: every strategy in the same layout, and the same run planned with
other settings.

A `Study` has everything that `canzona plan` prints about a plan; the reports only format it.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from canzona_cli.core import phases
from canzona_cli.core.costs.memory import capacity, estimate
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.model.shapes import ModelShapes
from canzona_cli.core.planner.make import make_plan, plan_unbounded
from canzona_cli.core.planner.measures import Balance, Communication, balance, communication, kinds
from canzona_cli.core.planner.memory import PlanMemory, plan_memory
from canzona_cli.core.planner.plan import Plan, sum_by_cell
from canzona_cli.core.planner.reduction import GATHERED_AHEAD
from canzona_cli.core.setup import KroneckerConfig, Layout, MuonTpMode, Setup
from canzona_cli.core.setup.execution import (
    PLANNED,
    RELEASED_TP_MODES,
    AnyStrategy,
    has_tp_modes,
    splitting_of,
    with_strategy,
    with_tp_mode,
)
from canzona_cli.core.simulate.estimate import flex_speedup
from canzona_cli.core.simulate.fast_paths import FastPaths, fast_paths
from canzona_cli.core.simulate.predict import simulate_plan, with_cores, workload_without_plan
from canzona_cli.core.simulate.step import Refreshes, StrategyResult, refreshes, simulate_tp_modes
from canzona_cli.core.simulate.update import UpdateModel, Workload

STRATEGIES = (phases.STRATEGIES[-1], *phases.STRATEGIES[:-1])
"""The strategies in the order of the tables. AdamW comes first, because the others are compared with it."""
SUMMARY: tuple[AnyStrategy, ...] = ("adamw", "canzona", "sc", "layerwise")
"""The strategies of a plan's summary: the planner's own, and those that Megatron offers."""
VERSION = 3
"""The version of the output of `--json`. Adding a key does not change the version."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStrategy:
    """The simulation of one strategy. All strategies have the same model, layout and batch."""

    simulated: StrategyResult | None
    """The simulated step; None if the strategy was left out, because it does not fit."""
    memory_bytes: int
    """The bytes on the fullest rank."""
    fits: bool
    """True if the strategy fits in memory. Otherwise it has no speed-up or overhead."""
    loads: tuple[float, ...] | None
    """The seconds of matrix updates of each cell, in the stage that is slowest under the plan; None for
    strategies without owners, and for the entries of modes."""
    tp_mode: MuonTpMode | None = None
    """The mode of Megatron's Muon; None for strategies that do not use it, and with one TP rank."""

    @property
    def result(self) -> StrategyResult:
        assert self.simulated is not None
        return self.simulated


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan and its alternatives, with load balance, communication, memory and simulated times."""

    setup: Setup
    layout: Layout
    plan: Plan
    balance: Balance
    memory: PlanMemory
    strategies: Mapping[str, SimulatedStrategy]
    """The simulations by strategy. Megatron's Muon (layerwise, sc) is in the faster of the modes that the supported
    Megatron can run. Further entries, such as layerwise/duplicated, have it in each mode (`mode_key`); there are none
    with one TP rank, and for optimizers without modes."""
    planning_s: float
    shapes: ModelShapes | None = None
    """The user's shapes if these were planned instead of `config.model`."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        return assumptions()

    @property
    def strategy(self) -> str:
        """The strategy of the plan."""
        return self.plan.subject.settings.strategy

    @property
    def drawn_strategies(self) -> tuple[str, str, str]:
        """The strategies whose loads reports draw side by side."""
        return "canzona", "paper" if self.strategy == "paper" else "asc", "layerwise"

    @property
    def shown_strategies(self) -> tuple[str, ...]:
        """The keys of `strategies` in the order of the tables, with other modes after the faster one."""
        names: list[str] = []
        for name in filter(self.strategies.__contains__, STRATEGIES):
            others = (mode_key(name, mode) for mode in get_args(MuonTpMode) if mode != self.strategies[name].tp_mode)
            names += [name, *(key for key in others if key in self.strategies)]
        return tuple(names)

    @property
    def planned(self) -> SimulatedStrategy:
        return self.strategies[self.strategy]

    def result(self, strategy: str) -> StrategyResult:
        return self.strategies[strategy].result

    def optimizer_speedup(self, baseline: str) -> float | None:
        """Returns the ratio of the optimizer time of the strategy `baseline` to that of the plan; None if one
        of the two does not fit in memory in this layout."""
        return self._ratio(baseline, self.strategy, lambda result: result.optimizer_s)

    def iteration_speedup(self, baseline: str) -> float | None:
        """Returns the ratio of the iteration time of the strategy `baseline` to that of the plan; None if one
        of the two does not fit in memory in this layout."""
        return self._ratio(baseline, self.strategy, lambda result: result.iteration_s)

    def overhead(self, strategy: str) -> float | None:
        """Returns how much longer a strategy's iteration takes than AdamW's in this layout (0.01 is 1%); None
        if one of them does not fit in memory."""
        ratio = self._ratio(strategy, "adamw", lambda result: result.iteration_s)
        return None if ratio is None else ratio - 1

    def _ratio(self, strategy: str, baseline: str, seconds: Callable[[StrategyResult], float]) -> float | None:
        if not (self.strategies[strategy].fits and self.strategies[baseline].fits):
            return None
        return seconds(self.result(strategy)) / seconds(self.result(baseline))

    @property
    def flex_speedup(self) -> float | None:
        """The estimated gain from the dispatcher `flex` in this layout, see `estimate.flex_speedup`."""
        return flex_speedup(self.setup, self.layout)

    @cached_property
    def communication(self) -> Communication:
        return communication(self.setup, self.layout, self.plan)

    @cached_property
    def refreshes(self) -> Refreshes | None:
        """The update times in a refresh period under the plan; None for optimizers that do not refresh."""
        if not isinstance(self.setup.optimizer, KroneckerConfig):
            return None
        return refreshes(self.setup, self.plan.matrices, self.plan.assignment.cells)

    def fast_paths(self, *, simulated: bool) -> FastPaths:
        """Returns the fast paths that the run leaves off.

        Args:
            simulated: True to simulate the step with them, which takes as long as planning the run.
        """
        return fast_paths(self.setup, self.layout, self.shapes, simulated=simulated)

    def figures(self, strategy: str) -> dict[str, object]:
        """Returns a strategy's entry in the output of `--json`."""
        compared = self.strategies[strategy]
        return {
            "iteration_s": compared.result.iteration_s,
            "optimizer_s": compared.result.optimizer_s,
            "overhead_over_adamw": self.overhead(strategy),
            "memory_bytes": compared.memory_bytes,
            "fits": compared.fits,
            "muon_tp_mode": compared.tp_mode,
        }

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json`."""
        mesh, buffers = self.plan.subject.layout, self.memory.buffers
        baselines = ("sc", "layerwise", "asc", "paper")
        balanced = {name: value for name, value in vars(self.balance).items() if name != "slowest"}
        return {
            "version": VERSION,
            "plan_hash": self.plan.hash,
            "plan_version": self.plan.version,
            "recipe": self.setup.name,
            "gpus": self.setup.gpus,
            "cluster": self.setup.cluster.name,
            "optimizer": self.setup.optimizer.name,
            "layout": asdict(mesh),
            "settings": asdict(self.plan.subject.settings),
            "matrices": len(self.plan.matrices),
            "buckets": len(self.plan.buckets),
            "micro_groups": len(self.plan.groups),
            "updates": [asdict(kind) for kind in kinds(self.setup, self.plan)],
            "load_balance": {
                **balanced,
                "gap": self.balance.gap,
                "slowest_rank": self.balance.slowest.rank,
            },
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
            "dearest_iteration_s": self.planned.result.iteration_s
            + (0.0 if self.refreshes is None else self.refreshes.excess_s),
            "communication": asdict(self.communication),
            "flex_speedup": self.flex_speedup,
            "strategies": {
                name: {**self.figures(name), "phases": dict(compared.result.phases)}
                for name, compared in self.strategies.items()
            },
            "speedup": {
                **{f"optimizer_vs_{baseline}": self.optimizer_speedup(baseline) for baseline in baselines},
                **{f"iteration_vs_{baseline}": self.iteration_speedup(baseline) for baseline in baselines},
                "overhead_over_adamw": self.overhead(self.strategy),
            },
            "assumptions": list(self.assumptions),
            "fast_paths_off": list(self.fast_paths(simulated=False).off),
            "planning_s": self.planning_s,
        }


def with_shapes(setup: Setup, shapes: ModelShapes) -> Setup:
    """Returns `setup` with the name of the user's shapes and a model of similar size. Memory, forward and
    backward are estimated from this model."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", shapes.name).strip("-._") or "shapes"
    return replace(setup, name=name, model=shapes.stand_in(setup.model))


def study_run(
    setup: Setup,
    layout: Layout,
    shapes: ModelShapes | None = None,
    baselines: Sequence[AnyStrategy] = STRATEGIES,
    tp_modes: Sequence[MuonTpMode] = get_args(MuonTpMode),
    details: bool = True,
) -> Study:
    """Plans a run and simulates the plan and its alternatives.

    Args:
        setup: the resolved setup (`simulate.fit.resolve`), with a strategy that has a plan
            (`planner.make.plannable`).
        layout: the resolved layout.
        shapes: the user's shapes, which are planned instead of `config.model`; `setup` is then the result of
            `with_shapes`.
        baselines: the strategies to simulate besides the run's own.
        tp_modes: the modes of Megatron's Muon in which layerwise is simulated, at least those that the supported
            Megatron can run.
        details: False to leave out what summaries do not show: the loads of layerwise, and the simulation of a
            strategy that fits in no mode.

    Raises:
        ConfigError: see `make_plan` and `simulate`.
        DoesNotFit: no plan fits the profile's memory.
    """
    start = time.perf_counter()
    plan = make_plan(setup, layout, shapes)
    names = [name for name in STRATEGIES if name == setup.engine.strategy or name in baselines]
    plans: dict[AnyStrategy, Plan] = {
        name: plan if name == setup.engine.strategy else plan_unbounded(with_strategy(setup, name), layout, shapes)
        for name in names
        if name in PLANNED
    }
    load_balance, memory = balance(plan), plan_memory(setup, layout, plan)
    memories = {name: memory if other is plan else plan_memory(setup, layout, other) for name, other in plans.items()}
    simulated, stage = with_cores(setup), load_balance.slowest.stage
    strategies: dict[str, SimulatedStrategy] = {}
    for name in names:
        if name in plans:
            strategies[name] = _simulate_plan(simulated, layout, plans[name], memories[name], stage)
        else:
            modes = tp_modes if name == "layerwise" else RELEASED_TP_MODES
            strategies.update(_simulate_unplanned(simulated, layout, name, modes, plan, stage, shapes, details))
    return Study(
        setup=setup,
        layout=layout,
        plan=plan,
        balance=load_balance,
        memory=memory,
        strategies=MappingProxyType(strategies),
        shapes=shapes,
        planning_s=time.perf_counter() - start,
    )


def mode_key(strategy: AnyStrategy, mode: MuonTpMode) -> str:
    """Returns the key of `Study.strategies` for layerwise or sc in a mode of Megatron's Muon."""
    return f"{strategy}/{mode}"


def _simulate_plan(setup: Setup, layout: Layout, plan: Plan, memory: PlanMemory, stage: int) -> SimulatedStrategy:
    return SimulatedStrategy(
        simulated=simulate_plan(setup, layout, plan),
        memory_bytes=memory.total,
        fits=memory.total <= capacity(setup),
        loads=tuple(plan.loads(stage)),
    )


def _simulate_unplanned(
    setup: Setup,
    layout: Layout,
    strategy: AnyStrategy,
    tp_modes: Sequence[MuonTpMode],
    plan: Plan,
    stage: int,
    shapes: ModelShapes | None,
    details: bool,
) -> Iterator[tuple[str, SimulatedStrategy]]:
    """Simulates a strategy without a plan; yields its entries of `Study.strategies`. Megatron's own optimizers cannot
    update gate and up apart, so they have their own matrices (`splitting_of`), as when they run.

    Args:
        tp_modes: the modes to simulate if the strategy is Megatron's Muon.
        plan: the plan whose matrices the strategy updates if it can, or if they are the user's own `shapes`.
        stage: the stage of `SimulatedStrategy.loads`.
        details: see `study_run`.
    """
    setup = with_strategy(setup, strategy)
    modes: Sequence[MuonTpMode | None] = tp_modes if layout.tp > 1 and has_tp_modes(setup) else (None,)
    runs = [setup if mode is None else with_tp_mode(setup, mode) for mode in modes]
    memories = [estimate(run, layout).total for run in runs]
    if not details and min(memories) > capacity(setup):
        yield strategy, SimulatedStrategy(simulated=None, memory_bytes=min(memories), fits=False, loads=None)
        return
    members = plan.matrices
    if shapes is None and strategy != "adamw" and splitting_of(setup) != setup.engine.splitting:
        members = matrices_of(setup.model, layout, splitting_of(setup))
    workload = workload_without_plan(setup, layout, strategy, members)
    results = simulate_tp_modes(setup, layout, workload, [run.engine.muon_tp_mode for run in runs])
    by_mode: dict[MuonTpMode | None, SimulatedStrategy] = {}
    for mode, memory_bytes, result in zip(modes, memories, results, strict=True):
        by_mode[mode] = SimulatedStrategy(
            simulated=result,
            memory_bytes=memory_bytes,
            fits=memory_bytes <= capacity(setup),
            loads=None,
            tp_mode=mode,
        )
    released = [simulated for mode, simulated in by_mode.items() if mode is None or mode in RELEASED_TP_MODES]
    best = min(released, key=lambda simulated: (not simulated.fits, simulated.result.iteration_s))
    if strategy == "layerwise" and details:
        run = setup if best.tp_mode is None else with_tp_mode(setup, best.tp_mode)
        best = replace(best, loads=tuple(_layerwise_loads(run, layout, workload, stage)))
    yield strategy, best
    yield from ((mode_key(strategy, mode), simulated) for mode, simulated in by_mode.items() if mode is not None)


def _layerwise_loads(setup: Setup, layout: Layout, workload: Workload, stage: int) -> list[float]:
    """Returns the update seconds of each cell of a stage under layerwise in a mode in which all TP ranks of an owner
    work equally long, except on experts that are divided among ranks."""
    assert workload.assignment is not None
    model = UpdateModel(setup, layout, workload.matrices, workload.costs)
    placed = (
        (cell, model.unplanned_seconds(matrix.index), matrix.expert_rank is None)
        for matrix, cell in zip(workload.matrices, workload.assignment.cells, strict=True)
        if matrix.stage == stage
    )
    return sum_by_cell(placed, 0.0, cells=layout.cells, tp=layout.tp)


def assumptions() -> tuple[str, ...]:
    """Returns the assumptions of the simulation for the user: the paragraphs of `assumptions.txt`."""
    text = Path(__file__).with_name("assumptions.txt").read_text(encoding="utf-8").format(ahead=GATHERED_AHEAD)
    return tuple(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
