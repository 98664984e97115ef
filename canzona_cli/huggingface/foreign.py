"""Translates a model's settings from and to Hugging Face's `config.json`, and its units to tensor names.

Sources: the configuration classes of transformers, and the published files. Version 5 of transformers nests
the rotary embedding's base in `rope_parameters` and calls `torch_dtype` `dtype`. Both forms are read; the
older one, which version 5 reads too, is written. Each tensor is one unit (`canzona_cli.model.geometry`), with
the same rows.
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
"""The model's settings that are integers, and their keys in `config.json`."""
_NUMBERS: Final = {"rope_base": "rope_theta", "norm_eps": "rms_norm_eps", "init_std": "initializer_range"}
"""The model's settings that are any numbers, and their keys in `config.json`."""
_TIED: Final = "tie_word_embeddings"


def read_model(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a recipe's model section, except its name, from the content of a `config.json`.

    Raises:
        ConfigError: canzona does not support the model; lists every key that prevents it.
    """
    foreign = foreign_family(tree.get("model_type")).foreign
    problems = list(_unusable(tree, foreign))
    settings: dict[str, object] = {}
    flat = {**foreign.defaults} | {key: value for key, value in {**tree, **_rope(tree)}.items() if value is not None}
    for setting, key in _WIDTHS.items():
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
    return {**settings, **foreign.fixed}


def config_json(model: ModelConfig, *, dtype: str, max_positions: int) -> dict[str, object]:
    """Returns the content of a model's `config.json`, with the keys that the published files of its family
    have.

    Args:
        dtype: the type of the exported weights: bfloat16, float16 or float32.
        max_positions: the longest sequence of the model, in tokens.

    Raises:
        ConfigError: the model is not a Qwen3, because it does not normalise queries and keys.
    """
    foreign = family_of(model).foreign
    if not model.qk_norm:
        reason = "Hugging Face's Qwen3 normalises queries and keys, and this model does not"
        refuse([Problem(key="model.qk_norm", value=False, reason=reason, fix="export a model with qk_norm")])
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
    """Returns the settings of the rotary embedding, from whichever key has them."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := tree.get(key), Mapping):
            return rope
    return {}


def _unusable(tree: Mapping[str, object], foreign: Foreign) -> Iterator[Problem]:
    for key, values in foreign.must_be.items():
        if (value := tree.get(key)) not in values:
            required = "null" if values[0] is None else str(values[0]).lower()
            yield _problem(key, value, f"must be {required} in canzona's Qwen3")
    architectures = tree.get("architectures")
    if architectures not in (None, [foreign.architecture]):
        yield _problem("architectures", architectures, f"is not {foreign.architecture}")
    layers = tree.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        yield _problem("layer_types", layers, "every layer of canzona's Qwen3 has full attention")
    for key in ("rope_parameters", "rope_scaling"):
        rope = tree.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
        if rope is not None and (not isinstance(rope, Mapping) or kind != "default"):
            yield _problem(key, rope, "canzona's rotary embedding is not scaled")
        elif isinstance(rope, Mapping) and rope.get("partial_rotary_factor", 1) != 1:
            yield _problem(key, rope, "canzona's rotary embedding rotates all dimensions of a head")


def _problem(key: str, value: object, reason: str) -> Problem:
    fix = f"only a Qwen3 without experts, biases, sliding windows and rope scaling can be imported ({FILE})"
    return Problem(key=key, value=value, reason=reason, fix=fix)


@lru_cache(maxsize=4)
def tensor_names(model: ModelConfig) -> Mapping[str, str]:
    """Returns the Hugging Face name of each unit, in the order of the model.

    A tied output layer is not included, because it is the embedding.
    """
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
