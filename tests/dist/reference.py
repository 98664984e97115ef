"""Hugging Face's Qwen3 and Llama as the independent references: same shapes, our weights, their own code."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from canzona_cli.core.setup import ModelConfig
from tests.dist.whole import Weights

LLAMA = ("model.qk_norm=false", "model.rope_base=500000", "model.norm_eps=1e-5")
"""Overrides that make a Qwen3 a Llama."""
type Reference = Qwen3ForCausalLM | LlamaForCausalLM | Qwen3MoeForCausalLM


def hugging_face_model(shape: ModelConfig, weights: Weights, *, max_length: int) -> Reference:
    """The reference in fp32 with `weights`; built from its configuration, nothing is downloaded.

    Raises:
        RuntimeError: `weights` lacks one of its parameters or has one too many.
    """
    if shape.num_experts:
        # It stacks the experts' weights itself, and only this function takes them one by one, as published.
        config = hugging_face_config(shape, max_length=max_length)
        return Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    model = random_model(shape, max_length=max_length)
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"]} if shape.tied_embeddings else {}
    model.load_state_dict({**weights, **tied}, strict=True)
    return model


def random_model(shape: ModelConfig, *, max_length: int) -> Reference:
    """The reference in fp32 with the weights that Hugging Face draws."""
    config = hugging_face_config(shape, max_length=max_length)
    if isinstance(config, Qwen3MoeConfig):
        return Qwen3MoeForCausalLM(config).float()
    model = Qwen3ForCausalLM(config) if isinstance(config, Qwen3Config) else LlamaForCausalLM(config)
    return model.float()


def _dense_layers(shape: ModelConfig) -> list[int]:
    assert isinstance(shape.moe_layer_freq, tuple)
    return [layer for layer, has_experts in enumerate(shape.moe_layer_freq) if not has_experts]


def hugging_face_config(shape: ModelConfig, *, max_length: int) -> Qwen3Config | LlamaConfig | Qwen3MoeConfig:
    """The same shape in Hugging Face's words; Llama 3.1's scaling as its published files have it."""
    scaled = {"rope_type": "llama3", "factor": shape.rope_scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 8192
    scaling = {"rope_type": "default"} if shape.rope_scaling is None else scaled
    experts: dict[str, object] = {}
    if shape.num_experts:
        experts = {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.ffn_hidden_size,
            "norm_topk_prob": True,
            "mlp_only_layers": [] if shape.moe_layer_freq == 1 else _dense_layers(shape),
        }
    return (Qwen3MoeConfig if experts else Qwen3Config if shape.qk_norm else LlamaConfig)(
        **experts,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.dense_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        max_position_embeddings=max_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={**scaling, "rope_theta": shape.rope_base},
        tie_word_embeddings=shape.tied_embeddings,
        attn_implementation="eager",
        use_cache=False,
    )


def weights_of(model: Reference) -> Weights:
    """Its weights under the same names; the output layer of tied embeddings only once."""
    return {name: param.detach() for name, param in model.named_parameters()}


def token_losses(model: Reference, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token: `[batch, seq_length]` tokens and labels to `[batch, seq_length]`, nats."""
    logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
