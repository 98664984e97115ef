"""What workers leave in the run directory."""

import json
import math
import os
import threading
from pathlib import Path

import pytest

from canzona_cli.errors import CanzonaError, ConfigError, DoesNotFit, EnvironmentProblem, ExitCode, Problem
from canzona_cli.launch.files import RunFiles
from canzona_cli.training.loop import NonFiniteLoss
from canzona_cli.training.records import Journal, RankRecord, StepMetrics


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
    record.running()
    written = _read(files.rank(3))
    assert written.pop("time")
    assert written == {
        "rank": 3, "pid": os.getpid(), "status": "running", "exit_code": None, "step": 0, "loss": None,
        "checkpoint": None, "error": None,
    }  # fmt: skip
    record.step, record.loss = 12, 3.25
    record.ended("done")
    written = _read(files.rank(3))
    assert (written["status"], written["exit_code"], written["step"], written["loss"]) == ("done", 0, 12, 3.25)
    record.ended("interrupted")
    written = _read(files.rank(3))
    assert (written["status"], written["exit_code"]) == ("interrupted", 130)
    record.checkpoint = "step-00000012"
    record.ended("preempted")
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
    assert record.failed(raised.value) == code
    written = _read(files.rank(0))
    assert (written["status"], written["exit_code"]) == ("failed", int(code))
    described = written["error"]
    assert isinstance(described, dict)
    assert described["type"] == type(error).__name__
    assert described["message"] == str(error)
    # Where it was raised helps with a bug; an error written for the user says what to do and nothing else.
    assert ("test_records.py" in described["traceback"]) == (not isinstance(error, CanzonaError))


def test_a_record_with_a_loss_that_is_no_number_is_still_json(files: RunFiles) -> None:
    record = RankRecord(files, 0)
    record.step, record.loss = 4, math.nan
    record.failed(NonFiniteLoss(4, math.nan))
    assert _read(files.rank(0))["loss"] is None


def test_a_reader_never_sees_half_a_record(files: RunFiles) -> None:
    """The launcher polls these files while workers replace them."""
    record = RankRecord(files, 0)
    record.running()
    seen = set()
    finished = threading.Event()

    def rewrite() -> None:
        for step in range(100):
            record.step = step
            record.running()
        finished.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not finished.is_set():
        seen.add(_read(files.rank(0))["status"])
    writer.join()
    assert seen == {"running"}
    assert [path.name for path in files.ranks.iterdir()] == [files.rank(0).name], "a temporary file was left behind"


def test_the_journal_appends_whole_lines(files: RunFiles) -> None:
    journal = Journal(files, writes=True)
    journal.stage("train", "2 steps")
    journal.step(_metrics(1))
    journal.step(_metrics(2))
    journal.validation(2, 2.25)
    journal.breakdown({"version": 1})
    journal.close()
    lines = [json.loads(line) for line in files.metrics.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # Names other tools rely on.
    assert set(lines[0]) == {
        *("step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s", "tokens", "time"),
        *("skipped", "fallbacks"),
    }
    event = _read(files.events)
    assert (event["event"], event["stage"], event["detail"]) == ("stage", "train", "2 steps")
    validation = _read(files.validation)
    assert (validation["step"], validation["loss"]) == (2, 2.25)
    assert _read(files.breakdown) == {"version": 1}


def test_only_one_rank_writes_the_files_of_the_job(files: RunFiles) -> None:
    journal = Journal(files, writes=False, tensorboard=True)
    journal.stage("train")
    journal.step(_metrics(1))
    journal.validation(0, 6.0)
    journal.breakdown({"version": 1})
    journal.close()
    assert [path.name for path in files.root.iterdir()] == [files.ranks.name]
