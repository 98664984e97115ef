"""The names of a model's parameters and of their optimizer state in Megatron's checkpoints.

Parameters of the same name in all layers are one tensor, whose first axis is the layer, or each layer has a
separate tensor with the layer's index in its name. The weights of a layer's experts are one tensor, in which the
expert's axis comes next; a checkpoint does not show whether the experts are separate modules or grouped matmuls.
Parameters are fused as on a single tensor-parallel rank.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.core.engine.stored_state import ADAMWS_MASTER, MUONS_MASTER, OURS, STATE
from canzona_cli.core.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of, layer_kinds, layer_models
from canzona_cli.core.model.geometry import Block, fragment_blocks, unit_shape
from canzona_cli.core.optimizers.facts import MOMENTS, MOMENTUM
from canzona_cli.core.setup import ModelConfig

Kind = Literal["muon", "adamw"]
"""The optimizers whose state in Megatron's checkpoints does not depend on the layout of ranks."""
LAYERS: Final = "decoder.layers."
EXPERTS: Final = "mlp.experts.experts."
"""The prefix of experts' weights within a layer."""
_MASTERS: Final = (MUONS_MASTER, ADAMWS_MASTER)
"""The names of masters in Megatron's Muon and in its sharded AdamW."""
_AS_IF_FUSED: Final = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
"""The names of norms that Transformer Engine does not fuse, in checkpoints of Megatron's layers without Transformer
Engine, which store every norm under the name of a fused one."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the model, as Megatron's checkpoints store it."""

    name: str
    """The name in Megatron's model."""
    insides: tuple[str, ...]
    """The possible names within the layer, that of Transformer Engine's layers first; for parameters outside of layers,
    the whole name."""
    layer: int | None
    expert: int | None = None
    shape: tuple[int, ...]
    matrix: bool
    """True if a matrix optimizer updates it."""
    model: ModelConfig

    @property
    def keys(self) -> tuple[str, ...]:
        """The possible keys of the tensor if its first axis is the layer."""
        return self.insides if self.layer is None else tuple(f"{LAYERS}{inside}" for inside in self.insides)

    @property
    def numbered_keys(self) -> tuple[str, ...]:
        """The possible keys of the tensor if its name contains the layer's index."""
        return self.insides if self.layer is None else tuple(f"{LAYERS}{self.layer}.{name}" for name in self.insides)

    @property
    def written_keys(self) -> tuple[str, ...]:
        """The keys that Megatron looks for: with the layer's index if it does not treat all layers as equal."""
        return self.keys if self.model.moe_layer_freq == 1 else self.numbered_keys

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of units that the parameter's rows consist of; a vector is treated as one row."""
        return fragment_blocks(self.name, self.shape, self.model, tp=1, rank=0)

    def whole_shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the stored tensor with this key of the parameter."""
        experts = () if self.expert is None else (self.model.num_experts,)
        layers = (self.model.num_layers,) if len(self.place(key)) > len(experts) else ()
        return (*layers, *experts, *self.shape)

    def place(self, key: str) -> tuple[int, ...]:
        """Returns the parameter's indices on the first axes of the tensor with this key: of its layer and of its
        expert; empty if the tensor contains only this parameter."""
        layer = None if key.endswith(self.numbered_keys) else self.layer
        return tuple(index for index in (layer, self.expert) if index is not None)

    def state_fields(self, kind: Kind) -> tuple[str, ...]:
        """Returns the names of the tensors that an optimizer keeps for the parameter besides the master."""
        return (MOMENTUM,) if kind == "muon" and self.matrix else MOMENTS

    def updated_by_muon(self, keys: Collection[str]) -> bool:
        """Returns True if Megatron's Muon updated the parameter as a matrix, although it is AdamW's in canzona, as it
        does with routers by default."""
        return not self.matrix and self.stored_key(keys, MOMENTUM) is not None

    def stored_key(self, keys: Collection[str], field: str = "") -> str | None:
        """Returns the key of the parameter, or of a field of its state, in a checkpoint; None if there is
        none.

        Args:
            keys: the keys in the checkpoint.
            field: the master or a tensor of the state; empty for the parameter itself.
        """
        return next(self.stored_keys(keys, field), None)

    def stored_keys(self, keys: Collection[str], field: str = "") -> Iterator[str]:
        """Yields all keys that `stored_key` may return; a checkpoint may have a tensor under several names."""
        names = _MASTERS if field == MASTER else (field,)
        for prefix in [f"{STATE}{name}." if name else "" for name in names]:
            for key in (*self.keys, *self.numbered_keys):
                if f"{prefix}{key}" in keys:
                    yield f"{prefix}{key}"


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yields the model's parameters, in the order of the model; a tied output layer is not listed
    separately."""

    def outside(name: str) -> Parameter:
        shape = unit_shape(name.removeprefix("decoder."), model)
        return Parameter(name=name, insides=(name,), layer=None, shape=shape, matrix=False, model=model)

    yield outside(EMBEDDING)
    of_kind = {kind: [*_of_layer(kind, model)] for kind in layer_kinds(model)}
    for layer, kind in enumerate(layer_models(model)):
        for parameter in of_kind[kind]:
            yield replace(parameter, name=f"{LAYERS}{layer}.{parameter.name}", layer=layer)
    yield outside(FINAL_NORM)
    if not model.tied_embeddings:
        yield outside(OUTPUT)


