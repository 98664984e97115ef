"""Predicts the step of a resolved run. This module is the entry point of the simulator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Final

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.costs.padding import lay_out
from canzona_cli.core.costs.update import update_costs, update_times
from canzona_cli.core.host import cores
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.buckets import (
    Pool,
    alike_pools,
    copy_buckets,
    even_bucket,
    pool_matrices,
    pool_parameters,
)
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.core.planner.plan import Assignment, Bucket, Cell, Plan, SameObject
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.core.setup.execution import AnyStrategy, splitting_of, strategy_of, with_strategy
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.core.simulate.step import StrategyResult, simulate
from canzona_cli.core.simulate.update import Workload


def predict(setup: Setup, layout: Layout, plan: Plan | None) -> Prediction:
    """Predicts the step of a resolved run on its cluster profile.

    Args:
        plan: the run's plan for strategies canzona, paper and asc; None for other strategies.
    """
    setup = with_cores(setup)
    result = simulate_run(setup, layout, plan)
    return Prediction(
        strategy=result.strategy,
        profile=setup.cluster.name,
        calibrated=setup.cluster.calibrated,
        iteration_s=result.iteration_s,
        optimizer_s=result.optimizer_s,
        phases=dict(result.mean_phases),
        cores=setup.cluster.cores if setup.cluster.device == "cpu" else None,
        load_balance=result.update_balance,
        memory_bytes=memory_of(setup, layout, plan).total,
        events=result.events,
    )


def simulate_run(setup: Setup, layout: Layout, plan: Plan | None) -> StrategyResult:
    """Simulates one iteration of a resolved run, with a plan or without (see `predict`)."""
    if plan is not None:
        return simulate_plan(setup, layout, plan)
    strategy = strategy_of(setup)
    if strategy == "adamw":
        return simulate_strategy(setup, layout, strategy, ())
    return simulate_strategy(setup, layout, strategy, matrices_of(setup.model, layout, splitting_of(setup)))


def simulate_plan(setup: Setup, layout: Layout, plan: Plan) -> StrategyResult:
    """Simulates one iteration under a plan.

    The last 8 results are cached, because the search for a layout has already simulated the plan of the chosen
    layout.
    """
    return _simulate_plan(setup, layout, SameObject(plan))


@lru_cache(maxsize=8)
def _simulate_plan(setup: Setup, layout: Layout, key: SameObject[Plan]) -> StrategyResult:
    plan = key.value
    workload = Workload(
        strategy=plan.subject.settings.strategy,
        matrices=plan.matrices,
        costs=plan.costs,
        times=update_times(with_strategy(setup, plan.subject.settings.strategy), plan.matrices),
        assignment=plan.assignment,
        buckets=plan.buckets,
        groups=plan.groups,
    )
    return simulate(setup, layout, workload)


def simulate_strategy(
    setup: Setup, layout: Layout, strategy: AnyStrategy, matrices: Sequence[Matrix]
) -> StrategyResult:
    """Simulates one iteration of a strategy without a plan: layerwise, sc or adamw.

    Args:
        matrices: the matrices that the strategy updates; ignored for adamw.
    """
    return simulate(setup, layout, workload_without_plan(setup, layout, strategy, matrices))


def workload_without_plan(setup: Setup, layout: Layout, strategy: AnyStrategy, matrices: Sequence[Matrix]) -> Workload:
    """Returns the work of a strategy without a plan: layerwise, sc or adamw."""
    if strategy == "adamw":
        return Workload(strategy=strategy)
    configured = with_strategy(setup, strategy)
    times = update_times(configured, matrices)
    costs = update_costs(configured, matrices)
    workload = Workload(strategy=strategy, matrices=matrices, costs=costs, times=times)
    if strategy != "layerwise":
        return workload
    assignment, buckets = assign_layerwise(matrices, layout, bucket_elements(setup, layout))
    return replace(workload, assignment=assignment, buckets=buckets)


def assign_layerwise(
    matrices: Sequence[Matrix], layout: Layout, bucket_elements: int | None
) -> tuple[Assignment, tuple[Bucket, ...]]:
    """Returns the owners and buckets of `LayerWiseDistributedOptimizer` in megatron-core 0.19. Of the buckets of
    experts, only those of the first expert-parallel rank are included.

    Whole parameters are packed into shards, which are padded to equal sizes (`lay_out`). Experts that are
    divided among ranks have separate buffers, and their cells are those of the ranks that store them. All
    other matrices get host 0, a placeholder: every TP rank of the owner updates all of the owner's matrices.

    Args:
        bucket_elements: the size at which Megatron closes a bucket of the first stage; None for one bucket
            per model chunk.
    """
    cells = [Cell(owner=0, host=0)] * len(matrices)
    buckets: list[Bucket] = []
    bucket_counts = Counter[int]()
    members, alike = pool_matrices(matrices), alike_pools(matrices)
    laid_out: dict[Pool, tuple[list[int], list[Bucket]]] = {}
    """The owner of each matrix, and the buckets, of the first of several alike pools."""
    cells_of: dict[int | None, list[Cell]] = {}
    """The cell of each owner, by `Pool.expert_rank`: alike stages have the same objects."""
    for pool, matrices_of_pool in members.items():
        first = alike[pool]
        if first not in laid_out:
            laid_out[first] = _lay_out_layerwise(matrices, first, layout, bucket_elements)
        owners, of_pool = laid_out[first]
        if pool.expert_rank not in cells_of:
            cells_of[pool.expert_rank] = [
                pool.cell(owner, layout) for owner in range(layout.reducers(pool.expert_rank))
            ]
        cell_of = cells_of[pool.expert_rank]
        for matrix, owner in zip(matrices_of_pool, owners, strict=True):
            cells[matrix.index] = cell_of[owner]
        if pool.expert_rank in (None, 0):
            buckets += copy_buckets(of_pool, members[first], matrices_of_pool, pool, bucket_counts[pool.stage])
            bucket_counts[pool.stage] += len(of_pool)
    return Assignment(cells=tuple(cells)), tuple(buckets)


def _lay_out_layerwise(
    matrices: Sequence[Matrix], pool: Pool, layout: Layout, bucket_elements: int | None
) -> tuple[list[int], list[Bucket]]:
    """Returns the owner of each matrix of a pool, and the pool's buckets (see `assign_layerwise`)."""
    owner_of: dict[int, int] = {}
    buckets: list[Bucket] = []
    for model_chunk in reversed(range(layout.vpp)):
        parameters = [p for p in pool_parameters(matrices, pool, layout.tp) if p.chunk == model_chunk]
        sizes, limit = [parameter.elements for parameter in parameters], bucket_elements if pool.stage == 0 else None
        for bucket in lay_out(sizes, layout.reducers(pool.expert_rank), limit):
            shards = [[parameters[index] for index in shard] for shard in bucket.shards]
            for owner, parameters_of_owner in enumerate(shards):
                owner_of |= {index: owner for parameter in parameters_of_owner for index in parameter.matrices}
            buckets.append(even_bucket(shards, pool))
    return [owner_of[matrix.index] for matrix in pool_matrices(matrices)[pool]], buckets


