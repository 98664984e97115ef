"""A job that Slurm takes away saves itself, queues again and ends with the weights of one that nobody disturbed."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.launch.files import RunFiles, read_json
from tests.slurm.cluster import Slurm
from tests.slurm.test_jobs import SMALL, environment, submit

pytestmark = pytest.mark.slurm
__all__ = ["environment"]  # the fixture

STEPS = 30


def steps_done(files: RunFiles) -> int:
    return files.metrics.read_text().count("\n") if files.metrics.exists() else 0


def wait_for_steps(slurm: Slurm, job_id: str, files: RunFiles, count: int) -> None:
    deadline = time.monotonic() + 120
    while steps_done(files) < count:
        job = slurm.job(job_id)
        if job["JobState"] not in ("PENDING", "RUNNING") or time.monotonic() > deadline:
            raise AssertionError(f"{job['JobState']} before step {count}:\n{Path(job['StdOut']).read_text()}")
        time.sleep(0.05)


def final_tensors(files: RunFiles) -> Mapping[str, str]:
    """What the last checkpoint says of each tensor, its hash included; the whole of it is verified."""
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


def test_a_preempted_job_goes_on_where_it_was_and_ends_with_the_same_weights(
    slurm: Slurm, here: Path, environment: dict[str, str]
) -> None:
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
    ended = slurm.wait_for(job_id, "COMPLETED", seconds=180)
    assert ended["Restarts"] == "1"
    log = Path(ended["StdOut"]).read_text()
    assert "goes back to the queue, for the 1. of at most 20 times" in log, "the log of the first start is kept"
    assert (read_json(files.result) or {})["status"] == "done"

    undisturbed = submit(slurm, here, environment, *arguments)
    slurm.wait_for(undisturbed, "COMPLETED", seconds=180)
    other = RunFiles(here / "runs" / f"qwen3-tiny-{undisturbed}")
    assert list(losses(files)) == list(losses(other))
    assert final_tensors(files) == final_tensors(other)


def test_a_job_is_requeued_as_often_as_it_may_and_no_more(
    slurm: Slurm, here: Path, environment: dict[str, str]
) -> None:
    job_id = submit(slurm, here, environment, "--requeues=0", *SMALL, "train.steps=100000")
    files = RunFiles(here / "runs" / f"qwen3-tiny-{job_id}")
    wait_for_steps(slurm, job_id, files, 2)
    slurm.ask("scancel", "--signal=USR2", job_id)
    ended = slurm.wait_for(job_id, "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("75:0", "0")
    assert "as often as it may: it ends here, its checkpoints stay" in Path(ended["StdOut"]).read_text()
    newest = CheckpointStore(files.checkpoints).latest()
    assert newest is not None
    assert verify(newest.path)[1] == []
