"""The layers of dense decoders, as Megatron-core's specifications and settings."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from canzona_cli.config.schema import Layout, ModelConfig, RunConfig
from canzona_cli.megatron.attention import CausalAttention


def layer_spec(model: ModelConfig, *, transformer_engine: bool) -> ModuleSpec:
    """Returns the specification of a layer, built from Transformer Engine's modules or from Megatron's
    own."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = rms_norm
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = rms_norm
    return spec


def rms_norm(*, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.RMSNorm:
    """Creates a `torch.nn.RMSNorm`, because Megatron's wrapper of this class rejects sequence parallelism.
    With sequence parallelism, each TP rank computes a partial gradient of the norm's weight; the attribute
    `sequence_parallel` makes Megatron sum these gradients."""
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def transformer_settings(config: RunConfig, layout: Layout) -> dict[str, object]:
    """Returns the settings of `TransformerConfig` that determine the computation of a layer."""
    del layout
    model = config.model
    return {
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }


def model_settings(model: ModelConfig) -> dict[str, object]:
    """Returns the arguments of `GPTModel` that determine how positions are encoded."""
    return {
        "position_embedding_type": "rope",
        "rotary_base": model.rope_base,
        "rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": model.rope_scaling,
    }
