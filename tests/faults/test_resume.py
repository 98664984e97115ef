"""`canzona train` typed again after its processes have gone goes on as if nothing had happened."""

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from canzona_cli.checkpoint.manifest import step_name
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.run.files import RunFiles
from canzona_cli.run.summary import load_summary
from canzona_cli.training.data import Batch
from tests.faults.forked import forked_run
from tests.faults.support import TRAINED, TrainingRun, alive
from tests.faults.table import RecordFault

STEPS = 20
EVERY = 5
"""Steps between two checkpoints."""
SHORT = (
    f"train.steps={STEPS}",
    "train.eval_interval=10",
    "train.eval_batches=1",
    "schedule.warmup_steps=2",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.every_minutes=null",
)
ONE_RANK = ("gpus=1", "parallel.tp=1")
FOUR_RANKS = ("gpus=4", "parallel.tp=2", "train.global_batch_size=4")
# What each optimizer keeps comes back bit by bit in tests/dist/test_checkpoint_state.py.
CASES = {
    "muon, one rank": ONE_RANK,
    "muon": FOUR_RANKS,
    # Refreshed every tenth step: before and after the kill.
    "soap": ("optimizer=soap", "optimizer.lr=0.002", *FOUR_RANKS),
}
Start = Callable[..., TrainingRun]


@pytest.fixture
def start(tmp_path: Path, corpus_cache: Path) -> Iterator[Start]:
    started: list[TrainingRun] = []

    def begin(name: str, *overrides: str) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        started.append(TrainingRun(tmp_path / name, corpus_cache, *SHORT, *overrides))
        return started[-1]

    yield begin
    for training in started:
        training.process.kill()
        training.process.wait()


def curve(files: RunFiles) -> list[tuple[object, ...]]:
    lines = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    return [tuple(line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")) for line in lines]


def validations(files: RunFiles) -> list[tuple[object, ...]]:
    lines = [json.loads(line) for line in files.validation.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def assert_same_end(one: RunFiles, other: RunFiles, steps: int) -> None:
    """Masters and states of the last checkpoints, byte by byte."""
    ends = [read_manifest(files.checkpoints / step_name(steps)) for files in (one, other)]
    shards = [{name: file for name, file in end.files.items() if name.startswith("rank-")} for end in ends]
    assert shards[0] == shards[1]
    assert shards[0]
    assert ends[0].progress == ends[1].progress


@pytest.mark.sweep  # three launches each; below, the same of forked ranks
@pytest.mark.parametrize(("case", "kill_after"), [("muon, one rank", 10), ("muon", 15), ("soap", 15)])
def test_a_killed_run_typed_again_ends_as_if_it_had_never_been_killed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_fault: RecordFault, case: str, kill_after: int
) -> None:
    """Bit by bit: every step, every validation, and the weights and states at the end. While it runs, nobody else gets
    its directory."""
    overrides, straight = CASES[case], RunFiles(tmp_path / "straight")
    same = (*SHORT, "train.micro_batch_size=null", *overrides)
    assert forked_run(straight.root, *same, job=TRAINED).exit_code == 0
    for library in ("OMP", "MKL"):  # as in the forked ranks, so that sums are made in the same order
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")

    killed = start("killed", *overrides)
    checkpoints = killed.files.checkpoints
    killed.wait_for(killed.files.command.exists)
    second = start("killed", *overrides)
    code, output = second.finish()
    assert code == 2, output
    assert f"process {killed.process.pid} on" in output
    assert "is training in it" in output
    killed.wait_for(lambda: (checkpoints / step_name(kill_after)).exists() and killed.steps > kill_after)
    family = killed.processes()
    killed.process.send_signal(signal.SIGKILL)
    killed.finish()
    assert not alive(family)
    newest = max(checkpoints.glob("step-*"))
    saved = read_manifest(newest).progress.step
    lost = killed.steps - saved

    again = start("killed", *overrides)
    code, output = again.finish()
    assert code == 0, output
    assert f"from step {saved}" in output
    assert [line[0] for line in curve(again.files)] == list(range(1, STEPS + 1))
    assert curve(again.files) == curve(straight)
    assert validations(again.files) == validations(straight)
    assert_same_end(straight, again.files, STEPS)
    if case == "muon, one rank":
        record_fault(
            fault="two launches in one directory",
            happened="the second refused by name of the first, which trained on",
            exit_code=2,
            lost="nothing",
        )
    record_fault(
        fault=f"SIGKILL of everything, started again ({case})",
        happened=f"went on from step {saved}; curve and weights equal an unbroken run's, bit by bit",
        exit_code=0,
        lost=f"{lost} steps, made again",
    )


def test_a_run_whose_rank_is_killed_every_five_steps_ends_as_an_unbroken_one(
    tmp_path: Path, record_fault: RecordFault
) -> None:
    """Bit by bit; and `report` counts what was trained twice."""
    steps = 12
    often = ("gpus=2", "parallel.tp=1", f"train.steps={steps}", "checkpoint.every_steps=2")
    straight, broken = RunFiles(tmp_path / "straight"), RunFiles(tmp_path / "broken")
    assert forked_run(straight.root, *often).exit_code == 0
    goes_on_at = 1
    for at in (6, 10):
        batch = at - goes_on_at + 1  # each launch counts its own

        def kill(rank: int, number: int, given: Batch, batch: int = batch) -> Batch:
            if (rank, number) == (1, batch):
                os.kill(os.getpid(), signal.SIGKILL)
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
    record_fault(
        fault="SIGKILL of a rank every five steps",
        happened="curve and weights equal an unbroken run's, bit by bit; report counts the steps made twice",
        exit_code=0,
        lost="two steps, made again",
    )
