"""Builds a model as Megatron-core `GPTModel`s, with initial weights that do not depend on the layout."""

import hashlib
import importlib.util
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import FunctionCtx

from canzona_cli.core.costs.machine import missing_for_compiling
from canzona_cli.core.megatron import layers
from canzona_cli.core.megatron.experts import RoutingMeter, leave_to_adamw
from canzona_cli.core.megatron.parallel import World, Wrapped
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.model.families import POSITIONS, family_of, layer_kinds, layer_models
from canzona_cli.core.model.family import Weight
from canzona_cli.core.model.geometry import weight_of
from canzona_cli.core.setup import ModelConfig, Recompute, Setup
from canzona_cli.core.setup.stages import chunk_layers, count_parts_as_layers

_LOG = logging.getLogger(__name__)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)")
"""The name of an expert's weight in a layer: `linear_fc1.weight3`, or `local_experts.3.linear_fc1.weight` in Megatron's
layers without grouped matmuls."""


def transformer_config(setup: Setup, world: World, *, compiled: bool) -> TransformerConfig:
    """Returns Megatron's configuration of the run's model and of its computation.

    Args:
        compiled: True to use the functions that Megatron fuses with torch.compile: SwiGLU (its fused GELU is
            another function, the tanh approximation) and, in bf16 training, the cross-entropy, whose fused gradients
            are always bf16.
    """
    model, layout, train = setup.model, world.layout, setup.train
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    on_gpu = world.device.type == "cuda"
    counted = count_parts_as_layers(model.num_layers, layout.pp * layout.vpp)
    assert counted is not None
    recompute_settings: dict[Recompute, dict[str, object]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.dense_width,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        **layers.transformer_settings(setup, layout),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=compiled and model.gated,
        cross_entropy_loss_fusion=compiled and dtype is torch.bfloat16,
        apply_rope_fusion=on_gpu and setup.cluster.fused_layers,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        # Megatron's own layers, which always include the output layer, need APEX's kernel for this fusion.
        gradient_accumulation_fusion=on_gpu and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        # initialize_weights() below gives every layout the same weights; those of Megatron's initialization
        # would depend on tp and pp.
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        account_for_embedding_in_pipeline_split=counted.embedding,
        account_for_loss_in_pipeline_split=counted.loss,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=train.precision == "bf16",
        deallocate_pipeline_outputs=True,
        # With several model chunks, transfers for the next pass overlap with the current pass, which needs
        # transfers that are waited for one by one rather than in batches.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=on_gpu and layout.vpp == 1,
        # Otherwise, after every transfer, the host would wait for everything on the device, including
        # gradient reductions in flight. That works around "a bug in older version of PyTorch"
        # (model_parallel_config.py), which the versions that canzona supports do not have.
        batch_p2p_sync=False,
        **recompute_settings[layout.recompute],
        **fp8_settings(setup),
    )


def chunk_sizes(mcore: TransformerConfig, vpp: int) -> list[int]:
    """Returns the numbers of layers of all model chunks, in the order of the model.

    Args:
        vpp: the number of model chunks of each pipeline stage.
    """

    def size(stage: int, chunk: int) -> int:
        if mcore.pipeline_model_parallel_layout is not None:
            return int(mcore.pipeline_model_parallel_layout.layout[stage][chunk].count(LayerType.decoder))
        return int(get_num_layers_to_build(mcore, chunk if vpp > 1 else None, stage))

    return [size(stage, chunk) for chunk in range(vpp) for stage in range(mcore.pipeline_model_parallel_size)]


def fp8_settings(setup: Setup) -> dict[str, object]:
    """Returns Megatron's settings for `train.fp8`; none if matmuls are not in FP8.

    Gradients are in e5m2 if a tensor has one scale, which does not cover their range in e4m3. Delayed scales come from
    the largest values of the last 1,024 steps, as Transformer Engine recommends."""
    recipe = setup.train.fp8
    if recipe == "none":
        return {}
    format_of = "e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid"
    history: dict[str, object] = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return {"fp8": format_of, "fp8_recipe": recipe, **(history if recipe == "delayed" else {})}


def build_model(setup: Setup, world: World) -> list[torch.nn.Module]:
    """Builds this rank's part of the model on the rank's device, in the run's precision and with initial
    weights. Returns the model chunks in forward order; there are several only with an interleaved pipeline.
    Collective."""
    mcore = transformer_config(setup, world, compiled=world.device.type == "cuda" and can_compile(world))
    return [_build_chunk(setup, world, mcore, chunk) for chunk in range(world.layout.vpp)]


