"""Makes the `Plan` of a run. If a plan needs too much memory, further attempts need less and less.

An attempt balances matrices over the grid and shares some if sharing is faster. Of several equally fast
assignments, it keeps the one with the least communication. Buckets and micro-groups follow from the
assignment. Planning uses neither torch nor random numbers, and does not depend on elapsed time.
"""

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.costs.memory import GIB, capacity, element_bytes, headroom, spare_bytes
from canzona_cli.core.costs.sharing import shared_costs
from canzona_cli.core.costs.update import algorithm_of, update_costs
from canzona_cli.core.errors import ConfigError, DoesNotFit, Problem
from canzona_cli.core.fields import PLAN, affecting
from canzona_cli.core.model.matrices import Matrix, stage_matrices
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.model.shapes import ModelShapes
from canzona_cli.core.planner.attempt import Attempt, Prices
from canzona_cli.core.planner.bounds import stage_bound
from canzona_cli.core.planner.buckets import alike_pools
from canzona_cli.core.planner.exposure import Exposure
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.planner.paper import as_published
from canzona_cli.core.planner.pipeline import HostedPipeline, planning_config
from canzona_cli.core.planner.plan import Plan, PlanSettings, Scalar, Subject
from canzona_cli.core.planner.reduction import uniform_buckets
from canzona_cli.core.setup import ClusterConfig, Execution, Layout, ModelConfig, ScheduleConfig, Setup
from canzona_cli.core.setup.execution import PLANNED

_CAPACITIES = (8, 4, 2, 1)
"""The values of C_max that are tried, as multiples of the largest matrix."""


def subject(setup: Setup, layout: Layout, shapes: ModelShapes | None = None) -> Subject:
    """Collects everything that a run's plan depends on.

    Args:
        shapes: the user's own shapes if these are planned instead of `config.model`.
    """
    model = {name: _scalar(getattr(setup.model, name)) for name in affecting(PLAN, ModelConfig)}
    for name in ("layernorm", "biases", "positions", "moe_layer_freq", "dense_ffn_hidden_size"):  # rare
        if model[name] == getattr(ModelConfig, name):
            del model[name]
    return Subject(
        model=MappingProxyType(model if shapes is None else {"shapes": shapes.digest}),
        layout=layout.mesh,
        settings=settings(setup),
        optimizer=algorithm_of(setup),
        buffers=MappingProxyType(
            {
                "bucket_elements": bucket_elements(setup, layout),
                "precision": setup.train.precision,
                "grad_reduce_dtype": setup.train.grad_reduce_dtype,
                "seq_length": setup.train.seq_length,
                "micro_batch_size": setup.train.micro_batch_size,
                "recompute": setup.train.recompute,
                **({} if setup.train.fp8 == "none" else {"fp8": setup.train.fp8}),
                **({"averaged": True} if setup.train.ema else {}),
            }
        ),
        profile=MappingProxyType(
            {name: _scalar(getattr(setup.cluster, name)) for name in affecting(PLAN, ClusterConfig)}
        ),
    )


def _scalar(value: object) -> Scalar:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def settings(setup: Setup) -> PlanSettings:
    """Collects a run's planner settings. Strategies without a plan, sc and layerwise, are planned as
    canzona."""
    engine = setup.engine
    requested = PlanSettings(
        strategy=engine.strategy if engine.strategy in PLANNED else "canzona",
        splitting=engine.splitting,
        alpha=engine.alpha if engine.strategy == "paper" else 1.0,
        c_max_bytes=None if engine.c_max_mib is None else int(engine.c_max_mib * (1 << 20)),
        reduction=engine.reduction,
        exchange_dtype=engine.exchange_dtype,
        mode=engine.mode,
    )
    return as_published(requested) if requested.strategy == "paper" else requested


def planned_matrices(setup: Setup, layout: Layout, shapes: ModelShapes | None) -> tuple[Matrix, ...]:
    """Lists the matrices that a plan of the run assigns, in the plan's order."""
    if shapes is not None:
        return shapes.matrices(layout)
    return matrices_of(setup.model, layout, setup.engine.splitting)


def attempt(
    setup: Setup, layout: Layout, shapes: ModelShapes | None, memory_cap: int | None, c_max: int | None = None
) -> Plan:
    """Makes the plan that the cost model predicts to be fastest within `memory_cap`.

    For strategy paper with tp > 1, several values of C_max are tried if none is given.

    Args:
        memory_cap: the elements of matrices that a rank may keep; None for no limit.
        c_max: a smaller C_max, in elements, to save memory; None for the C_max of the run's settings.
    """
    return _fastest(setup, layout, _attempts_with(setup, layout, shapes, memory_cap, c_max))


def _fastest(setup: Setup, layout: Layout, attempts: Sequence[Attempt]) -> Plan:
    """Returns the plan of the attempt whose balanced assignment adds the fewest seconds to an iteration."""
    exposure = _exposure(setup, layout)
    best = attempts[0] if len(attempts) == 1 else min(attempts, key=lambda attempt: attempt.seconds(exposure))
    return best.plan(exposure)


