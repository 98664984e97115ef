"""Translates between a model's settings and Hugging Face's `config.json`, and between units and tensor names.

Sources: the configuration classes of transformers, and published files. Version 5 of transformers nests the
rotary embedding's base in `rope_parameters`, and renames `torch_dtype` to `dtype`. Imports read both forms;
exports write the older form, which version 5 also reads. Each tensor is one unit
(`canzona_cli.model.geometry`), with its rows in the same order.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from canzona_cli.config.schema import ModelConfig
from canzona_cli.errors import ConfigError, Problem, refuse
from canzona_cli.model.families import EMBEDDING, FAMILIES, FINAL_NORM, OUTPUT, family_of
from canzona_cli.model.family import Family

FILE: Final = "config.json"
_WIDTHS: Final = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""The settings of a model that are integers, each with its key in `config.json`."""
_NUMBERS: Final = {"rope_base": "rope_theta", "norm_eps": "rms_norm_eps", "init_std": "initializer_range"}
"""The settings of a model that are other numbers, each with its key in `config.json`."""
_TIED: Final = "tie_word_embeddings"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of rope type `llama3` in every published Llama; Megatron-core does not support other
values."""


def read_model(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a recipe's model section, except its name, from the contents of a
    `config.json`.

    Raises:
        ConfigError: canzona does not support the model. The error lists every key that is the reason; if
            `model_type` is, only this key.
    """
    family = _family(tree.get("model_type"))
    foreign = family.foreign
    problems = list(_unsupported_keys(tree, family))
    settings: dict[str, object] = {}
    present = {key: value for key, value in {**tree, **_rope(tree)}.items() if value is not None}
    flat = {**foreign.defaults(present), **present}
    for setting, key in {**_WIDTHS, **foreign.widths}.items():
        value = flat.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            problems.append(_problem(key, value, "is missing" if value is None else "must be a whole number above 0"))
        else:
            settings[setting] = value
    for setting, key in _NUMBERS.items():
        value = flat.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            problems.append(_problem(key, value, "is missing" if value is None else "must be a number above 0"))
        else:
            settings[setting] = float(value)
    settings["tied_embeddings"] = tree.get(_TIED, False)
    if not isinstance(settings["tied_embeddings"], bool):
        problems.append(_problem(_TIED, tree[_TIED], "is neither true nor false"))
    refuse(problems)
    factor = _rope(tree).get("factor") if _rope_type(_rope(tree)) == "llama3" else None
    settings["rope_scaling"] = float(factor) if isinstance(factor, int | float) else None
    return {**settings, "gated": True, **foreign.fixed}


def _family(model_type: object) -> Family:
    """Returns the model family with this `model_type`.

    Raises:
        ConfigError: canzona has no such family.
    """
    for family in FAMILIES:
        if family.foreign.model_type == model_type:
            return family
    supported = " or ".join(family.foreign.model_type for family in FAMILIES)
    raise ConfigError(_problem("model_type", model_type, f"is not {supported}"))


