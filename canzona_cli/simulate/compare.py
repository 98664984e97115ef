"""A plan beside its alternatives: every strategy simulated on the same layout, and the same run planned differently."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from canzona_cli.config.execution import AnyStrategy, even_shards, with_strategy
from canzona_cli.config.schema import BufferLayout, EngineConfig, Layout, RunConfig, Strategy
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.buckets import bucket_elements
from canzona_cli.planner.measures import balance, communication
from canzona_cli.planner.memory import capacity, estimate, plan_memory
from canzona_cli.planner.plan import Assignment, Bucket, Cell, Plan
from canzona_cli.planner.planner import make_plan, plan_unbounded, update_costs
from canzona_cli.simulate.baselines import layerwise
from canzona_cli.simulate.cores import with_cores
from canzona_cli.simulate.simulate import StrategyResult, assumptions, simulate
from canzona_cli.simulate.study import STRATEGIES, Compared, Study, Variant

Comparison = Literal["strategies", "layouts", "alpha"]
LAYOUTS: tuple[BufferLayout, ...] = ("owner", "contiguous", "aligned")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def with_shapes(config: RunConfig, shapes: ModelShapes) -> RunConfig:
    """`config` under the name of the user's own shapes, with a model like them for memory and forward and backward."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", shapes.name).strip("-._") or "shapes"
    return replace(config, name=name, model=shapes.stand_in(config.model))


def study_run(
    config: RunConfig, layout: Layout, compare: Comparison | None = None, shapes: ModelShapes | None = None
) -> Study:
    """Plan and simulate a run.

    Args:
        config: resolved (`cluster.fit.resolve`), of strategy canzona or asc (`planner.plannable`).
        layout: what it was resolved to.
        compare: what to plan besides; strategies are always compared.
        shapes: the user's own, planned instead of `config.model`; `config` is `with_shapes` of them.

    Raises:
        ConfigError: the engine settings are impossible.
        DoesNotFit: no plan fits the profile's memory.
    """
    start = time.perf_counter()
    plan = make_plan(config, layout, shapes)
    other = plan_unbounded(
        with_strategy(config, "canzona" if config.engine.strategy == "asc" else "asc"), layout, shapes
    )
    plans = {config.engine.strategy: plan, other.subject.settings.strategy: other}
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


def _possible(engine: EngineConfig) -> EngineConfig:
    """Without the even collectives that were asked for where shards are not equal."""
    equal = even_shards(engine.layout, engine.strategy)
    return engine if equal or engine.reduction != "even" else replace(engine, reduction=None)


def _compared(
    config: RunConfig, layout: Layout, plans: dict[Strategy, Plan], strategy: AnyStrategy, stage: int
) -> Compared:
    plan = plans[config.engine.strategy]
    mesh = plan.subject.layout
    assignment: Assignment | None = None
    buckets: Sequence[Bucket] = ()
    loads: list[float] | None = None
    if strategy == "canzona" or strategy == "asc":
        own = plans[strategy]
        result = simulate_plan(config, layout, own)
        memory = plan_memory(config, layout, own).total
        loads = own.loads(stage)
    else:
        if strategy == "layerwise":
            placed = layerwise(plan.matrices, layout, bucket_elements(config, layout))
            assignment = Assignment(cells=tuple(Cell(owner=owner, host=0) for owner in placed.owners))
            buckets = placed.buckets
            loads = [
                load
                for load in placed.loads(plan.matrices, plan.costs, stage, mesh.owners)
                for _ in range(mesh.tp)  # every TP rank of the owner repeats its updates
            ]
        as_run = with_strategy(config, strategy)
        memory = estimate(as_run, layout).total
        costs = update_costs(as_run, plan.matrices, "megatron") if strategy != "adamw" else plan.costs
        result = simulate(as_run, layout, plan.matrices, costs, assignment, buckets, (), strategy)
    return Compared(
        result=result,
        memory_bytes=memory,
        fits=memory <= capacity(config),
        loads=None if loads is None else tuple(loads),
    )


def simulate_plan(config: RunConfig, layout: Layout, plan: Plan) -> StrategyResult:
    """One iteration under a plan."""
    strategy = plan.subject.settings.strategy
    return simulate(
        config,
        layout,
        plan.matrices,
        plan.costs,
        plan.assignment,
        plan.buckets,
        plan.groups,
        strategy,
    )


def _variants(
    config: RunConfig, layout: Layout, shapes: ModelShapes | None, plan: Plan, compare: Comparison | None
) -> Iterator[Variant]:
    engine = config.engine
    if compare == "layouts":
        engines: dict[str, EngineConfig] = {name: _possible(replace(engine, layout=name)) for name in LAYOUTS}
    elif compare == "alpha":
        engines = {f"alpha {alpha:g}": replace(engine, alpha=alpha) for alpha in ALPHAS}
    else:
        return
    for name, changed in engines.items():
        run = replace(config, engine=changed)
        tried = plan if changed == engine else plan_unbounded(run, layout, shapes)
        yield Variant(
            name=name,
            balance=balance(tried),
            communication=communication(run, layout, tried),
            memory_bytes=plan_memory(run, layout, tried).total,
            result=simulate_plan(with_cores(run), layout, tried),
        )
