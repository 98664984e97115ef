"""Folders in Megatron's format `torch_dist`: what is written is read again bit for bit, and what somebody forged is
refused without running it."""

import io
import json
import os
import pickle
import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.numpy import load_file

from canzona_cli.checkpoint.commit import write_checkpoint
from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.checkpoint.manifest import Buffer, Progress, Shard
from canzona_cli.checkpoint.shard_file import raw_bytes
from canzona_cli.checkpoint.torch_dist.folder import TorchDistFolder
from canzona_cli.checkpoint.torch_dist.names import Kind, kind_of_state, parameters
from canzona_cli.config.compose import compose_run
from canzona_cli.core.errors import CheckpointInvalid
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.records.files import RunFiles
from tests.cli.commands.support import canzona
from tests.test_untrusted_files import Trap

STEP = 4
QWEN3 = (
    *("recipe=qwen3-tiny", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=192"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=16", "train.seq_length=64"),
    *("train.global_batch_size=8", "train.steps=8"),
)
FEW_IDS = (*QWEN3, "model.vocab_size=128", "data=prepared", "data.path=text")
"""A model with fewer ids than the tokenizers of built-in text."""
EXPERTS = (*QWEN3, "model.num_experts=4", "model.ffn_hidden_size=96", "model.balancing_loss=global")
SECOND = ("model.moe_layer_freq=[0,1]", "model.dense_ffn_hidden_size=160")
LLAMA = (*QWEN3, "model.qk_norm=false", "model.tied_embeddings=false", "train.precision=bf16")


def saved(root: Path, kind: Kind, *settings: str, optimizer: str = "") -> Path:
    """A run with one checkpoint of random numbers."""
    config = compose_run([*settings, f"optimizer={optimizer or kind}"]).config
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Buffer] = {}
    scalars = {}
    for parameter in parameters(config.model):
        for unit in dict.fromkeys(block.unit for block in parameter.blocks):
            shape = unit_shape(unit, config.model)
            fields = parameter.state_fields(kind)
            for field in (MASTER, *fields):
                data = torch.randn(shape, generator=generator)
                tensors[f"{unit}/{field}"] = Buffer(dtype="F32", shape=shape, data=raw_bytes(data))
            if "exp_avg" in fields:
                scalars[f"{unit}/step"] = float(STEP)
    root.mkdir()
    progress = Progress(step=STEP, samples=8 * STEP, tokens=8 * STEP * 64)
    shards = [Shard(tensors=tensors, scalars=scalars)]
    write_checkpoint(RunFiles(root), shards, config, progress, optimizer=optimizer or kind)
    return root


def state(run: Path) -> dict[str, np.ndarray]:
    """Returns the content of a run's only checkpoint, by names of units."""
    [folder] = (run / "checkpoints").glob("step-*")
    scalars = json.loads((folder / "manifest.json").read_text())["scalars"]
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return tensors | {name: np.array(value) for name, value in scalars.items()}


def assert_equal(one: Path, other: Path) -> None:
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name], err_msg=name)


