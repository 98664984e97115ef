"""Strategy sc for what Megatron has no sc: every rank updates every matrix, and comes to what strategy canzona does.

Gradients are known ones of whole matrices (`tests.dist.synthetic`), so there is no sum whose order could differ but the
global norm's.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.setup import Layout
from canzona_cli.training.step import train_step
from tests.dist.engine_support import batches, custom, engine_of, parameter, poisoned, resolve, tensor_bytes, weights
from tests.dist.jobs import EXPERTS, Runs, build, ranks_of
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import Case, Result, fill_gradients, noise, optimizer_step, run_engines
from tests.dist.whole import Weights

STEPS = 3
LR = 0.01
LAYOUTS = {
    "tp2 dp2": ("gpus=4", "parallel.tp=2", "parallel.pp=1"),
    "dp2": ("gpus=2", "parallel.tp=1", "parallel.pp=1"),
    "tp2": ("gpus=2", "parallel.tp=2", "parallel.pp=1"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "dp4 ep2": ("gpus=4", "parallel.ep=2"),
}
ONE = ("gpus=1", "parallel.tp=1", "parallel.pp=1")
OFTEN = ("optimizer.precondition_frequency=2", "train.precision=fp32", "model.num_layers=2")
OWN = """
from torch.optim import SGD


class Plain(SGD):
    pass


class Anchored(SGD):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.starts = {p: p.detach().clone() for p in self.param_groups[0]["params"]}

    def step(self, closure=None):
        super().step(closure)
        for p, start in self.starts.items():
            p.lerp_(start, 0.5)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own optimizers. Plain's update is in proportion to the gradient. Anchored's is too, but then it pulls
    weights halfway back to the values that they had when it was created."""
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def _worst(first: Weights, second: Weights) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


COMMON = ("optimizer=soap", "optimizer.clip_grad=0", "engine.strategy=sc")
RUNS = {where: (*COMMON, *layout) for where, layout in {"one rank": ONE, **LAYOUTS}.items()}
FUSED = (*RUNS["tp2"], "engine.splitting=fused")


def _canzona(run: tuple[str, ...]) -> tuple[str, ...]:
    return (*run, "engine.strategy=canzona")


def _run(runs: Sequence[tuple[str, ...]]) -> list[Weights]:
    made = [resolve(*OFTEN, *settings) for settings in runs]
    found = run_engines([Case(config=config, layout=layout, steps=STEPS) for config, layout in made])
    for one in found:
        assert all(not torch.equal(one.before[name], one.after[name]) for name in one.after), "something stood still"
    return [one.after for one in found]


ELSEWHERE = (RUNS["tp2 dp2"], RUNS["tp2 pp2"], _canzona(RUNS["tp2 dp2"]))
AFTER = Runs([RUNS["one rank"], *ELSEWHERE, FUSED, _canzona(FUSED)], ranks_of, _run)


@pytest.mark.parametrize("run", ELSEWHERE, ids=" ".join)
def test_every_layout_is_one_rank_bitwise_and_so_is_canzona(run: tuple[str, ...]) -> None:
    """Matrices and AdamW's parameters."""
    assert _worst(AFTER[run], AFTER[RUNS["one rank"]]) == 0.0


def test_fused_matrices_are_canzonas() -> None:
    assert _worst(AFTER[FUSED], AFTER[_canzona(FUSED)]) == 0.0


def _plain(source: Path, *overrides: str) -> tuple[RunConfig, Layout]:
    """SC or canzona with the user's own optimizer; gradients of unit size are clipped to about a third."""
    config, layout = resolve("train.precision=fp32", "optimizer.clip_grad=100", *overrides)
    return custom(config, source, "Plain"), layout


