"""Runs that are saved while they train: when, what a failure costs, and that stopping and going on changes nothing."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from canzona_cli.checkpoint import commit
from canzona_cli.checkpoint.manifest import Shard, hidden_name
from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import read_manifest, verify
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ExitCode, SaveFailed
from canzona_cli.megatron.model import Trainee
from canzona_cli.run.files import RunFiles
from canzona_cli.training import saving
from canzona_cli.training.data import Datasets, HeldOut
from canzona_cli.training.loop import Start, Training
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.requests import StopRequests
from canzona_cli.training.saving import Saver
from tests.dist import jobs
from tests.dist.jobs import SMALL, build
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens

STEPS = 6
FIXED = (
    *SMALL,
    "gpus=2",
    "train.batch_tokens=256",
    f"train.steps={STEPS}",
    "train.eval_interval=2",
    "train.eval_batches=1",
)
BY_STEPS = ("checkpoint.every_steps=2", "checkpoint.every_minutes=null")
DP2 = ("parallel.tp=1", "optimizer=adamw")
PATIENCE_S = 60.0
"""Before a test gives up; on a machine that is very busy too, nothing takes as long."""
TEXTS = {"config.yaml": "name: test\n"}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended on one rank."""

    how: str
    """What `train` returned, or the error."""
    code: int
    step: int
    checkpoint: str | None


class Samples(RandomTokens):
    """Calls back with each step whose first sample is read, as the training loop goes on."""

    tell: Callable[[int], None] = staticmethod(lambda _: None)
    batch = 1

    def __getitem__(self, index: int) -> dict[str, object]:  # type: ignore[override]
        self.tell(index // self.batch + 1)
        return super().__getitem__(index)  # type: ignore[return-value]


def run(
    root: Path,
    *overrides: str,
    start: Path | None = None,
    prepare: Callable[[int, Saver], None] = lambda rank, saver: None,
    on_step: Callable[[int, int, RunFiles, StopRequests], None] = lambda rank, step, files, asked: None,
    clock: Callable[[int, int], float] | None = None,
) -> list[Ending]:
    """Train with a saver, from the beginning or from a checkpoint.

    Args:
        on_step: called with the rank and the step it begins.
        clock: seconds by rank and step begun, in place of the time of day.
    """
    config, layout = jobs.resolve(*FIXED, *overrides)
    root.mkdir(exist_ok=True)
    return run_ranks(layout.world_size, partial(_rank, root, config, layout, start, prepare, on_step, clock))


def _rank(
    root: Path,
    config: RunConfig,
    layout: Layout,
    start: Path | None,
    prepare: Callable[[int, Saver], None],
    on_step: Callable[[int, int, RunFiles, StopRequests], None],
    clock: Callable[[int, int], float] | None,
) -> Ending:
    files, trainee, asked, begun = RunFiles(root), build(config, layout), StopRequests(), [0]
    files.ranks.mkdir(exist_ok=True)
    rank = trainee.world.rank
    journal, record = Journal(files, writes=rank == 0), RankRecord(files, rank)
    sizes = {"seq_length": config.train.seq_length, "vocab_size": config.model.vocab_size}
    samples = Samples(samples=STEPS * layout.global_batch_size, **sizes)
    samples.batch = layout.global_batch_size

    def tell(step: int) -> None:
        if step > begun[0]:
            begun[0] = step
            on_step(rank, step, files, asked)

    samples.tell = tell
    record.requests = asked
    held_out = HeldOut(name="random", share=1.0, samples=RandomTokens(samples=layout.global_batch_size, **sizes))
    datasets = Datasets(train=samples, validation=(held_out,))
    now = time.monotonic if clock is None else lambda: clock(rank, begun[0])
    saver = Saver(trainee, files, journal, texts=TEXTS, clock=now)
    prepare(rank, saver)
    try:
        began = _start(trainee, start)
        how: str = Training(trainee, datasets, files, journal, record, start=began, saver=saver).run()
        code = 0
    except SaveFailed as error:
        how, code = str(error), int(error.exit_code)
    return Ending(how=how, code=code, step=record.step, checkpoint=record.checkpoint)


def _start(trainee: Trainee, start: Path | None) -> Start:
    if start is None:
        return Start()
    manifest = verify_together(trainee.world, start)
    restore(trainee, start, manifest)
    return Start(progress=manifest.progress, validate=False)


def names(root: Path) -> list[str]:
    return [found.name for found in CheckpointStore(RunFiles(root).checkpoints).checkpoints() if found.sound]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def events(root: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in lines(RunFiles(root).events) if event["event"] == kind]


def hold_writes(ready: Callable[[Path], object]) -> None:
    """Have this rank write its part of a checkpoint once `ready` returns, for the folder it writes into."""
    genuine = commit.write_part

    def write_part(partial: Path, rank: int, shard: Shard) -> None:
        ready(partial)
        genuine(partial, rank, shard)

    setattr(saving, "write_part", write_part)  # noqa: B010  # of this rank


def step_of(partial: Path) -> int:
    hidden = hidden_name(partial.name)
    assert hidden is not None
    return int(hidden[0].removeprefix("step-"))


def wait_until_said(root: Path, times: int) -> None:
    """Return once it has been said so often that a save waits for the one before."""
    deadline = time.monotonic() + PATIENCE_S
    while times and (not RunFiles(root).events.exists() or len(events(root, "save_waits")) < times):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    """The same losses, rates, norms and validations, bit by bit, and at the end the same bytes on the disk."""
    setup = ("parallel.tp=2", "optimizer=muon", "engine.strategy=canzona", "checkpoint.every_minutes=null")

    def stop(rank: int, step: int, files: RunFiles, _: StopRequests) -> None:
        if step == 3 and rank == 0:
            files.request_stop("preempted")

    straight, halves = tmp_path / "straight", tmp_path / "halves"
    assert run(straight, *setup) == [Ending(how="done", code=0, step=STEPS, checkpoint="step-00000006")] * 2
    stopped = Ending(how="preempted", code=0, step=3, checkpoint="step-00000003")
    assert run(halves, *setup, on_step=stop) == [stopped] * 2
    checkpoint = RunFiles(halves).checkpoints / "step-00000003"
    assert verify(checkpoint)[1] == []
    RunFiles(halves).stop.unlink()
    assert {ending.how for ending in run(halves, *setup, start=checkpoint)} == {"done"}

    def curve(root: Path) -> list[list[object]]:
        wanted = ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "fallbacks")
        return [[line[key] for key in wanted] for line in lines(RunFiles(root).metrics)]

    assert [line[0] for line in curve(straight)] == list(range(1, STEPS + 1))
    assert curve(halves) == curve(straight)
    validations = [[(v["step"], v["loss"]) for v in lines(RunFiles(root).validation)] for root in (straight, halves)]
    assert [step for step, _ in validations[0]] == [0, 2, 4, 6]
    assert validations[0] == validations[1]
    ends = [read_manifest(RunFiles(root).checkpoints / "step-00000006") for root in (straight, halves)]
    assert ends[0].progress == ends[1].progress
    assert ends[0].tensors == ends[1].tensors
    assert ends[0].scalars == ends[1].scalars
    assert ends[0].files == ends[1].files, "the hashes of the shards"


