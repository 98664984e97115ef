"""The list of recipes agrees with what runs are composed of; nothing of a composition stays behind."""

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir
from canzona_cli.config.tree import composed, list_recipes


@pytest.mark.parametrize("own", [False, True])
def test_each_line_agrees_with_the_composed_recipe(own: bool, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - qwen3-8b\n  - override /optimizer: adamw\nmodel: {num_layers: 3}\n"
    )
    dirs = (tmp_path,) if own else ()
    recipes = list_recipes(dirs)
    assert len(recipes) == (9 if own else 8)
    for info in recipes:
        config = compose_run([f"recipe={info.name}"], recipes_dirs=dirs).config
        assert info.model == config.model
        assert (info.gpus, info.cluster) == (config.gpus, config.cluster.name)
        assert (info.optimizer, info.description) == (config.optimizer.name, config.description)
        assert not info.error


def test_own_recipes_come_first_and_shadowing_shows(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "qwen3-tiny.yaml").write_text("defaults:\n  - qwen3-tiny\n")
    first = list_recipes((tmp_path,))[0]
    assert (first.name, first.builtin, first.shadows) == ("qwen3-tiny", False, True)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "\x00"])
def test_a_file_that_cannot_be_read_is_listed_with_the_reason(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "broken.yaml").write_text(text)
    first = list_recipes((tmp_path,))[0]
    assert first.name == "broken"
    assert first.error


def test_hydra_forgets_a_given_file_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))  # there is no such folder to write in
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [qwen3-tiny]\ngpus: 4\n")
    before = {*ConfigStore.instance().repo}
    assert compose_run([f"recipe={path}"]).config.gpus == 4
    assert {*ConfigStore.instance().repo} == before


@pytest.mark.parametrize(
    ("private", "parameters"),
    [
        (ConfigLoaderImpl.__init__, "self config_search_path"),
        (ConfigLoaderImpl._compose_config_from_defaults_list, "self defaults repo"),
        (CachingConfigRepository.__init__, "self delegate"),
        (ConfigSearchPathImpl.append, "self provider path anchor"),
        (create_defaults_list, "repo config_name overrides_list prepend_hydra skip_missing"),
    ],
)
def test_what_we_use_of_hydras_inside_is_as_we_use_it(private: Callable[..., object], parameters: str) -> None:
    assert [*inspect.signature(private).parameters] == parameters.split()


@pytest.mark.parametrize("recipe", ["qwen3-tiny", "qwen3-32b"])
def test_composing_by_hydras_inside_gives_what_its_public_function_gives(recipe: str) -> None:
    folder = builtin_recipes_dir()
    with initialize_config_dir(str(folder), version_base="1.3"):
        public = OmegaConf.to_container(compose("config", overrides=[f"recipe={recipe}"]), resolve=False)
    tree, files = composed({"recipe": recipe}, {}, (folder,))
    assert tree == public
    assert files[-1] == folder / "recipe" / f"{recipe}.yaml"
