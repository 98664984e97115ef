"""Runs that are saved while they train: when, what a failure costs, and that stopping and going on changes nothing."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from canzona_cli.checkpoint import commit
from canzona_cli.checkpoint.manifest import Shard, hidden_name
from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import read_manifest, verify
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ExitCode, SaveFailed
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.records.files import RunFiles
from canzona_cli.training import saving
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Datasets, ValidationSet
from canzona_cli.training.loop import Start, Training
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.saving import Saver
from tests.dist import jobs
from tests.dist.jobs import SMALL, on_ranks, planned
from tests.dist.samples import RandomTokens, samples_of
from tests.waiting import PATIENCE_S

STEPS = 6
FIXED = (
    *SMALL,
    "gpus=2",
    "train.batch_tokens=256",
    f"train.steps={STEPS}",
    "train.eval_interval=2",
    "train.eval_sequences=8",
)
DP2 = ("parallel.tp=1", "optimizer=adamw")
TP2 = ("parallel.tp=2", "optimizer=muon", "engine.strategy=canzona", "checkpoint.every_minutes=null")
BY_STEPS = (*DP2, "checkpoint.every_minutes=null")
BY_TIME = (*DP2, "checkpoint.every_minutes=1", "checkpoint.at_end=false")
TEXTS = {"config.yaml": "name: test\n"}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run on one rank."""

    how: str
    """The value that `train` returned, or the error."""
    code: int
    step: int
    checkpoint: str | None


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of a run, for what happens to it."""

    number: int
    files: RunFiles
    saver: Saver
    asked: threading.Event


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that trains with a saver, from the beginning or from another run's checkpoint of step 3."""

    settings: tuple[str, ...]
    start: str | None = None
    prepare: Callable[[Rank], None] = lambda rank: None
    on_step: Callable[[Rank, int], None] = lambda rank, step: None
    """Called with the step that the rank begins."""
    clock: Callable[[int, int], float] | None = None
    """Seconds by rank and step begun, in place of the time of day."""


class Samples(RandomTokens):
    """Calls back with each step whose first sample is read, as the training loop goes on."""

    tell: Callable[[int], None] = staticmethod(lambda _: None)
    batch = 1

    def __getitem__(self, index: int) -> dict[str, object]:  # type: ignore[override]
        self.tell(index // self.batch + 1)
        return super().__getitem__(index)  # type: ignore[return-value]


def train(folder: Path, runs: Mapping[str, Run]) -> dict[str, list[Ending]]:
    """Runs one training after another on the same ranks, each in a directory of its name, and returns how each ended on
    every rank."""
    made = {name: jobs.resolve(*FIXED, *run.settings) for name, run in runs.items()}
    plans = {name: planned(*case) for name, case in made.items()}
    for name in runs:
        (folder / name).mkdir(exist_ok=True)

    def work(name: str, world: World) -> Ending:
        trainee = assemble(made[name][0], world, plans[name])
        setattr(saving, "write_part", commit.write_part)  # noqa: B010  # whatever the run before has made of it
        return _end(made[name][0], trainee, RunFiles(folder / name), runs[name], folder)

    return on_ranks(made, work)


def _end(config: RunConfig, trainee: Trainee, files: RunFiles, run: Run, folder: Path) -> Ending:
    layout, number = trainee.world.layout, trainee.world.rank
    files.ranks.mkdir(exist_ok=True)
    asked, begun = threading.Event(), [0]
    journal, record = Journal(files, writes=number == 0), RankRecord(files, number)
    samples = Samples(
        samples=STEPS * layout.global_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=config.model.vocab_size,
    )
    samples.batch = layout.global_batch_size
    record.preempted = asked
    batch = layout.global_batch_size
    held_out = ValidationSet(name="random", share=1.0, samples=samples_of(config.setup, batch), count=batch)
    clock = run.clock
    now = time.monotonic if clock is None else lambda: clock(number, begun[0])
    saver = Saver(trainee, config.checkpoint, files, journal, texts=TEXTS, clock=now)
    rank = Rank(number=number, files=files, saver=saver, asked=asked)

    def tell(step: int) -> None:
        if step > begun[0]:
            begun[0] = step
            run.on_step(rank, step)

    samples.tell = tell
    run.prepare(rank)
    try:
        start = Start() if run.start is None else _start(trainee, checkpoint(folder / run.start, 3))
        datasets = Datasets(train=samples, validation=(held_out,))
        how: str = Training(config, trainee, datasets, files, journal, record, start=start, saver=saver).run()
        code = 0
    except SaveFailed as error:
        how, code = str(error), int(error.exit_code)
    return Ending(how=how, code=code, step=record.step, checkpoint=record.checkpoint)


def _start(trainee: Trainee, folder: Path) -> Start:
    manifest = verify_together(trainee.world, folder)
    restore(trainee, folder, manifest)
    return Start(progress=manifest.progress, validate=False)


def checkpoint(root: Path, step: int) -> Path:
    return RunFiles(root).checkpoints / f"step-{step:08d}"


def names(root: Path) -> list[str]:
    return [found.name for found in CheckpointStore(RunFiles(root).checkpoints).checkpoints() if found.usable]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def events(root: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in lines(RunFiles(root).events) if event["event"] == kind]


def hold_writes(ready: Callable[[Path], object]) -> None:
    """Have this rank write its part of a checkpoint once `ready` returns, for the folder it writes into."""

    def write_part(partial: Path, rank: int, shard: Shard) -> None:
        ready(partial)
        commit.write_part(partial, rank, shard)

    setattr(saving, "write_part", write_part)  # noqa: B010  # of this rank


def step_of(partial: Path) -> int:
    hidden = hidden_name(partial.name)
    assert hidden is not None
    return int(hidden[0].removeprefix("step-"))


def wait_until_told(files: RunFiles, times: int) -> None:
    """Return once it has been told so often that a save waits for the one before."""
    deadline = time.monotonic() + PATIENCE_S
    while times and (not files.events.exists() or len(events(files.root, "save_waits")) < times):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stop_at_3(rank: Rank, step: int) -> None:
    if step == 3 and rank.number == 0:
        rank.files.request_stop("preempted")


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    """The same losses, rates, norms and validations, bit by bit, and at the end the same bytes on the disk."""
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    ended = train(tmp_path, {"straight": Run(settings=TP2), "halves": Run(settings=TP2, on_step=stop_at_3)})
    assert ended["straight"] == [Ending(how="done", code=0, step=STEPS, checkpoint="step-00000006")] * 2
    assert ended["halves"] == [Ending(how="preempted", code=0, step=3, checkpoint="step-00000003")] * 2
    assert verify(checkpoint(halves, 3))[1] == []
    RunFiles(halves).stop.unlink()
    assert {ending.how for ending in train(tmp_path, {"halves": Run(settings=TP2, start="halves")})["halves"]} == {
        "done"
    }

    def curve(root: Path) -> list[list[object]]:
        wanted = ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "fallbacks")
        return [[line[key] for key in wanted] for line in lines(RunFiles(root).metrics)]

    assert [line[0] for line in curve(straight)] == list(range(1, STEPS + 1))
    assert curve(halves) == curve(straight)
    validations = [[(v["step"], v["loss"]) for v in lines(RunFiles(root).validation)] for root in (straight, halves)]
    assert [step for step, _ in validations[0]] == [0, 2, 4, 6]
    assert validations[0] == validations[1]
    ends = [read_manifest(checkpoint(root, 6)) for root in (straight, halves)]
    assert ends[0].progress == ends[1].progress
    assert ends[0].tensors == ends[1].tensors
    assert ends[0].scalars == ends[1].scalars
    assert ends[0].files == ends[1].files, "the hashes of the shards"


