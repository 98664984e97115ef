"""The prediction of a run's step: the entry to the simulator for everyone who has a run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Final, NamedTuple

from canzona_cli.config.execution import AnyStrategy, Execution, execution_of, splitting_of, strategy_of, with_strategy
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import bucket_elements, element_bytes, lay_out, stage_weights
from canzona_cli.costs.links import Groups, Links
from canzona_cli.costs.memory import checkpoint_bytes, estimate
from canzona_cli.costs.model import NormClip, hop, passes, stage_time
from canzona_cli.costs.sharing import HOSTED, shares
from canzona_cli.costs.update import adamw_seconds, implementation, step_factor, update_costs
from canzona_cli.model.families import flops_per_token
from canzona_cli.model.matrices import Matrix
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.planner.buckets import even_bucket, stage_parameters, stages
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.packing import simple_bound
from canzona_cli.planner.plan import Assignment, Bucket, Cell, Plan
from canzona_cli.run.breakdown import Prediction
from canzona_cli.run.machine import cores
from canzona_cli.simulate.buffers import after_reduction
from canzona_cli.simulate.step import StrategyResult, simulate
from canzona_cli.simulate.update import UpdateModel, Workload


def predict(config: RunConfig, layout: Layout, plan: Plan | None) -> Prediction:
    """The step of a resolved run on its cluster profile.

    Args:
        plan: the plan that canzona, paper and asc execute; None for the others.
    """
    config = with_cores(config)
    result = simulate_run(config, layout, plan)
    memory = (plan_memory(config, layout, plan) if plan is not None else estimate(config, layout)).total
    return Prediction(
        strategy=result.strategy,
        profile=config.cluster.name,
        calibrated=config.cluster.calibrated,
        iteration_s=result.iteration_s,
        optimizer_s=result.optimizer_s,
        phases=dict(result.mean_phases),
        cores=config.cluster.cores if config.cluster.device == "cpu" else None,
        load_balance=result.update_balance,
        memory_bytes=memory,
        events=result.events,
    )


def simulate_run(config: RunConfig, layout: Layout, plan: Plan | None) -> StrategyResult:
    """One iteration of a resolved run, on as many cores as its profile says."""
    if plan is not None:
        return simulate_plan(config, layout, plan)
    strategy = strategy_of(config)
    if strategy == "adamw":
        return simulate_strategy(config, layout, strategy, ())
    return simulate_strategy(config, layout, strategy, matrices_of(config.model, layout, splitting_of(config)))


def simulate_plan(config: RunConfig, layout: Layout, plan: Plan) -> StrategyResult:
    """One iteration under a plan."""
    workload = Workload(
        strategy=plan.subject.settings.strategy,
        matrices=plan.matrices,
        costs=plan.costs,
        assignment=plan.assignment,
        buckets=plan.buckets,
        groups=plan.groups,
    )
    return simulate(config, layout, workload)


def simulate_strategy(
    config: RunConfig, layout: Layout, strategy: AnyStrategy, matrices: Sequence[Matrix]
) -> StrategyResult:
    """One iteration of a strategy that needs no plan.

    Args:
        matrices: the matrices that it updates; adamw, which has none, leaves them alone.
    """
    if strategy == "adamw":
        return simulate(config, layout, Workload(strategy=strategy))
    configured = with_strategy(config, strategy)
    costs = update_costs(configured, matrices, implementation(configured))
    workload = Workload(strategy=strategy, matrices=matrices, costs=costs)
    if strategy == "layerwise":
        assignment, buckets = layerwise(matrices, layout, bucket_elements(config, layout))
        workload = replace(workload, assignment=assignment, buckets=buckets)
    return simulate(config, layout, workload)


def layerwise(
    matrices: Sequence[Matrix], layout: Layout, bucket_elements: int | None = None
) -> tuple[Assignment, tuple[Bucket, ...]]:
    """Places matrices and buckets as `LayerWiseDistributedOptimizer` of megatron-core 0.19 does.

    Whole parameters are packed into equal padded shards by elements (`lay_out`). Hosts mean nothing: every TP
    rank of an owner updates its matrices.

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    shards = layout.owners
    owner_of = [0] * len(matrices)
    buckets: list[Bucket] = []
    for stage in stages(matrices):
        everything, index = stage_parameters(matrices, stage, layout.tp), 0
        for chunk in reversed(range(layout.vpp)):
            parameters = [parameter for parameter in everything if parameter.chunk == chunk]
            sizes = [parameter.elements for parameter in parameters]
            for bucket in lay_out(sizes, shards, bucket_elements if stage == 0 else None):
                held = [[parameters[number] for number in shard] for shard in bucket.shards]
                for owner, of_owner in enumerate(held):
                    for parameter in of_owner:
                        for matrix in parameter.matrices:
                            owner_of[matrix] = owner
                buckets.append(even_bucket(held, stage, index))
                index += 1
    return Assignment(cells=tuple(Cell(owner=owner, host=0) for owner in owner_of)), tuple(buckets)


