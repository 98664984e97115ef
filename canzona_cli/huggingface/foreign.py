"""The model in Hugging Face's words: its `config.json`, and the names of its tensors.

Sources: the settings classes of transformers, and the published files. Version 5 nests the rotary embedding's
base in `rope_parameters` and says `dtype` for `torch_dtype`; it reads the older words, which are written
here. A tensor is a unit of model space (`canzona_cli.model.geometry`), with the same rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from canzona_cli.config.schema import ModelConfig
from canzona_cli.errors import Problem, refuse
from canzona_cli.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of, foreign_family
from canzona_cli.model.family import Foreign

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
"""Settings of the model that are whole numbers, and their keys."""
_NUMBERS: Final = {"rope_base": "rope_theta", "norm_eps": "rms_norm_eps", "init_std": "initializer_range"}
_TIED: Final = "tie_word_embeddings"


def read_model(tree: Mapping[str, object]) -> dict[str, object]:
    """Reads the settings of a recipe's model section, but for its name, from a `config.json`.

    Raises:
        ConfigError: it is no Qwen3 that canzona has; names every key at once.
    """
    foreign = foreign_family(tree.get("model_type")).foreign
    problems = list(_unusable(tree, foreign))
    settings: dict[str, object] = {}
    flat = {**foreign.defaults} | {key: value for key, value in {**tree, **_rope(tree)}.items() if value is not None}
    for setting, key in (_WIDTHS | _NUMBERS).items():
        value = flat.get(key)
        kinds = int if setting in _WIDTHS else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            number = "a whole number" if setting in _WIDTHS else "a number"
            problems.append(_problem(key, value, "is missing" if value is None else f"must be {number} above 0"))
        else:
            settings[setting] = value if setting in _WIDTHS else float(value)
    settings["tied_embeddings"] = tree.get(_TIED, False)
    if not isinstance(settings["tied_embeddings"], bool):
        problems.append(_problem(_TIED, tree[_TIED], "is neither true nor false"))
    refuse(problems)
    return {**settings, **foreign.fixed}


def config_json(model: ModelConfig, *, dtype: str, max_positions: int) -> dict[str, object]:
    """Returns the `config.json` of a model, as the published files of its family have it.

    Args:
        dtype: the type of the weights beside it: bfloat16, float16 or float32.
        max_positions: tokens that the model has been trained on at once.

    Raises:
        ConfigError: it is no Qwen3.
    """
    foreign = family_of(model).foreign
    if not model.qk_norm:
        reason = "Hugging Face's Qwen3 normalises queries and keys, and this model does not"
        refuse([Problem(key="model.qk_norm", value=False, reason=reason, fix="only a model with qk_norm has its form")])
    settings = asdict(model)
    return {
        "architectures": [foreign.architecture],
        "model_type": foreign.model_type,
        **{key: settings[setting] for setting, key in (_WIDTHS | _NUMBERS).items()},
        _TIED: model.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_positions,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_scaling": None,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _rope(tree: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the settings of the rotary embedding, wherever they are."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := tree.get(key), Mapping):
            return rope
    return {}


def _unusable(tree: Mapping[str, object], foreign: Foreign) -> Iterator[Problem]:
    for key, values in foreign.must_be.items():
        if (value := tree.get(key)) not in values:
            value_there = "null" if values[0] is None else str(values[0]).lower()
            yield _problem(key, value, f"canzona's Qwen3 has {value_there} there")
    architectures = tree.get("architectures")
    if architectures not in (None, [foreign.architecture]):
        yield _problem("architectures", architectures, f"is not {foreign.architecture}")
    layers = tree.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        yield _problem("layer_types", layers, "every layer of canzona's Qwen3 attends to everything before")
    for key in ("rope_parameters", "rope_scaling"):
        rope = tree.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
        if rope is not None and (not isinstance(rope, Mapping) or kind != "default"):
            yield _problem(key, rope, "canzona's rotary embedding is not scaled")
        elif isinstance(rope, Mapping) and rope.get("partial_rotary_factor", 1) != 1:
            yield _problem(key, rope, "canzona's rotary embedding rotates all of a head")


def _problem(key: str, value: object, reason: str) -> Problem:
    fix = f"only a Qwen3 without experts, biases, sliding windows and rope scaling can be taken over ({FILE})"
    return Problem(key=key, value=value, reason=reason, fix=fix)


@lru_cache(maxsize=4)
def tensor_names(model: ModelConfig) -> Mapping[str, str]:
    """Returns Hugging Face's name of each unit, in the order of the model: each weight once,
    so none for a tied output layer."""
    foreign = family_of(model).foreign
    names = {EMBEDDING: foreign.embedding}
    for layer in range(model.num_layers):
        names |= {
            f"layers.{layer}.{unit}": f"model.layers.{layer}.{name}.weight" for unit, name in foreign.layer.items()
        }
    names[FINAL_NORM.removeprefix("decoder.")] = foreign.final_norm
    if not model.tied_embeddings:
        names[OUTPUT] = foreign.output
    return MappingProxyType(names)
