"""Builds the gradient buffers of every strategy, and Megatron's own, unmodified optimizers: AdamW
(`DistributedOptimizer`), and Muon for the strategies sc and layerwise."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    Adam,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.errors import Problem, Unsupported, refuse
from canzona_cli.core.megatron import owner_bucket_group
from canzona_cli.core.megatron.matrix_buffers import (
    TAG,
    check_model,
    full_param_layout,
    global_parameters,
    matrix_parameters,
    tag_matrices,
)
from canzona_cli.core.megatron.model import parameters_in_plan_order
from canzona_cli.core.megatron.parallel import World, Wrapped, exchange_objects_as_json
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Execution, MuonConfig, OptimizerBase, Precision, Setup
from canzona_cli.core.setup.execution import aligns_param_gather, overlaps_param_gather, tp_mode_of


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module], setup: Setup, world: World, plan: Plan | None = None
) -> list[DistributedDataParallel]:
    """Wraps model chunks in `DistributedDataParallel`, with the gradient buffers, bucketed reduction and
    parameter gathering of the run's strategy.

    Args:
        chunks: this rank's part of the model.
        plan: the plan of strategies canzona, paper and asc, which defines the buckets of matrices; None for
            other strategies.

    Raises:
        PlanMismatch: the plan is for another model or layout.
    """
    mcore = get_model_config(chunks[0])
    sharded = not setup.execution.everywhere
    aligned = aligns_param_gather(setup, world.layout)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.train.grad_reduce_dtype == "fp32",
        overlap_grad_reduce=setup.parallel.overlap_grad_reduce,
        overlap_param_gather=overlaps_param_gather(setup),
        align_param_gather=aligned,
        use_distributed_optimizer=sharded,
        bucket_size=setup.parallel.bucket_elements,
        average_in_collective=False,
    )
    if plan is not None:
        wrapped = wrap_planned(chunks, setup, world, plan, ddp_config)
    else:
        wrapped = _wrap_as_megatron(chunks, setup, world, ddp_config)
    mcore.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    # Gradients are reduced bucket by bucket. With `align_grad_reduce`, they would wait for complete model
    # chunks.
    mcore.param_sync_func = [chunk.start_param_sync for chunk in wrapped] if aligned else None
    mcore.finalize_model_grads_func = finalize_model_grads
    return wrapped


def wrap_planned(
    chunks: Sequence[torch.nn.Module],
    setup: Setup,
    world: World,
    plan: Plan,
    ddp_config: DistributedDataParallelConfig,
) -> list[DistributedDataParallel]:
    """Wraps model chunks with the plan's buckets.

    `disable_bucketing` stays off: with it, Megatron would put all buckets of a chunk in one group, and
    AdamW's parameters and matrices could not be communicated separately.

    Raises:
        PlanMismatch: the plan is for another model or layout.
        Unsupported: `ddp_config` has settings that buckets with owners do not support.
    """
    check_model(chunks, plan, world)
    tag_matrices(chunks, matrix_parameters(chunks, plan, world))
    size = _bucket_size(setup, world)
    layouts = [full_param_layout(c, index, plan, world, ddp_config, size) for index, c in enumerate(chunks)]
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(parameters_in_plan_order(chunk))
        wrapped = _wrap(chunks, layouts, ddp_config, world)
    owner_bucket_group.install(wrapped, plan, world)
    return wrapped


def _wrap_as_megatron(
    chunks: Sequence[torch.nn.Module], setup: Setup, world: World, ddp_config: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Wraps model chunks with the buffers of Megatron's own optimizers; without sharding for strategy sc."""
    layer_wise = setup.execution is Execution.LAYERWISE
    layouts = [None] * len(chunks)
    if layer_wise:
        tag_params_for_buffer_routing(chunks)
    if ddp_config.use_distributed_optimizer:
        optimizer_class = LayerWiseDistributedOptimizer if layer_wise else DistributedOptimizer
        layouts = [
            optimizer_class.compute_full_param_layout(
                [param for param in chunk.parameters() if param.requires_grad],
                _bucket_size(setup, world),
                world.groups.dp_cp.size(),
                ddp_config,
                expert_data_parallel_world_size=world.groups.expt_dp.size(),
            )
            for chunk in chunks
        ]
    return _wrap(chunks, layouts, ddp_config, world)


