"""How a run ended is read from the ranks' own words: the cause, not the echo."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.commands.train_run import _say_why
from canzona_cli.errors import (
    CanzonaError,
    CheckpointInvalid,
    ConfigError,
    Diverged,
    ExitCode,
    Problem,
    SaveFailed,
)
from canzona_cli.launch.outcome import Outcome, Workers, judge, stopped_at_once
from canzona_cli.run.codec import load_if_sound, save
from canzona_cli.run.files import RunFiles, write_json_atomic
from canzona_cli.run.records import RankError, RankResult, RankStatus, RunResult
from canzona_cli.training.records import RankRecord
from tests.checkpoint import checkpoints

ECHO = RankError(
    type="RuntimeError",
    message="[pair.cc:545] Read error [127.0.0.1]:31365: Connection reset by peer",
    traceback="Traceback ...",
)
NCCL_ECHO = RankError(type="DistBackendError", message="NCCL error: remote process exited")
OWN = RankError(type="ValueError", message="the loss is not finite", traceback="Traceback\n  line 1\nValueError: x")


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path)
    files.ranks.mkdir()
    files.logs.mkdir()
    return files


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


def report(files: RunFiles, codes: dict[int, int]) -> None:
    """What torchrun writes about the ranks it saw fail."""
    text = "".join(
        f"[{i}]:\n  time      : 2026-01-01\n  host      : h\n  rank      : {r} (local_rank: {r})\n"
        f"  exitcode  : {code} (pid: 10{r})\n  error_file: <N/A>\n"
        for i, (r, code) in enumerate(codes.items())
    )
    files.agent_log(0).write_text(text)


def verdict(files: RunFiles, *, ranks: int = 2, agent: int = 1, stopping: bool = False) -> Outcome:
    return judge(Workers(files=files, ranks=range(ranks), node_rank=0, agent_code=agent), stopping=stopping)


@pytest.mark.parametrize("echo", [ECHO, NCCL_ECHO])
def test_the_rank_with_an_error_of_its_own_comes_before_one_that_lost_it(files: RunFiles, echo: RankError) -> None:
    rank(files, 0, "failed", error=echo, after=-5)
    rank(files, 1, "failed", error=OWN)
    outcome = verdict(files)
    assert (outcome.exit_code, outcome.rank) == (70, 1)
    assert outcome.message == "rank 1: ValueError: the loss is not finite"
    assert outcome.traceback[-1] == "ValueError: x"


def test_of_two_errors_the_earlier_is_the_cause(files: RunFiles) -> None:
    rank(files, 0, "failed", error=OWN, after=2)
    rank(files, 1, "failed", error=replace(OWN, message="first"), after=1)
    assert verdict(files).message == "rank 1: ValueError: first"


def test_when_all_only_lost_a_neighbour_the_earliest_is_shown(files: RunFiles) -> None:
    rank(files, 0, "failed", error=ECHO, after=1)
    rank(files, 1, "failed", error=ECHO)
    assert verdict(files).rank == 1


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
    assert silent.exit_code == 70
    assert silent.message == "rank 0 ended without reporting"
    files.rank(0).unlink()
    report(files, {0: 1})
    assert verdict(files).message == "rank 0 ended before it could start, with exit code 1"


def test_stopping_is_an_interruption_unless_something_else_broke(files: RunFiles) -> None:
    rank(files, 0, "interrupted", code=130)
    rank(files, 1, "failed", error=ECHO)
    assert (verdict(files, stopping=True).status, verdict(files, stopping=True).exit_code) == ("interrupted", 130)
    rank(files, 1, "failed", error=OWN)
    assert verdict(files, stopping=True).exit_code == 70
    assert stopped_at_once(files, training=True).exit_code == 130
    assert stopped_at_once(files, training=True).message == "stopped before the first step was done"
    files.metrics.touch()
    assert stopped_at_once(files, training=True).message == "stopped at once, inside a step"
    assert stopped_at_once(files, training=False).message == "stopped before training began"


def test_ranks_that_are_all_done_are_done_even_if_torchrun_stumbles_over_their_end(files: RunFiles) -> None:
    rank(files, 0, "done", code=0)
    rank(files, 1, "done", code=0)
    assert verdict(files, agent=1).exit_code == 0
    # and a wish to stop that came after the last step changes nothing
    assert verdict(files, agent=0, stopping=True).status == "done"


class NonFiniteGradients(Diverged):
    """As the engine's."""


