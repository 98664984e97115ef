"""A cluster profile given as a file stands for an option of its group."""

from pathlib import Path

import pytest

from canzona_cli.bench.calibrate.calibrate import profile_text
from canzona_cli.config.completion import complete_override
from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.config.profiles import profile_warnings
from canzona_cli.config.recipes import builtin_recipes_dir
from canzona_cli.core.errors import Problem
from tests.bench.calibrate.calibrations import calibration, cut_off, written
from tests.refusals import refused

CPU_PROFILE = (builtin_recipes_dir() / "cluster" / "cpu.yaml").read_text(encoding="utf-8")


def refusal(*overrides: str) -> list[Problem]:
    return list(refused(compose_run, overrides))


def test_a_file_is_as_good_as_a_name(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.yaml", CPU_PROFILE.replace("name: cpu\n", "").replace("gpus_per_node: 8", "gpus_per_node: 6")
    )
    found = compose_run(["recipe=tiny", f"cluster={path}", "cluster.launch_us=2.5"])
    assert (found.config.cluster.name, found.config.cluster.gpus_per_node) == ("mine", 6)
    assert found.config.cluster.launch_us == 2.5, "overrides come last"
    assert path in found.files
    assert builtin_recipes_dir() / "cluster" / "cpu.yaml" not in found.files
    assert not found.warnings


def test_it_stands_for_the_profile_in_a_recipe_file(tmp_path: Path) -> None:
    recipe = written(tmp_path / "config.yaml", dump_resolved(compose_run(["recipe=tiny"]).config))
    path = written(tmp_path / "mine.yaml", CPU_PROFILE.replace("name: cpu", "name: other"))
    assert compose_run([f"recipe={recipe}", f"cluster={path}"]).config.cluster.name == "other"


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path / "mine.yaml", CPU_PROFILE)
    [near] = refusal("recipe=tiny", f"cluster={tmp_path}/mime.yaml")
    assert near.fix == f"did you mean cluster={tmp_path}/mine.yaml?"
    [far] = refusal("recipe=tiny", "cluster=./cpu.yaml")
    assert "cluster=cpu" in far.fix
    both = refusal("recipe=tiny", "cluster=./nowhere.yaml", "train.steps=many")
    assert [problem.key for problem in both] == ["cluster", "train.steps"], "all at once"


def test_strange_contents_are_named_with_their_file(tmp_path: Path) -> None:
    [strange] = refusal("recipe=tiny", f"cluster={written(tmp_path / 'a.yaml', CPU_PROFILE + 'flux: 3')}")
    assert strange.key == "cluster.flux"
    assert "a.yaml" in strange.reason
    [wrong] = refusal("recipe=tiny", f"cluster={written(tmp_path / 'b.yaml', CPU_PROFILE + 'cores: many')}")
    assert wrong.key == "cluster.cores"
    assert "b.yaml" in wrong.reason
    [code] = refusal("recipe=tiny", f"cluster={written(tmp_path / 'c.yaml', CPU_PROFILE + '_target_: os.system')}")
    assert "_target_" in code.reason
    [empty] = refusal("recipe=tiny", f"cluster={written(tmp_path / 'd.yaml', '')}")
    assert "d.yaml" in empty.key


def test_a_run_warns_of_another_machines_profile_and_a_plan_does_not(tmp_path: Path) -> None:
    path = written(tmp_path / "theirs.yaml", profile_text(calibration()))
    asked = ["recipe=tiny", f"cluster={path}"]
    composed = compose_run(asked)
    assert not composed.warnings
    [warning] = profile_warnings(composed.config.cluster)
    assert "another machine" in warning
    assert not profile_warnings(composed.config.cluster, training=False)


def test_a_calibration_that_was_cut_off_is_told_by_plans_too(tmp_path: Path) -> None:
    path = written(tmp_path / "cut.yaml", profile_text(cut_off()))
    cluster = compose_run(["recipe=tiny", f"cluster={path}"], training=False).config.cluster
    [warning] = profile_warnings(cluster, training=False)
    assert "collectives, model, updates come from profile cpu" in warning


def test_files_in_this_folder_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "here.yaml", profile_text(calibration()))
    written(tmp_path / "notes.txt", "a: 1\n")
    assert complete_override("cluster=./") == ["cluster=./here.yaml"]
    assert complete_override("recipe=./") == ["recipe=./here.yaml"]
    assert complete_override("cluster=c") == ["cluster=cpu"]
