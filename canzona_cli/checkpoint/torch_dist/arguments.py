"""Translates a run's settings to Megatron-LM's arguments, and to the parameter groups and the schedule in
Megatron-LM's checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.checkpoint.torch_dist.names import Kind
from canzona_cli.config.megatron_arguments import limited, table
from canzona_cli.config.megatron_translation import BALANCING
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.unknown_keys import exact_key
from canzona_cli.core.engine.stored_state import SHARDING
from canzona_cli.core.errors import value_of
from canzona_cli.core.setup import OptimizerConfig

_DECAYS: Final = {"wsd": "WSD"}
_BALANCING: Final = {ours: theirs for theirs, ours in BALANCING.items()}
_FIXED: Final[Mapping[str, object]] = {
    "swiglu": True,
    "group_query_attention": True,
    "add_position_embedding": True,
    "add_bias_linear": False,
    "use_rotary_position_embeddings": True,
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    "ckpt_format": "torch_dist",
    # The checkpoint has no layout and no random states: ranks read the tensors that they need.
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "no_save_rng": True,
    "dist_ckpt_optim_fully_reshardable": True,
}
"""The arguments that are the same for all of canzona's models, excluding those for which canzona supports
only one value."""


def arguments_of(config: RunConfig, progress: Progress, *, has_state: bool) -> dict[str, object]:
    """Returns Megatron-LM's arguments for a run, which `--use-checkpoint-args` reads, and the run's position
    in its data.

    Args:
        has_state: True if the checkpoint has optimizer state.
    """
    model, schedule = config.model, config.schedule.complete(config.train.steps)
    muon = config.optimizer.name == "muon"
    names = [*table()["same"], *(table()["muon"] if muon else ())]
    keys = {name: key for name in names if (key := exact_key(name)) is not None and not key.startswith("parallel.")}
    return {
        **{name: value_of(config, key) for name, key in keys.items()},
        **{name: accepted[0] for name, accepted, _ in (*limited("refused"), *limited("plans_only"))},
        **_FIXED,
        "ffn_hidden_size": model.dense_width,
        "moe_layer_freq": model.megatron_layer_freq,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.head_dim,
        "padded_vocab_size": model.vocab_size,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "use_rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": model.rope_scaling or 8.0,
        "max_position_embeddings": config.train.seq_length,
        "optimizer": "muon" if muon else "adam",
        **(_expert_arguments(config) if model.num_experts else {}),
        "muon_split_qkv": config.engine.splitting != "fused",
        "bf16": config.train.precision == "bf16",
        "grad_reduce_in_bf16": config.train.grad_reduce_dtype == "bf16",
        "global_batch_size": config.train.global_batch_size,
        "train_iters": config.train.steps,
        "min_lr": config.optimizer.min_lr,
        **_decoupled(config.optimizer),
        "lr_decay_style": _DECAYS.get(schedule.decay, schedule.decay),
        "lr_decay_iters": schedule.decay_steps,
        "lr_warmup_iters": schedule.warmup_steps,
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": schedule.wsd_decay_steps,
        "consumed_train_samples": progress.samples,
        "no_save_optim": not has_state,
    }


def _expert_arguments(config: RunConfig) -> dict[str, object]:
    """Returns Megatron-LM's arguments for a model with experts."""
    model = config.model
    return {
        "num_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_router_topk": model.experts_per_token,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": _BALANCING[model.balancing_loss],
        "moe_aux_loss_coeff": model.balancing_weight,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }


def _decoupled(optimizer: OptimizerConfig) -> dict[str, object]:
    """Returns Megatron-LM's arguments for a rate of embeddings and output layer that is not that of matrices."""
    own = optimizer.adamw_rates
    return {} if own.lr == optimizer.lr else {"decoupled_lr": own.lr, "decoupled_min_lr": own.min_lr}


def schedule_state(config: RunConfig, progress: Progress) -> dict[str, object]:
    """Returns the state of Megatron-LM's schedule, which counts samples."""
    train, optimizer = config.train, config.optimizer
    schedule = config.schedule.complete(train.steps)

    def samples(steps: int) -> int:
        return train.sequences(train.global_batch_size or 1, 1, steps)

    return {
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": samples(schedule.warmup_steps or 0),
        "lr_decay_steps": samples(schedule.decay_steps or 0),
        "lr_decay_style": _DECAYS.get(schedule.decay, schedule.decay),
        "num_steps": progress.samples,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": samples(train.steps),
    }


def optimizer_groups(config: RunConfig, kind: Kind, step: float) -> dict[object, object]:
    """Returns the parameter groups of Megatron's distributed AdamW, or of its layer-wise Muon together with
    AdamW.

    In Megatron, experts that are divided among ranks are in groups of their own, and AdamW of them is an optimizer of
    its own. Megatron only loads as many groups as it has, so experts are written as divided unless the run has
    `parallel.ep=1`.

    Megatron-LM can give embeddings and output layer their own rate (`--decoupled-lr`), but not norms, and they
    have no weight decay of their own.

    Args:
        step: The number of steps that AdamW has taken.
    """
    optimizer = config.optimizer
    usual = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": False,
        "default_config": True,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
    }
    adamw = {
        **usual,
        "betas": optimizer.adamw_betas,
        "eps": optimizer.eps,
        "bias_correction": True,
        "decoupled_weight_decay": True,
        "step": step,
        **({"optimizer": "adam"} if kind == "muon" else {}),
    }
    # Weight decay does not apply to norms.
    adamw_groups = [adamw, {**adamw, "wd_mult": 0.0}]
    if (own := optimizer.adamw_rates).lr != optimizer.lr:
        decoupled = {**adamw, "default_config": False, "max_lr": own.lr, "min_lr": own.min_lr, "lr": own.lr}
        adamw_groups = [*(adamw_groups if kind == "adamw" else adamw_groups[1:]), decoupled]
    groups: dict[object, object] = {
        "optimizer": {"param_groups": adamw_groups},
        "param_state_sharding_type": SHARDING,
    }
    divided = config.model.num_experts > 0 and config.parallel.ep != 1
    if kind == "adamw":
        if not divided:
            return groups
        of_experts: dict[object, object] = {"optimizer": {"param_groups": [{**adamw, "is_expert_parallel": True}]}}
        return {0: groups, 1: groups | of_experts}
    momentum = asdict(optimizer).get("momentum")
    muon = {**usual, "momentum": momentum}
    muons = [muon, {**muon, "is_expert_parallel": True}] if divided else [muon]
    return {0: {"optimizer": {"param_groups": muons}}, 1: groups}
