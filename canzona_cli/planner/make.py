"""The way from a run to its `Plan`: attempts, until every rank has the memory.

An attempt balances whole matrices and shares some where that is faster; of equally fast assignments it keeps
the one with less communication. Buckets and micro-groups follow. No torch, no clock, no chance.
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
"""Nothing is shared where the busiest rank without it is busy for at most this times what any plan takes."""

ALIKE = 0.001
"""The share of a step by which assignments may be longer and still be preferred for less communication."""


def subject(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Subject:
    """The subject of the plan for a run.

    Args:
        shapes: the user's own, where these are planned instead of `config.model`.
    """
    model: dict[str, Scalar] = {name: getattr(config.model, name) for name in affecting(PLAN, "model")}
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
                if value or name != "bf16_in_fp32"  # without it plans have the hash they had before there was one
            }
        ),
    )


def settings(config: RunConfig) -> PlanSettings:
    """Reads what a run asks of the planner. sc and layerwise have no plans;
    they are compared with canzona's."""
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
    """Lists the matrices that a plan of the run assigns, in its order."""
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
    """The plan that is done first, as far as prices are right.

    Args:
        members: the matrices of the plan, see `planned_matrices`.
        memory_cap: elements of matrices that a rank may keep.
        c_max_bytes: the capacity in bytes of micro-groups, where smaller ones save memory; None: as asked.
    """
    sizes: list[int | None] = [c_max_bytes]
    if config.engine.strategy == "paper" and config.engine.c_max_mib is None and c_max_bytes is None and layout.tp > 1:
        sizes += capacities(max(matrix.elements for matrix in members) * max(exchange_bytes(config)), None)
    ways = [_Attempt(config, layout, shapes, members, memory_cap, size) for size in sizes]
    return (ways[0] if len(ways) == 1 else min(ways, key=lambda way: way.seconds())).plan()


@lru_cache(maxsize=16)
def lower_bounds(config: RunConfig, layout: Layout, members: tuple[Matrix, ...]) -> tuple[float, ...]:
    """`Plan.lower_bounds`."""
    costs, possible = update_costs(config, members), _possible(config, layout, members)
    return tuple(lower_bound(members, costs, stage, layout.owners, layout.tp, possible) for stage in range(layout.pp))


