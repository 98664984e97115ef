"""The five ways to execute a run's updates: decided here once from optimizer and strategy,
and asked everywhere."""

from dataclasses import replace
from enum import Enum
from typing import Literal

from canzona_cli.config.schema import AdamWConfig, Layout, RunConfig, Splitting, Strategy

AnyStrategy = Strategy | Literal["adamw"]
"""The strategies of matrix optimizers, and AdamW, the yardstick of their overhead."""
PLANNED: tuple[Strategy, ...] = ("canzona", "paper", "asc")
"""Strategies that execute a plan."""
IN_ORDER: tuple[Strategy, ...] = ("paper", "asc")
"""Strategies whose buckets keep Megatron's order, whatever `engine.layout`,
and whose matrices are updated by hosts."""


class Execution(Enum):
    """The ranks that update each weight, and the code that does it."""

    PLANNED = "planned"
    """Strategies of `PLANNED`: a plan gives each matrix an owner and a host,
    and canzona's engine executes it."""
    REDUNDANT = "redundant"
    """Strategy sc by canzona's engine, for optimizers that Megatron does not have:
    every rank updates every matrix."""
    MEGATRON_SC = "megatron_sc"
    """Strategy sc with Muon: Megatron's own, and every rank updates everything."""
    LAYERWISE = "layerwise"
    """Megatron's `LayerWiseDistributedOptimizer`: owners of whole matrices,
    and every TP rank repeats their updates."""
    ADAMW = "adamw"
    """Megatron's `DistributedOptimizer` updates every parameter element by element."""

    @property
    def ours(self) -> bool:
        """True if canzona's engine updates the matrices; otherwise all of the step is Megatron's."""
        return self in (Execution.PLANNED, Execution.REDUNDANT)

    @property
    def has_owners(self) -> bool:
        """True if each matrix is updated by one data-parallel rank, its owner."""
        return self in (Execution.PLANNED, Execution.LAYERWISE)

    @property
    def everywhere(self) -> bool:
        """True if every rank updates everything: optimizer state is not sharded,
        and no parameter is gathered."""
        return self in (Execution.REDUNDANT, Execution.MEGATRON_SC)


def execution_of(config: RunConfig) -> Execution:
    """The way that executes `config`; AdamW leaves `engine.strategy` without effect."""
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
    """The strategy a run has in tables and records."""
    return "adamw" if execution_of(config) is Execution.ADAMW else config.engine.strategy


def splitting_of(config: RunConfig) -> Splitting:
    """Returns what the run updates as one matrix: Megatron's own optimizers split q,
    k and v apart at most."""
    splitting = config.engine.splitting
    return splitting if execution_of(config).ours or splitting == "fused" else "qkv"


def overlaps_param_gather(config: RunConfig) -> bool:
    """Returns True if parameters are gathered under the forward pass;
    a strategy that updates everywhere has none."""
    parallel = config.parallel
    return parallel.overlap_param_gather and parallel.overlap_grad_reduce and not execution_of(config).everywhere


def aligns_param_gather(config: RunConfig, layout: Layout) -> bool:
    """Returns True if parameters are gathered by whole model chunks,
    as Megatron-LM does with interleaved pipelines.

    Its `align_param_gather`, on by default; its other way, and the only one without interleaving, is one
    bucket ahead. A plan has an order of its own.
    """
    planned = execution_of(config) is Execution.PLANNED
    return overlaps_param_gather(config) and layout.vpp > 1 and not planned


def with_strategy(config: RunConfig, strategy: AnyStrategy) -> RunConfig:
    """The same run under another strategy; AdamW takes the rates of the run's own optimizer.

    Settings of the engine that only another strategy can have are dropped: a plan file.
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
