"""The five ways to execute the updates of a run. `execution_of` derives the way from optimizer and strategy."""

from dataclasses import replace
from enum import Enum
from typing import Literal

from canzona_cli.config.schema import AdamWConfig, Dispatcher, Layout, RunConfig, Splitting, Strategy

AnyStrategy = Strategy | Literal["adamw"]
"""The strategies of matrix optimizers, and AdamW, the baseline for their overhead."""
PLANNED: tuple[Strategy, ...] = ("canzona", "paper", "asc")
"""The strategies that execute a plan."""
IN_ORDER: tuple[Strategy, ...] = ("paper", "asc")
"""The strategies that keep Megatron's order of buckets, whatever `engine.layout`, and update every matrix on
its host."""


class Execution(Enum):
    """The way a run's updates are executed: which ranks update each weight, and with which code."""

    PLANNED = "planned"
    """The strategies in `PLANNED`: a plan gives each matrix an owner and a host, and canzona's engine
    executes the plan."""
    REDUNDANT = "redundant"
    """Strategy sc with canzona's engine, for optimizers that Megatron does not have: every rank updates every
    matrix."""
    MEGATRON_SC = "megatron_sc"
    """Strategy sc with Megatron's own Muon: every rank updates every matrix."""
    LAYERWISE = "layerwise"
    """Megatron's `LayerWiseDistributedOptimizer`: each matrix has an owner among the data-parallel ranks, and
    every TP rank of the owner repeats its update."""
    ADAMW = "adamw"
    """Megatron's `DistributedOptimizer` updates every parameter element by element."""

    @property
    def ours(self) -> bool:
        """True if canzona's engine updates the matrices, False if Megatron's optimizer does the entire step."""
        return self in (Execution.PLANNED, Execution.REDUNDANT)

    @property
    def has_owners(self) -> bool:
        """True if each matrix is updated by one data-parallel rank, its owner."""
        return self in (Execution.PLANNED, Execution.LAYERWISE)

    @property
    def everywhere(self) -> bool:
        """True if every rank updates every parameter, so optimizer state is not sharded and no parameter is
        gathered."""
        return self in (Execution.REDUNDANT, Execution.MEGATRON_SC)


def execution_of(config: RunConfig) -> Execution:
    """Returns the way to execute the updates of `config`. With AdamW, `engine.strategy` has no effect."""
    if config.optimizer.name == "adamw":
        return Execution.ADAMW
    match config.engine.strategy:
        case "canzona" | "paper" | "asc":
            return Execution.PLANNED
        case "layerwise":
            return Execution.LAYERWISE
        case "sc":
            return Execution.MEGATRON_SC if config.optimizer.name == "muon" else Execution.REDUNDANT


def strategy_of(config: RunConfig) -> AnyStrategy:
    """Returns the strategy of a run for tables and records: `engine.strategy`, or adamw."""
    return "adamw" if execution_of(config) is Execution.ADAMW else config.engine.strategy


def splitting_of(config: RunConfig) -> Splitting:
    """Returns the splitting of weights into matrices that the run uses.

    Megatron's own optimizers only support fused and qkv, so any finer `engine.splitting` becomes qkv there.
    """
    splitting = config.engine.splitting
    return splitting if execution_of(config).ours or splitting == "fused" else "qkv"


def dispatcher_of(config: RunConfig) -> Dispatcher:
    """Returns the way tokens reach experts on other ranks."""
    return config.parallel.dispatcher or "alltoall"


def overlaps_param_gather(config: RunConfig) -> bool:
    """Returns True if parameter gathering is overlapped with the forward pass.

    Needs both overlap settings, and a strategy that gathers parameters at all.
    """
    parallel = config.parallel
    return parallel.overlap_param_gather and parallel.overlap_grad_reduce and not execution_of(config).everywhere


def aligns_param_gather(config: RunConfig, layout: Layout) -> bool:
    """Returns True if the parameters of an entire model chunk are gathered together.

    Megatron-LM does so with interleaved pipelines (`align_param_gather`, on by default); otherwise it gathers
    one bucket ahead of its use. Runs that execute a plan follow the plan's order instead.
    """
    planned = execution_of(config) is Execution.PLANNED
    return overlaps_param_gather(config) and layout.vpp > 1 and not planned


def with_strategy(config: RunConfig, strategy: AnyStrategy) -> RunConfig:
    """Returns the run with another strategy.

    adamw keeps the learning rates, weight decay, clipping and AdamW settings of the run's optimizer. A plan
    file is dropped for every strategy except canzona.
    """
    if strategy == "adamw":
        optimizer = config.optimizer
        if isinstance(optimizer, AdamWConfig):
            return config
        adamw = AdamWConfig(
            name="adamw",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            clip_grad=optimizer.clip_grad,
            clip=optimizer.clip,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
        )
        return replace(config, optimizer=adamw)
    engine = replace(config.engine, strategy=strategy)
    if strategy != "canzona":
        engine = replace(engine, plan=None)
    return replace(config, engine=engine)
