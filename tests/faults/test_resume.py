"""`canzona train` typed again after its processes have gone goes on as if nothing had happened."""

import gc
import json
import os
import signal
from pathlib import Path

import pytest

from canzona_cli.checkpoint.manifest import step_name
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.core.engine.shared import Sharing
from canzona_cli.records.files import RunFiles
from canzona_cli.records.summary import load_summary
from canzona_cli.training.data import Batch
from tests.dist.jobs import EXPERTS
from tests.faults.forked import forked_run

SHARED = ("optimizer.form=gram", "engine.mode=shared", "train.precision=fp32")


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def curve(files: RunFiles) -> list[tuple[object, ...]]:
    lines = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    return [tuple(line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")) for line in lines]


def assert_same_end(one: RunFiles, other: RunFiles, steps: int) -> None:
    """Masters and states of the last checkpoints, byte by byte."""
    ends = [read_manifest(files.checkpoints / step_name(steps)) for files in (one, other)]
    shards = [{name: file for name, file in end.files.items() if name.startswith("rank-")} for end in ends]
    assert shards[0] == shards[1]
    assert shards[0]
    assert ends[0].progress == ends[1].progress


@pytest.mark.sweep  # five launches; `tests/dist/test_checkpoint_state.py` resumes too, and tests/launch restarts
def test_a_run_whose_rank_is_killed_every_five_steps_ends_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, the first time between two exchanges of matrices that two TP ranks share; and `report` counts what
    was trained twice."""
    steps = 12
    often = (
        *SHARED,
        "gpus=2",
        "parallel.tp=2",
        "train.micro_batch_size=4",
        f"train.steps={steps}",
        "checkpoint.every_steps=2",
    )
    straight, broken = RunFiles(tmp_path / "straight"), RunFiles(tmp_path / "broken")
    assert forked_run(straight.root, *often).exit_code == 0
    goes_on_at = 1
    for at in (6, 10):
        batch = at - goes_on_at + 1  # each launch counts its own

        def kill(rank: int, number: int, given: Batch, batch: int = batch, within: bool = at == 6) -> Batch:
            if (rank, number) == (1, batch):
                if within:
                    monkeypatch.setattr(Sharing, "update", lambda *_: _end())
                else:
                    _end()
            return given

        with pytest.raises(AssertionError, match="rank 1 died without a word"):
            forked_run(broken.root, *often, "checkpoint.asynchronous=false", spoil=kill)
        gc.collect()  # the launch's hold on its directory
        goes_on_at = at - 1
    assert forked_run(broken.root, *often).exit_code == 0
    assert curve(broken) == curve(straight)
    assert_same_end(straight, broken, steps)

    def trained_s(files: RunFiles) -> float:
        return sum(float(json.loads(line)["step_s"]) for line in files.metrics.read_text().splitlines())

    attempts = [RunFiles(folder) for folder in broken.attempts.iterdir()]
    assert sorted(curve(attempt)[0][0] for attempt in attempts) == [5, 9], "trained twice"  # type: ignore[type-var]
    found = load_summary(broken.root).goodput
    assert found is not None
    assert found.kept_s == pytest.approx(trained_s(broken))
    assert found.redone_s == pytest.approx(sum(map(trained_s, attempts)))
    assert 0 < found.share < 1


@pytest.mark.sweep
def test_a_run_with_experts_is_killed_and_goes_on_wherever_it_has_ranks(tmp_path: Path) -> None:
    """Four ranks with a quarter of the experts each, one rank, and four with half of them, which TP 2 does not cut:
    together they train as the first four do alone. `test_checkpoint_state` compares what they read, bit by bit."""
    job = (*EXPERTS, "train.precision=fp32", "train.steps=9", "checkpoint.every_steps=2", "checkpoint.keep=9")
    quarters = ("gpus=4", "parallel.tp=1", "parallel.ep=4", "train.micro_batch_size=1")
    halves = ("gpus=4", "parallel.tp=2", "parallel.ep=2")
    straight, broken = RunFiles(tmp_path / "straight"), RunFiles(tmp_path / "broken")
    assert forked_run(straight.root, *job, *quarters).exit_code == 0
    for at, layout in ((4, quarters), (3, ("gpus=1", "parallel.tp=1", "train.micro_batch_size=4"))):

        def kill(rank: int, number: int, given: Batch, at: int = at) -> Batch:
            if (rank, number) == (0, at):
                _end()
            return given

        with pytest.raises(AssertionError, match="died without a word"):
            forked_run(broken.root, *job, *layout, "checkpoint.asynchronous=false", spoil=kill)
        gc.collect()  # the launch's hold on its directory
    assert forked_run(broken.root, *job, *halves).exit_code == 0
    assert [line[0] for line in curve(broken)] == [line[0] for line in curve(straight)] == list(range(1, 10))
    for place in (1, 3):  # losses and norms
        assert [line[place] for line in curve(broken)] == pytest.approx(
            [line[place] for line in curve(straight)], rel=1e-5
        )
    layouts = {step: broken.checkpoints / step_name(step) / "layout.json" for step in (2, 4, 6)}
    assert {step: json.loads(file.read_text())["ep"] for step, file in layouts.items()} == {2: 4, 4: 1, 6: 2}
