"""The known model families, and functions that count the parameters and FLOPs of their models."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from canzona_cli.core.errors import Problem
from canzona_cli.core.model.family import Family, Kind, Vector, Weight
from canzona_cli.core.model.llama import LLAMA
from canzona_cli.core.model.qwen3 import QWEN3
from canzona_cli.core.model.qwen3_moe import QWEN3_MOE
from canzona_cli.core.setup import Mesh, ModelConfig
from canzona_cli.core.setup.stages import chunk_layers

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
FINAL_BIAS = "decoder.final_layernorm.bias"
FAMILIES = (QWEN3, LLAMA, QWEN3_MOE)


def family_of(model: ModelConfig) -> Family:
    """Returns the family of a model, judging by its settings: a model with experts is a Qwen3-MoE, a dense
    model without QK-norm is a Llama."""
    if model.num_experts:
        return QWEN3_MOE
    return QWEN3 if model.qk_norm else LLAMA


LayerBlocks = tuple[tuple[ModelConfig, int], ...]
"""Consecutive layers of a model: a model all of whose layers are like some of them, and their number."""


@lru_cache(maxsize=64)
def layer_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns, for each layer, a model all of whose layers are like it."""
    frequency = model.moe_layer_freq
    if frequency == 1 or model.num_experts == 0:
        return (model,) * model.num_layers
    with_experts = replace(model, moe_layer_freq=1, dense_ffn_hidden_size=0)
    dense = replace(with_experts, num_experts=0, shared_ffn_hidden_size=0, ffn_hidden_size=model.dense_width)
    if isinstance(frequency, int):
        return tuple(dense if layer % frequency else with_experts for layer in range(model.num_layers))
    return tuple(with_experts if has_experts else dense for has_experts in frequency)


@lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns, for each kind of layer in a model, a model all of whose layers are like it; one for most models."""
    return tuple(dict.fromkeys(layer_models(model)))


def blocks_of_layers(model: ModelConfig, parts: Iterable[range]) -> LayerBlocks:
    """Returns the blocks of equal layers that parts of a model consist of."""
    if model.moe_layer_freq == 1:
        return ((model, sum(map(len, parts))),)
    kinds = layer_models(model)
    equal = groupby(kinds[layer] for layers in parts for layer in layers)
    return tuple((kind, len([*layers])) for kind, layers in equal)


def all_layers(model: ModelConfig) -> LayerBlocks:
    """Returns the blocks of equal layers that a model consists of."""
    return blocks_of_layers(model, (range(model.num_layers),))


def stage_blocks(model: ModelConfig, layout: Mesh, stage: int) -> LayerBlocks:
    """Returns the blocks of equal layers that a pipeline stage consists of."""
    chunks = (chunk_layers(model.num_layers, layout, stage, chunk) for chunk in range(layout.vpp))
    return blocks_of_layers(model, chunks)


def weights_of_layers(model: ModelConfig) -> Iterator[Weight]:
    """Yields the 2-D parameters that a layer of the model may have."""
    for each in layer_kinds(model):
        yield from family_of(each).weights(each)


def vectors_of_layers(model: ModelConfig) -> Iterator[Vector]:
    """Yields the norms and biases that a layer of the model may have."""
    for each in layer_kinds(model):
        yield from family_of(each).vectors(each)


def family_problems(old: ModelConfig, new: ModelConfig, source: str) -> tuple[Problem, ...]:
    """Returns a problem if `old`, whose weights are in `source`, belongs to a different family than `new`."""
    theirs, ours = family_of(old).title, family_of(new).title
    if theirs == ours:
        return ()
    reason = f"belongs to the {ours} family, but the weights in {source} to the {theirs} family"
    fix = f"choose a recipe of the {theirs} family, or other weights"
    return (Problem("model", reason, fix, value=new.name),)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """The parameter counts of a model, by use."""

    embedding: int
    """The embedding of the vocabulary, and of learned positions."""
    output: int
    """The output layer's weight; 0 if it is tied to the embedding."""
    layer_matrices: int
    """All 2-D weights except embedding, output layer and routers; a matrix optimizer updates these."""
    vectors: int
    """The norms and biases of all layers, and the final norm."""
    routers: int
    idle: int
    """The parameters of the experts to which a token is not sent."""

    @property
    def non_embedding(self) -> int:
        """The parameters excluding embedding and output layer, as model cards count them."""
        return self.layer_matrices + self.vectors + self.routers

    @property
    def total(self) -> int:
        """All parameters; a tied output layer is counted once, with the embedding."""
        return self.non_embedding + self.embedding + self.output

    @property
    def active(self) -> int:
        """The number of parameters that a token uses; in models without experts, all parameters."""
        return self.total - self.idle


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Counts the parameters of a model."""
    vocabulary = model.vocab_size * model.hidden_size
    matrices = routers = idle = 0
    vectors = final_norm_elements(model)
    for kind, layers in all_layers(model):
        family = family_of(kind)
        matrices += layers * sum(weight.elements for weight in family.weights(kind))
        vectors += layers * sum(vector.elements for vector in family.vectors(kind))
        routers += layers * sum(router.elements for router in family.routers(kind))
        works = family.modules(kind)
        idle += layers * sum((work.experts - work.experts_per_token) * work.weight.elements for work in works)
    return ParameterCount(
        embedding=vocabulary + model.positions * model.hidden_size,
        output=0 if model.tied_embeddings else vocabulary,
        layer_matrices=matrices,
        vectors=vectors,
        routers=routers,
        idle=idle,
    )


def small_parameters(model: ModelConfig, tp: int) -> int:
    """Counts the elements of one layer's norms, biases and routers on a TP rank; all layers must be alike."""
    return sum(
        parameter.elements // (tp if isinstance(parameter, Vector) and parameter.cut else 1)
        for parameter in family_of(model).small(model)
    )


def final_norm_elements(model: ModelConfig) -> int:
    """Counts the elements of the norm after the last layer."""
    return model.hidden_size * (2 if model.layernorm else 1)


@lru_cache(maxsize=64)
def interleaved_kinds(model: ModelConfig) -> frozenset[Kind]:
    """Returns the kinds of matrices whose rows are interleaved with the rows of other matrices in the
    same parameter."""
    weights = family_of(model).weights(model)
    return frozenset(part.kind for weight in weights if weight.cut == "repeats" for part in weight.parts)


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Returns the model FLOPs of one token's forward and backward pass, the numerator of model FLOP
    utilisation.

    They are three times the forward pass's FLOPs, because the backward pass computes the gradients of inputs
    and of weights. Recomputation of activations is not included. The convention is PaLM's (arXiv 2204.02311,
    appendix B) with the causal half of attention and with the output layer, tied or not, as in Megatron-LM's
    `num_floating_point_operations`; only the experts to which a token is sent are included. The embedding is a
    look-up; norms, rotary embedding and softmax are not counted.
    """
    layers = sum(count * family_of(kind).layer_flops(kind, seq_length) for kind, count in all_layers(model))
    return 3.0 * (layers + 2.0 * model.vocab_size * model.hidden_size)
