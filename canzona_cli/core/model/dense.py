"""The layers of dense decoders: grouped-query attention and a feed-forward part, with a norm before each.

Dense families differ only in QK-norm and in their names and settings at Hugging Face.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from canzona_cli.core.model.family import Activations, Attention, Band, Part, Vector, Weight, Work
from canzona_cli.core.setup import ModelConfig

QK_NORMS: Final = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
LAYER_NAMES: Final[Mapping[str, str]] = {
    "input_layernorm.weight": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    **dict(zip(QK_NORMS, ("self_attn.q_norm", "self_attn.k_norm"), strict=True)),
    "proj": "self_attn.o_proj",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Hugging Face's names within a layer by unit, in the order of the model."""
_PARTS: Final[tuple[Part, ...]] = ("proj", "qkv", "fc1", "fc2")
"""The modules of a layer in the order of `weights`."""


@lru_cache(maxsize=64)
def weights(model: ModelConfig) -> tuple[Weight, ...]:
    hidden, ffn, head, groups = model.hidden_size, model.ffn_hidden_size, model.head_dim, model.num_query_groups
    queries = model.num_attention_heads // groups * head
    attention = (Band("q", queries), Band("k", head), Band("v", head))
    return (
        Weight(
            name="self_attention.linear_proj.weight",
            kind="proj",
            parts=(Band("proj", hidden),),
            cols=groups * queries,
            cut="cols",
        ),
        Weight(
            name="self_attention.linear_qkv.weight",
            kind="qkv",
            parts=attention,
            cols=hidden,
            repeats=groups,
            cut="repeats",
        ),
        Weight(
            name="mlp.linear_fc1.weight",
            kind="fc1",
            parts=(Band("gate", ffn), Band("up", ffn)) if model.gated else (Band("up", ffn),),
            cols=hidden,
            cut="parts",
        ),
        Weight(name="mlp.linear_fc2.weight", kind="down", parts=(Band("down", hidden),), cols=ffn, cut="cols"),
    )


@lru_cache(maxsize=64)
def vectors(model: ModelConfig) -> tuple[Vector, ...]:
    """Lists the norms and biases of a layer; all heads share the weights of the norms of queries and keys."""
    kinds = ("weight", "bias") if model.layernorm else ("weight",)
    hidden = model.hidden_size
    before, after = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
    found = [
        *(Vector(name=f"input_layernorm.{kind}", fused=before + kind, elements=hidden, part="qkv") for kind in kinds),
        *(
            Vector(name=f"{name.removesuffix('weight')}{kind}", elements=model.head_dim, part="qkv")
            for name in (QK_NORMS if model.qk_norm else ())
            for kind in kinds
        ),
        *(Vector(name=f"pre_mlp_layernorm.{kind}", fused=after + kind, elements=hidden, part="fc1") for kind in kinds),
    ]
    if model.biases:
        for weight, part in zip(weights(model), _PARTS, strict=True):
            name, cut = f"{weight.name.removesuffix('weight')}bias", weight.cut != "cols"
            found.append(Vector(name=name, elements=weight.rows, part=part, cut=cut))
    return tuple(found)


@lru_cache(maxsize=64)
def modules(model: ModelConfig) -> tuple[Work, ...]:
    """Lists the modules of a layer with their memory traffic.

    A norm reads or writes the residual stream twice, a residual addition three times. SwiGLU reads or writes
    `ffn_hidden_size` elements per token three times, an activation without a gate twice.
    """
    proj, qkv, fc1, fc2 = weights(model)
    return (
        Work(part="qkv", weight=qkv, stream=2, attention=_attention(model)),
        Work(part="proj", weight=proj, stream=3),
        Work(part="fc1", weight=fc1, stream=2, elements=(3 if model.gated else 2) * model.ffn_hidden_size),
        Work(part="fc2", weight=fc2, stream=3),
    )


def _attention(model: ModelConfig) -> Attention:
    return Attention(
        queries=model.num_attention_heads * model.head_dim,
        keys=model.num_query_groups * model.head_dim,
        normalised=model.qk_norm,
    )


@lru_cache(maxsize=64)
def activations(model: ModelConfig, fused: bool) -> Activations:
    """Counts the activations of a layer with hidden size h, a heads and g query groups of width d, and an MLP
    of width f:
    - residual stream: the inputs of two norms and of the two linear layers after them, 4 h;
    - attention: fused qkv (a + 2g) d, which v keeps alive; queries copied from it, a d; rotated q and k,
      (a + g) d; context, a d;
    - SwiGLU: gate and up, 2 f; their product, f; if not fused, also silu(gate) and a copy of up;
    - without a gate: up, f, and its activation, f.
    """
    core = _attention(model)
    queries, keys = core.queries, core.keys
    fused_qkv, rotated, context = queries + 2 * keys, queries + keys, queries
    cut = fused_qkv + queries + rotated + context + feed_forward_elements(model, fused)
    return Activations(stream=4, cut=cut, largest=(3 if model.gated else 2) * model.ffn_hidden_size)


def feed_forward_elements(model: ModelConfig, fused: bool) -> int:
    """Counts the elements per token that a feed-forward network keeps, see `activations`."""
    return (2 if not model.gated else 3 if fused else 5) * model.ffn_hidden_size


def layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Counts the matmul FLOPs of one token's forward pass through a layer.

    Each weight takes two. In addition, q k^T and the weighted sum over v take 2 * 2 * seq_length * heads * head_dim,
    halved because a causal token attends to half of the sequence on average.
    """
    return 2.0 * sum(weight.elements for weight in weights(model)) + 2 * seq_length * _attention(model).queries
