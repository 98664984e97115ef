"""Compares the costs of Megatron's optimizers and of canzona's engine in the same Megatron-LM run.

All costs are for Megatron's training loop, in which canzona's engine can also run (`canzona_cli.library`).
Only the optimizers differ.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from canzona_cli.config.megatron_translation import MegatronRun
from canzona_cli.core.costs.memory import capacity, estimate
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.make import make_plan, plan_unbounded
from canzona_cli.core.planner.measures import padding_fraction
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.core.setup.execution import AnyStrategy, splitting_of, with_strategy, with_tp_mode
from canzona_cli.core.simulate.predict import simulate_plan, workload_without_plan
from canzona_cli.core.simulate.step import StrategyResult, simulate


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one optimizer: its simulated step and its memory."""

    strategy: AnyStrategy
    result: StrategyResult
    memory_bytes: int
    """The bytes on the fullest rank."""
    fits: bool
    padding: float | None = None
    """The padding in the matrices' buffers relative to their matrices (0.5 is 50%); None if matrices have no
    separate buffers."""

    @property
    def balance(self) -> float | None:
        """The seconds of matrix updates on the busiest rank, relative to the mean over ranks; None for
        AdamW."""
        return None if self.strategy == "adamw" else self.result.update_balance

    def as_json(self) -> dict[str, object]:
        """Returns the cost's entry in the output of `--json`."""
        return {
            "iteration_s": self.result.iteration_s,
            "optimizer_s": self.result.optimizer_s,
            "update_balance": self.balance,
            "padding_fraction": self.padding,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, kw_only=True)
class MegatronComparison:
    """The costs of Megatron's optimizers and of canzona's plan."""

    run: MegatronRun
    setup: Setup
    layout: Layout
    plan: Plan
    adamw: Cost
    """Megatron's AdamW with the distributed optimizer."""
    muon: Cost
    """Megatron's Muon with the run's settings; layer-wise Muon if the run has AdamW."""
    canzona: Cost
    command: tuple[str, ...]
    """The overrides that configure the same run in canzona's training loop."""

    @property
    def overlaps(self) -> tuple[str, ...]:
        """The overlap arguments of the Megatron-LM run that have an effect in this layout, but no counterpart
        in canzona's training loop."""
        effective = {
            "--tp-comm-overlap": self.run.tp_overlap and self.layout.tp > 1,
            "--overlap-moe-expert-parallel-comm": self.run.dispatch_overlap and self.layout.ep > 1,
        }
        return tuple(name for name, has_effect in effective.items() if has_effect)

    def overhead(self, cost: Cost) -> float | None:
        """Returns how much longer an optimizer's iteration takes than AdamW's (0.05 is 5%); None if one of
        them does not fit in memory."""
        if not (cost.fits and self.adamw.fits):
            return None
        return cost.result.iteration_s / self.adamw.result.iteration_s - 1

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json`."""
        run = self.run
        return {
            "version": 1,
            "file": str(run.path),
            "cluster": self.setup.cluster.name,
            "gpus": self.setup.gpus,
            "layout": asdict(self.layout.mesh),
            "optimizer": run.optimizer,
            "muon_tp_mode": run.tp_mode,
            "strategy": self.muon.strategy,
            "costs": {
                "adamw": self.adamw.as_json(),
                "megatron": self.muon.as_json(),
                "canzona": self.canzona.as_json(),
            },
            "overlaps": list(self.overlaps),
            "overrides": list(self.command),
            "not_understood": list(run.not_understood),
            "assumed": list(run.assumed),
            "left_out": list(run.left_out),
            "plans_only": list(run.plans_only),
            "no_effect": list(run.no_effect),
        }


def compare_with_megatron(run: MegatronRun, setup: Setup, layout: Layout, command: Sequence[str]) -> MegatronComparison:
    """Simulates a step of Megatron's training loop with Megatron's optimizers and with canzona's engine.
    Optimizers that do not fit in memory are simulated too.

    Args:
        config: the same run for canzona's training loop, with the layout filled in.

    Raises:
        ConfigError: see `make_plan` and `simulate`.
    """
    cluster = setup.cluster
    overlapped = replace(
        cluster,
        tp_overlap=cluster.tp_overlap or run.tp_overlap,
        dispatch_overlap=cluster.dispatch_overlap or run.dispatch_overlap,
    )
    setup = replace(setup, cluster=overlapped)
    try:
        plan = make_plan(setup, layout)
    except DoesNotFit:
        plan = plan_unbounded(setup, layout)
    memory_bytes = plan_memory(setup, layout, plan).total
    return MegatronComparison(
        run=run,
        setup=setup,
        layout=layout,
        plan=plan,
        adamw=_cost(setup, layout, "adamw", ()),
        muon=_muon(run, setup, layout),
        canzona=Cost(
            strategy="canzona",
            result=simulate_plan(setup, layout, plan),
            memory_bytes=memory_bytes,
            fits=memory_bytes <= capacity(setup),
            padding=padding_fraction(plan.buckets),
        ),
        command=tuple(command),
    )


def _muon(run: MegatronRun, setup: Setup, layout: Layout) -> Cost:
    strategy: AnyStrategy = "layerwise" if run.distributed or run.optimizer == "adamw" else "sc"
    setup = with_tp_mode(setup, "distributed" if run.tp_mode == "distributed" else "duplicated")
    members = matrices_of(setup.model, layout, splitting_of(with_strategy(setup, strategy)))
    if run.optimizer == "muon" and run.tp_mode == "blockwise":
        members = tuple(_fragment(matrix, layout.tp) for matrix in members)
    return _cost(setup, layout, strategy, members)


def _fragment(matrix: Matrix, tp: int) -> Matrix:
    """Returns a TP rank's fragment of a matrix as a matrix, because `blockwise` orthogonalises fragments."""
    rows, cols = matrix.fragment_shape(tp)
    return replace(matrix, rows=rows, cols=cols, shard_dim=None)


def _cost(setup: Setup, layout: Layout, strategy: AnyStrategy, members: Sequence[Matrix]) -> Cost:
    workload = workload_without_plan(setup, layout, strategy, members)
    memory_bytes = estimate(with_strategy(setup, strategy), layout).total
    return Cost(
        strategy=strategy,
        result=simulate(setup, layout, workload),
        memory_bytes=memory_bytes,
        fits=memory_bytes <= capacity(setup),
        padding=padding_fraction(workload.buckets) if workload.buckets else None,
    )
