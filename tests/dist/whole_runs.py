"""Whole runs of the training loop on real ranks, with what happens to a rank on the way."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.checkpoint import commit
from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.canzona_optimizer import NonFiniteGradients
from canzona_cli.core.errors import SaveFailed
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.records.files import RunFiles
from canzona_cli.training import saving
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Datasets, ValidationSet
from canzona_cli.training.loop import NonFiniteLoss, Start, Training
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.saving import Saver
from tests.dist import jobs
from tests.dist.jobs import on_ranks, planned
from tests.dist.samples import RandomTokens, samples_of

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
    trainee: Trainee
    files: RunFiles
    saver: Saver
    asked: threading.Event


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that trains, from the beginning or from another run's checkpoint of step 3."""

    settings: tuple[str, ...]
    saves: bool = True
    validates: bool = True
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
    made = {name: jobs.resolve(*run.settings) for name, run in runs.items()}
    plans = {name: planned(*case) for name, case in made.items()}
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True)

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
        samples=config.train.steps * layout.global_batch_size,
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
    rank = Rank(number=number, trainee=trainee, files=files, saver=saver, asked=asked)

    def tell(step: int) -> None:
        if step > begun[0]:
            begun[0] = step
            run.on_step(rank, step)

    samples.tell = tell
    run.prepare(rank)
    try:
        start = Start() if run.start is None else _start(trainee, checkpoint(folder / run.start, 3))
        datasets = Datasets(train=samples, validation=(held_out,) if run.validates else ())
        training = Training(
            config, trainee, datasets, files, journal, record, start=start, saver=saver if run.saves else None
        )
        how, code = str(training.run()), 0
    except (SaveFailed, NonFiniteLoss, NonFiniteGradients) as error:
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
