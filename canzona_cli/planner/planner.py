"""From a run to its `Plan`: matrices, costs, owners and hosts, buckets, micro-groups. No torch, no clock, no chance."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.schema.field import PLAN
from canzona_cli.config.settings import affecting
from canzona_cli.errors import ConfigError, DoesNotFit, Problem, refuse
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrix import Matrix
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.activations import stage_weights, transient
from canzona_cli.planner.assign import assign
from canzona_cli.planner.buckets import FP32, bucket_elements, buckets, element_bytes
from canzona_cli.planner.cost import Implementation, algorithm, impossible_measurements, rounded, seconds
from canzona_cli.planner.exchange import exchange_bytes
from canzona_cli.planner.memory import GIB, capacity, factor_bytes, least_step_bytes, moment_bytes, plan_memory
from canzona_cli.planner.micro_groups import Grouped, micro_groups
from canzona_cli.planner.modes import best_of
from canzona_cli.planner.packing import lower_bound
from canzona_cli.planner.parts import HOSTED, Assignment, Bucket, Cell, Mesh, PlanSettings, Scalar, Share, Subject
from canzona_cli.planner.pipeline import HostedPipeline, planning
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import ReductionModel
from canzona_cli.planner.sharing import shares, shares_by_rows
from canzona_cli.planner.travel import few_owners, slowest, travel

SHARING_GAIN = 1.03
"""Nothing is shared where the busiest rank without it is busy for at most this times what any plan takes."""

ALIKE = 0.001
"""Of assignments whose steps are longer by at most this part the one is taken whose buckets travel for least."""


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
    """The plan of a resolved run (see `cluster.fit.resolve`); the same on every rank, machine and Python process.

    The last few are kept, for whoever chooses a layout has planned it already.

    Args:
        shapes: the user's own, planned instead of `config.model` (which is then their `stand_in`).

    Raises:
        ConfigError: `engine.c_max_mib` is smaller than the largest matrix, or a dimension that tp does not cut evenly.
        DoesNotFit: no assignment keeps every rank within its memory.
    """
    return _make_plan(config, layout, shapes)


@lru_cache(maxsize=8)
def _make_plan(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    config, _ = plannable(config)
    members = planned_matrices(config, layout, shapes)
    free = plan_unbounded(config, layout, shapes)
    for careful in (False, True):
        memory_cap = _memory_cap(config, layout, members, careful=careful)
        roomy = _most_held(free) <= memory_cap
        for c_max_bytes in _capacities(config, layout, members):
            # Most layouts have the memory, and then how much changes nothing.
            whole = roomy and c_max_bytes is None
            tried = free if whole else _plan(config, layout, shapes, members, memory_cap, c_max_bytes)
            for plan in _with_less(config, layout, tried):
                memory = plan_memory(config, layout, plan)
                if memory.fits:
                    return plan
    if config.engine.mode == "auto":
        # Messages of shared matrices may be what does not fit.
        plan = make_plan(replace(config, engine=replace(config.engine, mode="hosted")), layout, shapes)
        return replace(plan, subject=subject(config, layout, shapes), lower_bounds=_bounds(config, layout, members))
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


def plan_unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Plan:
    """As `make_plan`, whatever memory it takes: for comparisons, and where there is enough.

    The last few are kept: but for its subject it is the same for every `Layout.bare`.
    """
    open_parallel = replace(config.parallel, tp=None, pp=None, vpp=None, cp=None, sequence_parallel=None)
    open_train = replace(config.train, micro_batch_size=None, global_batch_size=None, recompute=None)
    found = _unbounded(replace(config, parallel=open_parallel, train=open_train), layout.bare, shapes)
    return replace(found, subject=subject(config, layout, shapes))


@lru_cache(maxsize=32)
def _unbounded(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> Plan:
    return _plan(config, layout, shapes, planned_matrices(config, layout, shapes), None)


def _most_held(plan: Plan) -> int:
    """Elements of the matrices of one cell."""
    held: Counter[tuple[int, Cell]] = Counter()
    tp, shared = plan.subject.layout.tp, plan.assignment.shares
    for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True):
        for one, elements in cell.held(matrix, tp, shared=matrix.index in shared):
            held[matrix.stage, one] += elements
    return max(held.values())


def subject(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Subject:
    """The subject of the plan for a run.

    Args:
        shapes: the user's own, where these are planned instead of `config.model`.
    """
    model: dict[str, Scalar] = {name: getattr(config.model, name) for name in affecting(PLAN, "model")}
    return Subject(
        model=MappingProxyType(model if shapes is None else {"shapes": shapes.digest}),
        layout=Mesh.of(layout),
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
            }
        ),
    )


def settings(config: RunConfig) -> PlanSettings:
    """What the planner is asked for. Only asc and canzona have plans; sc and layerwise are compared with canzona's."""
    engine = config.engine
    return PlanSettings(
        strategy="asc" if engine.strategy == "asc" else "canzona",
        layout=engine.layout,
        splitting=engine.splitting,
        alpha=engine.alpha,
        c_max_bytes=None if engine.c_max_mib is None else int(engine.c_max_mib * (1 << 20)),
        grouping=engine.grouping,
        reduction=engine.reduction,
        exchange_dtype=engine.exchange_dtype,
        mode=engine.mode,
    )


