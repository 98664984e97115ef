"""`canzona recipes`: list, show, copy and layouts, with built-in recipes and the user's own."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from canzona_cli.cli.commands.recipes import copy
from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir
from canzona_cli.config.settings import settings
from tests.cli.commands.support import canzona
from tests.config.test_compose import BUILTIN, KINDS


def test_list_fits_80_columns_and_names_every_recipe() -> None:
    result = canzona("recipes", "list", code=0)
    for name, size in [("qwen3-tiny", "3.25 M"), ("qwen3-0.6b", "596 M"), ("qwen3-32b", "32.8 B")]:
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"{name} "))
        assert size in line
    assert max(map(len, result.stdout.splitlines())) <= 80
    recipes = [*(builtin_recipes_dir() / "recipe").glob("*.yaml")]
    assert len(result.stdout.splitlines()) == 2 + len(recipes), "one line for each recipe"


def test_list_marks_own_and_shadowing_recipes(tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    for name in ("ours", "qwen3-8b"):
        (tmp_path / "mine" / "recipe" / f"{name}.yaml").write_text("defaults:\n  - /recipe/qwen3-tiny\n")
    result = canzona("recipes", "list", "--recipes-dir", "mine", cwd=tmp_path, environment={"COLUMNS": "160"}, code=0)
    assert "./mine/recipe/ours.yaml" in result.stdout
    assert "./mine/recipe/qwen3-8b.yaml, shadows the built-in" in result.stdout


def test_show_prints_yaml_and_its_files() -> None:
    result = canzona("recipes", "show", "tiny", "gpus=4", code=0)
    shown = yaml.safe_load(result.stdout)
    assert (shown["name"], shown["gpus"], shown["parallel"]["tp"]) == ("qwen3-tiny", 4, None)
    comments = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert any(line.endswith("model/qwen3-tiny.yaml") for line in comments)
    assert "# and gpus=4" in comments


def test_a_copy_stands_alone_holds_every_setting_and_is_not_replaced(tmp_path: Path) -> None:
    canzona("recipes", "copy", "8b", "own/mine.yaml", "optimizer.lr=0.002", cwd=tmp_path, code=0)
    path = tmp_path / "own" / "mine.yaml"
    copied = compose_run([f"recipe={path}"])
    original = compose_run(["recipe=8b", "optimizer.lr=0.002", "name=mine"])
    assert copied.config == original.config
    assert [file for file in copied.files if file != path] == []
    in_file = {
        f"{section}.{key}" if isinstance(values, dict) else section
        for section, values in yaml.safe_load(path.read_text()).items()
        for key in (values if isinstance(values, dict) else [""])
    }
    assert in_file == {key for key, s in settings().items() if not s.optimizers or "muon" in s.optimizers}

    path.write_text("mine")
    again = canzona("recipes", "copy", "8b", "own/mine.yaml", cwd=tmp_path, code=2)
    assert "--force" in again.stderr
    assert path.read_text() == "mine"
    assert canzona("recipes", "copy", "8b", "own/mine.yaml", "--force", cwd=tmp_path).returncode == 0
    assert path.read_text() != "mine"


def test_a_short_copy_has_the_values_of_a_profile_that_was_given_as_a_file(tmp_path: Path) -> None:
    profile, file = tmp_path / "here.yaml", tmp_path / "mine.yaml"
    profile.write_text((builtin_recipes_dir() / "cluster" / "cpu.yaml").read_text().replace("name: cpu", "name: here"))
    changes = (f"cluster={profile}", "cluster.cores=2", "train.steps=5")
    canzona("recipes", "copy", "tiny", str(file), *changes, "--short", code=0)
    short = compose_run([f"recipe={file}"]).config
    assert short == replace(compose_run(["recipe=qwen3-tiny", *changes]).config, name="mine")


def test_a_short_copy_has_only_the_changes_and_is_the_same_run(tmp_path: Path) -> None:
    changes = ("optimizer=soap", "train.steps=50", "gpus=4", "parallel.tp=2")
    file = tmp_path / "mine.yaml"
    canzona("recipes", "copy", "tiny", str(file), *changes, "--short", code=0)
    assert len(file.read_text().splitlines()) <= 14
    short = compose_run([f"recipe={file}"]).config
    assert short == replace(compose_run(["recipe=qwen3-tiny", *changes]).config, name="mine")
    again = canzona("recipes", "copy", str(file), str(tmp_path / "other.yaml"), "--short", code=2)
    assert "can build only on another recipe's name" in " ".join(again.stderr.split())


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.sweep]) for name in BUILTIN]
)
def test_a_short_copy_of_every_recipe_can_be_read_and_is_the_same_run(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for changes in (
        ("data.path=texts/mine",),
        ("optimizer=adamw", "optimizer.lr=0.001", "optimizer.lrs={}", "data.blend={texts/a:1,texts/b:3}"),
        ("optimizer=soap", "optimizer.min_lr_ratio=0.01", "optimizer.adamw_lr=0.001", "train.global_batch_size=8"),
    ):
        copy(recipe, file, list(changes), force=True, short=True)
        read = compose_run([f"recipe={file}"]).config
        assert read == replace(compose_run([f"recipe={recipe}", *changes]).config, name="mine")


def test_a_short_copy_with_files_of_a_folder_names_the_folder_in_the_next_command(tmp_path: Path) -> None:
    for group, option in (("model", "qwen3-tiny"), ("cluster", "cpu")):
        (tmp_path / "my recipes" / group).mkdir(parents=True)
        text = (builtin_recipes_dir() / group / f"{option}.yaml").read_text().replace(f"name: {option}", "name: ours")
        (tmp_path / "my recipes" / group / "ours.yaml").write_text(text)
    changes = ("model=ours", "cluster=ours", "--recipes-dir", "my recipes")
    done = canzona("recipes", "copy", "tiny", "mine.yaml", *changes, "--short", cwd=tmp_path, code=0)
    command, *words = shlex.split(done.stdout.partition("Train it with: ")[2])
    assert command == "canzona"
    shown = [
        yaml.safe_load(canzona("recipes", "show", *named, cwd=tmp_path, code=0).stdout)
        for named in (("tiny", *changes), ("mine.yaml", *words[2:]))
    ]
    assert shown[0] | {"name": "mine"} == shown[1]
    assert "lr 0.005" in canzona(*words, "--dry-run", cwd=tmp_path, code=0).stdout


def test_copy_refuses_what_no_recipe_may_be_named(tmp_path: Path) -> None:
    assert canzona("recipes", "copy", "tiny", "mine.txt", cwd=tmp_path).returncode == 2
    (tmp_path / "folder.yaml").mkdir()
    assert canzona("recipes", "copy", "tiny", "folder.yaml", "--force", cwd=tmp_path).returncode == 2
    refused = canzona("recipes", "copy", "tiny", "optimizer=soap", "data.path=a/b", cwd=tmp_path, code=2)
    assert "write the file before the settings: mine.yaml optimizer=soap" in " ".join(refused.stderr.split())


def test_a_misspelt_name_is_exit_code_2() -> None:
    result = canzona("recipes", "show", "qwen3-8bb", code=2)
    assert "did you mean qwen3-8b?" in result.stderr
