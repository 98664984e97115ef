"""A model family: the facts that planner, simulator, Megatron,
checkpoints and Hugging Face ask about a kind of model.

Each family is one `Family` value, as in `canzona_cli.model.qwen3`. Its Megatron layers need torch and are
therefore in `canzona_cli.megatron`, under the family's name. Names of parameters are Megatron's, below their
layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from canzona_cli.config.schema import ModelConfig

Kind = Literal["q", "k", "v", "qkv", "gate", "up", "fc1", "proj", "down", "other"]
"""The kind of a matrix; other for a user's own and a vocabulary."""
Part = Literal["embedding", "qkv", "proj", "fc1", "fc2", "output"]
"""A module of the model that has one 2-D weight."""
Copies = Literal["data", "tp"]
"""A group whose ranks hold copies of one tensor and add up its gradients (`canzona_cli.costs.links.Groups`)."""


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a parameter that belong to one unit."""

    kind: Kind
    """Kind of that unit; other for a vocabulary, whose unit has the parameter's name."""
    rows: int
    """Rows in one repeat, over all TP ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A 2-D parameter."""

    name: str
    """Megatron's name, below the layer in `Family.weights`."""
    kind: Kind
    """Kind of the matrix that all parts are together."""
    parts: tuple[Band, ...]
    cols: int
    repeats: int = 1
    cut: Literal["repeats", "parts", "cols"]
    """The unit that tensor parallelism deals out: consecutive repeats, rows of every part, or columns."""
    copies: Copies = "data"
    """The group that holds copies of each fragment."""

    @property
    def rows(self) -> int:
        return self.repeats * sum(part.rows for part in self.parts)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of all matrices that it can be split into, its own first."""
        return self.kind, *(part.kind for part in self.parts)

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def shard_dim(self) -> Literal[0, 1]:
        return 1 if self.cut == "cols" else 0

    def stored(self, tp: int) -> "Weight":
        """The weight as each TP rank stores it."""
        match self.cut:
            case "repeats":
                return replace(self, repeats=self.repeats // tp)
            case "parts":
                return replace(self, parts=tuple(Band(part.kind, part.rows // tp) for part in self.parts))
            case "cols":
                return replace(self, cols=self.cols // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm's weight, which every TP rank has all of."""

    name: str
    fused: str | None = None
    """Its name where Transformer Engine keeps it in the linear layer that follows."""
    elements: int
    part: Part
    """The module that needs it."""
    copies: tuple[Copies, ...] = ("data", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Core attention: elements of one token's queries and of its keys, over all TP ranks."""

    queries: int
    keys: int
    normalised: bool
    """True where queries and keys are normalised head by head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The forward pass of one module of a layer."""

    part: Part
    weight: Weight
    """The weight that a token is multiplied by."""
    stream: int
    """Passes over the residual stream through memory."""
    elements: int = 0
    """Further elements of a token through memory, over all TP ranks."""
    attention: Attention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Elements of one token that a layer keeps for its backward pass."""

    stream: int
    """Copies of the residual stream."""
    cut: int
    """Elements that tensor parallelism cuts, over all TP ranks."""
    largest: int
    """Elements of the gradients that are alive at once in the backward pass, over all TP ranks."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """The family in transformers' words."""

    architecture: str
    model_type: str
    config: str
    """The class of its settings."""
    defaults: Mapping[str, object]
    """Keys that a `config.json` may leave out."""
    must_be: Mapping[str, tuple[object, ...]]
    """Keys whose value the family fixes; the first value is its own."""
    fixed: Mapping[str, object]
    """Settings of a recipe's model section that this form cannot express otherwise."""
    embedding: str
    output: str
    final_norm: str
    layer: Mapping[str, str]
    """Names in a layer by unit, in the order of the model."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model."""

    name: str
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    """2-D parameters of a layer in the order modules are created,
    which is that of Megatron's gradient buffers."""
    norms: Callable[[ModelConfig], tuple[Norm, ...]]
    """The norms of a layer in the same order."""
    work: Callable[[ModelConfig], tuple[Work, ...]]
    """The modules of a layer in forward order."""
    activations: Callable[[ModelConfig, bool], Activations]
    """Activations of a layer; the flag says whether elementwise work is fused."""
    forward_flops: Callable[[ModelConfig, int], float]
    """Matrix-multiply FLOPs of one token's forward pass, averaged over a sequence of so many tokens."""
    foreign: Foreign
    published: Mapping[str, tuple[str, str]]
    """Parameters in all and without embeddings as the model cards round them, by recipe."""
