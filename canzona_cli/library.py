"""canzona's engine for other training loops: Megatron-LM's `pretrain`, or any loop on Megatron-core.

The objects of a loop, and settings as on the command line, are composed to the setup that the engine plans from.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_translation import min_lr_ratio
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core import api
from canzona_cli.core.api import Caller
from canzona_cli.core.costs.sharing import mode_warnings
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.errors import EnvironmentProblem, Problem, Unsupported, refuse
from canzona_cli.core.megatron import contract
from canzona_cli.core.megatron.limits import BUCKETS, MODEL, OPTIMIZER, problems
from canzona_cli.core.megatron.model import chunk_sizes
from canzona_cli.core.megatron.optimizer import Overrides
from canzona_cli.core.megatron.parallel import Wrapped
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.core.setup.execution import PLANNED
from canzona_cli.core.setup.stages import count_parts_as_layers, cut_layers
from canzona_cli.core.simulate.possible import fill, possible_layouts

Value = bool | int | float | str
_RECIPE: Final = "qwen3-tiny"
"""The recipe to start from. Every setting in it that has an effect on the engine is replaced."""
_FREE: Final = ("cluster", "engine", "optimizer", "train.non_finite", "train.seq_length", "train.micro_batch_size")
"""The settings, and groups of settings, that a caller may set, except the optimizer settings that the loop's own
configuration determines (`_optimizer`)."""
_FEWEST_IDS: Final = 512
"""The smallest vocabulary with which the recipe is valid. The recipe's tokenizer, which is not used, has
fewer ids."""


class Engine(api.Engine):
    """canzona's engine for a training loop on Megatron-core: call `wrap` in place of
    `DistributedDataParallel(...)`, and `optimizer` in place of `get_megatron_optimizer(...)`.

    The engine is experimental: it supports decoders (`GPTModel`), dense or with experts, and raises
    `Unsupported` for all other models, with the reason and the fix. It has only been run on CPUs, with gloo.

    Args:
        optimizer_config: Megatron's configuration, with `optimizer="muon"`. Its settings for Muon, AdamW,
            clipping and schedules apply.
        settings: Settings as on canzona's command line: `cluster` (the profile to plan for, required on
            GPUs), the groups `engine` and `optimizer`, `train.non_finite`, and the sizes that the loop trains
            with, `train.micro_batch_size` and `train.seq_length`. For example `Engine(config,
            "cluster=h100-80g", "engine.mode=hosted")`.
        groups: The loop's process groups; None for the groups of `megatron.core.parallel_state`.
    """

    def __init__(
        self, optimizer_config: MegatronOptimizerConfig, *settings: str, groups: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(optimizer_config, lambda caller: describe(caller, settings), groups)


def describe(caller: Caller, settings: Sequence[str]) -> tuple[Setup, Layout, Sequence[str]]:
    """Returns the setup and the layout that a training loop's objects describe, and warnings about settings
    that have no effect or will probably work badly.

    Args:
        settings: Further settings, as on the command line (`engine.mode=hosted`, `cluster=h100-80g`).

    Raises:
        Unsupported: The engine does not support a feature of the loop; lists every problem.
        ConfigError: A setting is not valid, or the loop determines it.
    """
    refuse([*_unsupported(caller)], Unsupported)
    loop = dict([*_model(caller), *_layout(caller), *_optimizer(caller, settings), *_training(caller)])
    chosen = [*_chosen(settings, loop, caller.device)]
    chosen_keys = set(map(key_of, chosen))
    fixed = [f"{key}={override_text(value)}" for key, value in loop.items() if key not in chosen_keys]
    composed = compose_run([f"recipe={_RECIPE}", *chosen, *fixed])
    config = composed.config
    refuse(_engine_problems(config, caller.device))
    vocabulary = caller.models[0].vocab_size
    assert isinstance(vocabulary, int)
    model = replace(
        config.model,
        name="model",
        vocab_size=vocabulary,
        qk_norm=caller.model.qk_layernorm,
        gated=caller.model.gated_linear_unit,
        experts_per_token=caller.model.moe_router_topk,
        shared_ffn_hidden_size=caller.model.moe_shared_expert_intermediate_size or 0,
    )
    if caller.model.num_moe_experts and (frequency := caller.model.moe_layer_freq) != 1:
        layers = tuple(frequency) if isinstance(frequency, list) else frequency
        model = replace(model, moe_layer_freq=layers, dense_ffn_hidden_size=caller.model.ffn_hidden_size)
    config = replace(config, model=model)
    [layout] = possible_layouts(config.setup)
    setup = fill(config.setup, layout)
    return setup, layout, [*composed.warnings, *mode_warnings(setup, layout)]


def _unsupported(caller: Caller) -> Iterator[Problem]:
    """Yields a problem for each feature of the caller's training loop that the engine does not support; every
    rank yields the same problems."""
    optimizer, model = caller.optimizer, caller.model
    yield from problems(optimizer, OPTIMIZER)
    yield from problems(caller.ddp, BUCKETS)
    if optimizer.bf16 and optimizer.muon_fp32_matmul_prec not in ("medium", "low"):
        yield Problem(
            key="muon_fp32_matmul_prec",
            value=optimizer.muon_fp32_matmul_prec,
            reason="with bf16 weights the matmuls of Newton-Schulz are in bf16",
            fix="leave it at medium",
        )
    if not all(isinstance(chunk, GPTModel) for chunk in caller.models):
        kinds = ", ".join(sorted({type(chunk).__name__ for chunk in caller.models}))
        yield Problem(key="model", value=kinds, reason="the engine supports only the matrices of GPTModel")
        return
    yield from problems(model, MODEL)
    if caller.groups.tp.size() > 1 and optimizer.muon_tp_mode == "blockwise":
        yield Problem(
            key="muon_tp_mode",
            value="blockwise",
            reason="each tensor-parallel rank orthogonalises its fragment, but canzona orthogonalises whole matrices",
            fix="use duplicated, which computes the same as canzona",
        )
    chunks = caller.groups.pp.size() * len(caller.models)
    counted = count_parts_as_layers(model.num_layers, chunks)
    if counted is None:
        reason = f"{chunks} model chunks would have different numbers of layers"
        yield Problem(key="num_layers", value=model.num_layers, reason=reason, fix=f"use a multiple of {chunks}")
    elif (sizes := chunk_sizes(model, len(caller.models))) != (
        planned := [len(part) for part in cut_layers(model.num_layers, chunks)]
    ):
        reason = f"the model chunks have {sizes} layers, but in the plan, which cuts layers evenly, {planned}"
        fix = f"count as layers of the pipeline: {', '.join(k for k, v in counted._asdict().items() if v) or 'nothing'}"
        yield Problem(key="num_layers", value=model.num_layers, reason=reason, fix=fix)
    if model.num_moe_experts:
        yield from _expert_problems(caller)
    gtp = getattr(caller.groups, "gtp_remat", None)
    if gtp is not None and gtp.size() > 1:
        reason = "the engine does not support this way of dividing weights among ranks"
        yield Problem(key="gtp_weight_remat_size", value=gtp.size(), reason=reason, fix="leave it at 1")
    ranks = caller.groups.tp.size() * caller.groups.pp.size() * caller.groups.dp_cp.size()
    if ranks != torch.distributed.get_world_size():
        reason = f"the groups have {ranks} ranks, but the job has {torch.distributed.get_world_size()}"
        yield Problem(key="groups", reason=reason, fix="use the engine in jobs whose ranks all train the model")


def _expert_problems(caller: Caller) -> Iterator[Problem]:
    """Yields a problem for each feature of a loop with experts that the engine does not support."""
    model, groups = caller.model, caller.groups
    expected = groups.tp.size() if groups.ep.size() == 1 else 1
    if groups.expt_tp.size() != expected:
        reason = (
            "experts that are divided among ranks are whole matrices" if expected == 1 else "all weights are cut alike"
        )
        fix = f"use {expected}"
        yield Problem(key="expert_tensor_parallel_size", value=groups.expt_tp.size(), reason=reason, fix=fix)
    if groups.ep.size() > 1 and model.add_bias_linear:
        reason = (
            "AdamW does not update biases of experts that are divided among ranks, as with Megatron's layer-wise Muon"
        )
        yield Problem(key="add_bias_linear", value=True, reason=reason, fix="use --disable-bias-linear")


def _model(caller: Caller) -> Iterator[tuple[str, Value]]:
    model, chunk = caller.model, caller.models[0]
    vocabulary = chunk.vocab_size
    assert isinstance(vocabulary, int)
    yield "model.num_layers", model.num_layers
    yield "model.hidden_size", model.hidden_size
    yield "model.ffn_hidden_size", model.moe_ffn_hidden_size or model.ffn_hidden_size
    yield "model.num_attention_heads", model.num_attention_heads
    yield "model.num_query_groups", model.num_query_groups or model.num_attention_heads
    yield "model.head_dim", model.kv_channels
    yield "model.vocab_size", -(-_FEWEST_IDS // vocabulary) * vocabulary
    yield "model.tied_embeddings", bool(chunk.share_embeddings_and_output_weights)
    yield "model.num_experts", model.num_moe_experts or 0


def _layout(caller: Caller) -> Iterator[tuple[str, Value]]:
    groups, pp, vpp = caller.groups, caller.groups.pp.size(), len(caller.models)
    yield "gpus", torch.distributed.get_world_size()
    yield "parallel.tp", groups.tp.size()
    yield "parallel.pp", pp
    yield "parallel.vpp", vpp
    yield "parallel.cp", groups.cp.size()
    yield "parallel.ep", groups.ep.size()
    if groups.ep.size() > 1:
        yield "parallel.dispatcher", caller.model.moe_token_dispatcher_type
    yield "parallel.sequence_parallel", bool(caller.model.sequence_parallel)
    yield "parallel.overlap_grad_reduce", bool(caller.ddp.overlap_grad_reduce)
    yield "parallel.overlap_param_gather", bool(caller.ddp.overlap_param_gather)
    if caller.ddp.bucket_size is not None:
        yield "parallel.bucket_elements", caller.ddp.bucket_size


def _optimizer(caller: Caller, settings: Sequence[str]) -> Iterator[tuple[str, Value]]:
    config = caller.optimizer
    yield "optimizer.lr", config.lr
    yield "optimizer.min_lr_ratio", min_lr_ratio(config.lr, config.min_lr) if config.lr else 0.0
    yield "optimizer.weight_decay", config.weight_decay
    yield "optimizer.clip_grad", config.clip_grad
    yield "optimizer.beta1", config.adam_beta1
    yield "optimizer.beta2", config.adam_beta2
    yield "optimizer.eps", config.adam_eps
    if not any(key_of(setting).startswith("optimizer.adamw_lr") for setting in settings):
        yield "optimizer.adamw_lr", config.lr
    # These settings do not apply to canzona's other optimizers.
    if all(key_of(setting) != "optimizer" or setting == "optimizer=muon" for setting in settings):
        yield "optimizer.momentum", config.muon_momentum
        yield "optimizer.nesterov", config.muon_nesterov
        yield "optimizer.ns_steps", config.muon_num_ns_steps
        yield "optimizer.coefficients", config.muon_coefficient_type
        yield "optimizer.scale_mode", config.muon_scale_mode
        yield "optimizer.scale_factor", config.muon_extra_scale_factor


def _training(caller: Caller) -> Iterator[tuple[str, Value]]:
    """Yields the settings for precision, recomputation, batch and splitting."""
    precision = "bf16" if caller.optimizer.bf16 else "fp32"
    yield "train.precision", precision
    # fp32 weights always have fp32 gradients.
    yield "train.grad_reduce_dtype", "fp32" if caller.ddp.grad_reduce_in_fp32 else precision
    yield "train.recompute", caller.model.recompute_granularity or "none"
    yield "train.seq_length", caller.models[0].max_sequence_length
    yield "train.micro_batch_size", 1
    # The loop chooses the number of micro-batches; an interleaved pipeline needs at least one for each stage.
    yield "train.global_batch_size", caller.groups.dp.size() * caller.groups.pp.size()
    # Matrices are split as in Megatron's Muon, so that training gives the same result.
    yield "engine.splitting", "qkv" if caller.optimizer.muon_split_qkv else "fused"


def _chosen(settings: Sequence[str], given: Mapping[str, Value], device: str) -> Iterator[str]:
    """Yields the caller's settings, a global batch that matches their micro-batch, and on CPUs `cluster=cpu`
    if they do not name a cluster.

    Raises:
        ConfigError: The loop determines one of the settings, or, on GPUs, none of them names a cluster.
    """
    micro = 1
    for setting in settings:
        key = key_of(setting)
        fixed = key in given and key not in _FREE and not key.startswith("engine.")
        if fixed or not any(key == free or key.startswith(f"{free}.") for free in _FREE):
            reason = "the loop's own configuration determines it"
            fix = (
                "change it there; the engine takes settings of cluster and engine, and settings of optimizer that "
                "Megatron's configuration does not have"
            )
            refuse([Problem(key=key, value=setting.partition("=")[2], reason=reason, fix=fix)])
        yield setting
        if key == "train.micro_batch_size":
            micro = int(setting.partition("=")[2])
    if micro > 1:
        yield f"train.global_batch_size={micro * int(given['train.global_batch_size'])}"
    if all(key_of(setting) != "cluster" for setting in settings):
        if device == "cuda":
            reason = "the plan depends on the speed of GPUs and links"
            fix = "name a profile (cluster=h100-80g, `canzona clusters list`), or the file of `canzona calibrate`"
            refuse([Problem(key="cluster", reason=reason, fix=fix)])
        yield "cluster=cpu"


def _engine_problems(config: RunConfig, device: str) -> Iterator[Problem]:
    if config.cluster.device != device:
        reason = f"it is a profile for {config.cluster.device} ranks, but this rank computes on {device}"
        yield Problem(key="cluster", value=config.cluster.name, reason=reason, fix="name another profile")
    adamw, strategy = config.optimizer.name == "adamw", config.engine.strategy
    if adamw or strategy not in PLANNED:
        key, value = ("optimizer", "adamw") if adamw else ("engine.strategy", strategy)
        yield Problem(key=key, value=value, reason="Megatron does this without canzona", fix="do not use the engine")


def use_in_megatron_lm(*settings: str) -> None:
    """Makes Megatron-LM's `pretrain`, and any other code that builds models with its `get_model`, train with
    canzona's engine.

    Call this before `pretrain`. Keep the arguments for Megatron's Muon: `--optimizer muon
    --use-distributed-optimizer`, and with tensor parallelism also `--muon-tp-mode duplicated`. This is
    experimental, like `Engine`.

    Args:
        settings: Settings for `Engine`, for example "cluster=h100-80g".

    Raises:
        EnvironmentProblem: `megatron.training` is not installed, or is not the version that canzona expects.
    """
    refuse(contract.verify_loop(), EnvironmentProblem)
    from canzona_cli.core.megatron.seams import replace_seams, stored_keys

    engines: WeakKeyDictionary[torch.nn.Module, tuple[Engine, MegatronOptimizerConfig]] = WeakKeyDictionary()

    def wrap(
        chunks: Sequence[torch.nn.Module],
        ddp_config: DistributedDataParallelConfig,
        config: MegatronOptimizerConfig,
        args: Namespace,
    ) -> list[DistributedDataParallel]:
        # A model may have positions for longer sequences than those that are trained.
        sizes = (f"train.micro_batch_size={args.micro_batch_size}", f"train.seq_length={args.seq_length}")
        engine = Engine(config, *sizes, *settings)
        wrapped = engine.wrap(chunks, ddp_config)
        engines[wrapped[0]] = engine, config
        return wrapped

    def build(config: MegatronOptimizerConfig, chunks: Wrapped, overrides: Overrides | None) -> CanzonaOptimizer:
        if chunks[0] not in engines:
            reason = "it was not wrapped by get_model of megatron.training"
            fix = "build it with a model provider, or use canzona_cli.Engine in your own loop"
            raise Unsupported(Problem(key="model", reason=reason, fix=fix))
        engine, planned_for = engines[chunks[0]]
        if replace(config, timers=None) != replace(planned_for, timers=None):
            reason = "it has changed since the model was wrapped and its updates were planned"
            raise Unsupported(Problem(key="OptimizerConfig", reason=reason, fix="set it with Megatron-LM's arguments"))
        planned_for.timers = config.timers
        optimizer = engine.optimizer(chunks, overrides)
        optimizer.stored = stored_keys
        return optimizer

    replace_seams(wrap, build)
