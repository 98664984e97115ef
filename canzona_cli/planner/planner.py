"""From a run to its `Plan`: attempts, until every rank has the memory. No torch, no clock, no chance."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit, Problem
from canzona_cli.model.matrix import Matrix
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.activations import stage_weights, transient
from canzona_cli.planner.attempt import attempt, lower_bounds
from canzona_cli.planner.buckets import FP32, element_bytes
from canzona_cli.planner.cost import algorithm
from canzona_cli.planner.exchange import exchange_bytes
from canzona_cli.planner.memory import GIB, capacity, factor_bytes, least_step_bytes, moment_bytes, plan_memory
from canzona_cli.planner.paper import capacities
from canzona_cli.planner.parts import Cell
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.reduction import ReductionModel
from canzona_cli.planner.subject import planned_matrices, settings, subject


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
            tried = free if whole else attempt(config, layout, shapes, members, memory_cap, c_max_bytes)
            for plan in _with_less(config, layout, tried):
                memory = plan_memory(config, layout, plan)
                if memory.fits:
                    return plan
    if config.engine.mode == "auto":
        # Messages of shared matrices may be what does not fit.
        plan = make_plan(replace(config, engine=replace(config.engine, mode="hosted")), layout, shapes)
        return replace(
            plan, subject=subject(config, layout, shapes), lower_bounds=lower_bounds(config, layout, members)
        )
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
