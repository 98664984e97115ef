"""A run directory that others could fill with links or files of theirs is refused before anything is written to it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from canzona_cli.errors import CanzonaError, EnvironmentProblem
from canzona_cli.launch.run_dir import RunDirectory, unsafe_place
from canzona_cli.run.files import RunFiles, append_json_line, try_append_json_line, write_json_atomic, write_text_atomic
from tests.faults.support import run_config


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_ordinary_folder_and_an_own_link_are_fine(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    assert unsafe_place(tmp_path / "run") is None
    assert unsafe_place(tmp_path / "link") is None


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    # Seen by somebody who made neither; what root makes is trusted, so the link must be a person's.
    link = tmp_path / "link"
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)
    assert "another user" in str(unsafe_place(link, user=os.lstat(link).st_uid + 1))
    assert unsafe_place(link, user=os.lstat(link).st_uid) is None


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("folder", "parent", "refused"),
    [
        *((0o755, 0o755, ""), (0o775, 0o755, ""), (0o755, 0o1777, "")),
        *((0o777, 0o755, "run"), (0o1777, 0o755, "run"), (0o755, 0o777, "root")),
    ],
)
def test_a_folder_that_everybody_may_write(tmp_path: Path, folder: int, parent: int, refused: str) -> None:
    root, run = tmp_path / "root", tmp_path / "root" / "run"
    run.mkdir(parents=True)
    run.chmod(folder)
    root.chmod(parent)
    why = unsafe_place(run)
    assert (why is None) == (refused == "")
    if refused:
        with pytest.raises(EnvironmentProblem, match=f"may write to .*{refused}"):
            RunDirectory.create(run_config(run_dir=run))
        assert list(run.iterdir()) == [], "nothing was written"


@pytest.mark.usefixtures("umask")
def test_files_are_written_by_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    run = RunDirectory.create(run_config(root=tmp_path))
    write_text_atomic(run.files.config, "a: 1\n")
    write_json_atomic(run.files.layout, {})
    append_json_line(run.files.metrics, {})
    for path in (run.path, *run.path.rglob("*")):
        assert mode(path) & 0o022 == 0, f"{path.name} is {mode(path):o}"


def test_a_strict_umask_is_kept(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run = RunDirectory.create(run_config(root=tmp_path))
        write_text_atomic(run.files.config, "a: 1\n")
        append_json_line(run.files.metrics, {})
    finally:
        os.umask(before)
    for path in (run.path, *run.path.rglob("*")):
        assert mode(path) & 0o077 == 0, f"{path.name} is {mode(path):o}"


@pytest.mark.parametrize("name", ["run.lock", "ranks", "logs", "config.yaml", "metrics.jsonl", "result.json"])
def test_planted_links_are_not_written_through(tmp_path: Path, name: str) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    (run / name).symlink_to(victim)
    files = RunFiles(run)
    with suppress(CanzonaError):
        RunDirectory.create(run_config(run_dir=run))
    write_text_atomic(files.config, "a: 1\n")
    write_json_atomic(files.result, {})
    try_append_json_line(files.metrics, {})
    assert victim.read_text() == "mine"
