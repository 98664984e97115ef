"""Runs whose checkpoints fail: a disk that fills while they train, and a newest checkpoint that is damaged."""

import os
import resource
from pathlib import Path

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.records.codec import JsonLines
from canzona_cli.training.data import Batch
from tests.faults.disks import small_disk
from tests.faults.forked import forked_run

TWO = ("gpus=2", "parallel.tp=1")
LEFT = 256 << 10
"""Bytes: room for what a run says, and for no checkpoint."""


def fill_disk(folder: Path) -> None:
    free = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - LEFT)


def test_a_disk_that_fills_costs_the_saves_it_has_no_room_for_and_the_run_says_so(tmp_path: Path) -> None:
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
        outcome = forked_run(disk / "run", *TWO, *settings, spoil=fill)
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
        begun = forked_run(tmp_path / "begun", *TWO, *settings, f"checkpoint.weights_from={disk / 'run'}")
        assert (begun.status, begun.exit_code) == ("done", 0)
        (first, *_), (only,) = (JsonLines(root / "metrics.jsonl").read() for root in (disk / "run", tmp_path / "begun"))
        assert (only["step"], only["tokens"]) == (1, first["tokens"])
        loss, before = only["loss"], first["loss"]
        assert isinstance(loss, float)
        assert isinstance(before, float)
        assert loss < before, "the batch of step 1 again, with weights that have learnt from it"
