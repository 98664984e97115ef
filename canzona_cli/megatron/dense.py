"""The layers of dense decoders, as Megatron-core's specifications and settings."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from canzona_cli.config.schema import ModelConfig
from canzona_cli.megatron.attention import CausalAttention


def layer_spec(model: ModelConfig, *, transformer_engine: bool) -> ModuleSpec:
    """Returns the specification of a layer, built from Transformer Engine's modules or from Megatron's own."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def transformer_settings(model: ModelConfig) -> dict[str, object]:
    """Returns the settings of `TransformerConfig` that determine what a layer computes."""
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
