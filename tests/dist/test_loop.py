"""The training loop on real ranks: it stops everywhere at once, and looking does not change what is looked at."""

import gc
import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from canzona_cli.core.engine.canzona_optimizer import NonFiniteGradients
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.optimizers import Muon
from canzona_cli.core.optimizers.graphs import Replayed
from canzona_cli.records.files import RunFiles
from canzona_cli.training import loop
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Batch, Datasets, ValidationSet
from canzona_cli.training.loop import NonFiniteLoss, Training
from canzona_cli.training.records import Journal, RankRecord
from tests.dist import jobs
from tests.dist.engine_support import engine_of
from tests.dist.jobs import SMALL, on_ranks, planned
from tests.dist.samples import RandomTokens, samples_of

STEPS = 4
FIXED = (*SMALL, f"train.steps={STEPS}", "train.batch_tokens=256", "train.eval_sequences=4")
WAYS = {
    "canzona": ("optimizer=muon", "engine.strategy=canzona"),
    "layerwise": ("optimizer=muon", "engine.strategy=layerwise"),
    "sc": ("optimizer=muon", "engine.strategy=sc"),
    "adamw": ("optimizer=adamw",),
}
LAYOUTS = {
    "dp2": ("gpus=2", "parallel.tp=1", "parallel.pp=1"),
    "pp2": ("gpus=2", "parallel.tp=1", "parallel.pp=2"),
    "tp2": ("gpus=2", "parallel.tp=2", "parallel.pp=1"),
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run on one rank."""

    how: str | None
    """The value that `train` returned; None when it raised."""
    error: str | None
    step: int
    """The last one this rank recorded."""


class Observed(torch.utils.data.Dataset[Batch]):
    """Random tokens that report the number of each sample they are asked for."""

    def __init__(self, samples: RandomTokens, tell: Callable[[int], None]) -> None:
        self._samples, self._tell = samples, tell

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Batch:
        self._tell(index)
        return self._samples[index]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to train in directory `root`."""

    root: Path
    settings: tuple[str, ...]
    validation: bool = True
    prepare: Callable[[Trainee, RunFiles], None] = lambda trainee, files: None
    """Called on each rank before."""
    on_step: Callable[[int, Trainee, RunFiles], None] = lambda step, trainee, files: None
    """Called whenever a rank reads the first sample of its step."""


def _run(
    root: Path,
    *overrides: str,
    validation: bool = True,
    prepare: Callable[[Trainee, RunFiles], None] = lambda trainee, files: None,
    on_step: Callable[[int, Trainee, RunFiles], None] = lambda step, trainee, files: None,
) -> list[Ending]:
    """Runs training and returns its end on each rank."""
    [endings] = _train([Run(root=root, settings=overrides, validation=validation, prepare=prepare, on_step=on_step)])
    return endings


def _train(runs: Sequence[Run]) -> list[list[Ending]]:
    """The same of several runs that are cut over ranks alike, on the same ranks."""
    made = [jobs.resolve(*FIXED, *run.settings) for run in runs]
    plans = [planned(*case) for case in made]
    for run in runs:
        run.root.mkdir(exist_ok=True)

    def work(number: int, world: World) -> Ending:
        run, (config, layout) = runs[number], made[number]
        files = RunFiles(run.root)
        samples = samples_of(config.setup, STEPS * layout.global_batch_size)
        trainee = assemble(config, world, plans[number])
        run.prepare(trainee, files)

        def tell(index: int) -> None:
            step, place = divmod(index, layout.global_batch_size)
            if place == world.dp_rank * layout.micro_batch_size:
                run.on_step(step + 1, trainee, files)

        held_out = (ValidationSet(name="random", share=1.0, samples=samples, count=4),) if run.validation else ()
        datasets = Datasets(train=Observed(samples, tell), validation=held_out)
        record = RankRecord(files, world.rank)
        how, error = None, None
        try:
            how = Training(config, trainee, datasets, files, Journal(files, writes=world.rank == 0), record).run()
        except (NonFiniteLoss, NonFiniteGradients) as raised:
            error = str(raised)
        return Ending(how=how, error=error, step=record.step)

    return [*on_ranks(dict(enumerate(made)), work).values()]


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _losses(root: Path) -> list[float]:
    return [line["loss"] for line in _lines(RunFiles(root).metrics)]


def _spoil_a_weight(trainee: Trainee) -> None:
    """NaN in one weight, as its forward pass begins: until then the last step's gather may still write over it."""
    module = next(m for m in trainee.chunks[0].modules() if any(p.dim() > 1 for p in m.parameters(recurse=False)))

    def spoil(module: torch.nn.Module, _: object) -> None:
        with torch.no_grad():
            next(p for p in module.parameters(recurse=False) if p.dim() > 1).fill_(math.nan)
        handle.remove()

    handle = module.register_forward_pre_hook(spoil)


def test_a_loss_that_is_no_number_stops_every_rank_at_the_same_step(tmp_path: Path) -> None:
    """One weight of the first stage becomes NaN during step 3; its line is still written, and no step is made on it."""

    def poison(step: int, trainee: Trainee, files: RunFiles) -> None:
        if step == 3 and trainee.world.rank == 0:
            _spoil_a_weight(trainee)

    endings = _run(tmp_path / "run", *LAYOUTS["pp2"], "optimizer=adamw", validation=False, on_step=poison)
    for ending in endings:
        assert (ending.how, ending.step) == (None, 3)
        assert ending.error is not None
        assert "step 3" in ending.error
        assert "no longer a finite number" in ending.error
    lines = _lines(RunFiles(tmp_path / "run").metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    # NaN is not JSON.
    assert [line["loss"] is None for line in lines] == [False, False, True]


def test_gradients_that_are_no_numbers_stop_every_rank_before_the_step(tmp_path: Path) -> None:
    """canzona checks before it changes anything; the step's line still has its loss."""

    def poison(step: int, trainee: Trainee, files: RunFiles) -> None:
        if step == 3 and trainee.world.rank == 1:
            _spoil_a_weight(trainee)

    endings = _run(tmp_path / "run", *LAYOUTS["pp2"], *WAYS["canzona"], validation=False, on_step=poison)
    for ending in endings:
        assert (ending.how, ending.step) == (None, 2)
        assert ending.error is not None
        assert "NaN or infinite" in ending.error
        assert "no weight has changed" in ending.error
        assert "the loss is not finite on rank" in ending.error
    assert len({ending.error for ending in endings}) == 1
    lines = _lines(RunFiles(tmp_path / "run").metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [lines[-1][key] is None for key in ("loss", "grad_norm")] == [True, True]


def test_a_stop_request_ends_the_run_after_the_step_it_comes_in(tmp_path: Path) -> None:
    """All ranks stop, that step's line is on disk, and no validation gets in the way."""

    def ask(step: int, trainee: Trainee, files: RunFiles) -> None:
        if step == 3 and trainee.world.rank == trainee.world.world_size - 1:
            files.request_stop()

    root = tmp_path / "run"
    endings = _run(root, *LAYOUTS["pp2"], on_step=ask)
    assert endings == [Ending(how="interrupted", error=None, step=3)] * 2
    assert [line["step"] for line in _lines(RunFiles(root).metrics)] == [1, 2, 3]
    assert [line["step"] for line in _lines(RunFiles(root).validation)] == [0]


class Thing:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def test_a_stop_request_during_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEPS_BETWEEN", 2)
    things: list[weakref.ref[Thing]] = []

    def ask(step: int, trainee: Trainee, files: RunFiles) -> None:
        # By itself, collecting would stop the ranks at different moments, and all of them would wait.
        assert not gc.isenabled()
        if step == 1:
            things.append(weakref.ref(Thing()))
        assert (things[0]() is None) == (step > 2)
        if step == STEPS:
            files.request_stop()

    root = tmp_path / "run"
    assert _run(root, *LAYOUTS["dp2"], on_step=ask) == [Ending(how="done", error=None, step=STEPS)] * 2
    assert [line["step"] for line in _lines(RunFiles(root).validation)] == [0, STEPS]


def test_failures_and_captures_are_counted_with_the_next_step_or_at_the_end(tmp_path: Path) -> None:
    def prepare(trainee: Trainee, files: RunFiles) -> None:
        matrices = engine_of(trainee).matrices
        assert isinstance(matrices, PlannedOptimizer)
        optimizer = matrices.groups[0].optimizer
        assert isinstance(optimizer, Muon)
        graph = optimizer._replayed[0] = Replayed()
        update, done = matrices._update, 0

        def updating() -> None:
            nonlocal done
            update()
            done += 1
            graph.captures += 1  # as if every step were captured anew on both ranks
            if done in (1, STEPS) and trainee.world.rank == 0:
                matrices._fallbacks(next(iter(matrices.masters.values())), "no convergence")

        matrices._update = updating  # type: ignore[method-assign]

    root = tmp_path / "run"
    _run(root, *LAYOUTS["tp2"], *WAYS["canzona"], validation=False, prepare=prepare)
    lines = _lines(RunFiles(root).metrics)
    assert [line["fallbacks"] for line in lines] == [0, 1, 1, 2]
    assert [line["captures"] for line in lines] == [0, 2, 4, 6]


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    """Bitwise the same losses without validation, with the two that every run has, and with one after every step."""
    often = {"none": (), "two": ("train.eval_interval=100",), "every": ("train.eval_interval=1",)}
    _train(
        [
            Run(
                root=tmp_path / f"{way} {name}",
                settings=(*LAYOUTS["dp2"], *WAYS[way], *settings),
                validation=name != "none",
            )
            for way in WAYS
            for name, settings in often.items()
            if name != "two" or way == "canzona"
        ]
    )
    numbers = {"two": [0, STEPS], "every": list(range(STEPS + 1))}
    for way in WAYS:
        losses = _losses(tmp_path / f"{way} none")
        assert len(set(losses)) == STEPS
        for name in ("two", "every") if way == "canzona" else ("every",):
            root = tmp_path / f"{way} {name}"
            assert [line["step"] for line in _lines(RunFiles(root).validation)] == numbers[name]
            assert _losses(root) == losses, way
            for line in _lines(RunFiles(root).metrics):  # 4 samples of 64 tokens a step, of the whole job
                assert line["tokens"] == 256 * line["step"]
                assert line["tokens_per_s"] * line["step_s"] == pytest.approx(256)