def done(*words: str | Path) -> str:
    """Runs a command that succeeds; returns what it said."""
    ran = canzona("checkpoint", *words, code=0)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param((*QWEN3, "optimizer.adamw_lr=0.001", "optimizer.min_lr_ratio=0.05"), "muon", id="qwen3-muon"),
        pytest.param(LLAMA, "adamw", id="llama-adamw"),
        pytest.param(FEW_IDS, "muon", id="128-ids"),
        pytest.param(EXPERTS, "muon", id="experts-muon"),
        pytest.param((*EXPERTS, *SECOND), "muon", id="experts-in-the-second-layer"),
        pytest.param(EXPERTS, "adamw", id="experts-adamw", marks=pytest.mark.sweep),
        pytest.param(QWEN3, "adamw", id="qwen3-adamw", marks=pytest.mark.sweep),
        pytest.param(LLAMA, "muon", id="llama-muon", marks=pytest.mark.sweep),
    ],
)
def test_masters_and_state_come_back_bit_for_bit(kind: Kind, settings: tuple[str, ...], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", kind, *settings)
    assert f"iteration 4 with the state of {kind}" in done("export", run, tmp_path / "out", "--to", "megatron")
    assert f"the state of {kind} at step 4" in done("import", tmp_path / "out", "--out", tmp_path / "again")
    assert_equal(run, tmp_path / "again")
    config = compose_run([*settings, f"optimizer={kind}"]).config
    again = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert (again["optimizer"]["lr"], again["optimizer"]["min_lr_ratio"], again["schedule"]["decay"]) == (
        config.optimizer.lr,
        config.optimizer.min_lr_ratio,
        config.schedule.decay,
    )
    names = [path.name for path in (tmp_path / "out").rglob("*")]
    assert sorted(names) == sorted(
        ["latest_checkpointed_iteration.txt", "iter_0000004", ".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    )


def test_parts_of_gpt2_are_not_exported(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "muon", *QWEN3, "model.gated=false", "model.positions=64")
    told = canzona("checkpoint", "export", run, tmp_path / "out", "--to", "megatron", code=2)
    assert "model.gated = false" in told.stderr
    assert not (tmp_path / "out").exists()


def test_the_last_lines_of_an_import_have_the_next_command_and_its_data(tmp_path: Path) -> None:
    done("export", saved(tmp_path / "run", "muon", *FEW_IDS), tmp_path / "out", "--to", "megatron")
    *_, command, data = done("import", tmp_path / "out", "--out", tmp_path / "again").splitlines()
    assert data.startswith("It reads PREFIX.bin and PREFIX.idx,")
    program, *words = shlex.split(command.partition("Train it with: ")[2])
    assert program == "canzona"
    text = IndexedDatasetBuilder(f"{tmp_path}/text.bin", dtype=np.int32)
    for number in range(100):
        text.add_document((number + np.arange(100)) % 128, [100])
    text.finalize(f"{tmp_path}/text.idx")
    known = {"gpus=N": "gpus=1", "cluster=NAME": "cluster=cpu", "data.path=PREFIX": f"data.path={tmp_path}/text"}
    assert known.keys() < set(words)
    told = canzona(*[known.get(word, word) for word in words], "--dry-run", code=0)
    assert f"continue from step {STEP}" in told.stderr
    typed = ("gpus=1", "cluster=cpu", "data.path=text")
    again = done("import", tmp_path / "out", "--out", tmp_path / "third", *typed)
    assert again.splitlines()[-2].endswith("third")
    assert again.splitlines()[-1] == "It reads text."


def test_the_state_of_another_optimizer_stays_behind_and_that_is_said(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "muon", *QWEN3, optimizer="normuon")
    assert "only weights were exported" in done("export", run, tmp_path / "out", "--to", "megatron")
    assert "weights only, as step 0" in done("import", tmp_path / "out", "--out", tmp_path / "again")
    masters = {name: tensor for name, tensor in state(run).items() if name.endswith(MASTER)}
    assert masters.keys() == state(tmp_path / "again").keys()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    done("export", saved(root / "run", "muon", *QWEN3), root / "out", "--to", "megatron")
    return root / "out"


def refused(folder: Path, *settings: str) -> tuple[int, str]:
    """The exit code and the message of an import that leaves nothing behind."""
    run = folder.with_name("refused")
    ran = canzona("checkpoint", "import", folder, "--out", run, *settings)
    assert "Traceback" not in ran.stderr
    assert not run.exists()
    return ran.returncode, " ".join(ran.stderr.split())


def test_every_fact_that_a_recipe_has_otherwise_is_named_at_once(exported: Path) -> None:
    other = ("model.num_attention_heads=8", "model.num_query_groups=4", "model.rope_base=500", "model.norm_eps=1e-5")
    code, said = refused(exported, *QWEN3, *other, "train.seq_length=128")
    assert code == 2
    keys = [setting.partition("=")[0] for setting in other]
    assert all(f"{key} = " in said for key in (*keys, "train.seq_length")), said
    assert "5 problems" in said
    assert refused(exported, "model.head_dim=32")[0] == 2


def _index(change: Callable[[object], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / ".metadata"
        path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))

    return apply


def _arguments(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=False)
        vars(common["args"]).update(values)
        torch.save(common, folder / "common.pt")

    return apply


def _elsewhere(index: object) -> object:
    for place in vars(index)["storage_data"].values():
        place.relative_path = "../other"
    return index


def _counts(iteration: int = STEP, samples: int = 8 * STEP) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=False)
        common["iteration"], common["args"].consumed_train_samples = iteration, samples
        torch.save(common, folder / "common.pt")

    return apply


def _contains_itself(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"]["more"] = common["optimizer"]
    common["iteration"] = -1
    torch.save(common, folder / "common.pt")


def _replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def _pickled(content: bytes) -> Callable[[Path], None]:
    """This pickle in the place of the index."""

    def apply(folder: Path) -> None:
        (folder / ".metadata").write_bytes(content)

    return apply


def _with_key(key: bytes) -> Callable[[Path], None]:
    """A dict in the index with this pickled key."""
    return _pickled(b"\x80\x04}(" + key + b"K\x01u.")


def _doubled(times: int) -> bytes:
    """A pickled tuple of two equal tuples, `times` levels deep: 2 ** times elements of a few bytes."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(times))


def _mentions(times: int) -> Callable[[object], object]:
    def change(index: object) -> object:
        chunks = vars(index)["state_dict_metadata"]["decoder.layers.mlp.linear_fc2.weight"].chunks
        chunks += [chunks[0]] * times
        return index

    return change


def _flipped(folder: Path) -> None:
    """One bit in the middle of the largest tensor."""
    path = folder / "__0_0.distcp"
    index = pickle.loads((folder / ".metadata").read_bytes())
    place = max(index.storage_data.values(), key=lambda place: place.length)
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    path.write_bytes(content)


FORGED: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "no index": (lambda folder: (folder / ".metadata").unlink(), 5, "cannot be read"),
    "no tensors": (lambda folder: (folder / "__0_0.distcp").unlink(), 5, "__0_0.distcp"),
    "no arguments": (lambda folder: (folder / "common.pt").unlink(), 5, "common.pt is missing"),
    "shorter": (lambda folder: _cut(folder / "__0_0.distcp"), 5, "the copy is not complete"),
    "half an index": (lambda folder: _cut(folder / ".metadata"), 5, ".metadata"),
    "half of the arguments": (lambda folder: _cut(folder / "common.pt"), 5, "common.pt"),
    "outside": (_index(_elsewhere), 5, "its file is not in this folder"),
    "experts": (_arguments(num_experts=4), 2, "decoder.layers.1.mlp.router.weight the checkpoint has no such tensor"),
    "experts in some layers": (
        _arguments(num_experts=4, moe_layer_freq=2), 2, "decoder.layers.0.mlp.router.weight the checkpoint has no such"
    ),
    "experts in no layer": (_arguments(num_experts=4, moe_layer_freq=[0, 0]), 2, "moe_layer_freq"),
    "biases": (_arguments(add_bias_linear=True), 2, "only models without parts of GPT-2"),
    "other layers": (_arguments(num_layers=3), 2, "shape [2, 64, 64]"),
    "samples below zero": (_counts(samples=-8), 5, "consumed_train_samples is -8"),
    "too many steps": (_counts(iteration=10**30), 5, "iteration is 1e+30"),
    "contains itself": (_contains_itself, 5, "iteration is -1"),
    "a flipped bit": (_flipped, 5, "Bad CRC-32"),
    "a pipe": (_replaced("__0_0.distcp", os.mkfifo), 5, "is not a regular file"),
    "a device": (_replaced("__0_0.distcp", lambda path: path.symlink_to("/dev/zero")), 5, "is not a regular file"),
    "a pipe for an index": (_replaced(".metadata", os.mkfifo), 5, "is not a regular file"),
    "2^40 elements": (_with_key(_doubled(40)), 5, "a tuple of more than 1,048,576 elements"),
    "100,000 levels": (_with_key(b"K\x01" + b"\x85" * 100_000), 5, "nested more than 32 levels"),
    "a thousand large keys": (
        _with_key(_doubled(19) + b"q\xc8" + b"K\x01h\xc8" * 1000), 5, "elements in keys"
    ),
    "a table of 2^32 places": (_pickled(b"\x80\x04Nr\xff\xff\xff\xff."), 5, "place 4,294,967,295"),
    "two million mentions": (_index(_mentions(2_000_000)), 5, "overlap"),
}  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("forged", FORGED)
def test_a_folder_that_is_damaged_or_of_another_model_is_refused(forged: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "in")
    change, code, reason = FORGED[forged]
    change(tmp_path / "in" / "iter_0000004")
    found, said = refused(tmp_path / "in")
    assert (found, reason in said) == (code, True), said


@pytest.mark.parametrize("place", [".metadata", "common.pt", "object", "tensor"])
def test_a_trap_in_a_pickle_is_refused_by_name(place: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "in")
    folder, made = tmp_path / "in" / "iter_0000004", tmp_path / "made"
    trap = Trap(made)
    if place == ".metadata":
        (folder / place).write_bytes(pickle.dumps(trap))
    elif place == "common.pt":
        torch.save({"args": Namespace(num_layers=2), "more": trap}, folder / place)
    else:
        content = io.BytesIO()
        torch.save(trap, content)
        index = pickle.loads((folder / ".metadata").read_bytes())
        (folder / "trap.distcp").write_bytes(content.getvalue())
        for stored in index.storage_data.values():
            stored.relative_path, stored.offset, stored.length = "trap.distcp", 0, len(content.getvalue())
        if place == "object":
            (folder / "common.pt").unlink()
            key = next(each for each in index.storage_data if each.offset is None)
            index.storage_data[type(key)("common_state/shard_0_1")] = index.storage_data[key]
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    code, said = refused(tmp_path / "in")
    assert code == 5
    assert "mkdir" in said
    assert not made.exists()


def test_chunks_that_leave_gaps_are_refused(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "in")

    def without_a_layer(index: object) -> object:
        vars(index)["state_dict_metadata"]["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
        return index

    _index(without_a_layer)(tmp_path / "in" / "iter_0000004")
    folder = TorchDistFolder(tmp_path / "in", key="DIR")
    assert folder.read("decoder.layers.mlp.linear_fc2.weight", (0,)).isfinite().all()
    with pytest.raises(CheckpointInvalid, match="leave gaps"):
        folder.read("decoder.layers.mlp.linear_fc2.weight", (1,))


def test_chunks_that_overlap_are_refused(exported: Path, tmp_path: Path) -> None:
    """Both layers in the first chunk, the second once more: nothing is missing, so what is read would depend on the
    order of chunks."""
    shutil.copytree(exported, tmp_path / "in")
    key = "decoder.layers.mlp.linear_fc2.weight"
    both = TorchDistFolder(tmp_path / "in", key="DIR").read(key)

    def longer(index: object) -> object:
        first = vars(index)["state_dict_metadata"][key].chunks[0]
        content = io.BytesIO()
        torch.save(both, content)
        (tmp_path / "in" / "iter_0000004" / "both.distcp").write_bytes(content.getvalue())
        first.sizes = torch.Size(both.shape)
        for index_of_chunk, place in vars(index)["storage_data"].items():
            if index_of_chunk.fqn == key and index_of_chunk.offset == first.offsets:
                place.relative_path, place.offset, place.length = "both.distcp", 0, len(content.getvalue())
        return index

    _index(longer)(tmp_path / "in" / "iter_0000004")
    folder = TorchDistFolder(tmp_path / "in", key="DIR")
    assert torch.equal(folder.read(key, (0,)), both[0])
    for at in ((), (1,)):
        with pytest.raises(CheckpointInvalid, match="overlap"):
            folder.read(key, at)


def test_the_state_of_an_engines_optimizer_is_not_taken_for_muons(exported: Path) -> None:
    """SOAP in Megatron's loop has a momentum under Muon's name too, and more under names of its own."""
    keys, model = TorchDistFolder(exported, key="DIR").keys, compose_run(QWEN3).config.model
    assert kind_of_state(keys, model) == "muon"
    assert kind_of_state([*keys, "optimizer.canzona.decoder.layers.0.q.exp_avg_sq"], model) is None


def test_sums_that_were_not_computed_are_not_compared(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "in")
    torch.serialization.set_crc32_options(False)
    try:
        _counts()(tmp_path / "in" / "iter_0000004")
    finally:
        torch.serialization.set_crc32_options(True)
    assert TorchDistFolder(tmp_path / "in", key="DIR").common["iteration"] == STEP


def test_masters_are_imported_of_all_parameters_or_of_none(exported: Path, tmp_path: Path) -> None:
    """One master is missing: with the others' masters, the model would be one that no step has had."""
    shutil.copytree(exported, tmp_path / "in")
    key = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight"
    folder = TorchDistFolder(tmp_path / "in", key="DIR")
    assert key in folder.keys

    def changed(index: object) -> object:
        del vars(index)["state_dict_metadata"][key]
        return index

    _index(changed)(tmp_path / "in" / "iter_0000004")
    said = done("import", tmp_path / "in", "--out", tmp_path / "run")
    assert "2 of 18 parameters, the first is decoder.layers.0.mlp.linear_fc2.weight" in " ".join(said.split()), said
    imported = state(tmp_path / "run")
    for layer in range(2):
        weight = folder.read("decoder.layers.mlp.linear_fc1.weight", (layer,)).numpy()
        np.testing.assert_array_equal(imported[f"layers.{layer}.gate/{MASTER}"], weight[:192])
        master = folder.read("optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight", (layer,)).numpy()
        assert not np.array_equal(weight, master)


def test_a_chunk_in_the_place_of_another_is_refused(exported: Path, tmp_path: Path) -> None:
    """The chunks have as many elements as the tensor."""
    shutil.copytree(exported, tmp_path / "in")

    def twice(index: object) -> object:
        chunks = vars(index)["state_dict_metadata"]["decoder.layers.mlp.linear_fc2.weight"].chunks
        chunks[-1] = chunks[0]
        return index

    _index(twice)(tmp_path / "in" / "iter_0000004")
    with pytest.raises(CheckpointInvalid, match="overlap"):
        TorchDistFolder(tmp_path / "in", key="DIR").read("decoder.layers.mlp.linear_fc2.weight")
