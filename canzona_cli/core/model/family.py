"""Describes a family of models: everything that planner, simulator, Megatron layers, checkpoints and Hugging
Face formats need to know about it.

Each family is one `Family` value, as in `canzona_cli.core.model.qwen3`. Its Megatron layers need torch, so they
are in `canzona_cli.core.megatron.layers`. Parameters have Megatron's names, without the prefix of the layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from canzona_cli.core.setup import ModelConfig

Kind = Literal["q", "k", "v", "qkv", "gate", "up", "fc1", "proj", "down", "other"]
"""The kind of a matrix; `other` for the matrices of the vocabulary and for user-defined matrices with other
names than these."""
Part = Literal["embedding", "qkv", "proj", "fc1", "fc2", "output"]
"""A module of the model, with one 2-D weight, or with such a weight for each expert."""


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive rows of a parameter that belong to one unit (see `model.geometry`)."""

    kind: Kind
    """The kind of the unit; `other` for the vocabulary, whose unit is named after the parameter."""
    rows: int
    """The number of rows in one repeat, counted over all TP ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A 2-D parameter."""

    name: str
    """Megatron's name; in `Family.weights` without the prefix of the layer."""
    kind: Kind
    """The kind of the matrix that consists of all parts."""
    parts: tuple[Band, ...]
    """The parts of one repeat, from top to bottom."""
    cols: int
    repeats: int = 1
    """The number of times that the parts repeat from top to bottom."""
    cut: Literal["repeats", "parts", "cols"]
    """The way in which tensor parallelism divides the weight: by consecutive repeats, by rows of each part,
    or by columns."""
    expert: int | None = None
    """The index of the expert in its layer; None for weights outside experts."""

    @property
    def unit_prefix(self) -> str:
        """The prefix of the names of the weight's units in a layer: `experts.17.` for an expert's weight,
        `shared.` for one of the network that processes every token beside experts, otherwise empty."""
        if self.expert is None:
            return "shared." if ".shared_experts." in self.name else ""
        return f"experts.{self.expert}."

    @property
    def rows(self) -> int:
        return self.repeats * sum(part.rows for part in self.parts)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The weight's kind, followed by the kinds of the matrices that it can be split into."""
        return self.kind, *(part.kind for part in self.parts)

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def shard_dim(self) -> Literal[0, 1]:
        return 1 if self.cut == "cols" else 0

    @lru_cache(maxsize=1024)  # noqa: B019 - there are few weights
    def stored(self, tp: int) -> "Weight":
        """Returns the part of the weight that each TP rank stores, as a weight."""
        match self.cut:
            case "repeats":
                return replace(self, repeats=self.repeats // tp)
            case "parts":
                return replace(self, parts=tuple(Band(part.kind, part.rows // tp) for part in self.parts))
            case "cols":
                return replace(self, cols=self.cols // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """The weight or the bias of a norm, or the bias of a linear layer."""

    name: str
    fused: str | None = None
    """The name in a norm that Transformer Engine fuses into the following linear layer; None if it is never fused."""
    elements: int
    part: Part
    """The linear layer, or the module that uses the norm's output."""
    cut: bool = False
    """True if tensor parallelism divides the elements, False if every TP rank has a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The weight that chooses the experts of a token. AdamW updates it, and every TP rank has a copy."""

    name: str
    rows: int
    """The number of experts."""
    cols: int
    part: Part
    """The module with the experts, which uses the router's choice."""

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The size of core attention: the elements of one token's queries and keys, summed over TP ranks."""

    queries: int
    keys: int
    normalised: bool
    """True if queries and keys are normalised per head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one module of a layer in the forward pass."""

    part: Part
    weight: Weight
    """The weight by which a token is multiplied."""
    stream: int
    """The number of times that the residual stream is read or written."""
    elements: int = 0
    """The other elements per token that are read or written, over all TP ranks."""
    attention: Attention | None = None
    experts: int = 1
    """The number of experts, each with a weight like `weight`; 1 without experts."""
    experts_per_token: int = 1
    copied: int = 0
    """The elements per token that are read or written to copy the token for its experts, or to add up their
    results. Tensor parallelism divides this work only if experts are divided among ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The elements per token that a layer keeps for its backward pass."""

    stream: int
    """The number of copies of the residual stream."""
    cut: int
    """The elements that tensor parallelism divides, over all TP ranks."""
    largest: int
    """The largest number of gradient elements that exist at the same time in the backward pass, over all TP
    ranks; they are not kept."""
    copied: int = 0
    """The elements of a token's copies for its experts and of their results; divided like `Work.copied`."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """The family's names and settings in Hugging Face transformers."""

    architecture: str
    model_type: str
    config: str
    """The name of the configuration class."""
    defaults: Callable[[Mapping[str, object]], Mapping[str, object]]
    """A function that returns the values of keys that a `config.json` may omit, given the keys that it
    has."""
    must_be: Mapping[str, tuple[object, ...]]
    """The accepted values of keys that the family fixes; the first is the family's value."""
    fixed: Mapping[str, object]
    """The settings of a recipe's model section that have the same value in all models of the family."""
    written: Mapping[str, object]
    """The additional keys, with constant values, that an export writes for this family."""
    embedding: str = "model.embed_tokens.weight"
    output: str = "lm_head.weight"
    final_norm: str = "model.norm.weight"
    layer: Mapping[str, str]
    """The names within a layer by unit, in the order of the model; `*` stands for the index of an expert."""
    widths: Mapping[str, str] = field(default_factory=dict)
    """The keys in `config.json` that only this family uses, by the integer setting that each represents."""


def head_width(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the default of `head_dim`, if the keys that determine it are numbers."""
    heads, hidden = tree.get("num_attention_heads"), tree.get("hidden_size")
    return {"head_dim": hidden // heads} if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A description of a family of models: weights, costs, and names in Megatron and Hugging Face."""

    name: str
    title: str
    """The name that messages use."""
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    """The 2-D parameters of a layer, in the order in which Megatron creates modules and fills gradient
    buffers."""
    vectors: Callable[[ModelConfig], tuple[Vector, ...]]
    """The norms and biases of a layer, in the same order."""
    routers: Callable[[ModelConfig], tuple[Router, ...]] = lambda model: ()
    """The routers of a layer."""
    modules: Callable[[ModelConfig], tuple[Work, ...]]
    """The modules of a layer in forward order."""
    activations: Callable[[ModelConfig, bool], Activations]
    """The activations of a layer; the flag is True if elementwise work is fused."""
    layer_flops: Callable[[ModelConfig, int], float]
    """The matmul FLOPs of one token's forward pass through a layer, averaged over a sequence of the given length."""
    foreign: Foreign

    def small(self, model: ModelConfig) -> tuple[Vector | Router, ...]:
        """Returns the parameters of a layer that AdamW updates."""
        return *self.vectors(model), *self.routers(model)
