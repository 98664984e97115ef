"""`canzona train` typed again after its processes have gone goes on as if nothing had happened, or says why not."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.launch.files import RunFiles, read_json
from tests.faults.support import TrainingRun, alive
from tests.faults.table import RecordFault

STEPS = 60
EVERY = 5
"""Steps between two checkpoints."""
ONE_RANK = (
    *(
        "gpus=1",
        "parallel.tp=1",
        f"train.steps={STEPS}",
        "train.eval_interval=20",
        "train.eval_batches=1",
        "schedule.warmup_steps=2",
    ),
    *(f"checkpoint.every_steps={EVERY}", "checkpoint.every_minutes=null"),
)
Start = Callable[..., TrainingRun]


@pytest.fixture
def start(tmp_path: Path, corpus_cache: Path) -> Iterator[Start]:
    started: list[TrainingRun] = []

    def begin(name: str, *overrides: str) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        started.append(TrainingRun(tmp_path / name, corpus_cache, *ONE_RANK, *overrides))
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


def test_a_killed_run_typed_again_ends_as_if_it_had_never_been_killed(start: Start, record_fault: RecordFault) -> None:
    """Bit by bit, and a damaged checkpoint on the way is refused, not passed over."""
    straight = start("straight")
    code, output = straight.finish()
    assert code == 0, output

    killed = start("killed")
    checkpoints = killed.files.checkpoints
    killed.wait_for(lambda: (checkpoints / "step-00000010").exists() and killed.steps > 10)
    family = killed.processes()
    killed.process.send_signal(signal.SIGKILL)
    killed.finish()
    assert not alive(family)
    newest = max(checkpoints.glob("step-*"))
    saved = read_manifest(newest).progress.step
    lost = killed.steps - saved

    shard = newest / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    refused = start("killed")
    code, output = refused.finish()
    assert code == 5, output
    assert f"{newest.name}/{shard.name}" in output
    assert f"checkpoint.resume=step-{saved - EVERY:08d}" in output
    assert "Traceback" not in output
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)

    again = start("killed")
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
    assert (read_json(again.files.attempts / "2" / "result.json") or {})["exit_code"] == 5
    record_fault(
        fault="SIGKILL of everything, started again",
        happened=f"went on from step {saved}; curve and weights equal an unbroken run's, bit by bit",
        exit_code=0,
        lost=f"{lost} steps, made again",
    )
    record_fault(
        fault="a bit flipped in the newest checkpoint",
        happened="refused before it was opened, file named, the one before offered",
        exit_code=5,
        lost="nothing",
    )


def test_two_launches_in_one_directory(start: Start, record_fault: RecordFault) -> None:
    """The second is refused while the first trains on."""
    first = start("run", "train.steps=100000")
    first.wait_for(lambda: first.steps >= 3)
    second = start("run", "train.steps=100000")
    code, output = second.finish()
    assert code == 2, output
    assert f"process {first.process.pid} on" in output
    assert "is training in it" in output
    before = first.steps
    first.wait_for(lambda: first.steps > before)
    family = [psutil.Process(first.process.pid), *first.processes()]
    first.process.send_signal(signal.SIGINT)
    code, output = first.finish()
    assert code == 130, output
    assert not alive(family)
    result = read_json(first.files.result)
    assert result is not None
    assert f"saved as step-{first.steps:08d}" in str(result["message"])
    record_fault(
        fault="two launches in one directory",
        happened="the second refused by name of the first, which trained on",
        exit_code=2,
        lost="nothing",
    )
