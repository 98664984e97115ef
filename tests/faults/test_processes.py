"""What becomes of a run of four ranks when one of its processes dies or never comes to life."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from canzona_cli.run.files import read_json
from canzona_cli.run.heartbeat import VARIABLE
from tests.faults.support import LaunchedRun, alive
from tests.waiting import PATIENCE_S

RANKS = 4


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[LaunchedRun]]:
    """Runs to be ended, also where a test fails midway."""
    runs: list[LaunchedRun] = []
    yield runs
    for run in runs:
        run.process.kill()
        run.process.communicate()


def launch(
    started: list[LaunchedRun], folder: Path, behaviour: str = "endless", *, hang_timeout_s: float = 0
) -> LaunchedRun:
    started.append(LaunchedRun(folder / "run", behaviour, ranks=RANKS, hang_timeout_s=hang_timeout_s))
    return started[-1]


def pid_of(run: LaunchedRun, rank: int) -> int:
    record = read_json(run.files.rank(rank))
    assert record is not None
    return int(str(record["pid"]))


def assert_logs_kept(run: LaunchedRun) -> None:
    for rank in range(RANKS):
        log = run.files.worker_log(0, rank)
        assert log is not None
        assert f"rank {rank} starts" in log.read_text()


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_killed_process_ends_the_run_and_is_named(victim: str, started: list[LaunchedRun], tmp_path: Path) -> None:
    run = launch(started, tmp_path)
    run.wait_for_steps(2)
    family = run.family()
    assert len(family) == RANKS + 1
    agent = next(p for p in family if p.ppid() == run.process.pid)
    os.kill(agent.pid if victim == "agent" else pid_of(run, 2), signal.SIGKILL)
    code, output = run.finish()
    assert code == 70, output
    assert not alive(family)
    result = run.result()
    named, rank = ("torchrun", None) if victim == "agent" else ("rank 2", 2)
    assert str(result["message"]).startswith(f"{named} was killed by signal 9")
    assert result["rank"] == rank
    assert_logs_kept(run)


def test_a_killed_launcher_takes_every_process_along(started: list[LaunchedRun], tmp_path: Path) -> None:
    run = launch(started, tmp_path, hang_timeout_s=60)
    run.wait_for_steps(2)
    family = run.family()
    assert len(family) == RANKS + 1
    beats = Path(psutil.Process(pid_of(run, 0)).environ()[VARIABLE])
    assert beats.parent.is_dir()
    run.process.kill()
    run.finish()
    assert not alive(family)
    assert_logs_kept(run)
    assert not beats.exists(), "nobody is left to remove it"


def test_a_worker_that_never_starts_is_named(started: list[LaunchedRun], tmp_path: Path) -> None:
    run = launch(started, tmp_path, "absent", hang_timeout_s=8)
    run.wait_for(lambda: len(run.family()) == RANKS + 1, "all workers")
    family = run.family()
    code, output = run.finish()
    assert code == 71, output
    assert not alive(family)
    result = run.result()
    assert result["rank"] == 1
    assert str(result["message"]).startswith("rank 1 has not started after "), result
    assert "ranks 0 2 3 waiting in start workers" in str(result["message"])


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        overrides = ("recipe=qwen3-tiny", "gpus=4", "cluster.nodes=2", "cluster.node_rank=0", f"run.dir={tmp_path}/run")
        done = subprocess.run(
            [sys.executable, "-m", "canzona_cli.app", "train", *overrides, f"cluster.rdzv_endpoint={endpoint}"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 3, done.stderr
    told = " ".join(done.stderr.split())
    assert "cluster.rdzv_endpoint" in told
    assert "another program on this machine uses this port" in told
    assert f"process {os.getpid()}" in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
