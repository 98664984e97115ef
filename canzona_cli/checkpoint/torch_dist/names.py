"""The names of a model's parameters and of their optimizer state in Megatron's checkpoints.

Parameters of the same name in all layers are one tensor, whose first axis is the layer, or each layer has a
separate tensor with the layer's index in its name. Parameters are fused as on a single tensor-parallel rank.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.core.engine.stored_state import ADAMWS_MASTER, MUONS_MASTER, OURS, STATE
from canzona_cli.core.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of
from canzona_cli.core.model.geometry import Block, fragment_blocks, unit_shape
from canzona_cli.core.optimizers.facts import MOMENTS, MOMENTUM
from canzona_cli.core.setup import ModelConfig

Kind = Literal["muon", "adamw"]
"""The optimizers whose state in Megatron's checkpoints does not depend on the layout of ranks."""
_LAYERS: Final = "decoder.layers."
_MASTERS: Final = (MUONS_MASTER, ADAMWS_MASTER)
"""The names of masters in Megatron's Muon and in its sharded AdamW."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the model, as Megatron's checkpoints store it."""

    name: str
    """The name in Megatron's model."""
    inside: str
    """The name within the layer; for parameters outside of layers, the whole name."""
    layer: int | None
    shape: tuple[int, ...]
    matrix: bool
    """True if a matrix optimizer updates it."""
    model: ModelConfig

    @property
    def key(self) -> str:
        """The key of the tensor if its first axis is the layer."""
        return self.inside if self.layer is None else f"{_LAYERS}{self.inside}"

    @property
    def numbered_key(self) -> str:
        """The key of the tensor if its name contains the layer's index."""
        return self.inside if self.layer is None else f"{_LAYERS}{self.layer}.{self.inside}"

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of units that the parameter's rows consist of; a vector is treated as one row."""
        return fragment_blocks(self.name, self.shape, self.model, tp=1, rank=0)

    def whole_shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the stored tensor with this key of the parameter."""
        return (self.model.num_layers, *self.shape) if self.place(key) is not None else self.shape

    def place(self, key: str) -> int | None:
        """Returns the parameter's index on the first axis of the tensor with this key; None if the tensor
        contains only this parameter."""
        return None if self.layer is None or key.endswith(self.numbered_key) else self.layer

    def state_fields(self, kind: Kind) -> tuple[str, ...]:
        """Returns the names of the tensors that an optimizer keeps for the parameter besides the master."""
        return (MOMENTUM,) if kind == "muon" and self.matrix else MOMENTS

    def stored_key(self, keys: Collection[str], field: str = "") -> str | None:
        """Returns the key of the parameter, or of a field of its state, in a checkpoint; None if there is
        none.

        Args:
            keys: the keys in the checkpoint.
            field: the master or a tensor of the state; empty for the parameter itself.
        """
        names = _MASTERS if field == MASTER else (field,)
        prefixes = [f"{STATE}{name}." if name else "" for name in names]
        candidates = (f"{prefix}{key}" for prefix in prefixes for key in (self.key, self.numbered_key))
        return next((key for key in candidates if key in keys), None)


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yields the model's parameters, in the order of the model; a tied output layer is not listed
    separately."""

    def outside(name: str) -> Parameter:
        shape = unit_shape(name.removeprefix("decoder."), model)
        return Parameter(name=name, inside=name, layer=None, shape=shape, matrix=False, model=model)

    yield outside(EMBEDDING)
    family = family_of(model)
    shapes: dict[str, tuple[str, tuple[int, ...], bool]] = {
        weight.name: (weight.name, (weight.rows, weight.cols), True) for weight in family.weights(model)
    }
    shapes |= {norm.name: (norm.fused or norm.name, (norm.elements,), False) for norm in family.vectors(model)}
    for layer in range(model.num_layers):
        for name, (inside, shape, matrix) in shapes.items():
            yield Parameter(
                name=f"{_LAYERS}{layer}.{name}", inside=inside, layer=layer, shape=shape, matrix=matrix, model=model
            )
    yield outside(FINAL_NORM)
    if not model.tied_embeddings:
        yield outside(OUTPUT)


def kind_of_state(keys: Collection[str], model: ModelConfig) -> Kind | None:
    """Returns the optimizer for which a checkpoint has the state of all parameters; None if there is no such
    optimizer."""
    if any(key.startswith(OURS) for key in keys):  # an optimizer of the engine, in Megatron's loop
        return None
    kinds: tuple[Kind, ...] = ("muon", "adamw")
    for kind in kinds:
        if all(
            parameter.stored_key(keys, field)
            for parameter in parameters(model)
            for field in parameter.state_fields(kind)
        ):
            return kind
    return None


def tensor_problems(keys: Mapping[str, tuple[int, ...]], model: ModelConfig) -> Mapping[str, str]:
    """Returns the keys of tensors that are missing or unexpected, or have another shape than in the model,
    each with the reason."""
    problems: dict[str, str] = {}
    known: set[str] = set()
    for parameter in parameters(model):
        for field in ("", MASTER, MOMENTUM, *MOMENTS):
            key = parameter.stored_key(keys, field)
            if key is None:
                if not field:
                    problems[parameter.numbered_key] = "the checkpoint has no such tensor"
                continue
            known.add(key)
            shape = parameter.whole_shape(key)
            if keys[key] != shape:
                problems[key] = f"has shape {list(keys[key])}; the model's tensor has shape {list(shape)}"
    title = family_of(model).title
    others = (key for key in sorted(keys.keys() - known) if "optimizer." not in key)
    return problems | dict.fromkeys(others, f"canzona's {title} has no such tensor")


def state_key(parameter: Parameter, field: str, kind: Kind) -> str:
    """Returns the key that Megatron's optimizer gives to a parameter's master or to a field of its state."""
    muons = kind == "muon" and parameter.matrix
    name = _MASTERS[0 if muons else 1] if field == MASTER else field
    return f"{STATE}{name}.{parameter.key}"