def _bucket_size(setup: Setup, world: World) -> int | None:
    """Returns the bucket size, in elements, that `DistributedDataParallel` will use; None for a single
    bucket. Only the first stage's buffers are divided into buckets."""
    return bucket_elements(setup, world.layout) if world.pp_rank == 0 else None


def _wrap(
    chunks: Sequence[torch.nn.Module],
    layouts: Sequence[FullParamLayout | None],
    ddp_config: DistributedDataParallelConfig,
    world: World,
) -> list[DistributedDataParallel]:
    return [
        DistributedDataParallel(
            config=get_model_config(chunks[0]),
            ddp_config=ddp_config,
            module=chunk,
            pg_collection=world.groups,
            full_param_layout=layout,
        )
        for chunk, layout in zip(chunks, layouts, strict=True)
    ]


def build_optimizer(chunks: Wrapped, setup: Setup, world: World) -> MegatronOptimizer:
    """Builds Megatron's own optimizer for the run's strategy: AdamW for all parameters, or Muon with AdamW.
    Collective."""
    optimizer = setup.optimizer
    changes: dict[str, object] = {}
    if isinstance(optimizer, MuonConfig):
        changes = {
            "optimizer": "muon",
            "muon_momentum": optimizer.momentum,
            "muon_nesterov": optimizer.nesterov,
            "muon_num_ns_steps": optimizer.ns_steps,
            "muon_coefficient_type": optimizer.coefficients,
            "muon_scale_mode": optimizer.scale_mode,
            "muon_extra_scale_factor": optimizer.scale_factor,
            "muon_split_qkv": setup.engine.splitting != "fused",
            # Never Megatron's default, blockwise, which orthogonalises each TP fragment separately, so that the
            # update depends on tp.
            "muon_tp_mode": tp_mode_of(setup, world.layout.tp),
            "muon_fp32_matmul_prec": "medium" if setup.train.precision == "bf16" else "highest",
            "use_distributed_optimizer": False,
            "use_layer_wise_distributed_optimizer": setup.execution is Execution.LAYERWISE,
        }
    config = adamw_settings(setup, changes)
    overrides = get_standard_config_overrides(config)
    if own := _own_rates(optimizer):
        names = {matrix.parameter for matrix in matrices_of(setup.model, world.layout, setup.engine.splitting)}
        matrices = {id(param) for name, param in global_parameters(chunks) if name in names}
        not_matrix = ParamPredicate(name="canzona_not_matrix", fn=lambda param: id(param) not in matrices)
        overrides[ParamKey(predicate=not_matrix)] = own
    with exchange_objects_as_json():
        return get_megatron_optimizer(
            config, list(chunks), overrides, use_gloo_process_groups=False, pg_collection=world.groups
        )


def _own_rates(optimizer: OptimizerBase) -> ParamGroupOverride:
    """Returns the settings of parameter groups without matrices that differ from the schedule's, which are those of
    matrices."""
    own, rates = ParamGroupOverride(), optimizer.adamw_rates
    if rates.lr != optimizer.lr:
        own.update(max_lr=rates.lr, min_lr=rates.min_lr)
    if rates.weight_decay != optimizer.weight_decay:
        own.update(start_wd=rates.weight_decay, end_wd=rates.weight_decay)
    return own