BEGUN = threading.Event()
"""An event on a rank: step 5 of the run whose saves are put off has begun."""


def settle_at_5(rank: Rank, step: int) -> None:
    if step == 5:
        BEGUN.set()
        rank.saver.wait_until_written()


def hold_rank_0(rank: Rank) -> None:
    BEGUN.clear()
    hold_writes(lambda _: rank.number == 1 or BEGUN.wait(PATIENCE_S))


def fail_the_second(rank: Rank) -> None:
    """Lets the second of rank 1's writes fail."""
    calls: list[Path] = []

    def spoil(partial: Path) -> None:
        calls.append(partial)
        if rank.number == 1 and len(calls) == 2:
            (partial / f"rank-{rank.number:05d}.safetensors").mkdir()  # cannot be written, for root neither

    hold_writes(spoil)


def ask_rank_1(rank: Rank, step: int) -> None:
    if rank.number == 1 and step == 2:
        rank.asked.set()


def minutes_at(*steps: int) -> Callable[[int, int], float]:
    """A minute passes at the end of each of these steps."""
    return lambda _, begun: 61.0 * sum(begun >= step for step in steps)


IN_THE_WAY = {"lost on the way": "false", "lost at the end": "true"}
RUNS = {
    "by steps": Run(settings=(*BY_STEPS, "checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.keep_every=4")),
    # On rank 1 a minute always has passed.
    "by the clock": Run(
        settings=BY_TIME,
        on_step=settle_at_5,
        clock=lambda rank, step: 1e6 * step if rank else minutes_at(3, 5)(rank, step),
    ),
    "put off": Run(settings=BY_TIME, prepare=hold_rank_0, on_step=settle_at_5, clock=minutes_at(2, 4)),
    "due at the last step": Run(
        settings=BY_TIME,
        prepare=lambda rank: hold_writes(lambda partial: wait_until_told(rank.files, step_of(partial) < STEPS)),
        clock=minutes_at(2, STEPS),
    ),
    "failed": Run(settings=(*BY_STEPS, "checkpoint.every_steps=2"), prepare=fail_the_second),
    "signal": Run(settings=DP2, on_step=ask_rank_1),
    "quick": Run(settings=(*DP2, "checkpoint.every_steps=1")),
    "slow": Run(
        settings=(*DP2, "checkpoint.every_steps=1"),
        prepare=lambda rank: hold_writes(lambda partial: wait_until_told(rank.files, step_of(partial) % STEPS)),
    ),
    **{
        name: Run(settings=(*BY_STEPS, "checkpoint.every_steps=4", f"checkpoint.at_end={at_end}"))
        for name, at_end in IN_THE_WAY.items()
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in IN_THE_WAY:
        (folder / name).mkdir()
        RunFiles(folder / name).checkpoints.write_text("in the way")
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, list[Ending]]:
    return train(folder, RUNS)


def test_checkpoints_come_by_steps_and_old_ones_go(ended: dict[str, list[Ending]], folder: Path) -> None:
    root = folder / "by steps"
    assert names(root) == ["step-00000004", "step-00000006"]
    told = events(root, "checkpoint")
    assert [event["step"] for event in told] == [2, 4, 6]
    for event in told:
        assert event["path"] == f"checkpoints/step-{event['step']:08d}"
        assert event["seconds"] > 0  # type: ignore[operator]
    last = root / str(told[-1]["path"])
    assert told[-1]["bytes"] == sum(file.stat().st_size for file in last.iterdir())
    assert (last / "config.yaml").read_text() == TEXTS["config.yaml"]


def test_checkpoints_come_by_rank_0s_clock_alone(ended: dict[str, list[Ending]], folder: Path) -> None:
    assert names(folder / "by the clock") == ["step-00000003", "step-00000005"]
    assert events(folder / "by the clock", "save_waits") == []


def test_a_save_due_by_time_waits_for_the_one_before(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Due at the ends of steps 2 and 4, while the first is written until step 5 begins."""
    assert names(folder / "put off") == ["step-00000002", "step-00000005"]
    [told] = events(folder / "put off", "save_waits")
    assert told["step"] == 4
    assert told["detail"] == "the checkpoint due after step 4 waits until that of step 2 is written"


def test_a_save_due_by_time_at_the_last_step_is_not_put_off(ended: dict[str, list[Ending]], folder: Path) -> None:
    """The one before is written only once it is told that training waits for it."""
    assert names(folder / "due at the last step") == ["step-00000002", f"step-{STEPS:08d}"]


def test_a_save_that_fails_costs_that_checkpoint_and_nothing_else(ended: dict[str, list[Ending]], folder: Path) -> None:
    """The second of rank 1's three saves fails."""
    root = folder / "failed"
    assert {ending.how for ending in ended["failed"]} == {"done"}
    assert names(root) == ["step-00000002", "step-00000006"]
    [failure] = events(root, "save_failed")
    assert (failure["step"], failure["level"]) == (4, "warning")
    for words in ("step 4 was not saved", "rank 1", "the last checkpoint is step-00000002"):
        assert words in str(failure["detail"])
    assert not [path for path in RunFiles(root).checkpoints.iterdir() if path.name.startswith(".")]


def test_only_the_save_a_run_ends_with_decides_how_it_ends(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Nothing can be saved where a file is in the way: all steps are made, and what is lost is told on every rank."""
    for name, steps in (("lost on the way", [4]), ("lost at the end", [4, 6])):
        assert [ending.step for ending in ended[name]] == [STEPS] * 2
        assert [line["step"] for line in lines(RunFiles(folder / name).metrics)] == list(range(1, STEPS + 1))
        assert [event["step"] for event in events(folder / name, "save_failed")] == steps
    assert {ending.how for ending in ended["lost on the way"]} == {"done"}
    for ending in ended["lost at the end"]:
        assert ending.code == ExitCode.ENVIRONMENT
        assert "the run ended at step 6 without being saved" in ending.how
        assert "there is no checkpoint yet" in ending.how


def test_a_signal_to_one_rank_preempts_all_of_them(ended: dict[str, list[Ending]], folder: Path) -> None:
    assert ended["signal"] == [Ending(how="preempted", code=0, step=2, checkpoint="step-00000002")] * 2
    assert names(folder / "signal") == ["step-00000002"]


def test_the_next_save_waits_for_the_one_before(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Its memory is used again: a slow disk delays training, and never mixes two steps in one checkpoint."""
    quick, slow = folder / "quick", folder / "slow"
    assert names(slow) == names(quick) == ["step-00000004", "step-00000005", "step-00000006"]
    for name in names(slow):
        first, second = (read_manifest(RunFiles(root).checkpoints / name) for root in (quick, slow))
        assert first.files == second.files
    assert [told["step"] for told in events(slow, "save_waits")] == [2, 3, 4, 5, 6]
    assert events(slow, "save_waits")[0]["detail"] == "training waits after step 2 until the save of step 1 is written"
