"""The records that workers leave in the run directory."""

import errno
import json
import math
import os
import resource
from pathlib import Path
from unittest.mock import Mock

import pytest

from canzona_cli.core.errors import CanzonaError, ConfigError, DoesNotFit, EnvironmentProblem, ExitCode, Problem
from canzona_cli.records.breakdown import MeasuredBreakdown, load_breakdown
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import StepMetrics
from canzona_cli.records.statistics import OverRanks
from canzona_cli.training.loop import NonFiniteLoss
from canzona_cli.training.records import Journal, RankRecord
from tests.records.runs import LAYOUT

BREAKDOWN = MeasuredBreakdown(
    strategy="canzona",
    optimizer="muon",
    layout=LAYOUT,
    steps_measured=1,
    steps_skipped=2,
    step=OverRanks.of([0.1]),
    phases={},
    tokens_per_s=1e4,
    tokens_per_s_per_gpu=2.5e3,
)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path)
    files.ranks.mkdir()
    return files


def _read(path: Path) -> dict[str, object]:
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _metrics(step: int, *, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, lr=1e-3, grad_norm=0.5, tokens_per_s=1e4, step_s=0.1, tokens=64 * step)


def test_a_record_follows_the_life_of_its_rank(files: RunFiles) -> None:
    record = RankRecord(files, 3)
    record.record_start()
    written = _read(files.rank(3))
    assert written.pop("time")
    assert written == {
        "rank": 3, "pid": os.getpid(), "status": "running", "exit_code": None, "step": 0, "loss": None,
        "checkpoint": None, "lost": {}, "error": None,
    }  # fmt: skip
    record.step, record.loss = 12, 3.25
    record.record_end("done")
    written = _read(files.rank(3))
    assert (written["status"], written["exit_code"], written["step"], written["loss"]) == ("done", 0, 12, 3.25)
    record.record_end("interrupted")
    written = _read(files.rank(3))
    assert (written["status"], written["exit_code"]) == ("interrupted", 130)
    record.checkpoint = "step-00000012"
    record.record_end("preempted")
    written = _read(files.rank(3))
    assert (written["status"], written["exit_code"], written["checkpoint"]) == ("preempted", 75, "step-00000012")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(Problem(key="train.steps", reason="no")), ExitCode.CONFIG),
        (EnvironmentProblem(Problem(key="gpus", reason="no")), ExitCode.ENVIRONMENT),
        (DoesNotFit(Problem(key="gpus", reason="no")), ExitCode.MEMORY),
        (NonFiniteLoss(4, math.nan), ExitCode.CRASH),
        (RuntimeError("gloo lost its peer"), ExitCode.CRASH),
        (KeyboardInterrupt(), ExitCode.CRASH),
    ],
)
def test_a_failure_says_what_it_was_and_with_which_code_the_worker_ends(
    files: RunFiles, error: BaseException, code: ExitCode
) -> None:
    record = RankRecord(files, 0)
    with pytest.raises(type(error)) as raised:
        raise error
    assert record.record_failure(raised.value) == code
    written = _read(files.rank(0))
    status = "diverged" if isinstance(error, NonFiniteLoss) else "failed"
    assert (written["status"], written["exit_code"]) == (status, int(code))
    described = written["error"]
    assert isinstance(described, dict)
    assert described["type"] == type(error).__name__
    assert described["message"] == str(error)
    # Where it was raised helps with a bug; an error written for the user says what to do and nothing else.
    assert ("test_records.py" in described["traceback"]) == (not isinstance(error, CanzonaError))