def with_cores(setup: Setup) -> Setup:
    """Returns `setup` with this machine's number of cores if its CPU profile does not have one.

    Only predictions use the result; plans and layouts do not depend on the cores of this machine.
    """
    cluster = setup.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return setup
    return replace(setup, cluster=replace(cluster, cores=cores()))


LABELS: Final = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tensor_s": "TP, CP and EP exchanges",
    "pipeline_s": "pipeline",
    "reduce_s": "gradient reduction",
    "gather_s": "parameter gathering",
    "update_s": "updates",
    "other_s": "other",
}
"""The labels of the fields of `IterationParts` in reports."""


@dataclass(frozen=True, kw_only=True)
class IterationParts:
    """The parts of the slowest rank's iteration, in seconds."""

    compute_s: float
    """The forward and backward passes, excluding `recompute_s` and `tensor_s`."""
    recompute_s: float
    """The forward work that is repeated in backward passes."""
    tensor_s: float
    """The collectives of tensor, context and expert parallelism in forward and backward."""
    pipeline_s: float
    """The waits for other stages."""
    reduce_s: float
    """The exposed part of gradient reduction."""
    gather_s: float
    """The exposed part of parameter gathering."""
    update_s: float
    """The norm and clipping, exchanges, matrix updates and AdamW's update."""
    other_s: float
    """The rest of the iteration."""

    @property
    def overheads(self) -> list[tuple[str, float]]:
        """The (label, seconds) of every part except compute, from the longest to the shortest."""
        named = [(LABELS[field.name], getattr(self, field.name)) for field in fields(self)[1:]]
        return sorted(named, key=lambda part: -part[1])


def divide_iteration(setup: Setup, layout: Layout, result: StrategyResult) -> IterationParts:
    """Divides a simulated iteration of the slowest rank into its parts."""
    phases = result.phases
    stage = stage_time(setup, layout, result.slowest_rank // (layout.tp * layout.owners))
    count = layout.num_microbatches
    again_s = count * sum(module.again_s for module in stage.modules)
    tensor_s = count * sum(transfer.seconds for module in stage.modules for transfer in module.moves)
    passes_s = phases["forward"] + phases["backward"] + phases["dispatch"]
    compute_s = passes_s - again_s - tensor_s
    other_parts = {
        "pipeline_s": phases["pipeline"],
        "reduce_s": phases["grad_reduce"],
        "gather_s": phases["param_gather"],
        "update_s": sum(phases[name] for name in ("norm_clip", "exchange", "matrix_update", "adamw_update")),
    }
    other_s = result.iteration_s - compute_s - again_s - tensor_s - sum(other_parts.values())
    return IterationParts(
        compute_s=compute_s, recompute_s=again_s, tensor_s=tensor_s, other_s=max(0.0, other_s), **other_parts
    )