def config_json(model: ModelConfig, *, dtype: str, max_positions: int) -> dict[str, object]:
    """Returns the contents of `config.json` for a model, with the keys that the published files of its family
    have.

    Args:
        dtype: the type of the exported weights: bfloat16, float16 or float32.
        max_positions: the length of the model's longest sequence, in tokens. With a scaled rotary embedding,
            the length of the scaled context is written if it is larger.
    """
    foreign = family_of(model).foreign
    settings = asdict(model)
    scaling = {"rope_type": "llama3", "factor": model.rope_scaling, **_LLAMA3} if model.rope_scaling else None
    stretched = int(_LLAMA3["original_max_position_embeddings"] * (model.rope_scaling or 0))
    return {
        "architectures": [foreign.architecture],
        "model_type": foreign.model_type,
        **{key: settings[setting] for setting, key in {**_WIDTHS, **foreign.widths, **_NUMBERS}.items()},
        _TIED: model.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max(max_positions, stretched),
        "rope_scaling": scaling,
        **foreign.written,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _rope(tree: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the settings of the rotary embedding: the first object among the keys `rope_parameters` and
    `rope_scaling`; empty if there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := tree.get(key), Mapping):
            return rope
    return {}


def _unsupported_keys(tree: Mapping[str, object], family: Family) -> Iterator[Problem]:
    """Yields a problem for each key whose value canzona does not support in models of this family."""
    foreign, ours = family.foreign, f"canzona's {family.title}"
    for key, values in foreign.must_be.items():
        if (value := tree.get(key)) not in values:
            required = "null" if values[0] is None else str(values[0]).lower()
            yield _problem(key, value, f"must be {required} in {ours}")
    architectures = tree.get("architectures")
    if architectures not in (None, [foreign.architecture]):
        yield _problem("architectures", architectures, f"is not {foreign.architecture}")
    layers = tree.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        yield _problem("layer_types", layers, f"every layer of {ours} has full attention")
    for key in ("rope_parameters", "rope_scaling"):
        if (rope := tree.get(key)) is not None and (reason := _wrong_rope(rope)):
            yield _problem(key, rope, reason)


def _wrong_rope(rope: object) -> str | None:
    """Returns the reason why a rotary embedding cannot be used; None if it can."""
    if not isinstance(rope, Mapping):
        return "is not an object"
    if rope.get("partial_rotary_factor", 1) != 1:
        return "canzona's rotary embedding rotates all dimensions of a head"
    match _rope_type(rope):
        case "default":
            return None
        case "llama3":
            factor = rope.get("factor")
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
                return "its factor is not a number of at least 1"
            if {key: rope.get(key) for key in _LLAMA3} == _LLAMA3:
                return None
            return "canzona's has " + ", ".join(f"{key} {value:g}" for key, value in _LLAMA3.items())
        case _:
            return "canzona's rotary embedding is scaled as Llama 3.1's (rope_type llama3), or not at all"


def _rope_type(rope: Mapping[str, object]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _problem(key: str, value: object, reason: str) -> Problem:
    titles = " or ".join(family.title for family in FAMILIES)
    restriction = "without shared experts, biases, sliding windows or rope scaling other than llama3's"
    return Problem(key=key, value=value, reason=reason, fix=f"only a {titles} {restriction} can be imported ({FILE})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSlice:
    """The place of one expert's tensor in a stack of all experts' tensors, `[experts, rows, columns]`."""

    name: str
    """The name of the stack."""
    expert: int
    row: int
    """The first row."""
    rows: int


_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")


def split_stack(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StackSlice]]:
    """Yields the tensors in a stack of all experts' tensors: the name that each tensor has in published
    files, and its place. Yields nothing for other tensors.

    Version 5 of transformers writes such stacks when it saves a model: `gate_up_proj`, with the rows of gate
    above the rows of up, and `down_proj`.
    """
    match = _STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
    rows = shape[1] // len(parts)
    for expert in range(shape[0]):
        for index, part in enumerate(parts):
            stack_slice = StackSlice(name=name, expert=expert, row=index * rows, rows=rows)
            yield f"{match[1]}.{expert}.{part}_proj.weight", stack_slice


def _expand_experts(unit: str, name: str, experts: int) -> Iterator[tuple[str, str]]:
    """Yields a unit and its tensor's name. If they contain a `*`, yields one such pair for each expert, with
    the expert's index in place of the `*`."""
    for expert in range(experts if "*" in unit else 1):
        yield unit.replace("*", f"{expert}"), name.replace("*", f"{expert}")


@lru_cache(maxsize=4)
def tensor_names(model: ModelConfig) -> Mapping[str, str]:
    """Returns the Hugging Face name of each unit, in the order of the model.

    A tied output layer is not included, because it is the embedding.
    """
    foreign = family_of(model).foreign
    names = {EMBEDDING: foreign.embedding}
    for layer in range(model.num_layers):
        names |= {
            f"layers.{layer}.{unit}": f"model.layers.{layer}.{name}.weight"
            for pattern, foreign_pattern in foreign.layer.items()
            for unit, name in _expand_experts(pattern, foreign_pattern, model.num_experts)
        }
    names[FINAL_NORM.removeprefix("decoder.")] = foreign.final_norm
    if not model.tied_embeddings:
        names[OUTPUT] = foreign.output
    return MappingProxyType(names)