def test_the_journal_appends_whole_lines(files: RunFiles) -> None:
    journal = Journal(files, writes=True)
    journal.stage("train", "2 steps")
    journal.step(_metrics(1))
    journal.step(_metrics(2))
    journal.validation(2, 2.25)
    journal.breakdown(BREAKDOWN)
    lines = [json.loads(line) for line in files.metrics.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # Names other tools rely on.
    assert set(lines[0]) == {
        *("step", "loss", "lr", "adamw_lr", "grad_norm", "tokens_per_s", "step_s", "tokens", "time"),
        *("skipped", "fallbacks", "balancing_loss", "expert_load", "captures"),
    }
    event = _read(files.events)
    assert (event["event"], event["stage"], event["detail"]) == ("stage", "train", "2 steps")
    validation = _read(files.validation)
    assert (validation["step"], validation["loss"]) == (2, 2.25)
    assert _read(files.breakdown)["version"] == 1
    assert load_breakdown(files.root).planned is None


def test_only_one_rank_writes_the_files_of_the_job(files: RunFiles) -> None:
    journal = Journal(files, writes=False)
    journal.stage("train")
    journal.step(_metrics(1))
    journal.validation(0, 6.0)
    journal.breakdown(BREAKDOWN)
    assert [path.name for path in files.root.iterdir()] == [files.ranks.name]


def test_an_unwritable_file_costs_lines_and_never_the_run(files: RunFiles, caplog: pytest.LogCaptureFixture) -> None:
    files.metrics.mkdir()  # whoever is root may write anything else
    journal = Journal(files, writes=True)
    for step in (1, 2, 3):
        journal.step(_metrics(step))
    journal.validation(3, 2.0)
    files.metrics.rmdir()
    journal.step(_metrics(4))
    assert journal.lost == {"metrics.jsonl": 3}
    assert _read(files.metrics)["step"] == 4
    assert _read(files.validation)["step"] == 3
    down, again = [json.loads(line) for line in files.events.read_text(encoding="utf-8").splitlines()]
    assert (down["event"], down["level"]) == ("writer", "warning")
    assert "metrics.jsonl cannot be written" in down["detail"]
    assert "3 lines were lost" in again["detail"]
    assert len(caplog.records) == 2, "said once, not for every line"


def test_only_whole_lines_are_in_a_file_whose_disk_became_full(files: RunFiles) -> None:
    journal = Journal(files, writes=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # for this process no file grows beyond that
    try:
        for step in range(10):
            journal.step(_metrics(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = [json.loads(line)["step"] for line in files.metrics.read_text(encoding="utf-8").splitlines()]
    assert kept == [0, 1], "whole lines, up to the limit"
    assert journal.lost == {"metrics.jsonl": 8}
    journal.step(_metrics(10))
    assert json.loads(files.metrics.read_text(encoding="utf-8").splitlines()[-1])["step"] == 10
    assert "8 lines were lost" in files.events.read_text(encoding="utf-8")


def test_a_planted_link_is_not_followed(files: RunFiles) -> None:
    victim = files.root / "victim"
    victim.write_text("mine")
    files.metrics.symlink_to(victim)
    journal = Journal(files, writes=True)
    journal.step(_metrics(1))
    assert victim.read_text() == "mine"
    assert journal.lost == {"metrics.jsonl": 1}


def test_a_breakdown_that_cannot_be_written_is_only_told(files: RunFiles) -> None:
    files.breakdown.mkdir()
    (files.breakdown / "x").touch()
    Journal(files, writes=True).breakdown(BREAKDOWN)
    assert "breakdown.json cannot be written" in str(_read(files.events)["detail"])


def test_on_a_full_disk_a_ranks_end_is_written_over_its_start(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RankRecord(files, 0)
    record.record_start()
    monkeypatch.setattr("canzona_cli.records.files.write_json_atomic", _full)
    monkeypatch.setattr("canzona_cli.training.records.write_json_atomic", _full)
    record.step, record.lost = 12, {"metrics.jsonl": 3}
    assert record.record_end("preempted") == ExitCode.OK, "the file tells it"
    written = _read(files.rank(0))
    assert (written["status"], written["exit_code"], written["step"]) == ("preempted", 75, 12)
    assert written["lost"] == {"metrics.jsonl": 3}
    record.record_failure(ValueError("x" * 100))
    assert _read(files.rank(0))["status"] == "failed"
    record.record_end("done")
    assert _read(files.rank(0))["status"] == "done", "shorter than what was there"

    files.rank(0).unlink()
    assert record.record_end("preempted") == ExitCode.PREEMPTED, "nothing else can tell it"
    with pytest.raises(EnvironmentProblem, match="rank 0 cannot write"):
        record.record_start()


def _full(path: Path, value: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_what_a_rank_says_of_its_failure_holds_no_secret(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "qwertyuiop")
    record = RankRecord(files, 0)
    for error in (
        ValueError("cannot log in with qwertyuiop at https://me:hunter2@host"),
        ConfigError(Problem(key="x.api_key", value="hunter2", reason="qwertyuiop is wrong", fix="api_key=hunter2")),
    ):
        try:
            raise error
        except (ValueError, ConfigError) as raised:
            record.record_failure(raised)
        text = files.rank(0).read_text(encoding="utf-8")
        assert "qwertyuiop" not in text
        assert "hunter2" not in text
        assert "***" in text


def test_room_is_advised_only_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = RankRecord(RunFiles(tmp_path / "not a run"), 0)
    with pytest.raises(EnvironmentProblem) as caught:
        nowhere.record_start()
    assert "canzona train" in caught.value.problems[0].fix
    assert "space" not in caught.value.problems[0].fix
    full = RankRecord(RunFiles(tmp_path), 0)
    monkeypatch.setattr(RankRecord, "_write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(EnvironmentProblem, match="free some space"):
        full.record_start()
