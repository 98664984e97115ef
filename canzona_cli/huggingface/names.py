"""What Hugging Face's Qwen3 calls the units of model space (`canzona_cli.model.geometry`): one tensor, the same rows.

Source: `Qwen3ForCausalLM` of transformers, whose names the published checkpoints have.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.geometry import EMBEDDING, OUTPUT
from canzona_cli.model.qwen3 import FINAL_NORM

TIED_OUTPUT: Final = "lm_head.weight"
"""The output layer; of tied embeddings some files have it a second time."""
_IN_LAYER: Final = {
    "input_layernorm.weight": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
    "proj": "self_attn.o_proj",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@lru_cache(maxsize=4)
def tensor_names(model: ModelConfig) -> Mapping[str, str]:
    """Hugging Face's name by unit, in the order of the model: each weight once, so none of a tied output layer."""
    names = {EMBEDDING: "model.embed_tokens.weight"}
    for layer in range(model.num_layers):
        names |= {f"layers.{layer}.{unit}": f"model.layers.{layer}.{name}.weight" for unit, name in _IN_LAYER.items()}
    names[FINAL_NORM.removeprefix("decoder.")] = "model.norm.weight"
    if not model.tied_embeddings:
        names[OUTPUT] = TIED_OUTPUT
    return MappingProxyType(names)
