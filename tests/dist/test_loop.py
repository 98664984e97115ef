"""The training loop on real ranks: it stops everywhere at once, and looking does not change what is looked at."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.optimizers.graphs import Replayed
from canzona_cli.optimizers import Muon
from canzona_cli.records.files import RunFiles
from canzona_cli.training import loop
from tests.dist.engine_support import engine_of
from tests.dist.jobs import SMALL
from tests.dist.whole_runs import Ending, Rank, Run, lines, train

STEPS = 4
FIXED = (*SMALL, f"train.steps={STEPS}", "train.batch_tokens=256", "train.eval_sequences=4")
WAYS = {
    "canzona": ("optimizer=muon", "engine.strategy=canzona"),
    "layerwise": ("optimizer=muon", "engine.strategy=layerwise"),
    "sc": ("optimizer=muon", "engine.strategy=sc"),
    "adamw": ("optimizer=adamw",),
}
LAYOUTS = {
    "dp2": (*FIXED, "gpus=2", "parallel.tp=1", "parallel.pp=1", "model.num_layers=1"),
    "tp2": (*FIXED, "gpus=2", "parallel.tp=2", "parallel.pp=1", "model.num_layers=1"),
}


def _run(
    root: Path,
    *settings: str,
    validates: bool = True,
    prepare: Callable[[Rank], None] = lambda rank: None,
    on_step: Callable[[Rank, int], None] = lambda rank, step: None,
) -> list[Ending]:
    run = Run(settings=settings, saves=False, validates=validates, prepare=prepare, on_step=on_step)
    return train(root.parent, {root.name: run})[root.name]


def _losses(root: Path) -> list[object]:
    return [line["loss"] for line in lines(RunFiles(root).metrics)]


class Thing:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def test_a_stop_request_during_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEPS_BETWEEN", 2)
    things: list[weakref.ref[Thing]] = []

    def ask(rank: Rank, step: int) -> None:
        # By itself, collecting would stop the ranks at different moments, and all of them would wait.
        assert not gc.isenabled()
        if step == 1:
            things.append(weakref.ref(Thing()))
        assert (things[0]() is None) == (step > 2)
        if step == STEPS:
            rank.files.request_stop()

    root = tmp_path / "run"
    assert _run(root, *LAYOUTS["dp2"], on_step=ask) == [Ending(how="done", code=0, step=STEPS, checkpoint=None)] * 2
    assert [line["step"] for line in lines(RunFiles(root).validation)] == [0, STEPS]


def test_failures_and_captures_are_counted_with_the_next_step_or_at_the_end(tmp_path: Path) -> None:
    def prepare(rank: Rank) -> None:
        matrices = engine_of(rank.trainee).matrices
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
            if done in (1, STEPS) and rank.number == 0:
                matrices._fallbacks(next(iter(matrices.masters.values())), "no convergence")

        matrices._update = updating  # type: ignore[method-assign]

    root = tmp_path / "run"
    _run(root, *LAYOUTS["tp2"], *WAYS["canzona"], validates=False, prepare=prepare)
    metrics = lines(RunFiles(root).metrics)
    assert [line["fallbacks"] for line in metrics] == [0, 1, 1, 2]
    assert [line["captures"] for line in metrics] == [0, 2, 4, 6]


def test_validation_does_not_change_training(tmp_path: Path) -> None:
    """Bitwise the same losses without validation, with the two that every run has, and with one after every step."""
    often = {"none": (), "two": ("train.eval_interval=100",), "every": ("train.eval_interval=1",)}
    runs = {
        f"{way} {name}": Run(settings=(*LAYOUTS["dp2"], *WAYS[way], *settings), saves=False, validates=name != "none")
        for way in WAYS
        for name, settings in often.items()
        if name != "two" or way == "canzona"
    }
    train(tmp_path, runs)
    numbers = {"two": [0, STEPS], "every": list(range(STEPS + 1))}
    for way in WAYS:
        losses = _losses(tmp_path / f"{way} none")
        assert len(set(losses)) == STEPS
        for name in ("two", "every") if way == "canzona" else ("every",):
            root = tmp_path / f"{way} {name}"
            assert [line["step"] for line in lines(RunFiles(root).validation)] == numbers[name]
            assert _losses(root) == losses, way
            for line in lines(RunFiles(root).metrics):  # 4 samples of 64 tokens a step, of the whole job
                step, tokens, per_s, step_s = (line[key] for key in ("step", "tokens", "tokens_per_s", "step_s"))
                assert (tokens, per_s) == (256 * step, pytest.approx(256 / step_s))  # type: ignore[operator]