def _of_layer(kind: ModelConfig, model: ModelConfig) -> Iterator[Parameter]:
    """Yields the parameters of a layer of `model`, with their names in the layer. All layers of `kind` are like it."""
    family = family_of(kind)
    for weight in family.weights(kind):
        inside, shape = weight.name, (weight.rows, weight.cols)
        if weight.expert is not None:
            inside = inside.removesuffix(f"{weight.expert}").replace("mlp.experts.", EXPERTS)
        yield Parameter(
            name=weight.name, insides=(inside,), layer=0, expert=weight.expert, shape=shape, matrix=True, model=model
        )
    for norm in family.vectors(kind):
        insides = (norm.fused,) if norm.fused else (norm.name, *filter(None, [_AS_IF_FUSED.get(norm.name)]))
        yield Parameter(name=norm.name, insides=insides, layer=0, shape=(norm.elements,), matrix=False, model=model)
    for router in family.routers(kind):
        shape = (router.rows, router.cols)
        yield Parameter(name=router.name, insides=(router.name,), layer=0, shape=shape, matrix=False, model=model)


def kind_of_state(keys: Collection[str], model: ModelConfig) -> Kind | None:
    """Returns the optimizer for which a checkpoint has the state of all parameters; None if there is no such
    optimizer."""
    if any(key.startswith(OURS) for key in keys):  # an optimizer of the engine, in Megatron's loop
        return None
    kinds: tuple[Kind, ...] = ("muon", "adamw")
    for kind in kinds:
        if all(
            parameter.stored_key(keys, field) or (kind == "muon" and parameter.updated_by_muon(keys))
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
            stored = [*parameter.stored_keys(keys, field)]
            if not stored and not field:
                problems[parameter.numbered_keys[0]] = "the checkpoint has no such tensor"
            known.update(stored)
            for key in stored:
                shape = parameter.whole_shape(key)
                if keys[key] != shape:
                    problems[key] = f"has shape {list(keys[key])}; the model's tensor has shape {list(shape)}"
    title = family_of(model).title
    others = (key for key in sorted(keys.keys() - known) if "optimizer." not in key)
    return problems | dict.fromkeys(others, f"canzona's {title} has no such tensor")


def written_keys(parameter: Parameter, field: str, kind: Kind | None) -> list[str]:
    """Returns the keys under which Megatron looks for a parameter, or for its master or a field of its state.

    Args:
        field: the master or a tensor of the state; empty for the parameter itself.
    """
    muons = kind == "muon" and parameter.matrix
    name = _MASTERS[0 if muons else 1] if field == MASTER else field
    return [f"{STATE}{name}.{key}" if field else key for key in parameter.written_keys]
