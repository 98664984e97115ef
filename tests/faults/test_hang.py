"""Ranks that slow down, stop or get stuck: named with step and phase, and no run waits for them for ever."""

import json
from pathlib import Path

from canzona_cli.run.files import RunFiles
from tests.faults.support import TRAINED_RANKS as RANKS
from tests.faults.support import LaunchedRun, alive


def test_a_rank_stuck_in_python_is_named_with_its_step_phase_and_stack(tmp_path: Path) -> None:
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


def events(files: RunFiles) -> list[dict[str, object]]:
    """Whole lines of events.jsonl so far."""
    text = files.events.read_text() if files.events.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
