"""Predicts the step of a resolved run. This module is the entry point of the simulator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Final

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.costs.memory import checkpoint_bytes
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.costs.padding import PaddedBucket, lay_out
from canzona_cli.core.costs.update import rounded, update_times
from canzona_cli.core.host import cores
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.buckets import even_bucket, pool_parameters, pools
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.core.planner.plan import Assignment, Bucket, Cell, Plan, PlanKey
from canzona_cli.core.setup import Layout, RunConfig
from canzona_cli.core.setup.execution import AnyStrategy, splitting_of, strategy_of, with_strategy
from canzona_cli.core.simulate.step import StrategyResult, simulate
from canzona_cli.core.simulate.update import Workload
from canzona_cli.records.breakdown import Prediction


def predict(config: RunConfig, layout: Layout, plan: Plan | None) -> Prediction:
    """Predicts the step of a resolved run on its cluster profile.

    Args:
        plan: the run's plan for strategies canzona, paper and asc; None for other strategies.
    """
    config = with_cores(config)
    result = simulate_run(config, layout, plan)
    return Prediction(
        strategy=result.strategy,
        profile=config.cluster.name,
        calibrated=config.cluster.calibrated,
        iteration_s=result.iteration_s,
        optimizer_s=result.optimizer_s,
        phases=dict(result.mean_phases),
        cores=config.cluster.cores if config.cluster.device == "cpu" else None,
        load_balance=result.update_balance,
        memory_bytes=memory_of(config, layout, plan).total,
        events=result.events,
    )


def simulate_run(config: RunConfig, layout: Layout, plan: Plan | None) -> StrategyResult:
    """Simulates one iteration of a resolved run, with a plan or without (see `predict`)."""
    if plan is not None:
        return simulate_plan(config, layout, plan)
    strategy = strategy_of(config)
    if strategy == "adamw":
        return simulate_strategy(config, layout, strategy, ())
    return simulate_strategy(config, layout, strategy, matrices_of(config.model, layout, splitting_of(config)))


def simulate_plan(config: RunConfig, layout: Layout, plan: Plan) -> StrategyResult:
    """Simulates one iteration under a plan.

    The last 8 results are cached, because the search for a layout has already simulated the plan of the chosen
    layout.
    """
    return _simulate_plan(config, layout, PlanKey(plan))


@lru_cache(maxsize=8)
def _simulate_plan(config: RunConfig, layout: Layout, key: PlanKey) -> StrategyResult:
    plan = key.plan
    workload = Workload(
        strategy=plan.subject.settings.strategy,
        matrices=plan.matrices,
        costs=plan.costs,
        times=update_times(with_strategy(config, plan.subject.settings.strategy), plan.matrices),
        assignment=plan.assignment,
        buckets=plan.buckets,
        groups=plan.groups,
    )
    return simulate(config, layout, workload)


def simulate_strategy(
    config: RunConfig, layout: Layout, strategy: AnyStrategy, matrices: Sequence[Matrix]
) -> StrategyResult:
    """Simulates one iteration of a strategy without a plan: layerwise, sc or adamw.

    Args:
        matrices: the matrices that the strategy updates; ignored for adamw.
    """
    return simulate(config, layout, workload_without_plan(config, layout, strategy, matrices))


def workload_without_plan(
    config: RunConfig, layout: Layout, strategy: AnyStrategy, matrices: Sequence[Matrix]
) -> Workload:
    """Returns the work of a strategy without a plan: layerwise, sc or adamw."""
    if strategy == "adamw":
        return Workload(strategy=strategy)
    configured = with_strategy(config, strategy)
    times = update_times(configured, matrices)
    costs = tuple(rounded(time.alone_s) for time in times)
    workload = Workload(strategy=strategy, matrices=matrices, costs=costs, times=times)
    if strategy != "layerwise":
        return workload
    assignment, buckets = assign_layerwise(matrices, layout, bucket_elements(config, layout))
    return replace(workload, assignment=assignment, buckets=buckets)


def assign_layerwise(
    matrices: Sequence[Matrix], layout: Layout, bucket_elements: int | None
) -> tuple[Assignment, tuple[Bucket, ...]]:
    """Returns the owners and buckets of `LayerWiseDistributedOptimizer` in megatron-core 0.19.

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
    laid_out: dict[tuple[tuple[int, ...], int, int | None], list[PaddedBucket]] = {}
    for pool in pools(matrices):
        all_parameters, shard_count = pool_parameters(matrices, pool, layout.tp), layout.reducers(pool.expert_rank)
        for model_chunk in reversed(range(layout.vpp)):
            parameters = [parameter for parameter in all_parameters if parameter.chunk == model_chunk]
            sizes = tuple(parameter.elements for parameter in parameters)
            key = sizes, shard_count, bucket_elements if pool.stage == 0 else None
            if key not in laid_out:  # the experts of all expert-parallel ranks have the same sizes
                laid_out[key] = list(lay_out(*key))
            for bucket in laid_out[key]:
                shards = [[parameters[index] for index in shard] for shard in bucket.shards]
                for owner, parameters_of_owner in enumerate(shards):
                    cell = pool.cell(owner, layout)
                    for index in (index for parameter in parameters_of_owner for index in parameter.matrices):
                        cells[index] = cell
                buckets.append(even_bucket(shards, pool, bucket_counts[pool.stage]))
                bucket_counts[pool.stage] += 1
    return Assignment(cells=tuple(cells)), tuple(buckets)


def with_cores(config: RunConfig) -> RunConfig:
    """Returns `config` with this machine's number of cores if its CPU profile does not have one.

    Only predictions use the result; plans and layouts do not depend on the cores of this machine.
    """
    cluster = config.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return config
    return replace(config, cluster=replace(cluster, cores=cores()))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected throughput, duration and checkpoint sizes of a run that is never interrupted."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """The model FLOP utilisation, relative to the profile's bf16 peak, as runs measure it."""
    training_s: float
    """The seconds of all steps, excluding start-up, saves and validation."""
    gpu_hours: float
    """The hours of training, added up over all GPUs."""
    checkpoint_bytes: int
    """The bytes of one checkpoint."""
    checkpoints_kept: int
    """The largest possible number of checkpoints on disk at the end of the run."""
    host_bytes: int
    """The mean host memory per node, in bytes, that holds the ranks' copies of state for saves, from the first
    save on."""


def outlook(config: RunConfig, layout: Layout, iteration_s: float) -> Outlook:
    """Computes the outlook of a resolved run whose steps take `iteration_s` each."""
    train, checkpoint = config.train, config.checkpoint
    tokens_per_s = layout.global_batch_size * train.seq_length / iteration_s
    per_gpu = tokens_per_s / layout.world_size
    saved_bytes = checkpoint_bytes(config)
    machines = config.cluster.nodes or -(-layout.world_size // config.cluster.gpus_per_node)
    return Outlook(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops_per_token(config.model, train.seq_length) / (config.cluster.bf16_tflops * 1e12),
        training_s=train.steps * iteration_s,
        gpu_hours=layout.world_size * train.steps * iteration_s / 3600,
        checkpoint_bytes=saved_bytes,
        checkpoints_kept=checkpoint.keep + (train.steps // checkpoint.keep_every if checkpoint.keep_every else 0),
        host_bytes=round(saved_bytes / machines),
    )


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


def divide_iteration(config: RunConfig, layout: Layout, result: StrategyResult) -> IterationParts:
    """Divides a simulated iteration of the slowest rank into its parts."""
    phases = result.phases
    stage = stage_time(config, layout, result.slowest_rank // (layout.tp * layout.owners))
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