def test_checkpoints_come_by_steps_and_old_ones_go(tmp_path: Path) -> None:
    run(tmp_path / "run", *DP2, *BY_STEPS, "checkpoint.keep=1", "checkpoint.keep_every=4")
    assert names(tmp_path / "run") == ["step-00000004", "step-00000006"]
    told = events(tmp_path / "run", "checkpoint")
    assert [event["step"] for event in told] == [2, 4, 6]
    for event in told:
        assert event["path"] == f"checkpoints/step-{event['step']:08d}"
        assert event["seconds"] > 0  # type: ignore[operator]
    last = tmp_path / "run" / str(told[-1]["path"])
    assert told[-1]["bytes"] == sum(file.stat().st_size for file in last.iterdir())
    assert (last / "config.yaml").read_text() == TEXTS["config.yaml"]


def test_checkpoints_come_by_rank_0s_clock_alone(tmp_path: Path) -> None:
    """A minute has passed at the end of step 3, and another at the end of step 5; on rank 1 it always has."""
    savers: list[Saver] = []

    def clock(rank: int, step: int) -> float:
        return 1e6 * step if rank else 61.0 * (step >= 3) + 61.0 * (step >= 5)

    def settle(rank: int, step: int, _: RunFiles, __: StopRequests) -> None:
        if step == 5:
            savers[0].settle()

    settings = ("checkpoint.every_minutes=1", "checkpoint.at_end=false")
    run(tmp_path, *DP2, *settings, prepare=lambda _, saver: savers.append(saver), on_step=settle, clock=clock)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    assert events(tmp_path, "save_waits") == []


def test_a_save_due_by_time_is_put_off_until_the_one_before_is_written(tmp_path: Path) -> None:
    """Due at the ends of steps 2 and 4, while the first is written until step 5 begins."""
    savers: list[Saver] = []
    begun = threading.Event()

    def prepare(rank: int, saver: Saver) -> None:
        savers.append(saver)
        hold_writes(lambda _: rank == 1 or begun.wait(PATIENCE_S))

    def release(rank: int, step: int, _: RunFiles, __: StopRequests) -> None:
        if step == 5:
            begun.set()
            savers[0].settle()

    def clock(_: int, step: int) -> float:
        return 61.0 * (step >= 2) + 61.0 * (step >= 4)

    settings = ("checkpoint.every_minutes=1", "checkpoint.at_end=false")
    run(tmp_path, *DP2, *settings, prepare=prepare, on_step=release, clock=clock)
    assert names(tmp_path) == ["step-00000002", "step-00000005"]
    [said] = events(tmp_path, "save_waits")
    assert said["step"] == 4
    assert said["detail"] == "the checkpoint due after step 4 waits until that of step 2 is on the disk"