def _possible(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """Returns the prices of the matrices that may be shared."""
    return HOSTED if config.engine.mode == "hosted" else shares(config, layout, members)


class _Attempt:
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
        assignment = self._that_travels_least(self._shared_where_sooner(self._balanced))
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
        """Prices the part of the plan that nothing hides, without sharing."""
        return self._price(self._balanced)[0]

    @cached_property
    def _balanced(self) -> Assignment:
        """Owner and host of every matrix; nothing is shared unless all is to be."""
        return self._assigned(self._asked, self._possible if self._asked.mode == "shared" else HOSTED, self._memory_cap)

    def _shared_where_sooner(self, hosted: Assignment) -> Assignment:
        """Shares some matrices where modes are free and whole matrices leave ranks idle."""
        if self._asked.mode != "auto" or not self._possible or not self._leaves_idle(hosted):
            return hosted
        members, costs, layout = self._members, self._costs, self._layout
        balanced = self._assigned(self._asked, self._possible, self._memory_cap)
        best = best_of(members, costs, hosted, balanced, self._possible, layout.tp, self._grouped, self._memory_cap)
        if not best.shares or self._own_shapes:
            return best
        others = [stage_weights(self._config, layout, stage).others for stage in range(layout.pp)]
        gathered = [self._model.gather_evenly(elements) for elements in others]
        # AdamW's parameters, gathered under the updates, may take longer than either.
        sooner = self._price(hosted, gathered)[0] > (1 + ALIKE) * self._price(best, gathered)[0]
        return best if sooner else hosted

    def _that_travels_least(self, assignment: Assignment) -> Assignment:
        """Keeps the balance but changes owners, or takes natural order,
        where buckets then travel for less."""
        asked, layout = self._asked, self._layout
        if not (asked.strategy == "canzona" and asked.layout == "owner" and asked.alpha == 1 and layout.owners > 1):
            return assignment
        ways = [assignment, few_owners(self._members, self._costs, assignment, layout, self._limit)]
        ways = [in_order_of_reductions(self._members, way, layout, self._limit) for way in ways]
        if self._memory_cap is None and asked.mode != "shared":
            # Balanced for its own sake an assignment may travel for longer than that gains.
            ways.append(self._assigned(replace(asked, strategy="asc"), HOSTED, None))
        prices = [self._price(way) for way in ways]
        least = min(seconds for seconds, _ in prices)
        _, best = min((whole, n) for n, (seconds, whole) in enumerate(prices) if seconds <= (1 + ALIKE) * least)
        return ways[best]

    def _assigned(self, asked: PlanSettings, possible: Mapping[int, Share], memory_cap: int | None) -> Assignment:
        return assign(
            self._members,
            [float(one.elements) for one in self._members] if asked.strategy == "paper" else self._costs,
            self._layout,
            asked,
            memory_cap,
            bucket_elements=self._limit,
            bytes_per_element=self._width,
            shares=possible,
        )

    def _leaves_idle(self, assignment: Assignment) -> bool:
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

    def _price(self, assignment: Assignment, hidden: Sequence[float] | None = None) -> tuple[float, float]:
        """Seconds that nothing hides, of updates at least what is `hidden` under them (by stage); and of all
        buckets' travel."""
        unhidden, whole = travel(self._buckets(assignment), self._model)
        busy = slowest(self._members, self._costs, assignment, self._grouped)
        if hidden is not None:
            busy = {stage: max(seconds, hidden[stage]) for stage, seconds in busy.items()}
        return rounded(max(busy[stage] + unhidden[stage] for stage in busy)), rounded(whole)


def plannable(config: RunConfig, explicit: frozenset[str] = frozenset()) -> tuple[RunConfig, tuple[str, ...]]:
    """The run as it is planned, and what to tell the user about that.

    sc and layerwise have no plan of ours; a run of theirs is planned as canzona, and compared with them.

    Raises:
        ConfigError: AdamW updates element by element, there is nothing to plan.
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
        notes = (f"engine.strategy={strategy} needs no plan; this is canzona's, compared with {strategy}",)
    return replace(config, engine=replace(config.engine, strategy="canzona")), notes


def make_plan(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """The plan of a resolved run (see `cluster.fit.resolve`); the same on every rank,
    machine and Python process.

    The last few are kept, for whoever chooses a layout has planned it already.

    Args:
        shapes: the user's own, planned instead of `config.model` (which is then their `stand_in`).

    Raises:
        ConfigError: `engine.c_max_mib` is smaller than the largest matrix, or a dimension that tp does not
            cut evenly.
        DoesNotFit: no assignment keeps every rank within its memory.
    """
    return _make_plan(config, layout, shapes)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    config, _ = plannable(config)
    members, engine = planned_matrices(config, layout, shapes), config.engine
    # Messages of shared matrices may be what does not fit.
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
    """Yields plans that need less and less memory."""
    free = plan_unbounded(config, layout, shapes)
    for careful in (False, True):
        memory_cap = _memory_cap(config, layout, members, careful=careful)
        roomy = _most_held(free) <= memory_cap
        for c_max_bytes in _capacities(config, layout, members):
            # Most layouts have the memory, and then how much changes nothing.
            whole = roomy and c_max_bytes is None
            yield from _with_less(
                config, layout, free if whole else attempt(config, layout, shapes, members, memory_cap, c_max_bytes)
            )


def plan_unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """Makes a plan whatever memory it takes: for comparisons, and where there is enough.

    The last few are kept: but for its subject it is the same for every `Layout.bare`.
    """
    open_parallel = replace(config.parallel, tp=None, pp=None, vpp=None, cp=None, sequence_parallel=None)
    open_train = replace(config.train, micro_batch_size=None, global_batch_size=None, recompute=None)
    plan = _unbounded(replace(config, parallel=open_parallel, train=open_train), layout.bare, shapes)
    return replace(plan, subject=subject(config, layout, shapes))


@lru_cache(maxsize=32)
def _unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    return attempt(config, layout, shapes, planned_matrices(config, layout, shapes), None)


def _most_held(plan: Plan) -> int:
    """Elements of the matrices of one cell."""
    held: Counter[tuple[int, Cell]] = Counter()
    tp, shared = plan.subject.layout.tp, plan.assignment.shares
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        for one, elements in cell.held(matrix, tp, shared=matrix.index in shared):
            held[matrix.stage, one] += elements
    return max(held.values())


def _with_less(config: RunConfig, layout: Layout, plan: Plan) -> Iterator[Plan]:
    """The plan, and the same whose buckets need no memory on their way that nobody asked for."""
    yield plan
    without = ReductionModel(config, layout).choose(plan.buckets, plan.subject.settings, scratch=False)
    if without != plan.buckets:
        yield replace(plan, buckets=without)


def _capacities(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Iterator[int | None]:
    """C_max of `make_plan`'s attempts: what was asked for or nothing, then down to the largest matrix."""
    yield None
    largest = max(matrix.elements for matrix in members) * max(exchange_bytes(config))
    yield from capacities(largest, settings(config).c_max_bytes)


def _memory_cap(config: RunConfig, layout: Layout, members: Sequence[Matrix], *, careful: bool) -> int:
    """Elements of whole matrices one rank may hold: what the fullest stage leaves,
    over an element's bytes of state.

    Preconditioners differ by shape: careless counts their mean over all matrices, `careful` the shape with
    most.
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
