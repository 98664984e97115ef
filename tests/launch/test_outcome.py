"""The end of a run is read from the ranks' own records: the cause, not the echo."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.cli.commands.train_run import _show_reason
from canzona_cli.core.errors import CheckpointInvalid, ConfigError, Diverged, ExitCode, Problem, SaveFailed
from canzona_cli.launch.outcome import Outcome, Workers, judge, killed_outcome
from canzona_cli.records.codec import load_if_valid, save
from canzona_cli.records.files import RunFiles, StopReason
from canzona_cli.records.records import RankError, RankResult, RankStatus, RunResult
from canzona_cli.training.records import RankRecord
from tests.checkpoint import checkpoints

ECHO = RankError(
    type="RuntimeError",
    message="[pair.cc:545] Read error [127.0.0.1]:31365: Connection reset by peer",
    traceback="Traceback ...",
)
NCCL_ECHO = RankError(type="DistBackendError", message="NCCL error: remote process exited")
OWN = RankError(type="ValueError", message="the loss is not finite", traceback="Traceback\n  line 1\nValueError: x")

Shown = Callable[[Outcome], str]


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path)
    files.ranks.mkdir()
    files.logs.mkdir()
    return files


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Captures the output of the command about a failure."""
    monkeypatch.setenv("COLUMNS", "200")

    def show(outcome: Outcome) -> str:
        _show_reason(outcome)
        return capsys.readouterr().err

    return show


def rank(
    files: RunFiles,
    number: int,
    status: RankStatus,
    *,
    error: RankError | None = None,
    code: int = 70,
    after: float = 0,
) -> None:
    result = RankResult(rank=number, pid=1, status=status, exit_code=code, step=3, loss=1.0, error=error)
    save(files.rank(number), replace(result, time=time.time() + after))


def both_fail(files: RunFiles, error: Exception) -> None:
    for number in range(2):
        RankRecord(files, number).record_failure(error)


def report(files: RunFiles, codes: dict[int, int]) -> None:
    """Writes torchrun's report about the ranks that failed."""
    text = "".join(
        f"[{i}]:\n  time      : 2026-01-01\n  host      : h\n  rank      : {r} (local_rank: {r})\n"
        f"  exitcode  : {code} (pid: 10{r})\n  error_file: <N/A>\n"
        for i, (r, code) in enumerate(codes.items())
    )
    files.agent_log(0).write_text(text)


def verdict(files: RunFiles, *, ranks: int = 2, agent: int = 1, stopping: bool = False) -> Outcome:
    return judge(Workers(files=files, ranks=range(ranks), node_rank=0, agent_code=agent), stopping=stopping)


def test_of_errors_the_earliest_that_is_no_echo_is_the_cause(files: RunFiles) -> None:
    for echo in (ECHO, NCCL_ECHO):
        rank(files, 0, "failed", error=echo, after=-5)
        rank(files, 1, "failed", error=OWN)
        outcome = verdict(files)
        assert (outcome.exit_code, outcome.rank, outcome.secondary) == (70, 1, False)
        assert outcome.message == "rank 1: ValueError: the loss is not finite"
        assert outcome.traceback[-1] == "ValueError: x"
    rank(files, 0, "failed", error=replace(OWN, message="later"), after=2)
    assert verdict(files).rank == 1
    rank(files, 0, "failed", error=ECHO, after=1)
    rank(files, 1, "failed", error=ECHO)
    assert (verdict(files).rank, verdict(files).secondary) == (1, True), "all have only lost a neighbour"


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_mistake_of_the_user_keeps_its_exit_code_and_has_no_traceback(files: RunFiles, code: int) -> None:
    rank(files, 0, "failed", error=replace(OWN, type="ConfigError", message="data.path: truncated"), code=code)
    rank(files, 1, "failed", error=ECHO)
    outcome = verdict(files)
    assert (outcome.exit_code, outcome.message, outcome.traceback) == (code, "data.path: truncated", ())


def test_a_rank_that_ended_by_a_signal_comes_before_the_ones_it_took_along(files: RunFiles) -> None:
    rank(files, 0, "failed", error=ECHO)
    rank(files, 1, "running")
    rank(files, 2, "running")
    report(files, {0: 1, 1: -15, 2: -11})
    outcome = verdict(files, ranks=3)
    assert (outcome.rank, outcome.message) == (2, "rank 2 was killed by signal 11 (SIGSEGV)")


def test_a_rank_that_never_wrote_a_word_is_named(files: RunFiles) -> None:
    rank(files, 0, "running")
    report(files, {1: 1})
    silent = verdict(files)
    assert (silent.exit_code, silent.message) == (70, "rank 0 ended without reporting")
    files.rank(0).unlink()
    report(files, {0: 1})
    assert verdict(files).message == "rank 0 ended before it could start, with exit code 1"