def adamw_settings(setup: Setup, changes: Mapping[str, object] | None = None) -> MegatronOptimizerConfig:
    """Returns Megatron's settings for AdamW. `DistributedOptimizer` shards its state, except with strategy sc.

    Args:
        changes: the settings of another optimizer that differ from AdamW's; None for AdamW.
    """
    optimizer = setup.optimizer
    bf16 = setup.train.precision == "bf16"
    settings = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adamw_betas[0],
        "adam_beta2": optimizer.adamw_betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": not setup.execution.everywhere,
        "overlap_param_gather": overlaps_param_gather(setup),
    }
    return MegatronOptimizerConfig(**{**settings, **(changes or {})})


def adamw_part(config: MegatronOptimizerConfig, settings: OptimizerBase) -> MegatronOptimizerConfig:
    """Returns settings for AdamW with `DistributedOptimizer`, derived from a caller's settings for Megatron's
    Muon, and the betas that the caller gave the engine for AdamW alone."""
    part = copy(config)
    part.adam_beta1, part.adam_beta2 = settings.adamw_betas
    part.optimizer = "adam"
    part.use_distributed_optimizer = True
    part.use_layer_wise_distributed_optimizer = False
    return part


def build_schedule(optimizer: MegatronOptimizer, setup: Setup) -> OptimizerParamScheduler:
    """Builds the learning-rate schedule: linear warm-up, then the decay that `config.schedule` sets. The
    caller runs `.step(increment=1)` after each optimizer step."""
    base, schedule = setup.optimizer, setup.schedule
    wsd = schedule.decay == "wsd"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=base.lr,
        min_lr=base.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style="WSD" if wsd else schedule.decay,
        start_wd=base.weight_decay,
        end_wd=base.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_decay_steps if wsd else None,
        lr_wsd_decay_style="linear" if wsd else None,
    )


_MATRICES = "canzona"
"""The name of a placeholder optimizer. Megatron puts the parameters that are assigned to it, which AdamW does
not update, into separate groups."""
Overrides = Mapping[ParamKey, ParamGroupOverride]
"""The settings that differ from the optimizer's for some parameters, by the keys that select the
parameters."""


def build_adamw(
    chunks: Wrapped,
    world: World,
    megatron_config: MegatronOptimizerConfig,
    settings: OptimizerBase,
    overrides: Overrides | None = None,
) -> MegatronOptimizer:
    """Builds AdamW for every parameter of a rank's model chunks that `tag_matrices` did not mark as a matrix.
    Weight decay does not apply to norms and biases.

    All ranks get the same parameter groups, some of which may be empty, because resuming from a checkpoint
    needs them. Collective.

    Args:
        megatron_config: settings with `optimizer="adam"`; with `use_distributed_optimizer=True`, matrices
            must be in separate buffers.
        settings: the run's optimizer, whose `adamw_rates` apply unless an override sets another rate.
        overrides: the caller's `config_overrides`; None for Megatron's standard ones.

    Raises:
        Unsupported: on all ranks, if an override chooses an optimizer or applies to matrices.
    """
    assert megatron_config.optimizer == "adam"
    if overrides is None:
        overrides = get_standard_config_overrides(megatron_config)
    refuse(_optimizer_overrides(overrides), Unsupported)
    is_matrix = ParamPredicate(name="canzona_matrix", fn=lambda param: getattr(param, TAG, False))
    models = list(chunks)
    with exchange_objects_as_json():
        groups = _get_param_groups(
            models, megatron_config, {**overrides, ParamKey(predicate=is_matrix): {"optimizer": _MATRICES}}
        )
    refuse(_overridden_matrices(groups, megatron_config), Unsupported)
    groups = [group for group in groups if group.get("optimizer") != _MATRICES]
    own = _own_rates(settings)
    for group in groups:
        # The caller's overrides take precedence. A group without one for rates has the default rates.
        default = {"max_lr", "min_lr"} if group["default_config"] else set()
        group.update({key: value for key, value in own.items() if key not in group or key in default})
    ranks = ProcessGroupCollection.setup_process_groups_for_optimizer(
        world.groups, models, use_gloo_process_groups=False
    )
    for model in models:
        model.overlap_param_gather_with_optimizer_step = False
    optimizer: MegatronOptimizer = _get_megatron_optimizer_based_on_param_groups(
        config=megatron_config,
        model_chunks=models,
        param_groups=groups,
        per_model_buffers={
            index: [buffer for buffer in model.buffers if not getattr(buffer.params[0], TAG, False)]
            for index, model in enumerate(models)
        },
        model_parallel_group=ranks["mp_group"],
        data_parallel_group=ranks["intra_dp_cp_group"],
        data_parallel_group_idx=ranks["mp_group"].rank(),
        intra_dist_opt_group=ranks["intra_dist_opt_group"],
        pg_collection=world.groups,
    )
    return optimizer


