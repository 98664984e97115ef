"""Puts the engine of one rank together from a plan."""

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.config.schema import CustomConfig, RunConfig
from canzona_cli.engine.agreement import agree_on_optimizer
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.factory import optimizer_factory
from canzona_cli.engine.fallbacks import Fallbacks
from canzona_cli.engine.fragments import Fragments
from canzona_cli.engine.hosted import Wiring
from canzona_cli.engine.matrix_optimizer import MatrixOptimizer, hosted_matrices
from canzona_cli.megatron.adamw import build_adamw
from canzona_cli.megatron.in_flight import watcher_for
from canzona_cli.megatron.matrix_buffers import named_matrix_parameters
from canzona_cli.megatron.optimizer import adamw_settings
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.planner.plan import Plan

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_canzona(
    model: DistributedDataParallel, config: RunConfig, world: World, plan: Plan, timer: PhaseTimer
) -> CanzonaOptimizer:
    """The optimizer of strategies canzona and asc over a model wrapped with the plan's buffers.

    Raises:
        OptimizerRefused: on all ranks together: a user's own class cannot update 2-D parameters by `step()` alone.
    """
    stage, owner, host = world.pp_rank, int(world.groups.dp_cp.rank()), world.tp_rank
    hosted = hosted_matrices(plan, stage, owner, host)
    masters = {
        matrix.index: torch.nn.Parameter(
            torch.empty(matrix.rows, matrix.cols, dtype=torch.float32, device=world.device)
        )
        for matrix in hosted
    }
    wiring = Wiring(
        fragments=Fragments(config.model, plan.subject.layout.tp, host, named_matrix_parameters(model, plan, stage)),
        rank=host,
        tp_group=world.groups.tp if plan.subject.layout.tp > 1 else None,
        timer=timer,
        watcher=watcher_for(world.device),
        device=world.device,
        masters=masters,
    )
    settings, fallbacks = adamw_settings(config), Fallbacks(hosted, masters)
    source = config.optimizer.source if isinstance(config.optimizer, CustomConfig) else None
    make_optimizer = agree_on_optimizer(lambda: optimizer_factory(config, plan.matrices, fallbacks), source, world)
    matrices = MatrixOptimizer(
        settings,
        model,
        plan,
        stage,
        owner,
        wiring,
        exchange_dtype=_DTYPES[config.engine.exchange_dtype],
        weight_dtype=_DTYPES[config.train.precision],
        make_optimizer=make_optimizer,
        fallbacks=fallbacks,
    )
    return CanzonaOptimizer(
        build_adamw(model, world, settings),
        matrices,
        model,
        stats_group=world.groups.intra_dist_opt,
        timer=timer,
        non_finite=config.train.non_finite,
    )
