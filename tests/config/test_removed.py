"""Settings and values that canzona had once are refused with what to use, and stored runs that have them are read."""

from pathlib import Path

import pytest
import yaml

from canzona_cli.config.compose import compose_run, dump_resolved, load_resolved
from canzona_cli.config.removed import REMOVED_SETTINGS, REMOVED_VALUES
from canzona_cli.config.settings import settings
from tests.refusals import refused


@pytest.mark.parametrize("key", REMOVED_SETTINGS)
def test_a_removed_setting_is_refused_with_what_to_use(key: str) -> None:
    (problem,) = refused(compose_run, ["recipe=tiny", f"{key}=4"])
    assert (problem.key, problem.value, problem.fix) == (key, "4", REMOVED_SETTINGS[key])
    assert "no longer exists" in problem.reason


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_typed_and_mapped_stored(key: str, value: str, tmp_path: Path) -> None:
    assert value not in settings()[key].choices
    problems = refused(compose_run, ["recipe=tiny", f"{key}={value}"])
    fix, stored_as = REMOVED_VALUES[key, value]
    assert [problem.fix for problem in problems] == [fix]
    tree = yaml.safe_load(dump_resolved(compose_run(["recipe=tiny"]).config))
    section, _, name = key.partition(".")
    tree[section][name] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert getattr(getattr(load_resolved(path), section), name) == stored_as


@pytest.mark.parametrize("key", REMOVED_SETTINGS)
def test_a_stored_run_may_have_a_removed_setting(key: str, tmp_path: Path) -> None:
    config = compose_run(["recipe=tiny"]).config
    tree = yaml.safe_load(dump_resolved(config))
    section, _, name = key.partition(".")
    tree[section][name] = 24.0

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_resolved(path) == config


def test_a_named_recipe_with_a_removed_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults: [qwen3-tiny]\ncheckpoint: {failure_hours: 3}\n")
    (problem,) = refused(lambda overrides: compose_run(overrides, recipes_dirs=[tmp_path]), ["recipe=mine"])
    assert (problem.key, problem.fix) == ("checkpoint.failure_hours", REMOVED_SETTINGS["checkpoint.failure_hours"])
