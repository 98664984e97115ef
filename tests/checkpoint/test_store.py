"""The newest checkpoint, the one a run continues from, and those that are removed: by step, and only whole ones
count."""

import os
import shutil
from pathlib import Path

import pytest

from canzona_cli.checkpoint.manifest import partial_path, step_name, step_of
from canzona_cli.checkpoint.store import CheckpointStore, resolve
from canzona_cli.checkpoint.verify import previous_usable
from canzona_cli.core.errors import CanzonaError, CheckpointInvalid
from tests.checkpoint.checkpoints import manifest_of, names, save
from tests.refusals import refused


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def damage(store: CheckpointStore, step: int) -> None:
    os.truncate(store.root / step_name(step) / "rank-00001.safetensors", 50)


def test_names_are_those_of_steps_and_no_others() -> None:
    assert step_of(step_name(30)) == 30
    assert step_of(step_name(123_456_789)) == 123_456_789
    for name in ("step-30", "step-000000030", "step-0000003x", "Step-00000030", "step-00000030.old", "step-00000030\n"):
        assert step_of(name) is None


def test_the_newest_is_the_whole_one_of_the_highest_step_whenever_it_was_written(store: CheckpointStore) -> None:
    assert store.checkpoints() == ()
    assert store.latest() is None
    for step in (100, 20, 3):
        save(store.root, step)
    assert names(store) == ["step-00000003", "step-00000020", "step-00000100"]
    assert manifest_of(store.latest()).progress.step == 100
    damage(store, 100)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.usable) == (100, False)
    assert latest.problems[0].key == "step-00000100/rank-00001.safetensors"
    assert latest.problems[0].reason.startswith("truncated: 50 of ")
    assert latest.problems[0].fix == "resume from the previous checkpoint: checkpoint.resume=step-00000020"
    assert previous_usable(store.root / "step-00000020") == store.checkpoints()[0].path
    assert previous_usable(store.root / "step-00000003") is None


def test_other_things_in_the_folder_are_no_checkpoints(store: CheckpointStore) -> None:
    save(store.root, 20)
    (store.root / "notes").mkdir()
    (store.root / "step-30").mkdir()
    partial_path(store.root, 40).mkdir()
    assert names(store) == ["step-00000020"]
    (store.root / "step-00000050").write_text("")
    (store.root / "step-00000060").symlink_to(save(store.root.parent / "elsewhere", 60))
    shutil.copytree(store.root / "step-00000020", store.root / "step-00000070")
    assert [found.usable for found in store.checkpoints()] == [True, False, False, False]
    assert [found.problems[0].reason for found in store.checkpoints()[1:]] == [
        "cannot be read: Not a directory",
        "is a symbolic link; give the path of its target to use it",
        "it was saved at step 20: the folder has been renamed",
    ]
    assert previous_usable(store.root / "step-00000080") == store.root / "step-00000020"


@pytest.mark.parametrize(
    ("keep", "keep_every", "damaged", "left"),
    [
        (3, None, (), [30, 40, 50]),
        (1, None, (), [50]),
        (9, None, (), [10, 20, 30, 40, 50]),
        (1, 20, (), [20, 40, 50]),
        (2, None, (50,), [30, 40, 50]),
        (2, None, (10, 20), [40, 50]),
        (5, None, (30,), [10, 20, 30, 40, 50]),
    ],
)
def test_retention_keeps_the_newest_whole_ones_and_the_multiples(
    store: CheckpointStore, keep: int, keep_every: int | None, damaged: tuple[int, ...], left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        save(store.root, step)
    for step in damaged:
        damage(store, step)
    gone = store.retain(keep, keep_every)
    assert sorted(os.listdir(store.root)) == [step_name(step) for step in left]
    assert sorted([*gone, *names(store)]) == [step_name(step) for step in (10, 20, 30, 40, 50)]


def test_killed_saves_and_removals_are_cleared_and_a_half_done_replacement_is_undone(store: CheckpointStore) -> None:
    for step in (20, 30):
        save(store.root, step)
    partial_path(store.root, 40).mkdir()
    (store.root / ".step-00000010.removed").mkdir()
    (store.root / ".other").mkdir()
    (store.root / "step-00000030").rename(store.root / ".step-00000030.replaced")
    assert manifest_of(store.latest()).progress.step == 30, "found where it waits"
    assert store.clear_partials() == (".step-00000010.removed", ".step-00000040.partial")
    assert sorted(os.listdir(store.root)) == [".other", "step-00000020", "step-00000030"]


def test_a_run_that_goes_back_does_not_meet_its_later_checkpoints_again(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(store.root, step)
    assert store.move_later(10, tmp_path / "attempts" / "1") == ("step-00000020", "step-00000030")
    assert names(store) == ["step-00000010"]
    assert names(CheckpointStore(tmp_path / "attempts" / "1")) == ["step-00000020", "step-00000030"]
    assert store.move_later(10, tmp_path / "attempts" / "2") == ()
    assert not (tmp_path / "attempts" / "2").exists()


def test_all_ways_to_name_a_checkpoint(store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(store.root, "auto") is None
    for step in (10, 20):
        save(store.root, step)
    here, elsewhere = store.root, tmp_path / "other" / "checkpoints"
    assert resolve(here, "auto") == here / "step-00000020"
    assert resolve(here, "step-00000010") == here / "step-00000010"
    assert resolve(elsewhere, "auto") is None
    monkeypatch.chdir(tmp_path)
    for path in ("run", "run/checkpoints", "run/checkpoints/step-00000020", str(here), "./run/"):
        assert resolve(elsewhere, path) == here / "step-00000020"
    (tmp_path / "link").symlink_to(here / "step-00000010")
    assert resolve(elsewhere, "link") == here / "step-00000010"


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("step-00000099", "step-00000010, step-00000020"),
        ("nosuch", "step-00000010, step-00000020"),
        ("step-20", "step-00000010, step-00000020"),
        ("empty", "give a run directory"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_a_configuration_error_that_says_what_is(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, said: str
) -> None:
    for step in (10, 20):
        save(store.root, step)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    problems = refused(resolve, store.root, resume)
    problem = problems[0]
    assert (problem.key, problem.value) == ("checkpoint.resume", resume)
    assert said in problem.fix


@pytest.mark.parametrize("resume", ["auto", "step-00000020", "run", "run/checkpoints/step-00000020"])
def test_a_damaged_checkpoint_is_never_passed_over_in_silence(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    for step in (10, 20):
        save(store.root, step)
    damage(store, 20)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CanzonaError) as caught:
        resolve(store.root, resume)
    assert isinstance(caught.value, CheckpointInvalid)
    _, _, offered = caught.value.problems[0].fix.partition("checkpoint.resume=")
    another = store.root if "run" not in resume else tmp_path / "new"
    assert resolve(another, offered) == store.root / "step-00000010", "what is offered can be typed"
    damage(store, 10)
    with pytest.raises(CheckpointInvalid) as caught_again:
        resolve(store.root, resume)
    assert "no earlier checkpoint is usable" in caught_again.value.problems[0].fix