def update_costs(
    config: RunConfig, members: Sequence[Matrix], implementation: Implementation = "canzona"
) -> tuple[float, ...]:
    """Seconds of each matrix's update, `rounded`.

    Raises:
        ConfigError: the profile has measurements that no such device could reach.
    """
    how = algorithm(config)
    refuse(impossible_measurements(how, config.cluster))
    by_shape = {
        shape: rounded(seconds(how, *shape, config.cluster, implementation))
        for shape in {(matrix.rows, matrix.cols): None for matrix in members}
    }
    return tuple(by_shape[matrix.rows, matrix.cols] for matrix in members)


def planned_matrices(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> tuple[Matrix, ...]:
    """What a plan of the run assigns, in its order."""
    if shapes is not None:
        return shapes.matrices(layout)
    return matrices_of(config.model, layout, config.engine.splitting)


def _plan(
    config: RunConfig,
    layout: Layout,
    shapes: ModelShapes | None,
    members: tuple[Matrix, ...],
    memory_cap: int | None,
    c_max_bytes: int | None = None,
) -> Plan:
    """A plan; with `c_max_bytes` one that saves memory: groups of at most that."""
    about = subject(config, layout, shapes)
    mesh, asked, limit = about.layout, about.settings, bucket_elements(config, layout)
    costs = update_costs(config, members)
    width = max(exchange_bytes(config))
    frugal = asked if c_max_bytes is None else replace(asked, c_max_bytes=c_max_bytes)

    def assigned(possible: Mapping[int, Share]) -> Assignment:
        return assign(
            members, costs, layout, asked, memory_cap, bucket_elements=limit, bytes_per_element=width, shares=possible
        )

    model = ReductionModel(config, layout)
    grouped = Grouped(frugal, width, HostedPipeline.of(planning(config), layout))

    laid_out: dict[tuple[Cell, ...], tuple[Bucket, ...]] = {}

    def bucketed(assignment: Assignment) -> tuple[Bucket, ...]:
        if assignment.cells not in laid_out:
            found = buckets(members, assignment, layout, asked, limit)
            laid_out[assignment.cells] = model.choose(found, asked, scratch=True)
        return laid_out[assignment.cells]

    def price(assignment: Assignment, hidden: Sequence[float] = (0.0,) * mesh.pp) -> tuple[float, float]:
        """Seconds that nothing hides, of updates at least what is `hidden` under them; and of all buckets' travel."""
        unhidden, whole = travel(bucketed(assignment), model)
        busy = {stage: max(own, hidden[stage]) for stage, own in slowest(members, costs, assignment, grouped).items()}
        return rounded(max(busy[stage] + unhidden[stage] for stage in busy)), rounded(whole)

    possible, bounds = _possible(config, layout, members), _bounds(config, layout, members)
    assignment = assigned(possible if asked.mode in ("shared", "rows") else HOSTED)
    busiest = [max(assignment.loads(members, costs, stage, mesh.owners, mesh.tp)) for stage in range(mesh.pp)]
    if (
        asked.mode == "auto"
        and possible
        and any(busy > SHARING_GAIN * bound for busy, bound in zip(busiest, bounds, strict=True))
    ):
        balanced = assigned(possible)
        by_rows = shares_by_rows(config, layout, members)
        hosted = assignment
        assignment = best_of(members, costs, hosted, balanced, possible, by_rows, layout.tp, grouped, memory_cap)
        if assignment.shares and shapes is None:
            gathered = [model.gather_evenly(stage_weights(config, layout, stage).others) for stage in range(mesh.pp)]
            if price(hosted, gathered)[0] <= (1 + ALIKE) * price(assignment, gathered)[0]:
                assignment = hosted  # AdamW's parameters, gathered under the updates, take longer than either
    if asked.strategy == "canzona" and asked.layout == "owner" and asked.alpha == 1 and mesh.owners > 1:
        ways = [assignment, few_owners(members, costs, assignment, layout, limit)]
        if memory_cap is None and asked.mode not in ("shared", "rows"):
            # Balanced for its own sake an assignment may travel for longer than that gains.
            natural = replace(asked, strategy="asc")
            ways.append(assign(members, costs, layout, natural, bucket_elements=limit, bytes_per_element=width))
        prices = [price(way) for way in ways]
        least = min(seconds for seconds, _ in prices)
        _, best = min((whole, n) for n, (seconds, whole) in enumerate(prices) if seconds <= (1 + ALIKE) * least)
        assignment = ways[best]
    return Plan(
        subject=about,
        matrices=members,
        costs=costs,
        assignment=assignment,
        buckets=bucketed(assignment),
        groups=micro_groups(members, costs, assignment, grouped),
        lower_bounds=bounds,
    )


def _possible(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> Mapping[int, Share]:
    """What may be shared."""
    if config.engine.mode == "hosted":
        return HOSTED
    return (shares_by_rows if config.engine.mode == "rows" else shares)(config, layout, members)


def _bounds(config: RunConfig, layout: Layout, members: Sequence[Matrix]) -> tuple[float, ...]:
    """By stage."""
    costs, possible = update_costs(config, members), _possible(config, layout, members)
    by_rows = shares_by_rows(config, layout, members) if config.engine.mode == "auto" else HOSTED
    return tuple(
        lower_bound(members, costs, stage, layout.owners, layout.tp, possible, by_rows) for stage in range(layout.pp)
    )


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
    asked = settings(config).c_max_bytes
    for times in (8, 4, 2, 1):
        if asked is None or times * largest < asked:
            yield times * largest


def _memory_cap(config: RunConfig, layout: Layout, members: Sequence[Matrix], *, careful: bool) -> int:
    """Elements of whole matrices one rank may hold: what the fullest stage leaves, over an element's bytes of state.

    Preconditioners differ by shape: careless counts their mean over all matrices, `careful` the shape with most.
    """
    how = algorithm(config)
    shares = [(factor_bytes(how, matrix.rows, matrix.cols), matrix.elements) for matrix in members]
    if careful:
        factors = max(size / elements for size, elements in shares)
    else:
        factors = sum(size for size, _ in shares) / sum(elements for _, elements in shares)
    width, grad = element_bytes(config)
    master = FP32 if config.train.precision == "bf16" else 0
    state = FP32 + moment_bytes(how) + factors
    left = []
    for stage in range(layout.pp):
        weights = stage_weights(config, layout, stage)
        adamw = -(-weights.others // layout.owners) * (master + 2 * FP32)
        stored = (width + grad) * (weights.matrices + weights.others)
        needed = least_step_bytes(config, layout, stage) + sum(transient(config, layout, stage).parts().values())
        left.append(capacity(config) - stored - adamw - needed)
    return max(1, int(min(left) / state))
