"""Files of public models by family: accepted ones count and rotate as transformers' own model, others are refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from canzona_cli.checkpoint.huggingface.folder import compose_from_folder, open_folder, read_object
from canzona_cli.checkpoint.huggingface.foreign import known_keys, padded_vocabulary, positions_of, read_model
from canzona_cli.core.model.families import FAMILIES, parameter_count
from canzona_cli.core.setup import ModelConfig
from tests.cli.commands.support import canzona
from tests.refusals import refused

PUBLISHED = Path(__file__).with_name("published")
QWEN3_8B = dict(read_object(PUBLISHED / "qwen3-8b.json"))
QWEN3_30B = dict(read_object(PUBLISHED / "qwen3-30b-a3b.json"))
LLAMA_405B = dict(read_object(PUBLISHED / "llama-3.1-405b.json"))


def sized(base: Mapping[str, object], layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict[str, object]:
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }


LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
SCALED = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
ACCEPTED: dict[str, dict[str, object]] = {
    "Qwen3-0.6B": {**sized(QWEN3_8B, 28, 1024, 3072, 16, 8), "tie_word_embeddings": True},
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-32B": sized(QWEN3_8B, 64, 5120, 25600, 64, 8),
    "Qwen3-30B-A3B": QWEN3_30B,
    "Llama-2-7B": sized(LLAMA_2, 32, 4096, 11008, 32, 32),
    "Llama-3.1-8B": sized(LLAMA_405B, 32, 4096, 14336, 32, 8),
    "Llama-3.2-1B": {
        **sized(LLAMA_405B, 16, 2048, 8192, 32, 8),
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALED, "original_max_position_embeddings": 8192},
    },
    "SmolLM2-135M": {
        **sized(LLAMA_2, 30, 576, 1536, 9, 3),
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "a Qwen3 with experts that leaves out the width of a head": {
        key: value for key, value in sized(QWEN3_30B, 4, 1024, 3072, 16, 4).items() if key != "head_dim"
    },
}
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "Mistral-7B": ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type"),
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "n_shared_experts": 1}, "model_type"),
    "Llama with partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "Llama with ropes by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "rope_parameters",
    ),
    "Llama with two ropes": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA_405B["rope_scaling"]},
        "rope_scaling",
    ),
    "Llama with shared experts": ({"n_shared_experts": 2}, "n_shared_experts"),
    "Llama with code of its own": ({"auto_map": {"AutoConfig": "configuration_x.X"}}, "auto_map"),
    "Llama with more heads than there are": ({"num_attention_heads": 10**9}, "num_attention_heads"),
    "Llama with no positions": ({"max_position_embeddings": 0}, "max_position_embeddings"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_model_counts_and_rotates_as_transformers_own(name: str) -> None:
    tree = ACCEPTED[name]
    model = ModelConfig(name=name, **read_model(tree))  # type: ignore[arg-type]
    theirs = AutoConfig.for_model(**tree)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(theirs).parameters())
    assert parameter_count(model).total == parameters
    ours = RotaryEmbedding(
        model.head_dim,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scaling is not None,
        rope_scaling_factor=model.rope_scaling or 8.0,
        use_cpu_initialization=True,
    )
    # Both round a power and a quotient to fp32 a few times.
    wanted = LlamaRotaryEmbedding(theirs).inv_freq.numpy()
    np.testing.assert_allclose(ours.inv_freq.numpy(), wanted, rtol=1e-6)
    assert positions_of(tree) == theirs.max_position_embeddings


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_refused_by_its_key_and_can_be_planned_by_shapes(name: str) -> None:
    changed, key = REFUSED[name]
    problems = {problem.key: problem for problem in refused(read_model, {**ACCEPTED["Llama-2-7B"], **changed})}
    assert "canzona plan gpus=N --shapes" in problems[key].fix


def test_experts_beyond_any_model_are_refused_at_once() -> None:
    (problem,) = refused(read_model, QWEN3_30B | {"num_experts": 10**9})
    assert problem.key == "num_experts"


@pytest.mark.parametrize("theirs", [LlamaConfig, Qwen3Config, Qwen3MoeConfig])
def test_every_key_of_transformers_is_honoured_refused_or_known_to_have_no_effect(theirs: type) -> None:
    (family,) = (family for family in FAMILIES if family.foreign.config == theirs.__name__)
    keys = {*theirs().to_dict(), *(field.name for field in dataclasses.fields(theirs))}
    assert keys - known_keys(family) == set()


def folder(path: Path, **changed: object) -> Path:
    tree = sized(LLAMA_2, 2, 128, 256, 4, 4) | {"vocab_size": 1001, "max_position_embeddings": 64} | changed
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tree))
    return path


def test_a_folder_without_weights_has_a_recipe_that_plans_and_says_so_where_weights_are_needed(tmp_path: Path) -> None:
    source, recipe = folder(tmp_path / "tiny"), tmp_path / "tiny.yaml"
    written = canzona("recipes", "from-hf", source, recipe, cwd=tmp_path, code=0)
    assert "no weights" in written.stdout
    canzona("plan", f"recipe={recipe}", "--dry-run", cwd=tmp_path, code=0)
    missing = canzona("checkpoint", "import", source, "--out", tmp_path / "run", cwd=tmp_path, code=2)
    assert "has no safetensors weights" in missing.stderr


def test_positions_and_vocabulary_of_a_folder_are_honoured(tmp_path: Path) -> None:
    source = open_folder(folder(tmp_path / "tiny", my_note="x"), key="DIR")
    composed = compose_from_folder(source, [])
    assert composed.config.train.seq_length == 64
    assert composed.config.model.vocab_size == 1024
    assert any("my_note" in warning for warning in composed.warnings)
    longer = compose_from_folder(source, ["train.seq_length=128"])
    assert longer.config.train.seq_length == 128
    assert any("max_position_embeddings 64" in warning for warning in longer.warnings)


@pytest.mark.parametrize(
    ("size", "tp", "padded"),
    [
        (151936, 1, 151936),
        (151936, 8, 151936),
        (50257, 1, 50304),
        (50257, 4, 50688),
        (32000, 1, 32000),
        (32002, 2, 32256),
    ],
)
def test_a_vocabulary_is_padded_as_megatron_pads_it_unless_it_can_be_cut(size: int, tp: int, padded: int) -> None:
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    assert padded_vocabulary(size, tp) == padded
    assert padded in (size, calculate_padded_vocab_size(size, 128, tp, logging_enabled=False))


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "vocab.txt"])
def test_another_tokenizer_than_the_folders_is_not_taken_silently(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "tiny")
    (path / name).write_bytes(b"x")
    source = open_folder(path, key="DIR")
    assert any(name in warning for warning in compose_from_folder(source, []).warnings)
    assert not any(name in warning for warning in compose_from_folder(source, ["data.tokenizer=byte"]).warnings)
