"""The Llama family, versions 2 and 3: dense decoders without QK-norm.

Source: The Llama 3 Herd of Models, arXiv 2407.21783, the published `config.json` files, and
`LlamaForCausalLM` and `LlamaConfig` of transformers 4.43 and later.
"""

from collections.abc import Mapping
from dataclasses import replace

from canzona_cli.core.model.dense import LAYER_NAMES, QK_NORMS
from canzona_cli.core.model.family import Foreign, head_width
from canzona_cli.core.model.qwen3 import DEFAULTS, QWEN3


def _defaults(tree: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the defaults of `LlamaConfig`; most published files omit the width of a head."""
    heads = tree.get("num_attention_heads")
    return head_width(tree) | {**DEFAULTS, "num_key_value_heads": heads, "max_position_embeddings": 2_048}


LLAMA = replace(
    QWEN3,
    name="llama",
    title="Llama",
    foreign=Foreign(
        architecture="LlamaForCausalLM",
        model_type="llama",
        config="LlamaConfig",
        defaults=_defaults,
        must_be={
            "model_type": ("llama",),
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "mlp_bias": (False, None),
            **dict.fromkeys(("num_experts", "num_local_experts"), (0, None)),
            **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (False, None)),
        },
        fixed={"qk_norm": False},
        written={"mlp_bias": False},
        layer={unit: name for unit, name in LAYER_NAMES.items() if unit not in QK_NORMS},
    ),
)
