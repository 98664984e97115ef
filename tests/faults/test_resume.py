"""`canzona train` typed again after its processes have gone goes on as if nothing had happened."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from canzona_cli.checkpoint.manifest import step_name
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.run.files import RunFiles
from tests.faults.support import TrainingRun, alive
from tests.faults.table import RecordFault

STEPS = 30
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


@pytest.mark.parametrize(
    ("case", "kill_after"),
    [("muon, one rank", 10), *(pytest.param(case, 15, marks=pytest.mark.sweep) for case in list(CASES)[1:])],
)
def test_a_killed_run_typed_again_ends_as_if_it_had_never_been_killed(
    start: Start, record_fault: RecordFault, case: str, kill_after: int
) -> None:
    """Bit by bit: every step, every validation, and the weights and states at the end. While it runs, nobody else gets
    its directory."""
    overrides = CASES[case]
    straight = start("straight", *overrides)
    code, output = straight.finish()
    assert code == 0, output

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
    assert curve(again.files) == curve(straight.files)
    assert validations(again.files) == validations(straight.files)
    ends = [read_manifest(run.files.checkpoints / f"step-{STEPS:08d}") for run in (straight, again)]
    shards = [{name: file for name, file in end.files.items() if name.startswith("rank-")} for end in ends]
    assert shards[0] == shards[1]
    assert shards[0]
    assert [end.progress for end in ends] == [ends[0].progress] * 2
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
