"""Makes the `Plan` of a run, in attempts that need less and less memory until every rank has enough.

An attempt balances matrices over the grid and shares some where sharing is faster. Of equally fast
assignments it keeps the one with less communication. Buckets and micro-groups follow from the assignment.
Nothing depends on torch, on measured time or on randomness.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from types import MappingProxyType

from canzona_cli.config.execution import PLANNED, Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.settings import affecting
from canzona_cli.costs.buffers import bucket_elements, element_bytes, exchange_bytes, stage_weights, transient
from canzona_cli.costs.memory import GIB, capacity, factor_bytes, least_step_bytes, optimizer_state
from canzona_cli.costs.sharing import HOSTED, Share, shares
from canzona_cli.costs.update import algorithm, rounded, update_costs
from canzona_cli.errors import ConfigError, DoesNotFit, Problem
from canzona_cli.fields import PLAN
from canzona_cli.model.matrices import Matrix
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.assign import assign
from canzona_cli.planner.buckets import buckets, few_owners, in_order_of_reductions, slowest, travel
from canzona_cli.planner.groups import Grouped, best_of, micro_groups
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.packing import lower_bound
from canzona_cli.planner.paper import as_published, capacities
from canzona_cli.planner.pipeline import HostedPipeline, planning
from canzona_cli.planner.plan import Assignment, Bucket, Cell, Plan, PlanSettings, Scalar, Subject
from canzona_cli.planner.reduction import ReductionModel

SHARING_GAIN = 1.03
"""Sharing is considered only if, without it, some stage's busiest rank takes longer than this times the lower
bound."""

ALIKE = 0.001
"""The relative difference in time up to which assignments count as equally fast."""


def subject(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Subject:
    """Collects everything that a run's plan depends on.

    Args:
        shapes: the user's own shapes if these are planned instead of `config.model`.
    """
    model: dict[str, Scalar] = {
        name: value
        for name in affecting(PLAN, "model")
        for value in (getattr(config.model, name),)
        if value or name != "num_experts"  # left out of dense models, so that older plans keep their hashes
    }
    return Subject(
        model=MappingProxyType(model if shapes is None else {"shapes": shapes.digest}),
        layout=layout.mesh,
        optimizer=algorithm(config),
        settings=settings(config),
        buffers=MappingProxyType(
            {
                "bucket_elements": bucket_elements(config, layout),
                "precision": config.train.precision,
                "grad_reduce_dtype": config.train.grad_reduce_dtype,
            }
        ),
        profile=MappingProxyType(
            {
                name: value if value is None or isinstance(value, str | int | float) else json.dumps(value)
                for name in affecting(PLAN, "cluster")
                for value in (getattr(config.cluster, name),)
                if value or name != "bf16_in_fp32"  # left out if false, so that older plans keep their hashes
            }
        ),
    )


def settings(config: RunConfig) -> PlanSettings:
    """Collects a run's planner settings. A run with sc or layerwise, which have no plans, is planned as
    canzona."""
    engine = config.engine
    asked = PlanSettings(
        strategy=engine.strategy if engine.strategy in PLANNED else "canzona",
        layout=engine.layout,
        splitting=engine.splitting,
        alpha=engine.alpha,
        c_max_bytes=None if engine.c_max_mib is None else int(engine.c_max_mib * (1 << 20)),
        grouping=engine.grouping,
        reduction=engine.reduction,
        exchange_dtype=engine.exchange_dtype,
        mode=engine.mode,
    )
    return as_published(asked) if asked.strategy == "paper" else asked


def planned_matrices(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> tuple[Matrix, ...]:
    """Lists the matrices that a plan of the run assigns, in the plan's order."""
    if shapes is not None:
        return shapes.matrices(layout)
    return matrices_of(config.model, layout, config.engine.splitting)


def attempt(
    config: RunConfig,
    layout: Layout,
    shapes: ModelShapes | None,
    members: tuple[Matrix, ...],
    memory_cap: int | None,
    c_max_bytes: int | None = None,
) -> Plan:
    """Makes the fastest plan by the cost model, within `memory_cap`.

    Strategy paper with tp > 1 and no C_max given tries several values of C_max.

    Args:
        members: the matrices of the plan, see `planned_matrices`.
        memory_cap: elements of matrices that a rank may keep; None: no limit.
        c_max_bytes: C_max in bytes, to save memory; None: as the run's settings say.
    """
    sizes: list[int | None] = [c_max_bytes]
    if config.engine.strategy == "paper" and config.engine.c_max_mib is None and c_max_bytes is None and layout.tp > 1:
        sizes += capacities(max(matrix.elements for matrix in members) * max(exchange_bytes(config)), None)
    ways = [_Attempt(config, layout, shapes, members, memory_cap, size) for size in sizes]
    return (ways[0] if len(ways) == 1 else min(ways, key=lambda way: way.seconds())).plan()


