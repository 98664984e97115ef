"""Weights come in and go out bit by bit, wholly or not at all, and whatever does not fit is said at once."""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from canzona_cli.checkpoint.contents import saved_run
from canzona_cli.checkpoint.huggingface.folder import ExtraFiles, byte_tokenizer
from canzona_cli.checkpoint.huggingface.foreign import tensor_names
from canzona_cli.checkpoint.huggingface.weights import export_weights
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.config.compose import compose_run
from canzona_cli.core.model.geometry import unit_shape
from tests.checkpoint.huggingface.folders import Weights, random_folder, read_by_transformers, stored
from tests.cli.commands.support import canzona
from tests.dist.ranks import run_ranks
from tests.faults.disks import small_disk
from tests.faults.kill_points import killed_at
from tests.sizes import model

SHAPE = replace(model("tiny"), num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, head_dim=16)
SHAPE = replace(SHAPE, num_query_groups=2, name="small")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def imported(folder: Path, run: Path) -> Path:
    """The checkpoint of an import."""
    done = canzona("checkpoint", "import", folder, "--out", run, "--json", code=0)
    return Path(json.loads(done.stdout)["checkpoint"])


def same(found: Weights, wanted: Weights) -> bool:
    """Bit by bit, types included."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype
        and torch.equal(found[name].view(torch.uint8), wanted[name].contiguous().view(torch.uint8))
        for name in wanted
    )


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that begins with a random tied model in fp32, of several files that are links."""
    folder = tmp_path_factory.mktemp("huggingface")
    random_folder(folder / "in", SHAPE, shard="60KB")
    files = list((folder / "in").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:  # as they lie in Hugging Face's cache
        file.rename(folder / file.stem)
        file.symlink_to(folder / file.stem)
    imported(folder / "in", folder / "run")
    return folder / "run"


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [
        pytest.param("fp32", True, id="tied fp32", marks=pytest.mark.sweep),
        pytest.param("bf16", False, id="bf16"),
        pytest.param("fp16", False, id="fp16", marks=pytest.mark.sweep),
    ],
)
def test_what_came_in_goes_out_bit_by_bit(tmp_path: Path, dtype: str, tied: bool) -> None:
    """fp32 masters of any type are what the file had; out in that type they are it again."""
    shape = replace(SHAPE, tied_embeddings=tied)
    weights = random_folder(tmp_path / "in", shape, dtype=DTYPES[dtype], max_length=1 << 17)
    imported(tmp_path / "in", tmp_path / "run")
    for kind in {"fp32", dtype}:
        out = tmp_path / kind
        canzona("checkpoint", "export", tmp_path / "run", out, "--dtype", kind, code=0)
        assert same(stored(out), {name: tensor.to(DTYPES[kind]) for name, tensor in weights.items()})
        settings = json.loads((out / "config.json").read_text())
        assert settings["max_position_embeddings"] == 1 << 17, "as imported; sequences in training are shorter"
    assert same(read_by_transformers(tmp_path / dtype), weights)
    again = imported(tmp_path / "fp32", tmp_path / "again")
    first, second = (
        {name: file for name, file in saved_run(at)[0].files.items() if name.startswith("rank")}
        for at in (tmp_path / "run" / "checkpoints" / "step-00000000", again)
    )
    assert [file.blake3 for file in first.values()] == [file.blake3 for file in second.values()]


def test_an_average_that_was_not_saved_is_not_exported(run: Path, tmp_path: Path) -> None:
    said = canzona("checkpoint", "export", run, tmp_path / "out", "--ema", code=2).stderr
    assert "step 0 was saved without an average of the weights" in words(said)
    assert not (tmp_path / "out").exists()
    said = canzona("checkpoint", "export", run, tmp_path / "out", "--ema", "--to", "megatron", code=2).stderr
    assert "--ema" in said


