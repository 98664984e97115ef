"""Derives facts about a run from the way it executes its updates (`Setup.execution`)."""

from dataclasses import fields, replace
from typing import Literal

from canzona_cli.core.setup import (
    AdamWConfig,
    Dispatcher,
    Execution,
    Layout,
    MuonTpMode,
    OptimizerBase,
    Setup,
    Splitting,
    Strategy,
)

AnyStrategy = Strategy | Literal["adamw"]
"""The strategies of matrix optimizers, and AdamW, the baseline for their overhead."""
PLANNED: tuple[Strategy, ...] = ("canzona", "paper", "asc")
"""The strategies that execute a plan."""
IN_ORDER: tuple[Strategy, ...] = ("paper", "asc")
"""The strategies that keep Megatron's order of buckets in place of an order by owner, and that update every
matrix on its host."""

RELEASED_TP_MODES: tuple[MuonTpMode, ...] = ("duplicated", "distributed")
"""The values of `engine.muon_tp_mode` that the supported Megatron-core can run."""


def strategy_of(setup: Setup) -> AnyStrategy:
    """Returns the name that tables and records use for a run's strategy: `engine.strategy`, or adamw."""
    return "adamw" if setup.execution is Execution.ADAMW else setup.engine.strategy


def splitting_of(setup: Setup) -> Splitting:
    """Returns how the run splits weights into matrices.

    Megatron's own optimizers support only fused and qkv, so with them a finer `engine.splitting` becomes qkv.
    """
    splitting = setup.engine.splitting
    return splitting if setup.execution.ours or splitting == "fused" else "qkv"


def dispatcher_of(setup: Setup) -> Dispatcher:
    """Returns the method that sends tokens to experts on other ranks."""
    return setup.parallel.dispatcher or "alltoall"


def has_tp_modes(setup: Setup) -> bool:
    """Returns True if Megatron's own Muon updates the matrices, so that `engine.muon_tp_mode` has an effect with
    several TP ranks."""
    return setup.optimizer.name == "muon" and setup.execution in (Execution.LAYERWISE, Execution.MEGATRON_SC)


def tp_mode_of(setup: Setup, tp: int) -> MuonTpMode:
    """Returns how TP ranks divide the updates of a run without a plan. With one TP rank, and in code that has no
    other mode, every rank updates whole matrices."""
    return setup.engine.muon_tp_mode if tp > 1 and has_tp_modes(setup) else "duplicated"


def with_tp_mode(setup: Setup, mode: MuonTpMode) -> Setup:
    """Returns the run with this `engine.muon_tp_mode`."""
    if setup.engine.muon_tp_mode == mode:
        return setup
    return replace(setup, engine=replace(setup.engine, muon_tp_mode=mode))


def with_flex(setup: Setup) -> Setup | None:
    """Returns the run with the dispatcher `flex`, which needs DeepEP on every machine and is therefore never
    chosen; None if the user set a dispatcher, or if the run cannot use `flex`."""
    possible = setup.model.num_experts > 0 and setup.cluster.device == "cuda" and setup.train.precision == "bf16"
    if setup.parallel.dispatcher is not None or not possible:
        return None
    return replace(setup, parallel=replace(setup.parallel, dispatcher="flex"))


def overlaps_param_gather(setup: Setup) -> bool:
    """Returns True if parameter gathering overlaps with the forward pass. This needs both overlap settings
    and a strategy that gathers parameters."""
    parallel = setup.parallel
    return parallel.overlap_param_gather and parallel.overlap_grad_reduce and not setup.execution.everywhere


def aligns_param_gather(setup: Setup, layout: Layout) -> bool:
    """Returns True if all parameters of a model chunk are gathered at once.

    Megatron-LM does so with interleaved pipelines (`align_param_gather`, on by default); otherwise it gathers
    each bucket while the previous one is in use. Runs that execute a plan follow the plan's order instead.
    """
    planned = setup.execution is Execution.PLANNED
    return overlaps_param_gather(setup) and layout.vpp > 1 and not planned


def with_strategy(setup: Setup, strategy: AnyStrategy) -> Setup:
    """Returns the run with another strategy.

    With adamw, the run keeps the settings that all optimizers share. With
    any strategy other than canzona and adamw, `engine.plan` is dropped.
    """
    if strategy == "adamw":
        optimizer = setup.optimizer
        if isinstance(optimizer, AdamWConfig):
            return setup
        shared = {field.name: getattr(optimizer, field.name) for field in fields(OptimizerBase)}
        adamw = AdamWConfig(name="adamw", **shared)
        return replace(setup, optimizer=adamw)
    engine = replace(setup.engine, strategy=strategy)
    if strategy != "canzona":
        engine = replace(engine, plan=None)
    return replace(setup, engine=engine)