@pytest.mark.parametrize(("model", "where"), [((), "tp2 pp2"), (EXPERTS, "dp4 ep2")], ids=["dense", "experts"])
def test_an_own_optimizer_clipped_by_the_norm(source: Path, model: tuple[str, ...], where: str) -> None:
    """The norm's sum goes in another order, so its last bits differ. SOAP would blow them up (the factors of its first
    steps lack rank), whatever the strategy; an update in proportion to the gradient shows them as they are."""

    steps = 3  # each adds rounding

    def norm(trainee: Trainee) -> float:
        fill_gradients(trainee, steps, noise)
        engine_of(trainee).chained_optimizers[0].prepare_grads()
        return float(engine_of(trainee).get_grad_norm())

    def runs(layout: tuple[str, ...], *each: tuple[str, ...]) -> list[Result]:
        made = [_plain(source, *model, *layout, *settings) for settings in each]
        return run_engines([Case(config=config, layout=where, steps=steps, look=norm) for config, where in made])

    sc, canzona = ("engine.strategy=sc",), ("engine.strategy=canzona",)
    one, free = runs(ONE, sc, (*sc, "optimizer.clip_grad=0"))
    assert _worst(one.after, free.after) > 0.1 * LR, "nothing was clipped"
    for found in runs(LAYOUTS[where], sc, canzona):
        assert found.kept == pytest.approx([one.kept[0]] * 4, rel=1e-6)
        for name, weight in one.after.items():  # a step is about LR; norms' weights are about 1, whose last bit is more
            torch.testing.assert_close(found.after[name], weight, rtol=2.4e-7, atol=1e-6 * LR, msg=name)


def test_an_own_optimizer_may_read_weights_when_it_is_created(source: Path) -> None:
    settings = ("train.precision=fp32", "optimizer.clip_grad=0", *LAYOUTS["tp2"])
    made = [resolve(*settings, f"engine.strategy={strategy}") for strategy in ("sc", "canzona")]
    cases = [Case(config=custom(config, source, "Anchored"), layout=layout, steps=2) for config, layout in made]
    sc, canzona = run_engines(cases)
    assert _worst(sc.after, canzona.after) == 0.0


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("dp2", ("optimizer=shampoo", "train.grad_reduce_dtype=bf16")),
        ("tp2 pp2", ("optimizer=soap", "engine.splitting=per_head")),
    ],
)
def test_memory_is_what_was_estimated(where: str, settings: tuple[str, ...]) -> None:
    """Every rank keeps all of its stage: nothing but alignment and counters comes on top."""
    config, layout = resolve("engine.strategy=sc", *settings, *LAYOUTS[where])
    parts = estimate(config.setup, layout).parts
    expected = sum(parts[part] for part in ("weights", "gradients", "optimizer", "exchange"))

    def rank() -> int:
        trainee = build(config, layout)
        for step in range(2):
            optimizer_step(trainee, step)
        trainee.optimizer.zero_grad()
        return tensor_bytes(trainee)

    held = run_ranks(layout.world_size, rank)
    # Seen: 1.00001 to 1.0004.
    assert max(held) == pytest.approx(expected, rel=0.01)


def test_phases_and_guards() -> None:
    """Gathers are exchange, nothing travels afterwards; NaN gradients are found before any weight changes."""
    config, layout = resolve("engine.strategy=sc", "optimizer=soap", "train.non_finite=skip", *LAYOUTS["tp2 dp2"])

    def rank() -> tuple[dict[str, float], bool, bool]:
        trainee = build(config, layout)
        stream = batches(trainee)
        train_step(trainee, stream)
        before = weights(trainee)
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        with poisoned(parameter(trainee, name) if trainee.world.rank == 3 else None, float("nan")):
            skipped = train_step(trainee, stream).skipped
        unchanged = weights(trainee) == before
        train_step(trainee, stream)
        return trainee.timer.timings()[0].phases, skipped and unchanged, weights(trainee) != before

    for phases, left_out, went_on in run_ranks(layout.world_size, rank):
        assert left_out
        assert went_on
        assert all(phases[name] > 0 for name in ("exchange", "matrix_update", "adamw_update", "norm_clip"))
        assert phases.get("param_gather", 0.0) == 0.0
