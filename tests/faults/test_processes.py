"""The fate of a run of four ranks when one of its processes dies or never starts."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from canzona_cli.run.heartbeat import VARIABLE
from tests.faults.support import TRAINED_RANKS as RANKS
from tests.faults.support import LaunchedRun, alive


def launch(folder: Path, behaviour: str = "endless", *, hang_timeout_s: float = 0) -> LaunchedRun:
    return LaunchedRun(folder / "run", behaviour, ranks=RANKS, hang_timeout_s=hang_timeout_s)


def assert_logs_kept(run: LaunchedRun) -> None:
    for rank in range(RANKS):
        assert f"rank {rank} starts" in run.log(rank)


@pytest.mark.parametrize("victim", ["rank", pytest.param("agent", marks=pytest.mark.sweep)])
def test_a_killed_process_ends_the_run_and_is_named(victim: str, tmp_path: Path) -> None:
    with launch(tmp_path) as run:
        run.wait_for_steps(2)
        family = run.family()
        assert len(family) == RANKS + 1
        agent = next(p for p in family if p.ppid() == run.process.pid)
        os.kill(agent.pid if victim == "agent" else run.pid(2), signal.SIGKILL)
        code, output = run.finish()
    assert code == 70, output
    assert not alive(family)
    result = run.result()
    named, rank = ("torchrun", None) if victim == "agent" else ("rank 2", 2)
    assert str(result["message"]).startswith(f"{named} was killed by signal 9")
    assert result["rank"] == rank
    assert_logs_kept(run)


def test_a_killed_launcher_takes_every_process_along(tmp_path: Path) -> None:
    with launch(tmp_path, hang_timeout_s=60) as run:
        run.wait_for_steps(2)
        family = run.family()
        assert len(family) == RANKS + 1
        beats = Path(psutil.Process(run.pid(0)).environ()[VARIABLE])
        assert beats.parent.is_dir()
    assert not alive(family)
    assert_logs_kept(run)
    assert not beats.exists(), "nobody is left to remove it"


def test_a_worker_that_never_starts_is_named(tmp_path: Path) -> None:
    with launch(tmp_path, "absent", hang_timeout_s=8) as run:
        run.wait_for(lambda: len(run.family()) == RANKS + 1, "all workers")
        family = run.family()
        code, output = run.finish()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert result["rank"] == 1
    assert str(result["message"]).startswith("rank 1 has not started after "), result
    assert "ranks 0 2 3 waiting in start workers" in str(result["message"])


def test_a_rank_stuck_in_python_is_named_with_its_step_phase_and_stack(tmp_path: Path) -> None:
    with launch(tmp_path, "stuck", hang_timeout_s=15) as run:
        run.wait_for_steps(2)
        family = run.family()
        code, output = run.finish()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert (result["status"], result["rank"], result["step"]) == ("failed", 1, 2)
    message = str(result["message"])
    assert message.startswith("rank 1 has been stuck in train/data of step 3 for "), message
    assert message.endswith("; ranks 0 2 3 waiting in train/other of step 3"), message
    assert "stuck_in_a_file_server" in run.log(1), "the stack says in which function"
    events = [json.loads(line) for line in run.files.events.read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "hang")
    assert (event["rank"], event["step"], event["where"]) == (1, 3, "train/data")
