"""Puts the engine of one rank together: by a plan, or, for strategy sc, with everything on every rank."""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.config.schema import CustomConfig, RunConfig
from canzona_cli.engine.agreement import agree_on_optimizer
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.factory import Fallbacks, optimizer_factory
from canzona_cli.engine.masters import MasterOptimizer
from canzona_cli.engine.planned import PlannedOptimizer, updated_matrices
from canzona_cli.engine.redundant import RedundantOptimizer
from canzona_cli.engine.wire import Aside, Fragments, Wiring
from canzona_cli.megatron.matrix_buffers import global_parameters, named_matrix_parameters, tag_matrices
from canzona_cli.megatron.optimizer import adamw_settings, build_adamw
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer, watcher_for
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrices import stage_matrices
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.refresh import by_rank


def build_engine(
    chunks: Sequence[DistributedDataParallel], config: RunConfig, world: World, plan: Plan | None, timer: PhaseTimer
) -> CanzonaOptimizer:
    """The optimizer of a run whose matrices canzona updates (`Execution.ours`). Collective.

    Args:
        chunks: of the model, wrapped with the plan's buffers, or without sharding where there is no plan.
        plan: of strategies canzona, paper and asc; None for sc, where every rank updates all matrices of its stage.

    Raises:
        OptimizerRefused: on all ranks together: a user's own class cannot update 2-D parameters by `step()` alone.
    """
    if plan is not None:
        own, ranks = updated_matrices(plan, world), by_rank(plan.matrices, plan.assignment.cells)
        parameters = named_matrix_parameters(chunks, plan, world.pp_rank)
    else:
        everything = matrices_of(config.model, world.layout, config.engine.splitting)
        own, ranks = list(stage_matrices(everything, world.pp_rank)), by_rank(everything, None)
        named = dict(global_parameters(chunks))
        parameters = {matrix.parameter: named[matrix.parameter] for matrix in own}
        tag_matrices(chunks, parameters)
    cells = plan.assignment.cells if plan is not None else ()
    shared = plan.assignment.shares if plan is not None else {}
    masters = {
        matrix.index: torch.nn.Parameter(
            torch.empty(
                matrix.fragment_shape(world.layout.tp) if matrix.index in shared else matrix.shape,
                dtype=torch.float32,
                device=world.device,
            )
        )
        for matrix in own
    }
    # What all tensor-parallel ranks do alike for a shared matrix counts once, where it is hosted.
    fallbacks = Fallbacks((m for m in own if m.index not in shared or cells[m.index].host == world.tp_rank), masters)
    source = config.optimizer.source if isinstance(config.optimizer, CustomConfig) else None
    wiring = Wiring(
        fragments=Fragments(config.model, world.layout.tp, world.tp_rank, parameters),
        rank=world.tp_rank,
        tp_group=world.groups.tp if world.layout.tp > 1 else None,
        timer=timer,
        watcher=watcher_for(world.device),
        aside=Aside(world.device),
        device=world.device,
        masters=masters,
        make_optimizer=agree_on_optimizer(lambda: optimizer_factory(config, ranks, fallbacks), source, world),
    )
    updater: MasterOptimizer
    if plan is not None:
        updater = PlannedOptimizer(config, chunks, world, plan, wiring, fallbacks)
    else:
        updater = RedundantOptimizer(config, chunks, world, own, wiring, fallbacks)
    return CanzonaOptimizer(
        build_adamw(chunks, world, adamw_settings(config)),
        updater,
        chunks,
        # With a plan every gradient element is reduced on one rank; without, data-parallel ranks have equal gradients.
        stats_group=world.groups.intra_dist_opt if plan is not None else world.groups.mp,
        timer=timer,
        non_finite=config.train.non_finite,
        clip=config.optimizer.clip,
    )
