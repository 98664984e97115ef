"""The layers with experts of the Qwen3 family: each has many feed-forward networks, and a router sends each token to
a few of them. Layers without experts, if a model has any (`ModelConfig.moe_layer_freq`), are those of the dense family.

Attention, norms and embeddings are the same as in the dense family. Expert e of a layer has the unit names
`experts.e.gate`, `experts.e.up` and `experts.e.down`. A network beside the experts that processes every token, as in
Qwen2, has the unit names `shared.gate`, `shared.up` and `shared.down`.

Source: Qwen3 Technical Report, arXiv 2505.09388, the published `config.json` files, and
`Qwen3MoeForCausalLM` of transformers 4.51 and later.
"""

from dataclasses import replace
from functools import lru_cache

from canzona_cli.core.model.dense import LAYER_NAMES, feed_forward_elements
from canzona_cli.core.model.family import Activations, Family, Foreign, Router, Vector, Weight, Work, head_width
from canzona_cli.core.model.qwen3 import DEFAULTS, QWEN3
from canzona_cli.core.setup import ModelConfig


@lru_cache(maxsize=64)
def _weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Lists a layer's weights in the order of Transformer Engine's grouped linear layers: first all experts'
    fc1, then all experts' fc2; the network that processes every token is last."""
    proj, qkv, fc1, fc2 = QWEN3.weights(model)
    experts = range(model.num_experts)
    return (
        proj,
        qkv,
        *(replace(fc1, name=f"mlp.experts.linear_fc1.weight{e}", expert=e) for e in experts),
        *(replace(fc2, name=f"mlp.experts.linear_fc2.weight{e}", expert=e) for e in experts),
        *(replace(weight, name=weight.name.replace("mlp.", "mlp.shared_experts.")) for weight in _shared(model)),
    )


def _shared(model: ModelConfig) -> tuple[Weight, ...]:
    """Returns the weights of a dense network as wide as the one that processes every token; empty if there is none."""
    width = model.shared_ffn_hidden_size
    return QWEN3.weights(replace(model, ffn_hidden_size=width))[2:] if width else ()


@lru_cache(maxsize=64)
def _vectors(model: ModelConfig) -> tuple[Vector, ...]:
    """Lists the norms of a layer. Transformer Engine does not fuse the norm before the experts."""
    return tuple(replace(each, fused=None) if each.part == "fc1" else each for each in QWEN3.vectors(model))


def _routers(model: ModelConfig) -> tuple[Router, ...]:
    return (Router(name="mlp.router.weight", rows=model.num_experts, cols=model.hidden_size, part="fc1"),)


@lru_cache(maxsize=64)
def _modules(model: ModelConfig) -> tuple[Work, ...]:
    """Lists the modules of a layer with their memory traffic.

    SwiGLU reads or writes an expert's `ffn_hidden_size` elements per token three times, an activation without a gate
    twice. A copy of a token for
    each of its experts is read and written; adding up the experts' results takes the same traffic. The
    router's matmul is not included, because in the published models it has less than 1% of the FLOPs of the
    experts' matmuls.
    """
    qkv, proj, fc1, fc2 = QWEN3.modules(model)
    expert_fc1, *_, expert_fc2 = (weight for weight in _weights(model) if weight.expert is not None)
    # The experts, which come last in the forward pass, read the norm and write the residual stream.
    shared = [
        replace(
            work,
            weight=weight,
            stream=0,
            elements=work.elements * model.shared_ffn_hidden_size // model.ffn_hidden_size,
        )
        for work, weight in zip((fc1, fc2), _weights(model)[-2:], strict=True)
        if weight.expert is None
    ]
    experts, chosen = model.num_experts, model.experts_per_token
    copied = 2 * chosen * model.hidden_size
    swiglu = chosen * fc1.elements
    return (
        qkv,
        proj,
        *shared,
        replace(fc1, weight=expert_fc1, elements=swiglu, experts=experts, experts_per_token=chosen, copied=copied),
        replace(fc2, weight=expert_fc2, experts=experts, experts_per_token=chosen, copied=copied),
    )


@lru_cache(maxsize=64)
def _activations(model: ModelConfig, fused: bool) -> Activations:
    """Counts the activations of a layer as in the dense family, but those of the feed-forward network once
    for each of a token's experts, and adds the token's copies and results, 2 h for each expert."""
    dense, chosen = QWEN3.activations(model, fused), model.experts_per_token
    network = feed_forward_elements(model, fused)
    return replace(
        dense,
        cut=dense.cut + (chosen - 1) * network + _shared_activations(model, fused),
        largest=chosen * dense.largest,
        copied=chosen * 2 * model.hidden_size,
    )


def _shared_activations(model: ModelConfig, fused: bool) -> int:
    return feed_forward_elements(replace(model, ffn_hidden_size=model.shared_ffn_hidden_size), fused)


def _layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Counts the matmul FLOPs of one token's forward pass through a layer as in the dense family, with the experts
    to which the token is sent and the network that processes every token. The router's matmul is not included, as in
    Megatron-LM."""
    *_, fc1, fc2 = QWEN3.weights(model)
    network = fc1.elements + fc2.elements
    shared = sum(weight.elements for weight in _shared(model))
    return QWEN3.layer_flops(model, seq_length) + 2.0 * ((model.experts_per_token - 1) * network + shared)


QWEN3_MOE = Family(
    name="qwen3-moe",
    title="Qwen3 with experts",
    weights=_weights,
    vectors=_vectors,
    routers=_routers,
    modules=_modules,
    activations=_activations,
    layer_flops=_layer_flops,
    foreign=Foreign(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        config="Qwen3MoeConfig",
        # Version 5 of transformers calls the number of experts num_local_experts.
        defaults=lambda tree: {
            **DEFAULTS,
            **head_width(tree),  # unlike in the dense family
            "num_experts": tree.get("num_local_experts"),
        },
        written={**QWEN3.foreign.written, "norm_topk_prob": True},
        widths={
            "ffn_hidden_size": "moe_intermediate_size",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
        },
        must_be={
            **{key: values for key, values in QWEN3.foreign.must_be.items() if not key.endswith("_experts")},
            "model_type": ("qwen3_moe",),
            "norm_topk_prob": (True,),
        },
        fixed={**QWEN3.foreign.fixed, "shared_ffn_hidden_size": 0},
        layer={
            **{unit: name for unit, name in LAYER_NAMES.items() if not name.startswith("mlp.")},
            "mlp.router.weight": "mlp.gate",
            "experts.*.gate": "mlp.experts.*.gate_proj",
            "experts.*.up": "mlp.experts.*.up_proj",
            "experts.*.down": "mlp.experts.*.down_proj",
        },
    ),
)
