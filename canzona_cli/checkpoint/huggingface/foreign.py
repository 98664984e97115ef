"""Translates between a model's settings and Hugging Face's `config.json`, and between units and tensor names.

Sources: the configuration classes of transformers, and published files. Version 5 of transformers nests the
rotary embedding's base in `rope_parameters`, and renames `torch_dtype` to `dtype`. Imports read both forms;
exports write the older form, which version 5 also reads. Each tensor is one unit
(`canzona_cli.core.model.geometry`), with its rows in the same order.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from canzona_cli.config.settings import settings as all_settings
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.model.families import (
    EMBEDDING,
    FAMILIES,
    FINAL_NORM,
    OUTPUT,
    family_of,
    layer_kinds,
    layer_models,
)
from canzona_cli.core.model.family import Family
from canzona_cli.core.setup import PARTS_OF_LLAMA, ModelConfig

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
_STEP, _DENSE_LAYERS, _DENSE_WIDTH = "decoder_sparse_step", "mlp_only_layers", "intermediate_size"
"""Qwen3-MoE's keys for layers without experts: every layer whose number, from 1, is not a multiple of the first, and
the layers, counted from 0, in the second; and their width."""
_POSITIONS: Final = "max_position_embeddings"
_SHAPES: Final = "canzona plan gpus=N --shapes FILE.yaml"
_ROPES: Final = ("rope_parameters", "rope_scaling")
_ROPE_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"})
_MUST_BE: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "logit_scale", "logits_scaling"), (1, None)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "routed_scaling_factor"), (1, None)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"), (0, None)),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), (0, None)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("attention_multiplier", "attention_chunk_size", "clip_qkv", "kv_lora_rank"), (None,)),
    **dict.fromkeys(("q_lora_rank", "rope_local_base_freq", "auto_map", "quantization_config"), (None,)),
    **dict.fromkeys(("mlp_bias", "qkv_bias", "bias", "alibi", "rope_interleaved"), (False, None)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False, None)),
    "no_rope_layers": ([], None),
    "pruned_heads": ({}, None),
}
"""The accepted values of keys that would make another model, in every family; the first is the usual one."""
_NO_EFFECT: Final = frozenset(
    (
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_bfloat16", "torchscript"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("chunk_size_feed_forward", "is_decoder", "tie_encoder_decoder", "pretraining_tp", "router_aux_loss_coef"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        *("sliding_window", "max_window_layers", "_attn_implementation_autoset"),
    )
)
"""The keys without effect on a model's weights and its function."""
VOCABULARY_MULTIPLE: Final = 128
"""Megatron pads a vocabulary to a multiple of this number (`--make-vocab-size-divisible-by`) times tp."""
_USUAL_TP: Final = 8
"""The tensor-parallel size that a vocabulary must allow, or it is padded: the GPUs of a node."""
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
        limit = all_settings()[f"model.{setting}"].range
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            problems.append(_problem(key, value, "is missing" if value is None else "must be a whole number above 0"))
        elif value not in limit:
            problems.append(_problem(key, value, f"must be {limit.words(value)}"))
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
    with_experts = "num_experts" in foreign.widths
    if with_experts and not problems:
        settings |= _layers_with_experts(flat, settings)
    refuse(problems)
    factor = _rope(tree).get("factor") if _rope_type(_rope(tree)) == "llama3" else None
    settings["rope_scaling"] = float(factor) if isinstance(factor, int | float) else None
    return {**settings, **PARTS_OF_LLAMA, **foreign.fixed}


