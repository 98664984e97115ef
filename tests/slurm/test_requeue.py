"""A job that Slurm takes away saves itself, queues again and ends with the weights of one that nobody disturbed."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.records.files import RunFiles, read_json
from tests.slurm.cluster import Slurm
from tests.slurm.test_jobs import REPOSITORY, SMALL, environment, submit
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slurm
__all__ = ["environment"]  # the fixture

STEPS = 30


def steps_done(files: RunFiles) -> int:
    return files.metrics.read_text().count("\n") if files.metrics.exists() else 0


def wait_for_steps(slurm: Slurm, job_id: str, files: RunFiles, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while steps_done(files) < count:
        job = slurm.job(job_id)
        if job["JobState"] not in ("PENDING", "RUNNING") or time.monotonic() > deadline:
            raise AssertionError(f"{job['JobState']} before step {count}:\n{Path(job['StdOut']).read_text()}")
        time.sleep(0.05)


def final_tensors(files: RunFiles) -> Mapping[str, str]:
    """Returns the last checkpoint's entry for each tensor, its hash included, after verifying the whole of it."""
    newest = CheckpointStore(files.checkpoints).latest()
    assert newest is not None
    assert newest.step == STEPS
    manifest, problems = verify(newest.path)
    assert problems == []
    assert manifest.tensors
    return {name: repr(tensor) for name, tensor in manifest.tensors.items()}


def losses(files: RunFiles) -> Iterator[object]:
    for line in files.metrics.read_text().splitlines():
        yield json.loads(line)["loss"]


def test_a_preempted_job_ends_with_the_same_weights(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    arguments = (*SMALL, f"train.steps={STEPS}")
    job_id = submit(slurm, here, environment, *arguments)
    files = RunFiles(here / "runs" / f"qwen3-tiny-{job_id}")
    wait_for_steps(slurm, job_id, files, 3)
    slurm.ask("scancel", "--signal=USR2", job_id)
    slurm.wait_for(job_id, "PENDING")
    assert steps_done(files) < STEPS, "preempted in the middle"
    saved_at = CheckpointStore(files.checkpoints).latest()
    assert saved_at is not None
    assert saved_at.step == steps_done(files), "nothing was lost"
    ended = slurm.wait_for(job_id, "COMPLETED")
    assert ended["Restarts"] == "1"
    log = Path(ended["StdOut"]).read_text()
    assert ": requeueing (1 of 20)" in log, "the log of the first start is kept"
    assert (read_json(files.result) or {})["status"] == "done"

    undisturbed = submit(slurm, here, environment, *arguments)
    slurm.wait_for(undisturbed, "COMPLETED")
    other = RunFiles(here / "runs" / f"qwen3-tiny-{undisturbed}")
    assert list(losses(files)) == list(losses(other))
    assert final_tensors(files) == final_tensors(other)


@pytest.mark.parametrize(
    ("code", "requeues", "restarts", "said"),
    [
        (75, 2, 2, "was requeued 2 times, which is the limit; it ends, and its checkpoints are kept"),
        (75, 0, 0, "was requeued 0 times"),
        (70, 2, 0, "training"),
        (130, 2, 0, "training"),
    ],
)
def test_only_a_preempted_job_is_requeued_and_only_as_often_as_it_may(
    slurm: Slurm, here: Path, code: int, requeues: int, restarts: int, said: str
) -> None:
    """The bare script around a program that ends like `canzona train` would."""
    stand_in = here / "canzona"
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = slurm ] && echo 1 && exit\necho training; exit {code}\n')
    stand_in.chmod(0o755)
    environment = {"CANZONA": str(stand_in), "CANZONA_REQUEUES": str(requeues)}
    script = str(REPOSITORY / "scripts" / "train.sbatch")
    done = slurm.command("sbatch", "--parsable", script, cwd=here, environment=environment)
    ended = slurm.wait_for(done.stdout.strip(), "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", str(restarts))
    log = Path(ended["StdOut"]).read_text()
    assert log.splitlines().count("training") == restarts + 1, "each start adds to one log"
    assert said in log


def test_a_job_that_is_too_small_is_refused_and_not_submitted_again(slurm: Slurm, here: Path) -> None:
    stand_in = here / "canzona"
    stand_in.write_text('#!/bin/sh\n[ "$1" = slurm ] && echo 2 && exit\nexit 1\n')
    stand_in.chmod(0o755)
    script = str(REPOSITORY / "scripts" / "train.sbatch")
    done = slurm.command("sbatch", "--parsable", script, cwd=here, environment={"CANZONA": str(stand_in)})
    ended = slurm.wait_for(done.stdout.strip(), "FAILED")
    assert ended["ExitCode"] == "2:0"
    log = Path(ended["StdOut"]).read_text()
    assert "the run needs 2 nodes" in log
    assert log.rstrip().endswith("Submit it with: sbatch --nodes=2")
    assert slurm.ask("squeue", "--noheader") == "", "it has not submitted itself again"
