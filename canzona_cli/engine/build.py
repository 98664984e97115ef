"""Puts the engine of one rank together from a plan."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from canzona_cli.config.schema import CustomConfig, MuonConfig, RunConfig, ShampooConfig, SoapConfig
from canzona_cli.engine.agreement import agree_on_optimizer
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.fallbacks import Fallbacks
from canzona_cli.engine.fragments import Fragments
from canzona_cli.engine.hosted import MakeOptimizer, Wiring
from canzona_cli.engine.matrix_optimizer import MatrixOptimizer, hosted_matrices
from canzona_cli.megatron.adamw import build_adamw
from canzona_cli.megatron.in_flight import watcher_for
from canzona_cli.megatron.matrix_buffers import named_matrix_parameters
from canzona_cli.megatron.optimizer import adamw_settings
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.optimizers.muon import Muon
from canzona_cli.optimizers.registry import load_class, probe
from canzona_cli.optimizers.shampoo import Shampoo
from canzona_cli.optimizers.soap import SOAP
from canzona_cli.optimizers.stagger import stagger
from canzona_cli.optimizers.workspace import Workspace
from canzona_cli.planner.cost import algorithm, flops
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.types import Matrix

OnFallback = Callable[[torch.Tensor, str], None]

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


def optimizer_factory(
    config: RunConfig, matrices: Sequence[Matrix], on_fallback: OnFallback | None = None
) -> MakeOptimizer:
    """How a rank makes an optimizer of some of the matrices it hosts.

    Args:
        matrices: of the whole model. Refreshes of Shampoo and SOAP are spread over their period by cost, and a matrix's
            turn must not depend on who hosts it: any layout gives the same model.

    Raises:
        UnusableOptimizer: a user's own class cannot update 2-D parameters by `step()` alone.
    """
    chosen = config.optimizer
    if isinstance(chosen, MuonConfig):
        workspace = Workspace()

        def muon(_: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return Muon(
                params,
                chosen.lr,
                weight_decay=chosen.weight_decay,
                momentum=chosen.momentum,
                nesterov=chosen.nesterov,
                ns_steps=chosen.ns_steps,
                coefficients=chosen.coefficients,
                scale_mode=chosen.scale_mode,
                scale_factor=chosen.scale_factor,
                precision=config.train.precision,
                stack=chosen.stack,
                workspace=workspace,
            )

        return muon
    if isinstance(chosen, ShampooConfig | SoapConfig):
        offsets, workspace = _refresh_offsets(config, chosen, matrices), Workspace()

        def preconditioned(own_matrices: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            own = [offsets[matrix.index] for matrix in own_matrices]
            if isinstance(chosen, SoapConfig):
                return SOAP(
                    params,
                    chosen.lr,
                    weight_decay=chosen.weight_decay,
                    betas=(chosen.beta1, chosen.beta2),
                    eps=chosen.eps,
                    shampoo_beta=chosen.shampoo_beta,
                    precondition_frequency=chosen.precondition_frequency,
                    max_preconditioner_dim=chosen.max_preconditioner_dim,
                    refresh_offsets=own,
                    on_fallback=on_fallback,
                    precision="tf32" if chosen.tf32 else "fp32",
                    workspace=workspace,
                )
            return Shampoo(
                params,
                chosen.lr,
                weight_decay=chosen.weight_decay,
                betas=(chosen.beta1, chosen.beta2),
                eps=chosen.eps,
                shampoo_beta=chosen.shampoo_beta,
                shampoo_eps=chosen.shampoo_eps,
                precondition_frequency=chosen.precondition_frequency,
                max_preconditioner_dim=chosen.max_preconditioner_dim,
                grafting=chosen.grafting,
                refresh_offsets=own,
                on_fallback=on_fallback,
                precision="tf32" if chosen.tf32 else "fp32",
                workspace=workspace,
            )

        return preconditioned
    assert isinstance(chosen, CustomConfig)
    return _custom(chosen)


def _custom(chosen: CustomConfig) -> MakeOptimizer:
    kind: Callable[..., torch.optim.Optimizer] = load_class(chosen.source, chosen.allow)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind(params, lr=chosen.lr, weight_decay=chosen.weight_decay, **chosen.options)

    probe(make)

    def custom(_: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return make(params)

    return custom


def _refresh_offsets(
    config: RunConfig, chosen: ShampooConfig | SoapConfig, matrices: Sequence[Matrix]
) -> dict[int, int]:
    if not chosen.stagger:
        return {matrix.index: 0 for matrix in matrices}
    how = algorithm(config)
    costs = [flops(how, matrix.rows, matrix.cols) for matrix in matrices]
    return {
        matrix.index: offset
        for matrix, offset in zip(matrices, stagger(costs, chosen.precondition_frequency), strict=True)
    }
