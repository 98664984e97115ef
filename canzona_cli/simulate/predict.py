"""How long a run's step is predicted to take: the entry to the simulator for everyone who has a run."""

from collections.abc import Sequence
from dataclasses import replace

from canzona_cli.config.execution import AnyStrategy, splitting_of, strategy_of, with_strategy
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.buckets import bucket_elements, even_bucket, lay_out, stage_parameters, stages
from canzona_cli.planner.cost import implementation
from canzona_cli.planner.memory import estimate, plan_memory
from canzona_cli.planner.parts import Assignment, Bucket, Cell
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.subject import update_costs
from canzona_cli.run.breakdown import Prediction
from canzona_cli.run.machine import cores
from canzona_cli.simulate.simulate import StrategyResult, simulate
from canzona_cli.simulate.update import Workload


def predict(config: RunConfig, layout: Layout, plan: Plan | None) -> Prediction:
    """The step of a resolved run on its cluster profile.

    Args:
        plan: what canzona, paper and asc execute; None for the others.
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
        matrices: what it updates; adamw, which has none, leaves them alone.
    """
    if strategy == "adamw":
        return simulate(config, layout, Workload(strategy=strategy))
    own = with_strategy(config, strategy)
    costs = update_costs(own, matrices, implementation(own))
    workload = Workload(strategy=strategy, matrices=matrices, costs=costs)
    if strategy == "layerwise":
        assignment, buckets = layerwise(matrices, layout, bucket_elements(config, layout))
        workload = replace(workload, assignment=assignment, buckets=buckets)
    return simulate(config, layout, workload)


def layerwise(
    matrices: Sequence[Matrix], layout: Layout, bucket_elements: int | None = None
) -> tuple[Assignment, tuple[Bucket, ...]]:
    """Where `LayerWiseDistributedOptimizer` of megatron-core 0.19 puts every matrix, and its buckets.

    Whole parameters are packed into equal padded shards by elements (`lay_out`). Hosts mean nothing: every TP rank of
    an owner updates its matrices.

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    shards = layout.owners
    owner_of = [0] * len(matrices)
    found: list[Bucket] = []
    for stage in stages(matrices):
        everything, index = stage_parameters(matrices, stage, layout.tp), 0
        for chunk in reversed(range(layout.vpp)):
            parameters = [parameter for parameter in everything if parameter.chunk == chunk]
            sizes = [parameter.elements for parameter in parameters]
            for bucket in lay_out(sizes, shards, bucket_elements if stage == 0 else None):
                held = [[parameters[number] for number in shard] for shard in bucket.shards]
                for owner, own in enumerate(held):
                    for parameter in own:
                        for matrix in parameter.matrices:
                            owner_of[matrix] = owner
                found.append(even_bucket(held, stage, index))
                index += 1
    return Assignment(cells=tuple(Cell(owner=owner, host=0) for owner in owner_of)), tuple(found)


def with_cores(config: RunConfig) -> RunConfig:
    """CPU ranks of a profile that does not say how many cores they share have those of this machine.

    For predictions; no plan and no layout depends on it.
    """
    cluster = config.cluster
    if cluster.device != "cpu" or cluster.cores is not None:
        return config
    return replace(config, cluster=replace(cluster, cores=cores()))
