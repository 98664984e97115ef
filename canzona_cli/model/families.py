"""The families there are, and the counts that follow from any of them."""

from dataclasses import dataclass

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.family import Copies, Family
from canzona_cli.model.qwen3 import QWEN3

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
FAMILIES = (QWEN3,)


def family_of(model: ModelConfig) -> Family:
    """Returns the family of a model: Qwen3's, for a recipe's model section describes no other."""
    return QWEN3


def foreign_family(model_type: object) -> Family:
    """Returns the family that Hugging Face calls `model_type`, or Qwen3's,
    whose reader then refuses the folder."""
    return next((family for family in FAMILIES if family.foreign.model_type == model_type), QWEN3)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a whole model, by use."""

    embedding: int
    output: int
    """The output layer's own weight; 0 when it is the embedding's."""
    layer_matrices: int
    """Every 2-D weight but the embedding and the output layer:
    the weights that a matrix optimizer updates."""
    norms: int
    """Weights of all layers' norms and of the final one."""

    @property
    def non_embedding(self) -> int:
        """Parameters without the embedding and the output layer, as the model cards count them."""
        return self.layer_matrices + self.norms

    @property
    def total(self) -> int:
        """Every weight once; a tied output layer is not counted again."""
        return self.non_embedding + self.embedding + self.output


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Counts every weight of the model."""
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
    """Returns the group that reduces the gradients of all matrices:
    there is one buffer of them, and one plan."""
    [copies] = {weight.copies for weight in family_of(model).weights(model)}
    return copies


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one token's forward and backward pass: the numerator of model FLOP utilisation.

    Three times the forward's: the backward multiplies once for the input's and once for the weight's
    gradient. Work repeated by activation recomputation does not count. Convention of PaLM (arXiv 2204.02311,
    appendix B) with the causal half and the output layer included, as Megatron-LM's
    `num_floating_point_operations` has it.
    """
    return 3.0 * family_of(model).forward_flops(model, seq_length)