@pytest.mark.sweep
def test_the_rows_of_a_padded_vocabulary_are_copies_of_the_last(tmp_path: Path) -> None:
    """Megatron's own converter fills them alike; with a vocabulary of its own size a folder fits as well."""
    shape = replace(SHAPE, vocab_size=1001, tied_embeddings=False)
    wanted = random_folder(tmp_path / "in", shape)
    found = stored_masters(imported(tmp_path / "in", tmp_path / "run"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].shape == (1024, 32)
        assert torch.equal(found[name][:1001], wanted[name])
        assert torch.equal(found[name][1001:], wanted[name][-1:].expand(23, -1))


def stored_masters(checkpoint: Path) -> Weights:
    """Returns the weights of a checkpoint by their Hugging Face names."""
    manifest, config = saved_run(checkpoint)
    with Reader(checkpoint, manifest, config.model) as reader:
        return {
            name: reader.master(unit, range(unit_shape(unit, config.model)[0])).clone()
            for unit, name in tensor_names(config.model).items()
        }


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    """The process has done the same with a small model before, so that nothing is left to import."""
    large = replace(SHAPE, vocab_size=1 << 19)
    tensor_bytes = 4 * large.vocab_size * large.hidden_size
    for name, shape in (("small", SHAPE), ("large", large)):
        random_folder(tmp_path / name / "in", shape)

    def peak(name: str) -> int:
        from canzona_cli.cli.commands.checkpoint import import_

        import_(tmp_path / name / "in", tmp_path / name / "run")
        export(tmp_path / name / "run", tmp_path / name / "out", shard_bytes=10**9)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    [(before, after)] = run_ranks(1, lambda: (peak("small"), peak("large")))
    assert after - before < tensor_bytes / 2, f"{after - before:,} of {tensor_bytes:,} bytes"
    assert same(stored(tmp_path / "large" / "out"), stored(tmp_path / "large" / "in"))


def test_several_files_have_an_index_and_are_one_model(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", shard_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = stored(run.parent / "in")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert set(index["weight_map"]) == weights.keys()
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert same(read_by_transformers(tmp_path / "out"), weights)


def test_bf16_of_fp32_masters_is_torchs_rounding(run: Path, tmp_path: Path) -> None:
    assert canzona("checkpoint", "export", run, tmp_path / "out", "--dtype", "bf16").returncode == 0
    assert same(stored(tmp_path / "out"), {n: t.to(torch.bfloat16) for n, t in stored(run.parent / "in").items()})


def export(run: Path, out: Path, *, shard_bytes: int) -> None:
    checkpoint = run / "checkpoints" / "step-00000000"
    manifest, config = saved_run(checkpoint)
    with Reader(checkpoint, manifest, config.model) as reader:
        texts = {"tokenizer.json": byte_tokenizer()}
        export_weights(
            reader, out, dtype="fp32", seq_length=64, extra_files=ExtraFiles(texts=texts), shard_bytes=shard_bytes
        )


def kill_exports(run: Path, tmp_path: Path, moments: Callable[[int], list[int]]) -> int:
    """Kill an export at some moments of all it has; how many it was."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    calls = killed_at(None, lambda: export(run, whole, shard_bytes=40_000))
    assert calls is not None
    wanted = {path.name: path.read_bytes() for path in whole.iterdir()}
    kills = moments(calls)
    for call in kills:
        assert killed_at(call, lambda: export(run, out, shard_bytes=40_000)) is None
        if out.exists():  # killed behind its last step
            assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
            shutil.rmtree(out)
    export(run, out, shard_bytes=40_000)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"], "nothing is left of those before"
    return len(kills)


def test_killed_at_any_moment_an_export_is_whole_or_not_there(run: Path, tmp_path: Path) -> None:
    """Among the last ones the folder is renamed."""
    assert kill_exports(run, tmp_path, lambda calls: [3, calls // 3, *range(calls - 4, calls)]) == 6


@pytest.mark.sweep
def test_killed_at_every_moment_an_export_is_whole_or_not_there(run: Path, tmp_path: Path) -> None:
    assert kill_exports(run, tmp_path, lambda calls: [*range(calls)]) > 20


@pytest.mark.sweep
def test_an_import_onto_a_full_disk_says_where_to_make_room(run: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 60) as mounted:
        if not mounted:
            pytest.skip("this user may not mount")
        done = canzona("checkpoint", "import", run.parent / "in", "--out", tmp_path / "disk" / "run", code=3)
        assert f"--out = {tmp_path}/disk/run cannot be written: No space left" in words(done.stderr)
        assert "make room there, or choose a writable folder" in words(done.stderr)
        assert "checkpoint.keep" not in done.stderr
        assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.sweep  # an import for each call at which one is killed
def test_an_import_that_is_killed_leaves_no_run(run: Path, tmp_path: Path) -> None:
    def bring() -> None:
        from canzona_cli.cli.commands.checkpoint import import_

        import_(run.parent / "in", tmp_path / "run")

    calls = killed_at(None, bring)
    assert calls is not None
    shutil.rmtree(tmp_path / "run")
    for call in (calls // 3, 2 * calls // 3, calls - 2):
        assert killed_at(call, bring) is None
        assert not (tmp_path / "run").exists()
    imported(run.parent / "in", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_byte_tokenizer_is_read_as_bytes_by_transformers(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", shard_bytes=10**9)
    text = "def f(x):\n\treturn  'é ü 漢'  # 1"

    def theirs() -> tuple[list[int], str, int]:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        ids = tokenizer(text)["input_ids"]
        return ids, tokenizer.decode([*text.encode()]), tokenizer.convert_tokens_to_ids("<|endoftext|>")

    assert run_ranks(1, theirs) == [([*text.encode()], text, 256)]


def test_a_recipe_is_made_from_the_folder_and_trains_its_shape(run: Path, tmp_path: Path) -> None:
    canzona("recipes", "from-hf", run.parent / "in", tmp_path / "mine.yaml", "train.steps=7", code=0)
    config = compose_run([f"recipe={tmp_path / 'mine.yaml'}"]).config
    assert replace(config.model, name="small") == SHAPE
    assert (config.name, config.train.steps, config.cluster.name) == ("mine", 7, "cpu")
    assert config.description == "The model in in", "not that of the recipe that gave the rest"
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"]["num_layers"] == 2


def test_every_tensor_and_setting_that_differs_is_named_at_once(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    random_folder(folder, SHAPE)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    done = canzona(
        "checkpoint", "import", folder, "--out", tmp_path / "run", "model.rope_base=10000", "recipe=tiny", code=2
    )
    for key in (
        *weights.keys() & {"model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"},
        "model.norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.rope_base",
    ):
        assert key in words(done.stderr)
    assert "5 problems" in done.stderr
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    random_folder(tmp_path / "in", SHAPE)
    weights = load_file(tmp_path / "in" / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "in" / "model.safetensors")
    done = canzona("checkpoint", "import", tmp_path / "in", "--out", tmp_path / "run", code=2)
    assert "model.norm.weight" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tied_output_layer_that_is_another_is_refused(tmp_path: Path) -> None:
    """Published files of tied models have it a second time."""
    random_folder(tmp_path / "in", SHAPE)
    weights = load_file(tmp_path / "in" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "in" / "model.safetensors")
    imported(tmp_path / "in", tmp_path / "run")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / "in" / "model.safetensors")
    done = canzona("checkpoint", "import", tmp_path / "in", "--out", tmp_path / "other", code=2)
    assert "lm_head.weight" in done.stderr


def test_places_that_have_something_are_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for place in (tmp_path, tmp_path / "mine"):
        done = canzona("checkpoint", "export", run, place)
        assert (done.returncode, "already exists and is not an empty folder" in done.stderr) == (2, True)
        done = canzona("checkpoint", "import", run.parent / "in", "--out", place)
        assert (done.returncode, "already exists and is not an empty folder" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_not_exported_and_a_step_that_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    assert "use one of 0" in words(canzona("checkpoint", "export", run, tmp_path / "out", "--step", "3").stderr)
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000000" / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", code=5)
    assert path.name in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = canzona("checkpoint", "import", tmp_path / "empty", "--out", tmp_path / "run", code=2)
    assert "config.json cannot be read" in words(done.stderr)
    assert "has no safetensors weights" in words(done.stderr)
