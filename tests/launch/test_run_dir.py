"""A run directory belongs to one launch, holds no secrets, and is refused where others could put files into it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from canzona_cli.core.errors import CanzonaError, ConfigError, EnvironmentProblem
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch import torchrun
from canzona_cli.launch.run_dir import RunDirectory, check_free, describe_environment, unsafe_place
from canzona_cli.records.corpus import read_corpus
from canzona_cli.records.files import RunFiles, append_json_line, read_json, try_append_json_line, write_json_atomic
from tests.faults.support import LAYOUT, run_config
from tests.records.runs import CORPUS
from tests.refusals import refused


def test_of_many_launches_at_once_exactly_one_gets_the_directory(tmp_path: Path) -> None:
    config = run_config(run_dir=tmp_path / "new" / "run")
    got: list[object] = []
    gate = threading.Barrier(8)

    def claim() -> None:
        gate.wait()
        try:
            got.append(RunDirectory.create(config))
        except ConfigError as error:
            got.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert sum(isinstance(one, RunDirectory) for one in got) == 1


def test_a_used_directory_is_refused_and_a_free_one_suggested(tmp_path: Path) -> None:
    config = run_config(run_dir=tmp_path / "run")
    RunDirectory.create(config)
    (tmp_path / "run-2").mkdir()
    for attempt in (check_free, RunDirectory.create):
        [problem] = refused(attempt, config)
        assert (problem.key, problem.value) == ("run.dir", str(tmp_path / "run"))
        assert f"run.dir={tmp_path / 'run-3'}" in problem.fix


def test_an_existing_directory_with_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "slurm-12.out").write_text("")
    check_free(run_config(run_dir=tmp_path))
    assert RunDirectory.create(run_config(run_dir=tmp_path)).path == tmp_path


def test_runs_without_a_name_never_collide(tmp_path: Path) -> None:
    config = run_config(root=tmp_path)
    paths = {RunDirectory.create(config).path for _ in range(5)}
    assert len(paths) == 5
    assert all(path.parent == tmp_path and path.name.startswith("tiny-2") for path in paths)


@pytest.mark.parametrize("check", [check_free, RunDirectory.create])
def test_a_place_that_cannot_be_written_is_an_environment_problem(tmp_path: Path, check: object) -> None:
    assert callable(check)
    file = tmp_path / "file"
    file.write_text("")
    for config in (run_config(run_dir=file / "run"), run_config(root=file), run_config(run_dir=file)):
        with pytest.raises(EnvironmentProblem) as refused:
            check(config)
        assert refused.value.problems[0].key in ("run.dir", "run.root")
        assert "file" in refused.value.problems[0].reason


def test_inputs_repeat_the_run_and_leave_secrets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    config = run_config(run_dir=tmp_path / "run")
    run = RunDirectory.create(config)
    command = torchrun.build(config, run.path)
    run.write_inputs(config_yaml="name: tiny\n", layout=LAYOUT, corpus=CORPUS, command=command)
    assert read_json(run.files.layout) == asdict(LAYOUT)
    assert read_corpus(run.files) == CORPUS
    assert run.files.config.read_text() == "name: tiny\n"
    assert run.files.command.read_text() == command.shell() + "\n"
    everything = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert "hf_secret" not in everything
    variables = describe_environment()["variables"]
    assert isinstance(variables, dict)
    assert variables["SLURM_JOB_ID"] == "42"
    assert "HOME" in os.environ
    assert "HOME" not in variables


def test_what_breaks_before_the_workers_start_is_in_the_result(tmp_path: Path) -> None:
    for error, status, code in ((KeyboardInterrupt(), "interrupted", 130), (RuntimeError("no"), "failed", 70)):
        run = RunDirectory.create(run_config(root=tmp_path))
        with pytest.raises(type(error)), run.record_failure():
            raise error
        result = read_json(run.files.result)
        assert result is not None
        assert (result["status"], result["exit_code"]) == (status, code)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    link = tmp_path / "link"
    link.symlink_to("run")
    assert unsafe_place(tmp_path / "run") is None
    # Seen by somebody who made neither; what root makes is trusted, so the link must be a person's.
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)
    assert "another user" in str(unsafe_place(link, user=os.lstat(link).st_uid + 1))
    assert unsafe_place(link, user=os.lstat(link).st_uid) is None


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
    assert (unsafe_place(run) is None) == (refused == "")
    if refused:
        with pytest.raises(EnvironmentProblem, match=f"may write to .*{refused}"):
            RunDirectory.create(run_config(run_dir=run))
        assert list(run.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(("mask", "never"), [(0, 0o022), (0o077, 0o077)])
def test_only_owners_may_write_files_and_a_strict_umask_is_kept(tmp_path: Path, mask: int, never: int) -> None:
    with umask(mask):
        run = RunDirectory.create(run_config(root=tmp_path))
        write_text_atomic(run.files.config, "a: 1\n")
        append_json_line(run.files.metrics, {})
    for path in (run.path, *run.path.rglob("*")):
        assert path.stat().st_mode & never == 0, f"{path.name} is {path.stat().st_mode:o}"


def test_planted_links_are_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("run.lock", "ranks", "logs", "config.yaml", "metrics.jsonl", "result.json"):
        files = RunFiles(tmp_path / f"run-{name}")
        files.root.mkdir()
        (files.root / name).symlink_to(victim)
        with suppress(CanzonaError):
            RunDirectory.create(run_config(run_dir=files.root))
        write_text_atomic(files.config, "a: 1\n")
        write_json_atomic(files.result, {})
        try_append_json_line(files.metrics, {})
        assert victim.read_text() == "mine"
