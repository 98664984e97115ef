"""Bad numbers and full disks in real runs of four ranks: what is lost, who is named, and how the run ends."""

import json
import resource
import signal
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.compose import load_resolved
from canzona_cli.core.optimizers import shared_rows
from canzona_cli.core.optimizers.shared_muon import SharedMuon
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Shape, Turns, run_turns
from canzona_cli.launch.resume import choose_resumption
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.records import read_layout
from canzona_cli.training.data import Batch
from tests.faults.forked import forked_run
from tests.faults.support import LaunchedRun

SHARED = ("optimizer=muon", "optimizer.form=gram", "engine.mode=shared", "train.precision=fp32")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def doubt_an_answer() -> None:
    """Distrusts answers from now on, until this process has updated a shared matrix once."""
    real = SharedMuon.update_together

    def doubted(self: SharedMuon, p: torch.Tensor, *, whole: Shape, ranks: FragmentGroup) -> Turns[bool]:
        SharedMuon.update_together = real  # type: ignore[method-assign]
        return run_turns(real(self, p, whole=whole, ranks=ranks), lambda: patch.object(shared_rows, "DOUBT", -1.0))

    SharedMuon.update_together = doubted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "optimizer", [("optimizer=muon",), SHARED, ("optimizer=adamw",)], ids=["canzona", "shared", "megatron"]
)
def test_a_loss_that_is_no_number_on_one_rank(optimizer: tuple[str, ...], tmp_path: Path) -> None:
    """An answer that is not to be trusted precedes it where matrices are shared."""

    def spoil(rank: int, step: int, batch: Batch) -> Batch:
        if (rank, step) == (1, 1):
            doubt_an_answer()
        if (rank, step) == (2, 3):
            batch["loss_mask"] = batch["loss_mask"] * float("nan")
        return batch

    outcome = forked_run(tmp_path / "run", "train.steps=6", *optimizer, spoil=spoil)
    assert (outcome.status, outcome.exit_code) == ("diverged", 70)
    (problem,) = outcome.problems
    assert "the loss is not finite on rank 2" in problem.reason, "and on no other"
    assert ("no weight has changed" in problem.reason) == (optimizer != ("optimizer=adamw",))
    assert problem.fix
    files = RunFiles(tmp_path / "run")
    assert [line["step"] for line in lines(files.metrics)] == [1, 2, 3]
    assert lines(files.metrics)[-1]["loss"] is None
    if optimizer == SHARED:
        assert [line["fallbacks"] for line in lines(files.metrics)] == [0, 1, 1], "known with the next step"
    for rank in range(4):
        record = read_json(files.rank(rank)) or {}
        assert (record["status"], record["exit_code"]) == ("diverged", 70)


TWO = ("gpus=2", "parallel.tp=1", "optimizer=adamw")


@pytest.mark.sweep  # two launches and thirty saves
def test_a_run_that_diverges_after_it_was_resumed(tmp_path: Path) -> None:
    """The first launch goes well and says so; the second, at AdamW's learning rate 5, is lost within steps. Its guard
    knows the first loss of the first."""
    files = RunFiles(tmp_path / "run")
    two = (*TWO, "checkpoint.every_steps=2", "checkpoint.keep=20")
    well = forked_run(files.root, *two, "train.steps=26")
    assert (well.status, well.exit_code) == ("done", 0)
    assert not [line for line in lines(files.events) if line.get("level") == "warning"]
    first = lines(files.metrics)[0]["loss"]

    high = ("train.steps=60", "optimizer.lr=5", "optimizer.adamw_lr=5")
    lost = forked_run(files.root, *two, *high)
    assert (lost.status, lost.exit_code) == ("diverged", 70)
    events = lines(files.events)
    (divergence,) = (line for line in events if line["event"] == "divergence")
    assert isinstance(divergence["since"], int)
    assert 26 < divergence["since"] < 60
    memory = [found.manifest for found in CheckpointStore(files.checkpoints).checkpoints()]
    assert {None if one is None else one.progress.losses.first for one in memory} == {first}
    sound = max(step for step in range(2, divergence["since"], 2))
    assert lost.last_good == f"step-{sound:08d}"
    (problem,) = lost.problems
    assert f"checkpoint.resume=step-{sound:08d}" in problem.fix
    assert {(read_json(files.rank(rank)) or {})["status"] for rank in range(2)} == {"diverged"}

    again = choose_resumption(load_resolved(files.config), read_layout(files.layout))
    assert again is not None
    assert again.step == sound, "the next launch goes back to before it diverged"

    to_the_end = forked_run(files.root, *two, *high, "train.divergence=warn")
    assert [line["step"] for line in lines(files.metrics)] == list(range(1, 61))
    assert (to_the_end.status, to_the_end.exit_code, to_the_end.last_good) == ("diverged", 70, lost.last_good)
    assert "the run continued to its last step, 60, and did not recover" in to_the_end.message
    assert files.breakdown.exists(), "as of a run that is done"