class PlanRefused(ConfigError):
    """As the engine's."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            NonFiniteGradients(
                Problem(
                    key="gradients",
                    value="not finite",
                    reason="NaN or infinite in 1 of the parameters; no weight has changed",
                    fix="lower optimizer.lr",
                )
            ),
            ExitCode.CRASH,
        ),
        (
            PlanRefused(
                Problem(key="plan", value="1a2b", reason="it is for tp = 2, these ranks have tp = 1", fix="start anew")
            ),
            ExitCode.CONFIG,
        ),
    ],
)
def test_what_all_ranks_refused_together_is_told_as_it_was_written_without_traceback(
    files: RunFiles,
    error: CanzonaError,
    code: ExitCode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(2):
        RankRecord(files, number).failed(error)
    report(files, {0: int(code), 1: int(code)})
    outcome = verdict(files)
    status = "diverged" if isinstance(error, Diverged) else "failed"
    assert (outcome.status, outcome.exit_code, outcome.traceback) == (status, code, ())
    monkeypatch.setenv("COLUMNS", "200")
    _say_why(outcome)
    told = capsys.readouterr().err
    (problem,) = error.problems
    for words in (problem.key, problem.reason, problem.fix, "rank 0"):
        assert words in told
    for words in ("Traceback", type(error).__name__, "bug", "A worker crashed"):
        assert words not in told


@pytest.mark.parametrize(("since", "good"), [(25, "step-00000020"), (20, "step-00000010"), (10, None), (None, None)])
def test_a_run_that_diverged_names_the_last_checkpoint_from_before(
    files: RunFiles, since: int | None, good: str | None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for step in (10, 20, 30):
        checkpoints.save(files.checkpoints, step)
    error = Diverged(Problem(key="step 33", reason="the loss is 270", fix="a lower optimizer.lr"), since=since)
    for number in range(2):
        RankRecord(files, number).failed(error)
    report(files, {0: 70, 1: 70})
    outcome = verdict(files)
    assert (outcome.status, outcome.exit_code, outcome.failed, outcome.last_good) == ("diverged", 70, True, good)
    assert load_if_sound(_kept(files, outcome), RunResult) == outcome.result
    monkeypatch.setenv("COLUMNS", "200")
    _say_why(outcome)
    told = capsys.readouterr().err
    assert told.startswith("The run diverged")
    assert (f"checkpoint.resume={good} with a lower" in told) == (good is not None)
    assert ("there is no checkpoint from before" in told) == (good is None and since is not None)


def _kept(files: RunFiles, outcome: Outcome) -> Path:
    save(files.result, outcome.result)
    return files.result


def test_every_problem_of_a_worker_is_told_by_itself(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PlanRefused(
        Problem(key="plan", value="1a2b", reason="it is for tp = 2, these ranks have tp = 1", fix="start anew"),
        Problem(key="gpus", value=3, reason="there are two"),
    )
    RankRecord(files, 0).failed(error)
    RankRecord(files, 1).failed(error)
    outcome = verdict(files)
    assert [(p.key, p.value, p.reason, p.fix) for p in outcome.problems] == [
        ("plan", "1a2b", "it is for tp = 2, these ranks have tp = 1", "start anew"),
        ("gpus", "3", "there are two", ""),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    _say_why(outcome)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "Bad configuration: 2 problems"
    assert {"plan = 1a2b", "→ start anew", "gpus = 3", "there are two"} <= set(lines)


def test_ranks_that_were_saved_when_they_were_stopped_say_as_what(files: RunFiles) -> None:
    for number in range(2):
        record = RankRecord(files, number)
        record.checkpoint = "step-00000027"
        record.ended("preempted")
    outcome = verdict(files, agent=0)
    assert (outcome.status, outcome.exit_code) == ("preempted", ExitCode.PREEMPTED), "also where only ranks were told"
    assert "saved as step-00000027" in outcome.message
    for number in range(2):
        record = RankRecord(files, number)
        record.checkpoint = "step-00000027"
        record.ended("interrupted")
    outcome = verdict(files, agent=0, stopping=True)
    assert (outcome.status, outcome.exit_code) == ("interrupted", ExitCode.INTERRUPTED)
    assert "saved as step-00000027" in outcome.message


def test_a_run_that_ended_unsaved_says_that_and_a_damaged_checkpoint_keeps_its_code(files: RunFiles) -> None:
    unsaved = SaveFailed(Problem(key="checkpoint", value="step-00000008", reason="No space left on device"))
    damaged = CheckpointInvalid(Problem(key="step-00000008/rank-00000.safetensors", reason="damaged"))
    for error, code in ((unsaved, 3), (damaged, 5)):
        for number in range(2):
            RankRecord(files, number).failed(error)
        found = verdict(files, stopping=True)
        assert (found.status, found.exit_code) == ("failed", code)
        assert type(found.error()) is type(error)
        assert found.error().problems == error.problems


def test_records_of_earlier_versions_have_no_problems_and_damaged_ones_count_as_missing(files: RunFiles) -> None:
    record = {"rank": 0, "status": "failed", "exit_code": 70}
    earlier: dict[str, object] = {"type": OWN.type, "message": OWN.message}
    for error in (earlier, {**earlier, "problems": []}):
        write_json_atomic(files.rank(0), {**record, "error": error})
        assert verdict(files, ranks=1).problems == ()
        assert "the loss is not finite" in str(verdict(files, ranks=1).error())
    for damage in ({"problems": "x"}, {"problems": [3]}):
        write_json_atomic(files.rank(0), {**record, "error": damage})
        assert (verdict(files, ranks=1).status, verdict(files, ranks=1).exit_code) == ("failed", 70)
        assert "rank 0 ended before it could start" in verdict(files, ranks=1).message
