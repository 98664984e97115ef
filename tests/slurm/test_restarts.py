"""A job whose ranks crash and hang starts them again on its machines, and leaves a command that goes on after that."""

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from canzona_cli.records.codec import load_if_valid
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import RunResult, read_rank
from tests.slurm.cluster import Slurm
from tests.slurm.test_jobs import CANZONA, SMALL, environment, submit
from tests.slurm.test_requeue import steps_done, wait_for_steps
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]  # five starts on one machine
__all__ = ["environment"]  # the fixture

STEPS = 150
FAULTS = ((signal.SIGKILL, 10), (signal.SIGSTOP, 30), (signal.SIGKILL, 50))
"""The signals sent to rank 1, and the number of steps of the run after which each is sent."""


def wait_for_launch(files: RunFiles, number: int) -> None:
    """Waits until files of earlier launches have been moved and the ranks of this launch run."""
    deadline = time.monotonic() + PATIENCE_S
    while not (number == 0 or (files.attempts / str(number)).exists()) or read_rank(files, 1).status != "running":
        assert time.monotonic() < deadline, f"launch {number} does not start"
        time.sleep(0.1)


def test_a_job_starts_again_after_a_crash_and_a_hang_and_its_command_goes_on_after_that(
    slurm: Slurm, here: Path, environment: dict[str, str]
) -> None:
    job_id = submit(
        *(
            slurm,
            here,
            environment | {"CANZONA_REQUEUES_AFTER_FAILURES": "0"},
            *SMALL,
            "--time=20",
            f"train.steps={STEPS}",
            "checkpoint.every_steps=5",
        ),
        *("run.restarts=2", "run.hang_timeout_s=20"),
    )
    files = RunFiles(here / "runs" / f"qwen3-tiny-{job_id}")
    for launch, (fault, after) in enumerate(FAULTS):
        wait_for_launch(files, launch)
        wait_for_steps(slurm, job_id, files, after)
        pid = read_rank(files, 1).pid
        assert pid is not None
        os.kill(pid, fault)
    ended = slurm.wait_for(job_id, "FAILED")
    log = Path(ended["StdOut"]).read_text()
    assert (ended["ExitCode"], ended["Restarts"]) == ("70:0", "0"), log
    assert "restarting in 10 s (restart 1 of 2" in log
    assert "restarting in 10 s (restart 2 of 2" in log, "it had come further"
    results = [load_if_valid(one.result, RunResult) for one in (*(RunFiles(files.attempts / n) for n in "12"), files)]
    told = [(one.exit_code, one.rank, one.restarts) for one in results if one is not None]
    assert told == [(70, 1, 0), (71, 1, 1), (70, 1, 2)], log
    assert "is not requeued after failure 1 (at most 0)" in log
    last = results[-1]
    assert last is not None
    assert "restarted 2 times, as often as run.restarts allows" in last.message
    assert last.go_on is not None
    assert last.go_on in log

    program, *words = shlex.split(last.go_on)
    assert [program, *words[:4]] == ["canzona", "slurm", "--submit", "--time=20:00", "--partition=main"]
    done = slurm.command(str(CANZONA), *words, cwd=here, environment=environment)
    assert done.returncode == 0, done.stderr
    again = done.stdout.split("\n", 1)[0].removeprefix("job").strip().split(",")[0]
    slurm.wait_for(again, "COMPLETED")
    assert steps_done(files) == STEPS
    assert [json.loads(line)["step"] for line in files.metrics.read_text().splitlines()] == list(range(1, STEPS + 1))
    assert len(list(files.root.parent.iterdir())) == 2, "the run, and the folder of submitted arguments"