def test_a_disk_that_becomes_full_costs_lines_and_not_the_run(tmp_path: Path) -> None:
    """Rank 0's files cannot grow from step 5 on: metrics, events, its record, its timeline."""

    def fill(rank: int, step: int, batch: Batch) -> Batch:
        if (rank, step) == (0, 5):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        return batch

    outcome = forked_run(
        tmp_path / "run",
        *(*TWO, "train.steps=8", "checkpoint.at_end=false"),
        spoil=fill,
    )
    assert (outcome.status, outcome.exit_code) == ("done", 0)
    files = RunFiles(tmp_path / "run")
    assert [line["step"] for line in lines(files.metrics)] == [1, 2, 3, 4], "whole lines"
    assert [(read_json(files.rank(rank)) or {})["status"] for rank in range(2)] == ["running", "done"]
    assert outcome.message == "could not write the end of rank 0's record"


def test_a_disk_too_full_for_checkpoints_does_not_hold_training_up(tmp_path: Path) -> None:
    """Not a byte of that rank's share can be written, nor the words why; the others' can, and no save waits for it."""

    def fill(rank: int, step: int, batch: Batch) -> Batch:
        if (rank, step) == (1, 3):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return batch

    outcome = forked_run(
        tmp_path / "run",
        *(*TWO[:2], "train.steps=7", "optimizer=muon", "checkpoint.every_steps=2", "checkpoint.every_minutes=null"),
        *("checkpoint.at_end=false", "checkpoint.asynchronous=false"),
        spoil=fill,
    )
    assert (outcome.status, outcome.exit_code) == ("done", 0)
    files = RunFiles(tmp_path / "run")
    # What is hidden is the rest of the last try: other ranks may still write when rank 0 gives it up.
    assert [path.name for path in files.checkpoints.glob("step-*")] == ["step-00000002"]
    failed = [line for line in lines(files.events) if line["event"] == "save_failed"]
    assert [line["step"] for line in failed] == [4, 6]
    assert all("rank 1" in str(line["detail"]) for line in failed)
    assert all("the last checkpoint is step-00000002" in str(line["detail"]) for line in failed)
    assert len(lines(files.metrics)) == 7


@pytest.mark.sweep  # tests/attacks/test_endings.py has a launcher that cannot print
def test_a_disk_that_becomes_full_under_the_launcher(tmp_path: Path) -> None:
    """Ctrl-C still stops the ranks after a whole step, and the exit code tells what result.json cannot."""
    with LaunchedRun(tmp_path / "run", "endless") as run:
        run.wait_for_steps(2)
        psutil.Process(run.process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish()
    assert code == 130, output
    assert "Traceback" not in output
    assert "result.json cannot be written" in output
    assert not run.files.result.exists()
    assert [run.record(rank)["status"] for rank in range(2)] == ["interrupted"] * 2