def _layers_with_experts(tree: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that say which layers have experts, and how wide the others are.

    Raises:
        ConfigError: a key has another type, or no layer has experts.
    """
    step, dense, width = tree.get(_STEP, 1), tree.get(_DENSE_LAYERS, []), tree.get(_DENSE_WIDTH)
    if type(step) is not int or step < 1:
        raise ConfigError(_problem(_STEP, step, "must be a whole number above 0"))
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(_problem(_DENSE_LAYERS, dense, "must be a list of layers"))
    layers = range(int(str(settings["num_layers"])))
    frequency = tuple(int((layer + 1) % step == 0 and layer not in dense) for layer in layers)
    if all(frequency):
        return {"moe_layer_freq": 1, "dense_ffn_hidden_size": 0}
    if not any(frequency):
        raise ConfigError(_problem(_DENSE_LAYERS, dense, "no layer has experts"))
    if type(width) is not int or width not in all_settings()["model.ffn_hidden_size"].range:
        raise ConfigError(_problem(_DENSE_WIDTH, width, "must be the width of the layers without experts"))
    return {"moe_layer_freq": frequency, "dense_ffn_hidden_size": width}


def positions_of(tree: Mapping[str, object]) -> int:
    """Returns the length of the longest sequence that a model was made for, in tokens."""
    value = tree.get(_POSITIONS) or _family(tree.get("model_type")).foreign.defaults(tree)[_POSITIONS]
    assert isinstance(value, int)
    return value


def known_keys(family: Family) -> frozenset[str]:
    """Returns the keys of a `config.json` that are honoured, refused, or known to have no effect."""
    honoured = {*_WIDTHS.values(), *_NUMBERS.values(), *family.foreign.widths.values(), *_ROPES, _TIED, _POSITIONS}
    honoured |= {"num_local_experts", _STEP, _DENSE_LAYERS, _DENSE_WIDTH} if family.foreign.widths else set()
    checked = {*_MUST_BE, *family.foreign.must_be, "model_type", "architectures", "layer_types"}
    return frozenset(honoured | checked | _NO_EFFECT)


def ignored_keys(tree: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the keys of a `config.json` that transformers' configuration class of the family does not know
    either, and that have a value."""
    known = known_keys(_family(tree.get("model_type")))
    return tuple(key for key, value in tree.items() if key not in known and value not in (None, False))


def padded_vocabulary(size: int, tp: int) -> int:
    """Returns the vocabulary as Megatron pads it, unless tensor parallelism divides it already."""
    if size % math.lcm(tp, _USUAL_TP) == 0:
        return size
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-size // multiple) * multiple


def _family(model_type: object) -> Family:
    """Returns the model family with this `model_type`.

    Raises:
        ConfigError: canzona has no such family.
    """
    for family in FAMILIES:
        if family.foreign.model_type == model_type:
            return family
    supported = " or ".join(family.foreign.model_type for family in FAMILIES)
    fix = f"any other decoder-only model can be planned, but not trained: {_SHAPES}"
    raise ConfigError(Problem(key="model_type", value=model_type, reason=f"is not {supported}", fix=fix))


def config_json(model: ModelConfig, *, dtype: str, max_positions: int) -> dict[str, object]:
    """Returns the contents of `config.json` for a model, with the keys that the published files of its family
    have.

    Args:
        dtype: the type of the exported weights: bfloat16, float16 or float32.
        max_positions: the length of the model's longest sequence, in tokens. With a scaled rotary embedding,
            the length of the scaled context is written if it is larger.

    Raises:
        ConfigError: no model of transformers in which canzona writes weights computes the same.
    """
    refuse(foreign_problems(model))
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
        **(_written_layers(model) if model.num_experts else {}),
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _written_layers(model: ModelConfig) -> dict[str, object]:
    """Returns the keys of `config.json` that say which layers have experts."""
    dense = [layer for layer, kind in enumerate(layer_models(model)) if kind.num_experts == 0]
    return {_STEP: 1, _DENSE_LAYERS: dense, **({_DENSE_WIDTH: model.dense_width} if dense else {})}


def foreign_problems(model: ModelConfig) -> list[Problem]:
    """Returns a problem for each part of a model that the model of its family in transformers does not have."""
    no_gpt2 = "is in no model of transformers that canzona writes; GPT-2's matrices are transposed and fused there"
    no_shared = "is not in Qwen3-MoE of transformers, and in Qwen2-MoE it has a gate"
    parts = (
        *((key, value, True, no_gpt2) for key, value in model.parts_of_gpt2.items()),
        ("shared_ffn_hidden_size", model.shared_ffn_hidden_size, model.shared_ffn_hidden_size > 0, no_shared),
        ("qk_norm", False, model.num_experts > 0 and not model.qk_norm, "is always true in Qwen3-MoE of transformers"),
    )
    fix = "validate the model with canzona eval"
    return [Problem(f"model.{key}", why, fix, value=value) for key, value, differs, why in parts if differs]


def _rope(tree: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the settings of the rotary embedding: the first object among the keys `rope_parameters` and
    `rope_scaling`; empty if there is none."""
    for key in _ROPES:
        if isinstance(rope := tree.get(key), Mapping):
            return rope
    return {}


def _unsupported_keys(tree: Mapping[str, object], family: Family) -> Iterator[Problem]:
    """Yields a problem for each key whose value canzona does not support in models of this family."""
    foreign, ours = family.foreign, f"canzona's {family.title}"
    for key, values in {**_MUST_BE, **foreign.must_be}.items():
        if (value := tree.get(key)) not in values:
            required = json.dumps(values[0])
            yield _problem(key, value, f"must be {required} in {ours}")
    architectures = tree.get("architectures")
    if architectures not in (None, [foreign.architecture]):
        yield _problem("architectures", architectures, f"is not {foreign.architecture}")
    layers = tree.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        yield _problem("layer_types", layers, f"every layer of {ours} has full attention")
    for key in _ROPES:
        if (rope := tree.get(key)) is not None and (reason := _wrong_rope(rope)):
            yield _problem(key, rope, reason)
    ropes = [rope for key in _ROPES if isinstance(rope := tree.get(key), Mapping)]
    if len({(str(_rope_type(rope)), str(rope.get("factor"))) for rope in ropes}) > 1:
        yield _problem(_ROPES[1], tree[_ROPES[1]], f"differs from {_ROPES[0]}")
    positions = tree.get(_POSITIONS)
    if positions is not None and (isinstance(positions, bool) or not isinstance(positions, int) or positions <= 0):
        yield _problem(_POSITIONS, positions, "must be a whole number above 0")


def _wrong_rope(rope: object) -> str | None:
    """Returns the reason why a rotary embedding cannot be used; None if it can."""
    if not isinstance(rope, Mapping):
        return "is not an object"
    if unknown := [str(key) for key in rope if key not in _ROPE_KEYS | _LLAMA3.keys()]:
        return f"canzona's rotary embedding is the same in all layers and has no {', '.join(unknown)}"
    if rope.get("partial_rotary_factor", 1) not in (1, None):
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
    fix = f"only a {titles} {restriction} can be imported ({FILE}); plan others with: {_SHAPES}"
    return Problem(key=key, value=value, reason=reason, fix=fix)


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
    of_kind = {
        kind: [
            pair
            for pattern, foreign_pattern in family_of(kind).foreign.layer.items()
            for pair in _expand_experts(pattern, foreign_pattern, kind.num_experts)
        ]
        for kind in layer_kinds(model)
    }
    for layer, kind in enumerate(layer_models(model)):
        for unit, name in of_kind[kind]:
            names[f"layers.{layer}.{unit}"] = f"model.layers.{layer}.{name}.weight"
    names[FINAL_NORM.removeprefix("decoder.")] = foreign.final_norm
    if not model.tied_embeddings:
        names[OUTPUT] = foreign.output
    return MappingProxyType(names)
