"""Qwen3 models with experts in Hugging Face's format: published settings, and one tensor for each expert's weight."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from canzona_cli.checkpoint.contents import saved_run
from canzona_cli.checkpoint.huggingface.folder import read_object
from canzona_cli.checkpoint.huggingface.foreign import config_json, read_model, tensor_names
from canzona_cli.config.compose import compose_run
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.core.setup import ModelConfig
from tests.checkpoint.huggingface.folders import Weights, random_folder, stored
from tests.cli.commands.support import canzona
from tests.refusals import refused

# Of huggingface.co/Qwen/Qwen3-30B-A3B.
PUBLISHED = dict(read_object(Path(__file__).parent / "published" / "qwen3-30b-a3b.json"))


def _model(recipe: str) -> ModelConfig:
    return compose_run([f"recipe={recipe}"], training=False).config.model


def test_the_published_file_is_the_built_in_model() -> None:
    built_in = asdict(_model("qwen3-30b-a3b"))
    read = read_model(PUBLISHED)
    assert read == {name: built_in[name] for name in read}
    assert {"num_experts", "experts_per_token", "ffn_hidden_size"} <= read.keys()


def test_version_5_names_the_number_of_experts_differently() -> None:
    newer = {key: value for key, value in PUBLISHED.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read_model(newer) == read_model(PUBLISHED)


def test_an_exported_file_is_read_back_and_has_the_published_values() -> None:
    model = _model("qwen3-30b-a3b")
    written = config_json(model, dtype="bfloat16", max_positions=40960)
    assert read_model(written) == read_model(PUBLISHED)
    assert {key: value for key, value in written.items() if PUBLISHED[key] != value} == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", "0"),
        ("mlp_only_layers", [*range(48)]),
        ("num_experts", None),
    ],
)
def test_other_mixtures_are_refused(key: str, value: object) -> None:
    problems = refused(read_model, PUBLISHED | {key: value})
    assert [problem.key for problem in problems] == [key]


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {*range(0, 48, 2)}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {*range(48)} - {*range(5, 48, 3)}),
    ],
)
def test_layers_without_experts_are_those_of_transformers(keys: dict[str, object], dense: set[int]) -> None:
    """Its own model, without memory for the weights, has the tensors of the model that is read, of the same shapes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 8}
    tree = PUBLISHED | small | keys
    model = ModelConfig(name="", **read_model(tree))  # type: ignore[arg-type]
    with torch.device("meta"):
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**tree)).state_dict()
    ours = {name: unit_shape(unit, model) for unit, name in tensor_names(model).items()}
    assert {int(name.split(".")[2]) for name in ours if ".mlp.up_proj" in name} == dense
    stacks = {name for name in theirs if ".experts." in name}
    assert {name: tuple(theirs[name].shape) for name in theirs.keys() - stacks} == {
        name: shape for name, shape in ours.items() if ".experts." not in name
    }
    assert {int(name.split(".")[2]) for name in stacks} == {*range(48)} - dense
    written = config_json(model, dtype="bfloat16", max_positions=40960)
    assert read_model(written) == read_model(tree)


def _stacked(weights: Weights, experts: int) -> Weights:
    """The same weights as version 5 of transformers may write them: all experts of a layer in one tensor."""
    stacks = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in sorted({name.split(".mlp.")[0] for name in weights if ".experts." in name}):
        each = [f"{layer}.mlp.experts.{expert}" for expert in range(experts)]
        both = [torch.cat([weights[f"{e}.gate_proj.weight"], weights[f"{e}.up_proj.weight"]]) for e in each]
        stacks[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        stacks[f"{layer}.mlp.experts.down_proj"] = torch.stack([weights[f"{e}.down_proj.weight"] for e in each])
    return stacks


def _imported(folder: Path, run: Path) -> dict[str, str]:
    """The hashes of the files that an import writes."""
    done = canzona("checkpoint", "import", folder, "--out", run, "--json", code=0)
    manifest, _ = saved_run(Path(json.loads(done.stdout)["checkpoint"]))
    return {name: file.blake3 for name, file in manifest.files.items() if name.startswith("rank")}


def test_experts_come_in_one_by_one_or_stacked_and_go_out_one_by_one(tmp_path: Path) -> None:
    """Transformers writes and reads the folders; nothing is rounded."""
    shape = compose_run(["recipe=qwen3-moe-tiny", "model.num_layers=2", "model.hidden_size=32", "model.head_dim=16",
                         "model.ffn_hidden_size=48"], training=False).config.model  # fmt: skip
    weights = random_folder(tmp_path / "in", shape)
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in weights
    (tmp_path / "stacked").mkdir()
    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "stacked")
    save_file(_stacked(weights, shape.num_experts), tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    assert _imported(tmp_path / "in", tmp_path / "run") == _imported(tmp_path / "stacked", tmp_path / "again")
    canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32", code=0)
    written = stored(tmp_path / "out")
    assert written.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(written[name], weights[name])] == []
