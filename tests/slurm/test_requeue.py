"""A job that Slurm takes away, or whose machine fails, queues again and ends with the weights of one that nobody
disturbed."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.records import read_rank
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


def launcher_of(rank_pid: int, node: str) -> psutil.Process:
    """Returns the launcher of a node: the highest ancestor of its rank that has the node's name in its environment and
    is no process of Slurm's."""
    ancestors = psutil.Process(rank_pid).parents()
    return [p for p in ancestors if "canzona" in " ".join(p.cmdline()) and p.environ()["SLURMD_NODENAME"] == node][-1]


@pytest.mark.parametrize("fault", ["a rank is killed", "a rank hangs", "a machine dies"])
def test_after_a_failure_a_job_continues_without_the_machine(
    slurm: Slurm, here: Path, environment: dict[str, str], fault: str
) -> None:
    """Runs on two of three machines. The machine that dies is the one whose launcher would report the failure."""
    more = ("checkpoint.every_steps=5", "run.hang_timeout_s=20")
    job_id = submit(slurm, here, environment, *SMALL, f"train.steps={STEPS}", *more)
    files = RunFiles(here / "runs" / f"qwen3-tiny-{job_id}")
    wait_for_steps(slurm, job_id, files, 7)
    assert slurm.job(job_id)["NodeList"] == "n[1-2]"
    rank = 0 if fault == "a machine dies" else 1
    bad, pid = f"n{rank + 1}", read_rank(files, rank).pid
    assert pid is not None
    if fault == "a machine dies":
        launcher = launcher_of(pid, bad)
        for process in [launcher, *launcher.children(recursive=True)]:
            process.kill()
    else:
        os.kill(pid, signal.SIGKILL if fault == "a rank is killed" else signal.SIGSTOP)
    slurm.wait_for(job_id, "PENDING")
    ended = slurm.wait_for(job_id, "COMPLETED")
    log = Path(ended["StdOut"]).read_text()
    assert f": requeueing after a failure on {bad} (1 of 3)" in log, log
    assert (ended["Restarts"], ended["ExcNodeList"]) == ("1", bad)
    assert ended["NodeList"] == ("n[2-3]" if bad == "n1" else "n[1,3]")
    steps = [json.loads(line)["step"] for line in files.metrics.read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert re.search(r"resumes +from step \d+", log), log
    assert (read_json(files.result) or {})["status"] == "done"
    final_tensors(files)


@pytest.mark.parametrize(
    ("notes", "restarts", "said"),
    [
        (
            ["n1", "n2", "n3", ""],
            3,
            "is not requeued after failure 4 (at most 3); it ends, and its checkpoints are kept",
        ),
        (["", "preempted", "", "over"], 3, "requeueing after a failure (2 of 3)"),
        (["elsewhere", "over"], 1, "requeueing after a failure on elsewhere (1 of 3)"),
    ],
)
def test_a_job_is_requeued_after_three_failures_at_most_and_never_waits_for_machines_that_it_avoids(
    slurm: Slurm, here: Path, notes: list[str], restarts: int, said: str
) -> None:
    """The bare script around a program that fails on a machine in each start. With one machine left, none is added."""
    stand_in = here / "canzona"
    (here / "notes").write_text("".join(f"{note}\n" for note in notes))
    stand_in.write_text(
        f"""#!/bin/sh
[ "$1" = slurm ] && echo "1 0 {here}/with spaces" && exit
note=$(sed -n "$((${{SLURM_RESTART_COUNT:-0}} + 1))p" {here}/notes)
[ "$note" = preempted ] && exit 75
[ "$note" = over ] && exit 70
mkdir -p "{here}/with spaces"
echo "$note" >"$CANZONA_FAILURE"; exit 71
"""
    )
    stand_in.chmod(0o755)
    script = str(REPOSITORY / "scripts" / "train.sbatch")
    submitted = ("sbatch", "--parsable", "--exclude=n3", script)
    done = slurm.command(*submitted, cwd=here, environment={"CANZONA": str(stand_in)})
    ended = slurm.wait_for(done.stdout.strip(), "FAILED")
    log = Path(ended["StdOut"]).read_text()
    assert ended["Restarts"] == str(restarts), log
    assert said in log
    assert ("n2 is not excluded, because fewer than 1 other nodes are left" in log) == ("n2" in notes), log
    assert {*ended["ExcNodeList"].split(",")} == ({"n1", "n3"} if "n1" in notes else {"n3"})


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