@lru_cache(maxsize=16)
def lower_bounds(config: RunConfig, layout: Layout, members: tuple[Matrix, ...]) -> tuple[float, ...]:
    """Computes `Plan.lower_bounds`, in seconds by stage."""
    costs, possible = update_costs(config, members), _possible(config, layout, members)
    return tuple(lower_bound(members, costs, stage, layout.owners, layout.tp, possible) for stage in range(layout.pp))


def _possible(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """Returns the costs of the matrices that may be shared, by index."""
    return HOSTED if config.engine.mode == "hosted" else shares(config, layout, members)


class _Attempt:
    """One attempt at a plan, with a given memory cap and C_max."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        shapes: ModelShapes | None,
        members: tuple[Matrix, ...],
        memory_cap: int | None,
        c_max_bytes: int | None,
    ) -> None:
        self._config, self._layout, self._members, self._memory_cap = config, layout, members, memory_cap
        self._own_shapes = shapes is not None
        self._about = subject(config, layout, shapes)
        asked = self._about.settings
        self._asked = asked if c_max_bytes is None else replace(asked, c_max_bytes=c_max_bytes)
        self._limit = bucket_elements(config, layout)
        self._costs, self._bounds = update_costs(config, members), lower_bounds(config, layout, members)
        self._possible = _possible(config, layout, members)
        self._width = max(exchange_bytes(config))
        self._grouped = Grouped(self._asked, self._width, HostedPipeline.of(planning(config), layout))
        self._model = ReductionModel(config, layout)
        self._laid_out: dict[tuple[Cell, ...], tuple[Bucket, ...]] = {}

    def plan(self) -> Plan:
        assignment = self._with_least_communication(self._shared_where_faster(self._balanced))
        return Plan(
            subject=self._about,
            matrices=self._members,
            costs=self._costs,
            assignment=assignment,
            buckets=self._buckets(assignment),
            groups=micro_groups(self._members, self._costs, assignment, self._grouped),
            lower_bounds=self._bounds,
        )

    def seconds(self) -> float:
        """Returns the exposed seconds of the balanced assignment (`_times`), before any sharing or
        reordering."""
        return self._times(self._balanced)[0]

    @cached_property
    def _balanced(self) -> Assignment:
        """The balanced assignment; it shares nothing unless mode is shared."""
        return self._assigned(self._asked, self._possible if self._asked.mode == "shared" else HOSTED, self._memory_cap)

    def _shared_where_faster(self, hosted: Assignment) -> Assignment:
        """Shares some matrices if mode is auto, `hosted` leaves ranks idle, and sharing is faster."""
        if self._asked.mode != "auto" or not self._possible or not self._leaves_idle(hosted):
            return hosted
        members, costs, layout = self._members, self._costs, self._layout
        balanced = self._assigned(self._asked, self._possible, self._memory_cap)
        best = best_of(members, costs, hosted, balanced, self._possible, layout.tp, self._grouped, self._memory_cap)
        if not best.shares or self._own_shapes:
            return best
        others = [stage_weights(self._config, layout, stage).others for stage in range(layout.pp)]
        gathered = [self._model.gather_evenly(elements) for elements in others]
        # Gathering AdamW's parameters overlaps with the updates and may take longer than they do.
        faster = self._times(hosted, gathered)[0] > (1 + ALIKE) * self._times(best, gathered)[0]
        return best if faster else hosted

    def _with_least_communication(self, assignment: Assignment) -> Assignment:
        """Returns, of several equally fast assignments, the one whose buckets take the least time to
        communicate.

        The candidates are the given assignment, one with units exchanged between owners (`few_owners`), both
        with renumbered owners, and owners in natural order.
        """
        asked, layout = self._asked, self._layout
        if not (asked.strategy == "canzona" and asked.layout == "owner" and asked.alpha == 1 and layout.owners > 1):
            return assignment
        ways = [assignment, few_owners(self._members, self._costs, assignment, layout, self._limit)]
        ways = [in_order_of_reductions(self._members, way, layout, self._limit) for way in ways]
        if self._memory_cap is None and asked.mode != "shared":
            # A balanced assignment may lose more time to communication than its balance gains.
            ways.append(self._assigned(replace(asked, strategy="asc"), HOSTED, None))
        times = [self._times(way) for way in ways]
        least = min(exposed for exposed, _ in times)
        _, best = min((total, n) for n, (exposed, total) in enumerate(times) if exposed <= (1 + ALIKE) * least)
        return ways[best]

    def _assigned(self, asked: PlanSettings, possible: Mapping[int, Share], memory_cap: int | None) -> Assignment:
        return assign(
            self._members,
            [float(matrix.elements) for matrix in self._members] if asked.strategy == "paper" else self._costs,
            self._layout,
            asked,
            memory_cap,
            bucket_elements=self._limit,
            bytes_per_element=self._width,
            shares=possible,
        )

    def _leaves_idle(self, assignment: Assignment) -> bool:
        """Returns True if some stage's busiest rank takes longer than `SHARING_GAIN` times the lower bound."""
        layout = self._layout
        busiest = (
            max(assignment.loads(self._members, self._costs, stage, layout.owners, layout.tp))
            for stage in range(layout.pp)
        )
        return any(busy > SHARING_GAIN * bound for busy, bound in zip(busiest, self._bounds, strict=True))

    def _buckets(self, assignment: Assignment) -> tuple[Bucket, ...]:
        if assignment.cells not in self._laid_out:
            made = buckets(self._members, assignment, self._layout, self._asked, self._limit)
            self._laid_out[assignment.cells] = self._model.choose(made, self._asked, scratch=True)
        return self._laid_out[assignment.cells]

    def _times(self, assignment: Assignment, hidden: Sequence[float] | None = None) -> tuple[float, float]:
        """Returns the exposed seconds of the slowest stage (updates plus the last bucket's reduction and
        gathering), and the seconds in which all buckets are reduced and gathered.

        Args:
            hidden: seconds of communication that overlaps with the updates, by stage; updates count as at
                least as long.
        """
        last_bucket, total = travel(self._buckets(assignment), self._model)
        busy = slowest(self._members, self._costs, assignment, self._grouped)
        if hidden is not None:
            busy = {stage: max(seconds, hidden[stage]) for stage, seconds in busy.items()}
        return rounded(max(busy[stage] + last_bucket[stage] for stage in busy)), rounded(total)


def plannable(config: RunConfig, explicit: frozenset[str] = frozenset()) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run to plan and notes for the user.

    sc and layerwise have no plans: a run with one of them is planned as canzona, for comparison.

    Args:
        explicit: keys that the user set.

    Raises:
        ConfigError: the optimizer is AdamW, which updates element by element, so there is nothing to plan.
    """
    execution, strategy = execution_of(config), config.engine.strategy
    if execution is Execution.ADAMW:
        raise ConfigError(
            Problem(
                key="optimizer",
                value="adamw",
                reason="updates element by element (Megatron's DistributedOptimizer), so there are no matrices to plan",
                fix="use optimizer=muon, shampoo or soap; each plan is compared with AdamW",
            )
        )
    if execution is Execution.PLANNED:
        return config, ()
    notes: tuple[str, ...] = ()
    if explicit & {"engine", "engine.strategy"}:
        notes = (f"engine.strategy={strategy} has no plan; this is canzona's, for comparison with {strategy}",)
    return replace(config, engine=replace(config.engine, strategy="canzona")), notes


def plan_of_run(config: RunConfig, layout: Layout) -> Plan | None:
    """Makes the plan that a resolved run executes; None if the run's strategy has no plan.

    Raises:
        ConfigError, DoesNotFit: as `make_plan`.
    """
    return make_plan(config, layout) if execution_of(config) is Execution.PLANNED else None


def make_plan(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """Makes the plan of a resolved run (see `cluster.fit.resolve`); it is the same on every rank and node.

    The last 8 plans are cached, because the search for a layout has already planned the layout it chose.

    Args:
        shapes: the user's own shapes, planned instead of `config.model` (which is then their `stand_in`).

    Raises:
        ConfigError: `engine.c_max_mib` is smaller than the largest matrix, tp does not divide a dimension
            evenly, or the optimizer is AdamW.
        DoesNotFit: no assignment keeps every rank within its memory.
    """
    return _make_plan(config, layout, shapes)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    config, _ = plannable(config)
    members, engine = planned_matrices(config, layout, shapes), config.engine
    # The buffers of shared matrices may be what does not fit, so mode auto falls back to hosted.
    for mode in (engine.mode, "hosted") if engine.mode == "auto" else (engine.mode,):
        run = replace(config, engine=replace(engine, mode=mode))
        for plan in _attempts(run, layout, shapes, members):
            memory = plan_memory(run, layout, plan)
            if not memory.fits:
                continue
            if mode == engine.mode:
                return plan
            about, bounds = subject(config, layout, shapes), lower_bounds(config, layout, members)
            return replace(plan, subject=about, lower_bounds=bounds)
    raise DoesNotFit(
        Problem(
            key="gpus",
            value=config.gpus,
            reason=(
                f"{memory.worst.describe(plan.subject.layout)} needs {memory.total / GIB:.2f} GiB under the plan, but "
                f"{config.cluster.name} has only {memory.capacity / GIB:.2f} GiB to use"
            ),
            fix="use more GPUs, train.recompute=full, or more tensor or pipeline ranks",
        )
    )


def _attempts(
    config: RunConfig, layout: Layout, shapes: ModelShapes | None, members: tuple[Matrix, ...]
) -> Iterator[Plan]:
    """Yields plans that need less and less memory, the fastest first."""
    free = plan_unbounded(config, layout, shapes)
    for careful in (False, True):
        memory_cap = _memory_cap(config, layout, members, careful=careful)
        roomy = _most_held(free) <= memory_cap
        for c_max_bytes in _capacities(config, layout, members):
            # Under a memory cap that does not bind, the plan is the one made without a cap.
            reusable = roomy and c_max_bytes is None
            yield from _with_less(
                config, layout, free if reusable else attempt(config, layout, shapes, members, memory_cap, c_max_bytes)
            )


def plan_unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """Makes a plan without a memory limit, for comparisons and for runs with enough memory.

    The last 32 plans are cached; layouts with the same `Layout.bare` share a plan except for its subject.
    """
    open_parallel = replace(config.parallel, tp=None, pp=None, vpp=None, cp=None, sequence_parallel=None)
    open_train = replace(config.train, micro_batch_size=None, global_batch_size=None, recompute=None)
    plan = _unbounded(replace(config, parallel=open_parallel, train=open_train), layout.bare, shapes)
    return replace(plan, subject=subject(config, layout, shapes))


@lru_cache(maxsize=32)
def _unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    return attempt(config, layout, shapes, planned_matrices(config, layout, shapes), None)


def _most_held(plan: Plan) -> int:
    """Counts the elements of matrices on the cell that keeps most."""
    held: Counter[tuple[int, Cell]] = Counter()
    tp, shared = plan.subject.layout.tp, plan.assignment.shares
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        for keeper, elements in cell.held(matrix, tp, shared=matrix.index in shared):
            held[matrix.stage, keeper] += elements
    return max(held.values())


def _with_less(config: RunConfig, layout: Layout, plan: Plan) -> Iterator[Plan]:
    """Yields the plan, then the plan without rings that the planner chose itself, whose scratch takes memory."""
    yield plan
    without = ReductionModel(config, layout).choose(plan.buckets, plan.subject.settings, scratch=False)
    if without != plan.buckets:
        yield replace(plan, buckets=without)


def _capacities(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Iterator[int | None]:
    """Yields C_max of `make_plan`'s attempts in bytes: first None (as the settings say), then smaller and
    smaller, down to the largest matrix."""
    yield None
    largest = max(matrix.elements for matrix in members) * max(exchange_bytes(config))
    yield from capacities(largest, settings(config).c_max_bytes)


def _memory_cap(config: RunConfig, layout: Layout, members: Sequence[Matrix], *, careful: bool) -> int:
    """Returns the elements of matrices that one rank may keep: the free memory of the fullest stage divided
    by the bytes of state per element.

    Args:
        careful: preconditioners take more bytes per element for some shapes than for others. True to count
            the most of any matrix, False to count the mean over all matrices.
    """
    how = algorithm(config)
    shares = [(factor_bytes(how, matrix.rows, matrix.cols), matrix.elements) for matrix in members]
    if careful:
        factors = max(size / elements for size, elements in shares)
    else:
        factors = sum(size for size, _ in shares) / sum(elements for _, elements in shares)
    state = sum(optimizer_state(config, layout, others=0, whole=1, factors=0).values()) + factors
    left = []
    for stage in range(layout.pp):
        weights = stage_weights(config, layout, stage)
        adamw = sum(optimizer_state(config, layout, weights.others, whole=0, factors=0).values())
        stored = sum(element_bytes(config)) * (weights.matrices + weights.others)
        needed = least_step_bytes(config, layout, stage) + sum(transient(config, layout, stage).parts().values())
        left.append(capacity(config) - stored - adamw - needed)
    return max(1, int(min(left) / state))
