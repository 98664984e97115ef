"""Parameters and FLOPs of the Qwen3 family (dense), from its shapes alone.

Source: Qwen3 Technical Report, arXiv 2505.09388, and the published `config.json` files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.geometry import layer_weights

PUBLISHED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "qwen3-0.6b": ("0.6 B", "0.44 B"),
        "qwen3-1.7b": ("1.7 B", "1.4 B"),
        "qwen3-4b": ("4.0 B", "3.6 B"),
        "qwen3-8b": ("8.2 B", "6.95 B"),
        "qwen3-14b": ("14.8 B", "13.2 B"),
        "qwen3-32b": ("32.8 B", "31.2 B"),
    }
)
"""Parameters in all and without embeddings, as the model cards round them."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a whole model, by what they are."""

    embedding: int
    output: int
    """The output layer's own weight; 0 when it is the embedding's."""
    layer_matrices: int
    """What a matrix optimizer updates: every 2-D weight but the embedding and the output layer."""
    norms: int
    """RMSNorm weights: two per layer, q and k norms, and the final one."""

    @property
    def non_embedding(self) -> int:
        """Without the embedding and the output layer, as the model cards count it."""
        return self.layer_matrices + self.norms

    @property
    def total(self) -> int:
        """Every weight once; a tied output layer is not counted again."""
        return self.non_embedding + self.embedding + self.output


FINAL_NORM = "decoder.final_layernorm.weight"


def layer_norms(model: ModelConfig) -> dict[str, int]:
    """Elements of the RMSNorm weights of one layer, by Megatron's name; q and k norms have one per head dimension."""
    heads = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
    return {
        "input_layernorm.weight": model.hidden_size,
        **(dict.fromkeys(heads, model.head_dim) if model.qk_norm else {}),
        "pre_mlp_layernorm.weight": model.hidden_size,
    }


def norm_parameters(model: ModelConfig) -> int:
    """Elements of all norms of one layer."""
    return sum(layer_norms(model).values())


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Counts every weight of the model."""
    vocabulary = model.vocab_size * model.hidden_size
    return ParameterCount(
        embedding=vocabulary,
        output=0 if model.tied_embeddings else vocabulary,
        layer_matrices=model.num_layers * sum(weight.rows * weight.cols for weight in layer_weights(model)),
        norms=model.num_layers * norm_parameters(model) + model.hidden_size,
    )


def forward_flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Matrix-multiply FLOPs of one token's forward pass, averaged over a sequence of `seq_length` tokens.

    Two FLOPs per weight and token in the layers and in the output layer (tied or not; the embedding is a look-up),
    plus q k^T and the weighted sum over v, 2 * 2 * seq_length * heads * head_dim each layer, halved because a causal
    token attends to half of the sequence on average. Norms, rotary embedding and softmax are left out.
    """
    count = parameter_count(model)
    output_layer = model.vocab_size * model.hidden_size
    attention_core = 2 * seq_length * model.num_attention_heads * model.head_dim * model.num_layers
    return 2.0 * (count.layer_matrices + output_layer) + attention_core


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one token's forward and backward pass: the numerator of model FLOP utilisation.

    Three times the forward's: the backward multiplies once for the input's and once for the weight's gradient. Work
    repeated by activation recomputation does not count. Convention of PaLM (arXiv 2204.02311, appendix B) with the
    causal half and the output layer included, as Megatron-LM's `num_floating_point_operations` has it.
    """
    return 3.0 * forward_flops_per_token(model, seq_length)
