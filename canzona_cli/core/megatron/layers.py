"""The layers of decoders, dense or with experts, as Megatron-core's specifications and settings."""

from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from canzona_cli.core.megatron.attention import CausalAttention
from canzona_cli.core.megatron.experts import GroupedExperts
from canzona_cli.core.setup import Layout, ModelConfig, Setup
from canzona_cli.core.setup.execution import dispatcher_of

_BALANCING = {"none": "none", "sequence": "seq_aux_loss", "global": "global_aux_loss"}


class _UnbiasedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router without the expert bias, which canzona's models do not have. Megatron compiles the
    function that counts tokens for this bias, so every rank would load torch's compiler, which takes longer
    than a rank's first step."""

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Does nothing, because canzona's models have no expert bias."""


def layer_spec(model: ModelConfig, *, transformer_engine: bool) -> ModuleSpec:
    """Returns the specification of a layer, built from Transformer Engine's modules, or from Megatron's own
    and canzona's. All layers of `model` are like it."""
    if transformer_engine:
        experts = {"num_experts": model.num_experts, "moe_grouped_gemm": True} if model.num_experts else {}
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm, **experts)
    spec = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if model.num_experts:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        shared = partial(SharedExpertMLP, submodules=linear)
        experts = MoESubmodules(experts=GroupedExperts, shared_experts=shared, router=_UnbiasedRouter)
        layer.mlp = partial(MoELayer, submodules=experts)
    return spec


def norm(*, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.RMSNorm | torch.nn.LayerNorm:
    """Creates one of torch's norms, because Megatron's wrapper of these classes rejects sequence parallelism.
    With sequence parallelism, each TP rank computes a partial gradient of the norm's parameters; the attribute
    `sequence_parallel` makes Megatron sum these gradients."""
    kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
    module = kind(hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return module


def transformer_settings(setup: Setup, layout: Layout) -> dict[str, object]:
    """Returns the settings of `TransformerConfig` that determine the computation of a layer."""
    model = setup.model
    return {
        "normalization": "LayerNorm" if model.layernorm else "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": model.gated,
        "activation_func": torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        "add_bias_linear": model.biases,
        "add_qkv_bias": False,
        **(_expert_settings(setup, layout) if model.num_experts else {}),
    }


def _expert_settings(setup: Setup, layout: Layout) -> dict[str, object]:
    """Returns the settings of `TransformerConfig` for the experts of a layer.

    Megatron averages gradients over the data-parallel ranks, but has already divided the balancing loss over
    the global batch by the number of these ranks. So the weight of this loss is multiplied by that number;
    otherwise the loss would depend on the layout.
    """
    model = setup.model
    weight = model.balancing_weight * (layout.dp if model.balancing_loss == "global" else 1)
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": model.megatron_layer_freq,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_router_load_balancing_type": _BALANCING[model.balancing_loss],
        "moe_aux_loss_coeff": weight if model.balancing_loss != "none" else 0.0,
        # The router computes in fp32, because bf16 would round close scores to ties.
        "moe_router_dtype": "fp32",
        # If experts are not divided among ranks, tokens are not sent to experts; TP ranks only gather them.
        "moe_token_dispatcher_type": "allgather" if layout.ep == 1 else dispatcher_of(setup),
        "moe_grouped_gemm": True,
        # One parameter for all experts would not be a matrix.
        "moe_single_grouped_weight": False,
    }


def model_settings(model: ModelConfig) -> dict[str, object]:
    """Returns the arguments of `GPTModel` that determine how positions are encoded."""
    return {
        "position_embedding_type": "learned_absolute" if model.positions else "rope",
        "rotary_base": model.rope_base,
        "rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": model.rope_scaling,
    }