def test_stopping_is_an_interruption_unless_something_else_broke(files: RunFiles) -> None:
    rank(files, 0, "interrupted", code=130)
    rank(files, 1, "failed", error=ECHO)
    assert (verdict(files, stopping=True).status, verdict(files, stopping=True).exit_code) == ("interrupted", 130)
    rank(files, 1, "failed", error=OWN)
    assert verdict(files, stopping=True).exit_code == 70
    assert killed_outcome(files, training=True).exit_code == 130
    assert killed_outcome(files, training=True).message == "stopped before the first step was done"
    files.metrics.touch()
    assert killed_outcome(files, training=True).message == "stopped at once, in the middle of a step"
    assert killed_outcome(files, training=False).message == "stopped before training began"


def test_ranks_that_are_all_done_are_done_even_if_torchrun_stumbles_over_their_end(files: RunFiles) -> None:
    rank(files, 0, "done", code=0)
    rank(files, 1, "done", code=0)
    assert verdict(files, agent=1).exit_code == 0
    # and a wish to stop that came after the last step changes nothing
    assert verdict(files, agent=0, stopping=True).status == "done"


class NonFiniteGradients(Diverged):
    """An error with the name of the engine's."""


class PlanRefused(ConfigError):
    """An error with the name of the engine's."""


def test_problems_that_all_ranks_refused_together_are_shown_as_written(files: RunFiles, shown: Shown) -> None:
    infinite = Problem(key="gradients", value="not finite", reason="no weight has changed", fix="lower optimizer.lr")
    plan = Problem(key="plan", value="1a2b", reason="it is for tp = 2, these ranks have tp = 1", fix="start anew")
    gpus = Problem(key="gpus", value=3, reason="there are two")
    for error, code in ((NonFiniteGradients(infinite), ExitCode.CRASH), (PlanRefused(plan, gpus), ExitCode.CONFIG)):
        both_fail(files, error)
        report(files, {0: int(code), 1: int(code)})
        outcome = verdict(files)
        status = "diverged" if isinstance(error, Diverged) else "failed"
        assert (outcome.status, outcome.exit_code, outcome.traceback) == (status, code, ())
        told = shown(outcome)
        for problem in error.problems:
            assert all(words in told for words in (problem.key, problem.reason, problem.fix, "rank 0"))
        assert not any(words in told for words in ("Traceback", type(error).__name__, "bug", "A worker crashed"))
    assert [(p.key, p.value, p.reason, p.fix) for p in outcome.problems] == [
        ("plan", "1a2b", "it is for tp = 2, these ranks have tp = 1", "start anew"),
        ("gpus", "3", "there are two", ""),
    ]
    lines = [line.strip() for line in told.splitlines()]
    assert lines[0] == "Bad configuration: 2 problems"
    assert {"plan = 1a2b", "→ start anew", "gpus = 3", "there are two"} <= set(lines)


@pytest.mark.parametrize(("since", "good"), [(25, "step-00000020"), (20, "step-00000010"), (10, None), (None, None)])
def test_a_run_that_diverged_names_the_last_checkpoint_from_before(
    files: RunFiles, since: int | None, good: str | None, shown: Shown
) -> None:
    for step in (10, 20, 30):
        checkpoints.save(files.checkpoints, step)
    both_fail(
        files, Diverged(Problem(key="step 33", reason="the loss is 270", fix="a lower optimizer.lr"), since=since)
    )
    report(files, {0: 70, 1: 70})
    outcome = verdict(files)
    assert (outcome.status, outcome.exit_code, outcome.failed, outcome.last_good) == ("diverged", 70, True, good)
    save(files.result, outcome.result)
    assert load_if_valid(files.result, RunResult) == outcome.result
    told = shown(outcome)
    assert told.startswith("The run diverged")
    assert (f"checkpoint.resume={good} with a lower" in told) == (good is not None)
    assert ("there is no good checkpoint" in told) == (good is None and since is not None)


@pytest.mark.parametrize(
    ("status", "stopping", "code"),
    [("preempted", False, ExitCode.PREEMPTED), ("interrupted", True, ExitCode.INTERRUPTED)],
)
def test_ranks_that_were_saved_when_they_were_stopped_say_as_what(
    files: RunFiles, status: StopReason, stopping: bool, code: ExitCode
) -> None:
    for number in range(2):
        record = RankRecord(files, number)
        record.checkpoint = "step-00000027"
        record.record_end(status)
    outcome = verdict(files, agent=0, stopping=stopping)
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert "saved as step-00000027" in outcome.message


def test_a_run_that_ended_unsaved_says_that_and_a_damaged_checkpoint_keeps_its_code(files: RunFiles) -> None:
    unsaved = SaveFailed(Problem(key="checkpoint", value="step-00000008", reason="No space left on device"))
    damaged = CheckpointInvalid(Problem(key="step-00000008/rank-00000.safetensors", reason="damaged"))
    for error, code in ((unsaved, 3), (damaged, 5)):
        both_fail(files, error)
        outcome = verdict(files, stopping=True)
        assert (outcome.status, outcome.exit_code) == ("failed", code)
        assert type(outcome.error()) is type(error)
        assert outcome.error().problems == error.problems
