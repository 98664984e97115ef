"""A launch from a Hugging Face folder: looked at without torch, imported once, and gone on from like any other run."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.checkpoint.huggingface.folder import compose_with_weights
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.resolve import resolve
from canzona_cli.data.indexed import saved_tokenizer_path
from canzona_cli.launch.resume import choose_resumption
from canzona_cli.records.files import RunFiles
from tests.checkpoint.huggingface.folders import random_folder
from tests.cli.commands.support import canzona, imports_none_of
from tests.data.texts import prepare_documents
from tests.sizes import model

SHAPE = replace(model("tiny"), num_layers=2, hidden_size=32, ffn_hidden_size=48, num_query_groups=4, head_dim=16)
WIDTHS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "head_dim")
SMALL = [f"model.{name}={getattr(SHAPE, name)}" for name in WIDTHS]
JOB = ("gpus=2", "train.seq_length=32", "train.batch_tokens=128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "Qwen3-small"
    random_folder(folder, SHAPE)
    return folder


def test_it_is_looked_at_without_torch(folder: Path) -> None:
    imports_none_of(
        ("torch", "megatron", "transformers"), "train", "--dry-run", "recipe=tiny", f"init={folder}", *SMALL
    )


def test_all_that_a_recipe_has_otherwise_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    done = canzona("train", "recipe=tiny", f"init={folder}", "run.dir=run", "--prepare-only", cwd=tmp_path, code=2)
    for name in WIDTHS:
        assert name == "num_query_groups" or f"model.{name}={getattr(SHAPE, name)}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_family_are_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    """A folder, and a checkpoint of canzona."""
    llama = replace(SHAPE, qk_norm=False)
    random_folder(tmp_path / "llama", llama)
    assert canzona("checkpoint", "import", tmp_path / "llama", "--out", tmp_path / "run").returncode == 0
    for recipe, weights, said in (
        ("llama3-tiny", folder, "belongs to the Llama family, but the weights in {} to the Qwen3 family"),
        ("qwen3-tiny", tmp_path / "run", "belongs to the Qwen3 family, but the weights in {} to the Llama family"),
    ):
        done = canzona("train", f"recipe={recipe}", f"init={weights}", *SMALL, "--prepare-only", cwd=tmp_path, code=2)
        step = "" if weights == folder else "/checkpoints/step-00000000"
        assert "".join(said.format(f"{weights}{step}").split()) in "".join(done.stderr.split())


def test_the_command_that_an_import_names_begins_with_its_weights(folder: Path, tmp_path: Path) -> None:
    """No recipe is typed: the import has written the run's settings."""
    done = canzona("checkpoint", "import", folder, "--out", tmp_path / "run", "gpus=1", "cluster=cpu", code=0)
    command, *words = shlex.split(done.stderr.splitlines()[-2].partition("Train it with: ")[2])
    assert (command, words[0], words[2:]) == ("canzona", "resume", ["data.path=PREFIX"])
    told = canzona(*words[:2], "--dry-run", code=0)
    assert "start at step 1 with the imported weights (step-00000000)" in " ".join(told.stderr.split())


@pytest.mark.parametrize("recipe", [("recipe=tiny", *SMALL), ()], ids=["recipe", "no recipe"])
def test_a_run_begins_with_its_weights_imported_once(folder: Path, tmp_path: Path, recipe: tuple[str, ...]) -> None:
    typed = ("train", *recipe, *JOB, f"init={folder}", f"run.dir={tmp_path / 'run'}", "--prepare-only")
    files, inode = RunFiles(tmp_path / "run"), None
    for _ in range(2):
        done = canzona(*typed, code=0)
        assert "start at step 1 with the imported weights (step-00000000)" in " ".join(done.stderr.split())
        point = json.loads(files.resume.read_text())
        assert (point["weights_only"], point["step"]) == (True, 0)
        assert Path(point["checkpoint"]) == files.checkpoints / "step-00000000"
        newest = CheckpointStore(files.checkpoints).latest()
        assert newest is not None
        assert newest.path.stat().st_ino == (inode or newest.path.stat().st_ino), "imported again"
        inode = newest.path.stat().st_ino
    settings = (files.root / "config.yaml").read_text()
    assert ("name: Qwen3-small" in settings) is (recipe == ())
    assert "hidden_size: 32" in settings


def test_built_in_text_has_the_ids_that_the_weights_know(folder: Path, tmp_path: Path) -> None:
    """A recipe's tokenizer gives way, one that is typed is refused, and data that is typed is left as it is."""
    prefix = prepare_documents(tmp_path, "a", documents=60, seed=0, tokenizer="bpe")
    source, same = tmp_path / "model", tmp_path / "same.json"
    shutil.copytree(folder, source)
    for target in (source / "tokenizer.json", same):
        shutil.copy(saved_tokenizer_path(prefix), target)
    typed = ("recipe=tiny", *SMALL, *JOB, f"init={source}")

    composed = compose_with_weights(typed)
    assert composed.config.data.tokenizer == str(source)
    assert [line for line in composed.warnings if f"data.tokenizer={source}" in line and "the recipe's byte" in line]
    for tokenizer in (source, source / "tokenizer.json", same):
        composed = compose_with_weights([*typed, f"data.tokenizer={tokenizer}"])
        assert (composed.config.data.tokenizer, composed.warnings) == (str(tokenizer), ())
        assert choose_resumption(*resolve(composed.config)) is not None
    refused = canzona("train", "--dry-run", *typed, "data.tokenizer=byte", code=2)
    assert f"leave it out, or data.tokenizer={source}" in " ".join(refused.stderr.split())
    assert compose_with_weights([*typed, "data=prepared", f"data.path={prefix}"]).config.data.tokenizer != str(source)