def _build_chunk(setup: Setup, world: World, mcore: TransformerConfig, chunk: int) -> torch.nn.Module:
    model: torch.nn.Module = GPTModel(
        config=mcore,
        transformer_layer_spec=_block(setup, chunk_layers(setup.model.num_layers, world.layout, world.pp_rank, chunk)),
        vocab_size=setup.model.vocab_size,
        max_sequence_length=setup.model.positions or setup.train.seq_length,
        pre_process=world.is_first_stage and chunk == 0,
        post_process=world.is_last_stage and chunk == world.layout.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=setup.model.tied_embeddings,
        **layers.model_settings(setup.model),
        pg_collection=world.groups,
        vp_stage=chunk if world.layout.vpp > 1 else None,
    )
    if setup.cluster.fused_layers:
        fuse_weight_gradients(model)
    leave_to_adamw(model)
    if world.device.type == "cpu":
        use_processor_norms(model)
    model = model.to(world.device)
    initialize_weights(model, setup.model, world, seed=setup.train.seed)
    return Float16Module(mcore, model) if setup.train.precision == "bf16" else model


def _block(setup: Setup, of_chunk: range) -> TransformerBlockSubmodules:
    """Returns the specification of a model chunk: its layers, and the norm after the last layer."""
    fused, kinds = setup.cluster.fused_layers, layer_models(setup.model)
    specs = {kind: layers.layer_spec(kind, transformer_engine=fused) for kind in layer_kinds(setup.model)}
    norm = LayerNormImpl if fused else layers.norm
    return TransformerBlockSubmodules(layer_specs=[specs[kinds[layer]] for layer in of_chunk], layer_norm=norm)


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Makes Transformer Engine's layers add the gradient of a weight to `main_grad` within the matmul that
    computes this gradient.

    Otherwise, in every micro-batch, the gradient would be written in bf16 and then added. Megatron's
    `gradient_accumulation_fusion` would also enable this, but then Megatron's output layer, which is not from
    Transformer Engine, raises an error without APEX. Logs a warning if no layer supports the fusion.
    """
    fusible = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    for layer in fusible:
        layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    if not fusible:
        _LOG.warning(
            "weight gradients are not fused: this Transformer Engine has no layer with fuse_wgrad_accumulation"
        )


def can_compile(world: World) -> bool:
    """Returns True if torch.compile works on every rank. All ranks get the same answer, because the fused and
    the unfused cross-entropy use different collectives. Rank 0 logs a warning if torch.compile does not work
    on some rank. Collective."""
    missing = missing_for_compiling()
    works_everywhere = torch.tensor(float(missing is None), device=world.device)
    torch.distributed.all_reduce(works_everywhere, torch.distributed.ReduceOp.MIN)
    if world.rank == 0 and not works_everywhere:
        _LOG.warning(
            "SwiGLU and the loss run unfused: %s is missing",
            missing or "a requirement on another node (`canzona doctor` there names it)",
        )
    return bool(works_everywhere)


def initialize_weights(model: torch.nn.Module, config: ModelConfig, world: World, *, seed: int) -> None:
    """Sets every parameter to its initial weights, which depend on the seed but not on the layout.

    Each matrix (named by its layer in the whole model; gate and up are separate matrices) is drawn in full
    from a generator seeded by (seed, name) and then cut, so tp, pp and dp do not change any weight. Weights
    are drawn in fp32 on the parameter's device from normal(0, init_std); residual projections are scaled by
    1/sqrt(2 * layers) as in GPT-2 (Radford et al. 2019). Norms start at 1, biases at 0.

    Raises:
        RuntimeError: the model has a parameter whose initialisation is not known.
    """
    uncut = (POSITIONS, *(router.name for router in family_of(config).routers(config)))
    with torch.no_grad():
        for name, param in global_names(model):
            if param.dim() == 1:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            whole = weight_of(name, config)
            if whole is None and name.endswith(uncut):
                param.copy_(_draw(name, (param.size(0), param.size(1)), config.init_std, seed, param.device))
                continue
            if whole is None:
                raise RuntimeError(f"parameter {name} has no known initialisation")
            count, index = world.cut(name, config)
            std = config.init_std / math.sqrt(2 * config.num_layers) if whole.cut == "cols" else config.init_std
            fragments = [
                _draw(key, (rows, whole.cols), std, seed, param.device).chunk(count, dim=whole.shard_dim)[index]
                for key, rows in _matrices_to_draw(whole)
            ]
            param.copy_(torch.cat(fragments, dim=0))


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a model chunk without its wrappers, such as `Float16Module` and `DistributedDataParallel`."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def global_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters of a model chunk with their names in the whole model, in which layers and experts
    are numbered over all ranks, and experts are named as in grouped layers."""
    first_layer = first_expert = 0
    for module in model.modules():
        block = getattr(module, "layers", None)
        if isinstance(block, torch.nn.ModuleList) and len(block) > 0:
            layer_number = block[0].layer_number  # counted from 1 over all stages
            assert isinstance(layer_number, int)
            first_layer = layer_number - 1
        if isinstance(module, MoELayer):
            # All layers of a rank have experts with the same indices.
            first_expert = module.local_expert_indices[0]
            break
    for name, param in _in_plan_order(model.named_parameters()):
        match = _LAYER.fullmatch(name)
        if match is None:
            yield name, param
            continue
        part = match[2]
        if expert := _EXPERT.fullmatch(part):
            part = f"mlp.experts.{expert[2]}{int(expert[1] or expert[3]) + first_expert}"
        yield f"decoder.layers.{int(match[1]) + first_layer}.{part}", param