def outlined_seconds(setup: Setup, layout: Layout) -> float | None:
    """Estimates the seconds that updates, reductions and gatherings add to an iteration under the fastest plan,
    without making one; returns None if the planner may not choose the size of buckets."""
    run, one_pass = _reusable(setup, layout)
    attempts = _unbounded_attempts(run, one_pass.bare, None)
    return min(attempts[0].outlined_seconds(_exposure(run, one_pass)).values(), default=None)


@lru_cache(maxsize=16)
def _exposure(setup: Setup, layout: Layout) -> Exposure:
    """Returns the estimator of a run's waits. Attempts with the same settings share it."""
    return Exposure(setup, layout)


def _attempts_with(
    setup: Setup, layout: Layout, shapes: ModelShapes | None, memory_cap: int | None, c_max: int | None
) -> list[Attempt]:
    """Prepares attempts with the same arguments as `attempt`, one for each C_max to try."""
    prices = _prices(setup, layout, shapes)
    sizes = [c_max]
    if setup.engine.strategy == "paper" and setup.engine.c_max_mib is None and c_max is None and layout.tp > 1:
        sizes += _capacities(prices.matrices, None)
    plan_subject = subject(setup, layout, shapes)
    resizes = setup.parallel.bucket_elements is None
    return [Attempt(plan_subject, prices, resizes=resizes, memory_cap=memory_cap, c_max=size) for size in sizes]


def _capacities(members: Sequence[Matrix], user_limit: int | None) -> list[int]:
    """Returns the values of C_max to try, in elements and descending: those of `_CAPACITIES` that are below
    `user_limit`, the user's C_max."""
    largest = max(matrix.elements for matrix in members if matrix.expert_rank is None)
    return [times * largest for times in _CAPACITIES if user_limit is None or times * largest < user_limit]


@lru_cache(maxsize=16)
def _prices(setup: Setup, layout: Layout, shapes: ModelShapes | None) -> Prices:
    members = planned_matrices(setup, layout, shapes)
    costs = update_costs(setup, members)
    possible = shared_costs(setup, algorithm_of(setup), layout, members)
    bounds: dict[Hashable, float] = {}
    alike = alike_pools(members)
    kinds = [tuple(first for pool, first in alike.items() if pool.stage == stage) for stage in range(layout.pp)]
    for stage, kind in enumerate(kinds):
        if kind not in bounds:  # most stages are alike
            of_stage = stage_matrices(members, stage)
            bounds[kind] = stage_bound(of_stage, [costs[m.index] for m in of_stage], stage, layout, possible)
    return Prices(
        matrices=members,
        costs=costs,
        bounds=tuple(bounds[kind] for kind in kinds),
        possible=possible,
        pipeline=HostedPipeline.of(planning_config(setup), layout),
    )


def plannable(setup: Setup, explicit: frozenset[str] = frozenset()) -> tuple[Setup, tuple[str, ...]]:
    """Returns the run to plan, and notes for the user.

    A run with a strategy that has no plan, sc or layerwise, is planned as canzona for comparison.

    Args:
        explicit: the keys that the user set.

    Raises:
        ConfigError: the optimizer is AdamW, which updates element by element, so there is nothing to plan.
    """
    execution, strategy = setup.execution, setup.engine.strategy
    if execution is Execution.ADAMW:
        raise ConfigError(
            Problem(
                key="optimizer",
                value="adamw",
                reason="updates element by element (Megatron's DistributedOptimizer), so there are no matrices to plan",
                fix="use optimizer=muon, shampoo or soap; each plan is compared with AdamW",
            )
        )
    notes: tuple[str, ...] = ()
    if "engine.muon_tp_mode" in explicit:
        notes = ("engine.muon_tp_mode is ignored: a plan is compared with all modes of Megatron's Muon",)
    if execution is Execution.PLANNED:
        return setup, notes
    if explicit & {"engine", "engine.strategy"}:
        notes = (
            *notes,
            f"engine.strategy={strategy} has no plan; this is canzona's, for comparison with {strategy}",
        )
    return replace(setup, engine=replace(setup.engine, strategy="canzona")), notes


def plan_of_run(setup: Setup, layout: Layout) -> Plan | None:
    """Makes the plan that a resolved run executes; returns None if the run's strategy has no plan.

    Raises:
        ConfigError, DoesNotFit: see `make_plan`.
    """
    return make_plan(setup, layout) if setup.execution is Execution.PLANNED else None


