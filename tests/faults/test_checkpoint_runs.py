"""Runs whose checkpoints fail: a disk that fills while they train, and a newest checkpoint that is damaged."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.run.codec import JsonLines
from canzona_cli.run.files import RunFiles, read_json
from canzona_cli.training.data import Batch
from tests.checkpoint.checkpoints import names
from tests.faults.disks import small_disk
from tests.faults.forked import forked_run
from tests.faults.support import REPOSITORY
from tests.faults.table import RecordFault

LEFT = 256 << 10
"""Bytes: room for what a run says, and for no checkpoint."""


def fill_disk(folder: Path) -> None:
    free = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - LEFT)


def test_a_disk_that_fills_costs_the_saves_it_has_no_room_for_and_the_run_says_so(
    tmp_path: Path, record_fault: RecordFault
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 128 << 10) as mounted:

        def fill(rank: int, step: int, batch: Batch) -> Batch:
            if step == 3 and mounted and rank == 0:
                fill_disk(disk)
            elif step == 3 and not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT, LEFT))
            return batch

        # Each save is over when the next step begins, so that it is known what finds the disk full.
        settings = ("train.steps=6", "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
        outcome = forked_run(disk / "run", *settings, spoil=fill)
        assert (outcome.status, outcome.exit_code) == ("failed", 3)
        (problem,) = outcome.problems
        said = "No space left on device" if mounted else "File too large"
        assert said in problem.reason
        assert "the last checkpoint is step-00000002" in problem.reason
        store = CheckpointStore(disk / "run" / "checkpoints")
        assert os.listdir(store.root) == ["step-00000002"], "no half checkpoint is left"
        assert verify(store.root / "step-00000002")[1] == []
        # Its weights are good for a run of another kind, elsewhere.
        settings = ("train.steps=1", "optimizer=adamw", "checkpoint.at_end=false")
        begun = forked_run(tmp_path / "begun", *settings, f"checkpoint.weights_from={disk / 'run'}")
        assert (begun.status, begun.exit_code) == ("done", 0)
        (first, *_), (only,) = (JsonLines(root / "metrics.jsonl").read() for root in (disk / "run", tmp_path / "begun"))
        assert (only["step"], only["tokens"]) == (1, first["tokens"])
        loss, before = only["loss"], first["loss"]
        assert isinstance(loss, float)
        assert isinstance(before, float)
        assert loss < before, "the batch of step 1 again, with weights that have learnt from it"
        record_fault(
            fault="disk full while four ranks train",
            happened="the run goes on and warns at each save; at its end the last whole checkpoint is named",
            exit_code=outcome.exit_code,
            lost="steps since the last checkpoint",
        )


def train(run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    small = ("recipe=qwen3-tiny", "gpus=2", "model.num_layers=2", "train.seq_length=32", "train.global_batch_size=2")
    fixed = (*small, "train.eval_interval=0", "checkpoint.every_steps=2", "schedule.decay_steps=6", f"run.dir={run}")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "canzona_cli.app", "train", *fixed, *overrides]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.sweep
def test_a_damaged_newest_checkpoint_ends_a_launch_and_the_one_before_goes_on(
    tmp_path: Path, record_fault: RecordFault
) -> None:
    run = tmp_path / "run"
    files, store = RunFiles(run), CheckpointStore(run / "checkpoints")
    done = train(run, "train.steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    path = store.root / "step-00000004" / "rank-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    done = train(run, "train.steps=6")
    assert done.returncode == 5, done.stdout + done.stderr
    for part in ("step-00000004/rank-00001.safetensors", "damaged", "checkpoint.resume=step-00000002"):
        assert part in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert names(store) == ["step-00000002", "step-00000004"], "nothing is taken in silence"
    done = train(run, "train.steps=6", "checkpoint.resume=step-00000002")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (read_json(files.result) or {})["step"] == 6
    assert names(store) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [verify(found.path)[1] for found in store.checkpoints()] == [[], [], []]
    record_fault(
        fault="one bit of the newest checkpoint flipped, then launched again",
        happened="the ranks hash it before opening it; the one before is offered, and goes on when asked for",
        exit_code=5,
        lost="the steps since the checkpoint before",
    )
