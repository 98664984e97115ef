"""Settings and values that canzona had once are refused with what to use, and stored runs that have them are read."""

from pathlib import Path

import pytest
import yaml

from canzona_cli.config import removed
from canzona_cli.config.compose import compose_run, dump_resolved, load_resolved
from canzona_cli.config.removed import REMOVED_VALUES, RemovedSetting
from canzona_cli.config.settings import settings
from canzona_cli.errors import ConfigError
from tests.refusals import refused

OLD = RemovedSetting(instead="use train.steps", without_effect=(False, None))


@pytest.fixture(autouse=True)
def an_old_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "REMOVED_SETTINGS", {"train.ancient": OLD})


def test_a_removed_setting_is_refused_with_what_to_use() -> None:
    (problem,) = refused(compose_run, ["recipe=tiny", "train.ancient=4"])
    assert (problem.key, problem.value, problem.fix) == ("train.ancient", "4", "use train.steps")
    assert "no longer exists" in problem.reason


@pytest.mark.parametrize("value", [False, None, True])
def test_a_stored_run_may_have_a_removed_setting_where_it_had_no_effect(value: object, tmp_path: Path) -> None:
    config = compose_run(["recipe=tiny"]).config
    tree = yaml.safe_load(dump_resolved(config))
    tree["train"]["ancient"] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    if value:
        with pytest.raises(ConfigError, match=r"use train\.steps"):
            load_resolved(path)
    else:
        assert load_resolved(path) == config


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_typed_and_mapped_stored(key: str, value: str, tmp_path: Path) -> None:
    assert value not in settings()[key].choices
    problems = refused(compose_run, ["recipe=tiny", f"{key}={value}"])
    assert [problem.fix for problem in problems] == [REMOVED_VALUES[key, value].instead]
    tree = yaml.safe_load(dump_resolved(compose_run(["recipe=tiny"]).config))
    section, _, name = key.partition(".")
    tree[section][name] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert getattr(getattr(load_resolved(path), section), name) == REMOVED_VALUES[key, value].stored_as


def test_a_stored_run_may_have_any_value_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = compose_run(["recipe=tiny"]).config
    tree = yaml.safe_load(dump_resolved(config))
    tree["checkpoint"]["failure_hours"] = 24.0
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_resolved(path) == config
