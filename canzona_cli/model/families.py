"""The known model families, and parameter and FLOP counts of their models."""

from dataclasses import dataclass

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.family import Copies, Family
from canzona_cli.model.qwen3 import QWEN3

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
FAMILIES = (QWEN3,)


def family_of(model: ModelConfig) -> Family:
    """Returns the family of a model; always Qwen3, because a recipe's model section describes no other
    family."""
    return QWEN3


def foreign_family(model_type: object) -> Family:
    """Returns the family with Hugging Face's `model_type`; Qwen3 for an unknown type, which its reader then
    refuses."""
    return next((family for family in FAMILIES if family.foreign.model_type == model_type), QWEN3)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """The parameter counts of a model, by use."""

    embedding: int
    output: int
    """The output layer's weight; 0 if it is tied to the embedding."""
    layer_matrices: int
    """All 2-D weights except the embedding and the output layer; a matrix optimizer updates these."""
    norms: int
    """The weights of all layers' norms and of the final norm."""

    @property
    def non_embedding(self) -> int:
        """The parameters without embedding and output layer, as model cards count them."""
        return self.layer_matrices + self.norms

    @property
    def total(self) -> int:
        """All parameters; a tied output layer is counted once, with the embedding."""
        return self.non_embedding + self.embedding + self.output


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Counts the parameters of a model."""
    vocabulary = model.vocab_size * model.hidden_size
    return ParameterCount(
        embedding=vocabulary,
        output=0 if model.tied_embeddings else vocabulary,
        layer_matrices=model.num_layers * sum(weight.elements for weight in family_of(model).weights(model)),
        norms=model.num_layers * norm_parameters(model) + model.hidden_size,
    )


def norm_parameters(model: ModelConfig) -> int:
    """Counts the elements of all norms of one layer."""
    return sum(norm.elements for norm in family_of(model).norms(model))


def matrix_copies(model: ModelConfig) -> Copies:
    """Returns the group that reduces the matrices' gradients, the same for all: they share one buffer and one
    plan."""
    [copies] = {weight.copies for weight in family_of(model).weights(model)}
    return copies


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Returns the model FLOPs of one token's forward and backward pass, the numerator of model FLOP
    utilisation.

    They are three times the forward's, because the backward computes the gradients of inputs and of weights.
    Recomputation of activations does not count. The convention is PaLM's (arXiv 2204.02311, appendix B) with
    the causal half of attention and with the output layer, as in Megatron-LM's
    `num_floating_point_operations`.
    """
    return 3.0 * family_of(model).forward_flops(model, seq_length)