def _in_plan_order(named: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters of a model in the order of the plan. It differs from Megatron's order where a layer has a
    module for each expert: first come all experts' fc1, then all experts' fc2, as in grouped layers."""

    def layer(item: tuple[str, torch.nn.Parameter]) -> str:
        """Returns the same text for the parameters of all experts of a layer."""
        before, experts, _ = item[0].partition("local_experts.")
        return before if experts else item[0]

    for _, of_layer in groupby(named, layer):
        yield from sorted(of_layer, key=lambda item: item[0].rpartition("linear_")[2])


@contextmanager
def parameters_in_plan_order(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model list its parameters in the order of the plan, from which Megatron makes gradient buffers."""
    named = [*_in_plan_order(model.named_parameters())]
    model.named_parameters = lambda *_, **__: iter(named)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.named_parameters


def _matrices_to_draw(whole: Weight) -> list[tuple[str, int]]:
    """Returns the name and the number of rows of each matrix to draw for a parameter: one for each part if
    tensor parallelism cuts every part, otherwise one for the whole parameter."""
    if whole.cut == "parts" and len(whole.parts) > 1:
        return [(f"{whole.name}:{part.kind}", part.rows) for part in whole.parts]
    return [(whole.name, whole.rows)]


def _draw(name: str, shape: tuple[int, int], std: float, seed: int, device: torch.device) -> torch.Tensor:
    """Draws a whole matrix in fp32 from a normal distribution, the same on every rank."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, device=device).mul_(std)


class ProcessorNorm(torch.nn.Module):
    """An RMSNorm for CPUs that uses the weight of a `torch.nn.RMSNorm`. Forward and backward each make only a
    few passes over a tensor.

    torch's own RMSNorm takes a dozen operations on CPUs and stores its input twice in fp32. In bf16, for
    2,048 tokens of 256 features, it took 4.9 ms for forward and backward (one thread); this class takes 2.3
    ms. It stores its input once, in the input's dtype."""

    def __init__(self, norm: torch.nn.RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight, self._eps = norm.weight, norm.eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension; the result has the input's dtype."""
        normalised = _Normalised.apply(hidden, self.weight, self._eps)
        assert isinstance(normalised, torch.Tensor)
        return normalised


def use_processor_norms(model: torch.nn.Module) -> None:
    """Replaces every `torch.nn.RMSNorm` in the model by a `ProcessorNorm`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.RMSNorm:
                setattr(module, name, ProcessorNorm(child))


class _Normalised(torch.autograd.Function):
    """The autograd function of `ProcessorNorm`."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        hidden_fp32 = hidden.float()
        length = torch.linalg.vector_norm(hidden_fp32, dim=-1, keepdim=True)
        scale = length.square_().div_(hidden.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return torch.mul(hidden_fp32, scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        features = hidden.size(-1)
        normalised = torch.mul(hidden.float(), scale)
        grad_fp32 = grad.float()
        products = torch.mul(grad_fp32, normalised)
        rows = products.view(-1, features)
        along = torch.mv(rows, weight.float()).div_(features).view_as(scale)
        grad_weight = rows.sum(0).to(weight.dtype)
        # The input's gradient overwrites `products`. Its component along the normalised vector is removed,
        # because changing the length of the input does not change the result.
        grad_hidden = torch.mul(grad_fp32, weight.float(), out=products)
        grad_hidden.addcmul_(normalised, along, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Everything that a forward pass needs."""

    setup: Setup
    world: World
    chunks: Sequence[torch.nn.Module]
    """The chunks of this rank's part of the model, in forward order; one, or several with an interleaved
    pipeline (`parallel.vpp`)."""
    timer: PhaseTimer


@dataclass(frozen=True, kw_only=True)
class Trainee(Model):
    """Everything that a training step needs."""

    chunks: Wrapped
    optimizer: MegatronOptimizer
    routing: RoutingMeter | None = None
    """The meter that counts the tokens that each expert gets; None for dense models."""
    schedule: OptimizerParamScheduler