def _optimizer_overrides(overrides: Overrides) -> Iterator[Problem]:
    """Yields a problem for each override that chooses an optimizer."""
    for key, override in overrides.items():
        if "optimizer" in override:
            reason = f"an override of {key} chooses it, but canzona updates the matrices, and AdamW everything else"
            yield Problem(
                key="config_overrides", value=override["optimizer"], reason=reason, fix="remove optimizer from it"
            )


def _overridden_matrices(
    groups: Iterable[Mapping[str, object]], megatron_config: MegatronOptimizerConfig
) -> Iterator[Problem]:
    """Yields a problem for each parameter group of matrices whose settings differ from the optimizer's. The
    groups are the same on all ranks."""
    expected = {**_group_settings(megatron_config), "optimizer": _MATRICES}
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "is_expert_parallel")}
        if settings.get("optimizer") != _MATRICES or settings == expected:
            continue
        yield Problem(
            key="config_overrides",
            value={
                key: value for key, value in settings.items() if expected.get(key) != value and key != "default_config"
            },
            reason="it applies to matrices, which all have the same settings",
            fix="let it select parameters that are not matrices, such as the embedding, the output layer and norms",
        )


def _group_settings(config: MegatronOptimizerConfig) -> dict[str, object]:
    """Returns Megatron's settings for a parameter group without overrides."""
    return {
        "default_config": True,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
    }


def muon_groups(config: MegatronOptimizerConfig, chunks: Wrapped) -> list[dict[str, object]]:
    """Returns the settings of the parameter groups that Megatron's Muon has for wrapped model chunks, as Megatron's
    checkpoints store them: one group, and a second one for experts that are divided among ranks."""
    params = [torch.nn.Parameter(torch.empty(1, 1))]
    muon = TensorParallelMuon(params, lr=config.lr, momentum=config.muon_momentum, weight_decay=config.weight_decay)
    settings = {key: value for key, value in muon.param_groups[0].items() if key != "params"}
    kinds = (False, True) if chunks[0].expert_parallel_bucket_groups else (False,)
    return [{**_group_settings(config), "is_expert_parallel": of_experts, **settings} for of_experts in kinds]


def megatron_muon(
    params: list[torch.nn.Parameter], settings: MuonConfig, precision: Precision
) -> torch.optim.Optimizer:
    """Builds Megatron's Muon for whole fp32 masters, as strategies sc and layerwise use it."""
    muon: torch.optim.Optimizer = TensorParallelMuon(
        params,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fp32_matmul_prec="medium" if precision == "bf16" else "highest",
        coefficient_type=settings.coefficients,
        num_ns_steps=settings.ns_steps,
        scale_mode=settings.scale_mode,
        extra_scale_factor=settings.scale_factor,
        tp_mode="duplicated",
    )
    return muon


def megatron_adam(params: list[torch.nn.Parameter], settings: OptimizerBase) -> torch.optim.Optimizer:
    """Builds the AdamW that `DistributedOptimizer` uses for its shards of fp32 masters: that of Transformer
    Engine or APEX if one of them is installed, otherwise torch's."""
    optimizer: torch.optim.Optimizer = Adam(
        params,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    return optimizer
