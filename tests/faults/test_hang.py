"""Ranks that slow down, stop or get stuck: named with step and phase, and no run waits for them for ever."""

import json
import os
import re
import signal
from pathlib import Path

from canzona_cli.run.files import RunFiles, read_json
from tests.faults.support import TRAINED_RANKS as RANKS
from tests.faults.support import LaunchedRun, TrainingRun, alive
from tests.faults.table import RecordFault


def test_a_rank_stuck_in_python_is_named_with_its_step_phase_and_stack(
    tmp_path: Path, record_fault: RecordFault
) -> None:
    run = LaunchedRun(tmp_path / "run", "stuck", ranks=RANKS, hang_timeout_s=15)
    try:
        run.wait_for_steps(2)
        family = run.family()
        code, output = run.finish()
    finally:
        run.process.kill()
        run.process.communicate()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert (result["status"], result["rank"], result["step"]) == ("failed", 1, 2)
    message = str(result["message"])
    assert message.startswith("rank 1 is stuck in train/data of step 3 for "), message
    assert message.endswith("; ranks 0 2 3 waiting in train/other of step 3"), message
    log = run.files.worker_log(0, 1)
    assert log is not None
    assert "stuck_in_a_file_server" in log.read_text(), "the stack says in which function"
    (event,) = (e for e in events(run.files) if e["event"] == "hang")
    assert (event["rank"], event["step"], event["where"]) == (1, 3, "train/data")
    record_fault(
        fault="a rank stuck in a read",
        happened="rank, step and phase named after run.hang_timeout_s, stacks of all ranks in their logs",
        exit_code=code,
        lost="the steps since the last checkpoint",
    )


def test_a_stopped_rank_ends_the_run_and_is_named(
    tmp_path: Path, corpus_cache: Path, record_fault: RecordFault
) -> None:
    training = TrainingRun(tmp_path, corpus_cache, "run.hang_timeout_s=30")
    files = training.files
    try:
        training.wait_for(lambda: training.steps >= 3)
        family = training.processes()
        assert len(family) == RANKS + 1
        os.kill(training.pid(3), signal.SIGSTOP)
        code, output = training.finish()
    finally:
        training.process.kill()
        training.process.wait()
    assert code == 71, output
    assert not alive(family)
    result = read_json(files.result)
    assert result is not None
    assert result["rank"] == 3
    message = str(result["message"])
    assert message.startswith("rank 3 is stopped (SIGSTOP; SIGCONT resumes it), for "), message
    step = re.search(r", in train/\w+ of step (\d+); ", message)
    assert step is not None, message
    assert int(step[1]) - training.steps in (0, 1), "the last one in the metrics, or the one after it"
    assert re.search(r"ranks? [012 ]+ waiting in train/", message), message
    assert "The run hangs" in output
    assert "Traceback" not in output
    log = files.worker_log(0, 0)
    assert log is not None
    assert "in wait" in log.read_text(), "the stack of a rank that waits"
    record_fault(
        fault="SIGSTOP of a rank",
        happened="rank, step and phase named after run.hang_timeout_s, with what the others wait in",
        exit_code=71,
        lost="the steps since the last checkpoint",
    )


def events(files: RunFiles) -> list[dict[str, object]]:
    """Whole lines of events.jsonl so far."""
    text = files.events.read_text() if files.events.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