def test_a_save_due_by_time_at_the_last_step_is_not_put_off(tmp_path: Path) -> None:
    """The one before is written only once it is said that training waits for it."""

    def clock(_: int, step: int) -> float:
        return 61.0 * (step >= 2) + 61.0 * (step >= STEPS)

    def prepare(_: int, __: Saver) -> None:
        hold_writes(lambda partial: wait_until_said(tmp_path, step_of(partial) < STEPS))

    run(tmp_path, *DP2, "checkpoint.every_minutes=1", "checkpoint.at_end=false", prepare=prepare, clock=clock)
    assert names(tmp_path) == ["step-00000002", f"step-{STEPS:08d}"]


def test_a_save_that_fails_costs_that_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """Of rank 1, the second of three."""

    def prepare(own: int, _: Saver) -> None:
        genuine, calls = commit.write_part, []

        def write_part(partial: Path, rank: int, shard: Shard) -> None:
            calls.append(partial)
            if own == 1 and len(calls) == 2:
                (partial / f"rank-{rank:05d}.safetensors").mkdir()  # cannot be written, for root neither
            genuine(partial, rank, shard)

        setattr(saving, "write_part", write_part)  # noqa: B010  # of this rank

    endings = run(tmp_path / "run", *DP2, *BY_STEPS, prepare=prepare)
    assert {ending.how for ending in endings} == {"done"}
    assert names(tmp_path / "run") == ["step-00000002", "step-00000006"]
    [failure] = events(tmp_path / "run", "save_failed")
    assert (failure["step"], failure["level"]) == (4, "warning")
    for words in ("step 4 was not saved", "rank 1", "the last checkpoint is step-00000002"):
        assert words in str(failure["detail"])
    assert not [path for path in RunFiles(tmp_path / "run").checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("at_end", [True, False])
def test_only_the_save_a_run_ends_with_decides_how_it_ends(tmp_path: Path, at_end: bool) -> None:
    """Nothing can be saved where a file is in the way: all steps are made, and what is lost is said on every rank."""
    root = tmp_path / "run"
    root.mkdir()
    RunFiles(root).checkpoints.write_text("in the way")
    settings = ("checkpoint.every_steps=4", "checkpoint.every_minutes=null", f"checkpoint.at_end={str(at_end).lower()}")
    endings = run(root, *DP2, *settings)
    assert [ending.step for ending in endings] == [STEPS] * 2
    assert [line["step"] for line in lines(RunFiles(root).metrics)] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events(root, "save_failed")] == ([4, 6] if at_end else [4])
    for ending in endings:
        if at_end:
            assert ending.code == ExitCode.ENVIRONMENT
            assert "the run ended at step 6 without being saved" in ending.how
            assert "there is no checkpoint yet" in ending.how
        else:
            assert ending.how == "done"


def test_a_signal_to_one_rank_preempts_all_of_them(tmp_path: Path) -> None:
    def signal(rank: int, step: int, _: RunFiles, asked: StopRequests) -> None:
        asked.preempted |= rank == 1 and step == 2

    ending = Ending(how="preempted", code=0, step=2, checkpoint="step-00000002")
    assert run(tmp_path / "run", *DP2, on_step=signal) == [ending] * 2
    assert names(tmp_path / "run") == ["step-00000002"]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Its memory is used again: a slow disk delays training, and never mixes two steps in one checkpoint."""
    quick, slow = tmp_path / "quick", tmp_path / "slow"

    def prepare(_: int, __: Saver) -> None:
        hold_writes(lambda partial: wait_until_said(slow, step_of(partial) % STEPS))

    run(quick, *DP2, "checkpoint.every_steps=1")
    run(slow, *DP2, "checkpoint.every_steps=1", prepare=prepare)
    assert names(slow) == names(quick) == ["step-00000004", "step-00000005", "step-00000006"]
    for name in names(slow):
        first, second = (read_manifest(RunFiles(root).checkpoints / name) for root in (quick, slow))
        assert first.files == second.files
    assert [said["step"] for said in events(slow, "save_waits")] == [2, 3, 4, 5, 6]
    assert events(slow, "save_waits")[0]["detail"] == "training waits after step 2 until step 1 is on the disk"
