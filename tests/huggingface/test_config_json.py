"""`config.json` and recipes say the same: published files, transformers' own, and what canzona's Qwen3 cannot be."""

from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import Qwen3Config

from canzona_cli.errors import ConfigError
from canzona_cli.huggingface.folder import read_object
from canzona_cli.huggingface.foreign import config_json, read_model
from tests.dist.reference import hugging_face_config
from tests.sizes import model

PUBLISHED: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Of huggingface.co/Qwen/Qwen3-8B."""


def own(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name != "name"}


def test_the_published_file_is_the_built_in_model() -> None:
    assert read_model(PUBLISHED) == own(asdict(model("8b")))


@pytest.mark.parametrize("size", ["0.6b", "tiny"])
def test_transformers_own_file_is_read_whatever_its_version_calls_things(size: str, tmp_path: Path) -> None:
    shape = model("0.6b") if size == "0.6b" else model("tiny")
    hugging_face_config(shape, max_length=64).save_pretrained(tmp_path)
    assert read_model(read_object(tmp_path / "config.json")) == own(asdict(shape))


def test_transformers_reads_what_is_written() -> None:
    shape = model("tiny")
    found = Qwen3Config.from_dict(config_json(shape, dtype="bfloat16", max_positions=256))
    wanted = hugging_face_config(shape, max_length=256)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(found, key) == getattr(wanted, key)
    for key in ("head_dim", "vocab_size", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "layer_types"):
        assert getattr(found, key) == getattr(wanted, key), key
    assert found.max_position_embeddings == 256
    assert str(found.dtype) == "torch.bfloat16"


def test_everything_that_it_cannot_be_is_named_at_once() -> None:
    foreign: dict[str, object] = {
        "model_type": "qwen3_moe",
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
    with pytest.raises(ConfigError) as refused:
        read_model({key: value for key, value in (PUBLISHED | foreign).items() if key != "vocab_size"})
    assert {problem.key for problem in refused.value.problems} == {*foreign, "vocab_size"}
