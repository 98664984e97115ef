"""What a run's step is predicted to take: the one entry to the simulator for whoever shows a measurement beside it."""

from canzona_cli.config.execution import AnyStrategy, execution_of, strategy_of
from canzona_cli.config.schema import Layout, RunConfig, Splitting
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.planner.buckets import bucket_elements
from canzona_cli.planner.memory import estimate, plan_memory
from canzona_cli.planner.plan import Assignment, Plan
from canzona_cli.planner.planner import update_costs
from canzona_cli.run.prediction import Prediction
from canzona_cli.simulate.baselines import layerwise
from canzona_cli.simulate.compare import simulate_plan
from canzona_cli.simulate.cores import with_cores
from canzona_cli.simulate.simulate import StrategyResult, simulate


def predict(config: RunConfig, layout: Layout, plan: Plan | None) -> Prediction:
    """The step of a resolved run on its cluster profile.

    Args:
        plan: what canzona and asc execute; None for the others.
    """
    config = with_cores(config)
    result = simulate_run(config, layout, plan)
    memory = (plan_memory(config, layout, plan) if plan is not None else estimate(config, layout)).total
    return Prediction(
        strategy=result.strategy,
        profile=config.cluster.name,
        calibrated=bool(config.cluster.measured_on),
        iteration_s=result.iteration_s,
        optimizer_s=result.optimizer_exposed_s,
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
    return _without_plan(config, layout, strategy_of(config))


def _without_plan(config: RunConfig, layout: Layout, strategy: AnyStrategy) -> StrategyResult:
    if strategy == "adamw":
        return simulate(config, layout, (), (), None, (), (), strategy)
    splitting: Splitting = config.engine.splitting
    if splitting != "fused" and not execution_of(config).ours:
        splitting = "qkv"  # as far as Megatron's own go
    matrices = matrices_of(config.model, layout, splitting)
    costs = update_costs(config, matrices, "megatron")
    if strategy == "sc":
        return simulate(config, layout, matrices, costs, None, (), (), strategy)
    placed = layerwise(matrices, layout, bucket_elements(config, layout))
    assignment: Assignment = placed.assignment
    return simulate(config, layout, matrices, costs, assignment, placed.buckets, (), strategy)
