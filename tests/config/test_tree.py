"""The list of recipes agrees with what runs are composed of; nothing of a composition stays behind."""

import tempfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir, group_options
from canzona_cli.config.tree import compose_files, list_recipes
from canzona_cli.core.errors import ConfigError


def test_each_line_agrees_with_the_composed_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - qwen3-8b\n  - override /optimizer: adamw\nmodel: {num_layers: 3}\n"
    )
    recipes = list_recipes((tmp_path,))
    assert len(recipes) == 1 + len(list((builtin_recipes_dir() / "recipe").glob("*.yaml")))
    for info in recipes:
        dirs = () if info.builtin else (tmp_path,)
        config = compose_run([f"recipe={info.name}"], recipes_dirs=dirs, training=False).config
        assert info.model == config.model
        assert (info.gpus, info.cluster) == (config.gpus, config.cluster.name)
        assert (info.optimizer, info.description) == (config.optimizer.name, config.description)
        assert not info.error


def test_a_file_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for name, text in (("broken", "a: ["), ("empty", "")):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(text)
    first, second, *_ = list_recipes((tmp_path,))
    assert (first.name, second.name) == ("broken", "empty")
    assert first.error
    assert second.error


def test_hydra_forgets_a_given_file_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))  # there is no such folder to write in
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [qwen3-tiny]\ngpus: 4\n")
    before = {*ConfigStore.instance().repo}
    assert compose_run([f"recipe={path}"]).config.gpus == 4
    assert {*ConfigStore.instance().repo} == before


@pytest.mark.parametrize(
    "chosen", [{}, {"optimizer": "soap", "cluster": "cpu"}, {"model": "qwen3-8b", "data": "prepared"}]
)
def test_files_compose_to_what_hydra_gives(chosen: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    mine = "defaults:\n  - override /model: qwen3-tiny\n  - override /engine: asc\nname: mine\ngpus: 4\n"
    sections = (
        "optimizer: {lrs: {soap: 0.1}, nesterov: null}\nrun: null\nmodel: {rope_scaling: {a: {b: [1, 2]}, c: 1}}\n"
    )
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{mine}{sections}")
    (tmp_path / "recipe" / "again.yaml").write_text(
        "# @package _global_\ndefaults: [mine]\nname: again\nrun: {dir: a}\n"
    )
    folder = builtin_recipes_dir()
    for recipe, file in group_options("recipe", (tmp_path,) if chosen else (tmp_path, folder)).items():
        overrides = [f"hydra.searchpath=[file://{tmp_path}]", f"recipe={recipe}", *map("=".join, chosen.items())]
        with initialize_config_dir(str(folder), version_base="1.3"):
            public = OmegaConf.to_container(compose("config", overrides=overrides), resolve=False)
        options = {group: folder / group / f"{name}.yaml" for group, name in chosen.items()}
        tree, files = compose_files({"recipe": file, **options}, (tmp_path, folder))
        assert tree == public
        assert files[-1] == file
        assert {*options.values()} <= {*files}


def test_files_are_listed_in_their_order_of_application(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    mine = tmp_path / "recipe" / "mine.yaml"
    mine.write_text("# @package _global_\ndefaults:\n  - qwen3-8b\n  - override /optimizer: soap\n")
    _, files = compose_files({"recipe": mine}, (tmp_path, builtin_recipes_dir()))
    assert [file.name for file in files[-2:]] == ["qwen3-8b.yaml", "mine.yaml"]
    assert [file.stem for file in files if file.parent.name == "optimizer"] == ["soap"]


def test_a_recipe_does_not_set_up_hydra(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - qwen3-8b\nhydra: {searchpath: ['file:///elsewhere']}\n"
    )
    with pytest.raises(ConfigError, match="hydra"):
        compose_run(["recipe=mine"], recipes_dirs=(tmp_path,))
    given = tmp_path / "given.yaml"
    given.write_text("defaults:\n  - qwen3-8b\nhydra: {job: {name: other}}\n")
    with pytest.raises(ConfigError, match="hydra"):
        compose_run([f"recipe={given}"])
