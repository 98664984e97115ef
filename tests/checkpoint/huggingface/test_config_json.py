"""`config.json` and recipes say the same: published files, transformers' own, and what canzona's models cannot be."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from canzona_cli.checkpoint.huggingface.folder import read_object
from canzona_cli.checkpoint.huggingface.foreign import config_json, read_model
from canzona_cli.config.compose import compose_run
from canzona_cli.core.errors import ConfigError
from tests.dist.reference import hugging_face_config
from tests.refusals import refused
from tests.sizes import llama, model

PUBLISHED = dict(read_object(Path(__file__).parent / "published" / "qwen3-8b.json"))
"""The numbers of huggingface.co/Qwen/Qwen3-8B."""

LLAMA = dict(read_object(Path(__file__).parent / "published" / "llama-3.1-405b.json"))
"""The numbers of huggingface.co/meta-llama/Llama-3.1-405B."""


def own(settings: dict[str, object]) -> dict[str, object]:
    experts = (
        *("num_experts", "experts_per_token", "shared_ffn_hidden_size", "balancing_loss", "balancing_weight"),
        *("moe_layer_freq", "dense_ffn_hidden_size"),
    )
    return {name: value for name, value in settings.items() if name not in ("name", *experts)}


def test_the_published_file_is_the_built_in_model() -> None:
    assert read_model(PUBLISHED) == own(asdict(model("8b")))


def test_the_published_llama_is_the_built_in_one_with_scaled_positions() -> None:
    built_in = compose_run(["recipe=llama3-405b"]).config.model
    assert read_model(LLAMA) == own(asdict(replace(built_in, rope_scaling=8.0)))


SHAPES = {
    "qwen3-0.6b": model("0.6b"),
    "qwen3-tiny": model("tiny"),
    "llama": llama("tiny"),
    "llama 3.1": replace(llama("tiny"), rope_scaling=8.0),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_own_file_is_read_whatever_its_version_calls_things(kind: str, tmp_path: Path) -> None:
    shape = SHAPES[kind]
    hugging_face_config(shape, max_length=64).save_pretrained(tmp_path)
    assert read_model(read_object(tmp_path / "config.json")) == own(asdict(shape))


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_reads_what_is_written(kind: str) -> None:
    shape = SHAPES[kind]
    wanted = hugging_face_config(shape, max_length=256)
    found = type(wanted).from_dict(config_json(shape, dtype="bfloat16", max_positions=256))
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(found, key) == getattr(wanted, key)
    for key in ("head_dim", "vocab_size", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "layer_types"):
        assert getattr(found, key, None) == getattr(wanted, key, None), key
    assert found.max_position_embeddings == (256 if shape.rope_scaling is None else 65_536)
    assert str(found.dtype) == "torch.bfloat16"


def test_everything_that_it_cannot_be_is_named_at_once() -> None:
    foreign: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "gelu",
        "attention_bias": True,
        "attention_dropout": 0.1,
        "use_sliding_window": True,
        "num_experts": 128,
        "quantization_config": {"bits": 4},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "layer_types": ["sliding_attention"],
        "hidden_size": "large",
        "num_key_value_heads": 0,
        "tie_word_embeddings": "yes",
    }
    problems = refused(read_model, {key: value for key, value in (PUBLISHED | foreign).items() if key != "vocab_size"})
    assert {problem.key for problem in problems} == {*foreign, "vocab_size"}


@pytest.mark.parametrize("model_type", ["mixtral", ["llama"], None])
def test_a_model_of_an_unknown_family_is_refused_by_the_names_of_those_that_there_are(model_type: object) -> None:
    with pytest.raises(ConfigError, match=r"model_type.*is not qwen3 or llama"):
        read_model(PUBLISHED | {"model_type": model_type})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rope_type": "yarn"}, "scaled as Llama 3.1's"),
        ({"factor": "8"}, "not a number of at least 1"),
        ({"original_max_position_embeddings": 4096}, "original_max_position_embeddings 8192"),
    ],
)
def test_another_scaling_of_positions_is_refused_by_name(changed: dict[str, object], reason: str) -> None:
    scaling = LLAMA["rope_scaling"]
    assert isinstance(scaling, dict)
    with pytest.raises(ConfigError, match=reason) as refused:
        read_model(LLAMA | {"rope_scaling": scaling | changed})
    assert [problem.key for problem in refused.value.problems] == ["rope_scaling"]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"biases": True}, "model.biases"),
        ({"num_experts": 8, "shared_ffn_hidden_size": 64}, "model.shared_ffn_hidden_size"),
        ({"num_experts": 8, "qk_norm": False}, "model.qk_norm"),
    ],
)
def test_what_no_model_of_transformers_computes_is_not_written(changed: dict[str, Any], key: str) -> None:
    shape = replace(SHAPES["qwen3-tiny"], **changed)
    (problem,) = refused(config_json, shape, dtype="bfloat16", max_positions=256)
    assert problem.key == key
    assert "canzona eval" in problem.fix
