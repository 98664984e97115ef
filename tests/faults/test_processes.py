"""The fate of a run of three ranks when one of its processes dies or never starts."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.support import LaunchedRun, alive

RANKS = 3


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
    assert not alive(family)
    assert_logs_kept(run)


def test_a_worker_that_never_starts_is_named(tmp_path: Path) -> None:
    with launch(tmp_path, "absent", hang_timeout_s=5) as run:
        run.wait_for(lambda: len(run.family()) == RANKS + 1, "all workers")
        family = run.family()
        code, output = run.finish()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert result["rank"] == 1
    assert result["message"] == "rank 1 has not started"


def test_a_rank_stuck_in_python_is_named_with_its_step_and_place(tmp_path: Path) -> None:
    with launch(tmp_path, "stuck", hang_timeout_s=15) as run:
        run.wait_for_steps(2)
        family = run.family()
        code, output = run.finish()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert (result["status"], result["rank"], result["step"]) == ("failed", 1, 2)
    message = str(result["message"])
    assert message.startswith("rank 1 made no progress in File "), message
    assert message.endswith(" in stuck_in_a_file_server"), message


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    with launch(tmp_path, hang_timeout_s=10) as run:
        run.wait_for_steps(3)
        os.kill(run.pid(2), signal.SIGSTOP)
        code, output = run.finish()
    assert code == 71, output
    assert str(run.result()["message"]).startswith("rank 2 does not respond: stopped")