def with_cores(config: RunConfig) -> RunConfig:
    """CPU ranks of a profile that does not say how many cores they share have those of this machine.

    For predictions; no plan and no layout depends on it.
    """
    cluster = config.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return config
    return replace(config, cluster=replace(cluster, cores=cores()))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The outlook of a run without pauses."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs over the profile's bf16 peak, as runs measure it."""
    training_s: float
    """All steps; without start, saves and validation."""
    checkpoint_bytes: int
    """The bytes of one checkpoint."""
    checkpoints_kept: int
    """The checkpoints kept at the end, where the run is long enough for all that are to be kept."""
    host_bytes: int
    """The bytes of each machine's own memory that saves keep from the first one on, on average: copies of
    what its ranks save."""


def outlook(config: RunConfig, layout: Layout, iteration_s: float) -> Outlook:
    """Looks ahead at a resolved run whose step takes `iteration_s`."""
    train, keep = config.train, config.checkpoint
    tokens_per_s = layout.global_batch_size * train.seq_length / iteration_s
    per_gpu, saved = tokens_per_s / layout.world_size, checkpoint_bytes(config)
    machines = config.cluster.nodes or -(-layout.world_size // config.cluster.gpus_per_node)
    return Outlook(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops_per_token(config.model, train.seq_length) / (config.cluster.bf16_tflops * 1e12),
        training_s=train.steps * iteration_s,
        checkpoint_bytes=saved,
        checkpoints_kept=keep.keep + (train.steps // keep.keep_every if keep.keep_every else 0),
        host_bytes=round(saved / machines),
    )


LABELS: Final = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tensor_s": "TP and CP exchanges",
    "pipeline_s": "pipeline",
    "reduce_s": "gradient reduction",
    "gather_s": "parameter gathering",
    "update_s": "updates",
    "other_s": "other",
}
"""The names of `Spent`'s fields for people."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of the slowest rank; they add up to the iteration."""

    compute_s: float
    """Forward and backward."""
    recompute_s: float
    tensor_s: float
    """Tensor-parallel exchanges in forward and backward, and what slices of a sequence tell one another."""
    pipeline_s: float
    """Waiting for other stages."""
    reduce_s: float
    """The reduction of gradients, as far as no backward hides it."""
    gather_s: float
    """The gathering of parameters, as far as no forward hides it."""
    update_s: float
    """Norm and clipping, exchange, matrix update and AdamW."""
    other_s: float

    @property
    def limits(self) -> list[tuple[str, float]]:
        """(label, seconds) of all but compute, the most first."""
        named = [(LABELS[field.name], getattr(self, field.name)) for field in fields(self)[1:]]
        return sorted(named, key=lambda limit: -limit[1])


def spent(config: RunConfig, layout: Layout, result: StrategyResult) -> Spent:
    """Divides the time of a simulated iteration's slowest rank."""
    phases = result.phases
    stage = stage_time(config, layout, result.slowest_rank // (layout.tp * layout.owners))
    count = layout.num_microbatches
    again_s = count * sum(module.again_s for module in stage.modules)
    tensor_s = count * sum(transfer.seconds for module in stage.modules for transfer in module.moves)
    compute_s = phases["forward"] + phases["backward"] - again_s - tensor_s
    known = {
        "pipeline_s": phases["pipeline"],
        "reduce_s": phases["grad_reduce"],
        "gather_s": phases["param_gather"],
        "update_s": sum(phases[name] for name in ("norm_clip", "exchange", "matrix_update", "adamw_update")),
    }
    other_s = result.iteration_s - compute_s - again_s - tensor_s - sum(known.values())
    return Spent(compute_s=compute_s, recompute_s=again_s, tensor_s=tensor_s, other_s=max(0.0, other_s), **known)


def estimated_step_seconds(config: RunConfig, layout: Layout) -> float:
    """Estimates a step's seconds in a layout, under the plan it would get."""
    execution, parallel = execution_of(config), config.parallel
    times, hop_s = passes(config, layout), hop(config, layout).seconds
    stages = [sum(forward + backward + 2 * hop_s for forward, backward in chunks) for chunks in times]
    passed = layout.num_microbatches * max(stages) + (sum(stages) - max(stages)) / layout.vpp
    traffic = _traffic(config, replace(layout.bare, vpp=1))
    forward_s, backward_s = times[0][0]
    reduced, gathered = traffic.reduce_s, traffic.gather_s
    if parallel.overlap_grad_reduce:
        reduced = max(traffic.last_s, reduced / layout.vpp - backward_s)
        if parallel.overlap_param_gather:
            gathered = max(0.0, gathered / layout.vpp - forward_s)
    weights, ranks = stage_weights(config, layout, 0), 1 if execution.everywhere else layout.owners
    clipped = NormClip.of(config, layout).seconds((weights.matrices + weights.others) / ranks, weights.others / ranks)
    elements = weights.others + (weights.matrices if execution is Execution.ADAMW else 0)
    factor = step_factor(config.cluster, "adamw_update", implementation(config))
    updated = factor * adamw_seconds(elements / ranks, config.cluster) + _updates(config, layout)
    return passed + reduced + gathered + after_reduction(config, layout, 0) + clipped + updated


class _Traffic(NamedTuple):
    """Seconds of stage 0's data-parallel traffic."""

    reduce_s: float
    last_s: float
    """The embedding's gradients, which are ready last."""
    gather_s: float


@lru_cache(maxsize=1024)
def _traffic(config: RunConfig, layout: Layout) -> _Traffic:
    cluster, implemented = config.cluster, implementation(config)
    links, group = Links(cluster=cluster), Groups.of(layout, cluster).data
    if group.size == 1:
        return _Traffic(0.0, 0.0, 0.0)
    weights, (width, grad) = stage_weights(config, layout, 0), element_bytes(config)
    embedding = config.model.vocab_size * config.model.hidden_size // layout.tp
    reducing, gathering = (step_factor(cluster, phase, implemented) for phase in ("grad_reduce", "param_gather"))
    everywhere = execution_of(config).everywhere
    reduce = links.all_reduce if everywhere else links.reduce_scatter
    everything = weights.matrices + weights.others
    return _Traffic(
        reducing * reduce(everything * grad, group).seconds,
        reducing * reduce(embedding * grad, group).seconds,
        0.0 if everywhere else gathering * links.all_gather(everything * width, group).seconds,
    )


def _updates(config: RunConfig, layout: Layout) -> float:
    """Seconds of matrix updates on the rank of stage 0 that has most of them."""
    execution = execution_of(config)
    if execution is Execution.ADAMW:
        return 0.0
    layers, ranks = config.model.num_layers // layout.pp, layout.world_size // layout.tp
    layer = _layer(config, replace(layout.bare, pp=1, vpp=1, dp=ranks, global_batch_size=ranks))
    if execution.everywhere:
        return layers * layer.whole_s
    if execution is Execution.LAYERWISE:
        return layers * layer.whole_s / layout.owners
    cells = layout.owners * layout.tp
    return max(layers * layer.all_s / cells, _packed(layer.pieces, layers, cells))


@lru_cache(maxsize=1024)
def _packed(costs: tuple[float, ...], layers: int, cells: int) -> float:
    return simple_bound(costs * layers, cells)


class _Layer(NamedTuple):
    """Seconds of one layer's updates."""

    whole_s: float
    """The seconds on a rank that does them all, and gathers them first."""
    all_s: float
    """The seconds on all ranks together, hosted matrices' packing included."""
    pieces: tuple[float, ...]
    """Each matrix, on its host or on a rank of the TP group that shares it."""


@lru_cache(maxsize=64)
def _layer(config: RunConfig, layout: Layout) -> _Layer:
    members = matrices_of(replace(config.model, num_layers=1), layout, splitting_of(config))
    costs = update_costs(config, members, implementation(config))
    model = UpdateModel(config, layout, members, costs)
    if execution_of(config) is not Execution.PLANNED:
        return _Layer(model.duplicated(range(len(members))).seconds, 0.0, ())
    factor = step_factor(config.cluster, "matrix_update", implementation(config))
    packing_s = model.pipeline.packing_s if layout.tp > 1 else 0.0
    possible = HOSTED if config.engine.mode == "hosted" else shares(config, layout, members)
    everything, pieces = 0.0, []
    for matrix, cost in zip(members, costs, strict=True):
        parts = [factor * possible[matrix.index].each] if matrix.index in possible else []
        everything += min([factor * cost + matrix.elements * packing_s, *(layout.tp * part for part in parts)])
        pieces.append(min([factor * cost, *parts]))
    return _Layer(0.0, everything, tuple(pieces))