def make_plan(setup: Setup, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """Makes the plan of a resolved run (see `simulate.fit.resolve`), the same on every rank and node.

    The last 8 plans are cached, because the search for a layout has already made the plan of the chosen
    layout.

    Args:
        shapes: the user's own shapes, which are planned instead of `config.model`; `config.model` is then
            `ModelShapes.stand_in`.

    Raises:
        ConfigError: `engine.c_max_mib` is smaller than the largest matrix, the layout cannot divide the
            matrices (see `model.matrices.matrices`), or the optimizer is AdamW.
        DoesNotFit: no plan was found that keeps every rank within its memory.
    """
    return _make_plan(setup, layout, shapes)


@lru_cache(maxsize=8)
def _make_plan(setup: Setup, layout: Layout, shapes: ModelShapes | None) -> Plan:
    setup, _ = plannable(setup)
    for limit in sorted({capacity(setup) - headroom(setup), capacity(setup)}):
        for plan in _attempts(setup, layout, shapes, limit):
            memory = plan_memory(setup, layout, plan)
            if memory.total <= limit:
                return plan
    raise DoesNotFit(
        Problem(
            key="gpus",
            value=setup.gpus,
            reason=(
                f"{memory.worst.describe(plan.subject.layout)} needs {memory.total / GIB:.2f} GiB under the plan, but "
                f"{setup.cluster.name} has only {memory.capacity / GIB:.2f} GiB to use"
            ),
            fix="use more GPUs, train.recompute=full, or more tensor or pipeline ranks",
        )
    )


def _attempts(setup: Setup, layout: Layout, shapes: ModelShapes | None, limit: int) -> Iterator[Plan]:
    """Yields plans from the fastest to the one that needs the least memory. In mode auto, plans without shared matrices
    follow, because only the buffers of shared matrices may be too large.

    Args:
        limit: the bytes of one GPU that the run may use.
    """
    unbounded = plan_unbounded(setup, layout, shapes)
    algorithm = unbounded.subject.optimizer
    user_limit = unbounded.subject.settings.capacity(setup.exchange_bytes)
    spare = spare_bytes(setup, algorithm, layout, limit)
    counts = Counter(map(attrgetter("shape"), unbounded.matrices))
    for worst_case in (False, True):
        # The elements of matrices that one rank may keep.
        memory_cap = max(1, int(spare / element_bytes(setup, algorithm, counts, worst_case=worst_case)))
        fits = _most_held(unbounded) <= memory_cap
        plan = unbounded if fits else attempt(setup, layout, shapes, memory_cap)
        yield from _with_and_without_rings(plan)
        for c_max in _capacities(unbounded.matrices, user_limit):
            if c_max < _most_received(plan):  # otherwise the plan would be the same
                plan = attempt(setup, layout, shapes, memory_cap, c_max)
                yield from _with_and_without_rings(plan)
    prices = _prices(setup, layout, shapes)
    if setup.engine.mode == "auto" and prices.possible:
        hosted = replace(setup, engine=replace(setup.engine, mode="hosted"))
        for plan in _attempts(hosted, layout, shapes, limit):
            yield replace(plan, subject=subject(setup, layout, shapes), lower_bounds=prices.bounds)


def plan_unbounded(setup: Setup, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """Makes the fastest plan, without a memory limit.

    The last 32 plans are cached. Layouts with the same `Layout.bare` have the same candidates. Their plans
    may still differ, because the choice depends on the times of the forward and backward pass.
    """
    plan = _unbounded(*_reusable(setup, layout), shapes)
    return replace(plan, subject=subject(setup, layout, shapes))


def _reusable(setup: Setup, layout: Layout) -> tuple[Setup, Layout]:
    """Returns the run without its layout settings and what `simulate.possible.fill` completes, and the layout with one
    micro-batch, as arguments of cached functions: the results do not depend on the rest."""
    open_parallel = replace(setup.parallel, tp=None, pp=None, vpp=None, cp=None, ep=None, sequence_parallel=None)
    open_train = replace(setup.train, micro_batch_size=None, global_batch_size=None, recompute=None)
    one_pass = replace(layout, num_microbatches=1, global_batch_size=layout.dp * layout.micro_batch_size)
    any_nodes = setup.cluster if setup.cluster.nodes is None else replace(setup.cluster, nodes=None)
    run = replace(setup, parallel=open_parallel, train=open_train, schedule=ScheduleConfig(), cluster=any_nodes)
    return run, one_pass


@lru_cache(maxsize=32)
def _unbounded(setup: Setup, layout: Layout, shapes: ModelShapes | None) -> Plan:
    return _fastest(setup, layout, _unbounded_attempts(setup, layout.bare, shapes))


@lru_cache(maxsize=16)
def _unbounded_attempts(setup: Setup, layout: Layout, shapes: ModelShapes | None) -> list[Attempt]:
    return _attempts_with(setup, layout, shapes, None, None)


def _most_held(plan: Plan) -> int:
    """Counts the matrix elements on the fullest cell."""
    return max(map(max, plan.held_elements))


def _most_received(plan: Plan) -> int:
    """Counts the most elements that a host receives in one micro-group."""
    received = Counter[tuple[int, int]]()
    for group_index, group in enumerate(plan.groups):
        for matrix in group.matrices:
            received[group_index, plan.assignment.cells[matrix].host] += plan.matrices[matrix].elements
    return max(received.values(), default=0)


def _with_and_without_rings(plan: Plan) -> Iterator[Plan]:
    """Yields the plan, and then, if it has rings that the planner chose, the plan without them, which needs
    less scratch."""
    yield plan
    without_rings = uniform_buckets(plan.buckets, plan.subject.settings)
    if without_rings != plan.buckets:
        yield replace(plan, buckets=without_rings)
