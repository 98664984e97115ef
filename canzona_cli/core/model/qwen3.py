"""The dense Qwen3 family.

Source: Qwen3 Technical Report, arXiv 2505.09388, the published `config.json` files, and `Qwen3ForCausalLM`
and `Qwen3Config` of transformers 4.51 and later.
"""

from canzona_cli.core.model import dense
from canzona_cli.core.model.family import Family, Foreign

DEFAULTS = {
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 32_768,
}
"""The values of keys that files of both Qwen3 families may omit."""
QWEN3 = Family(
    name="qwen3",
    title="Qwen3",
    weights=dense.weights,
    vectors=dense.vectors,
    modules=dense.modules,
    activations=dense.activations,
    layer_flops=dense.layer_flops,
    foreign=Foreign(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        config="Qwen3Config",
        defaults=lambda _: {"head_dim": 128, **DEFAULTS},
        must_be={
            "model_type": ("qwen3",),
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "use_sliding_window": (False, None),
            **dict.fromkeys(("num_experts", "num_local_experts"), (0, None)),
        },
        fixed={"qk_norm": True},
        written={"use_sliding_window": False, "sliding_window": None},
        layer=dense.LAYER_NAMES,
    ),
)
