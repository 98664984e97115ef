"""Models with experts train the same on every layout: losses, weights, balancing losses and token counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.routing import Routing
from canzona_cli.training.step import train_step
from tests.dist import jobs, whole
from tests.dist.jobs import Runs, on_ranks, planned
from tests.dist.samples import samples_of
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, Weights, part_of

STEPS = 4
FIXED = (
    *jobs.SMALL,
    "model.ffn_hidden_size=64",
    "model.num_experts=8",
    "model.experts_per_token=2",
    "train.precision=fp32",
    "optimizer.lr=0.01",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
)
LAYOUTS = {
    "one rank": ("gpus=1",),
    "dp2": ("gpus=2",),
    "tp2": ("gpus=2", "parallel.tp=2"),
    "pp2": ("gpus=2", "parallel.pp=2"),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "tp2 dp2": ("gpus=4", "parallel.tp=2"),
}
SETTINGS = {
    # A large weight, so that a balancing loss that depends on the layout changes the weights.
    "muon": ("optimizer=muon", "model.balancing_weight=0.1"),
    "global": ("optimizer=muon", "model.balancing_loss=global", "model.balancing_weight=0.1"),
    "adamw": ("optimizer=adamw", "model.balancing_weight=0.1"),
    "sc": ("optimizer=muon", "engine.strategy=sc", "engine.splitting=qkv"),
    "qkv": ("optimizer=muon", "engine.splitting=qkv"),
    "recompute": ("optimizer=muon", "model.balancing_weight=0.1", "train.recompute=full"),
}
Run = tuple[str, str]
MATRICES, OTHERS = 1e-5, 1e-4
"""The largest differences of weights after four steps with a learning rate of 0.01, of which one is 0.01 for AdamW.
Seen: 2.8e-6 of matrices; 4.4e-5 of AdamW's weights, which it moves by the sign of tiny gradients."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    losses: list[float]
    routing: list[Routing]
    part: Part


@dataclass(frozen=True, kw_only=True)
class Found:
    losses: list[float]
    routing: list[Routing]
    weights: Weights


def _resolve(run: Run) -> tuple[RunConfig, Layout]:
    where, how = run
    # One micro-batch, because the global loss is a running mean over micro-batches.
    micro = {"global": ("train.micro_batch_size=8",) if where == "one rank" else ("train.micro_batch_size=4",)}
    return jobs.resolve(*FIXED, *SETTINGS[how], *LAYOUTS[where], *micro.get(how, ()))


def _train(runs: Sequence[Run]) -> list[Found]:
    made = {run: _resolve(run) for run in runs}
    plans = {run: planned(*case) for run, case in made.items()}

    def work(run: Run, world: World) -> Seen:
        config = made[run][0]
        trainee = assemble(config, world, plans[run])
        batches = BatchStream(samples_of(config, STEPS * world.layout.global_batch_size), world)
        steps = [train_step(trainee, batches) for _ in range(STEPS)]
        finish_gathering(trainee)
        return Seen(
            losses=[step.loss for step in steps],
            routing=[step.routing for step in steps if step.routing is not None],
            part=part_of(trainee.chunks, world),
        )

    return [_agreed(ranks, made[run][0]) for run, ranks in on_ranks(made, work).items()]


def _agreed(ranks: list[Seen], config: RunConfig) -> Found:
    assert all((seen.losses, seen.routing) == (ranks[0].losses, ranks[0].routing) for seen in ranks)
    weights = whole.assemble([seen.part for seen in ranks], config.model)
    return Found(losses=ranks[0].losses, routing=ranks[0].routing, weights=weights)


RUNS = Runs(
    [("one rank", "muon"), ("one rank", "qkv"), ("one rank", "sc"), ("one rank", "global"), ("one rank", "recompute"),
     ("one rank", "adamw"), ("dp2", "muon"), ("dp2", "global"), ("dp2", "adamw"), ("tp2", "muon")],
    lambda run: run[0],
    _train,
)  # fmt: skip


def _apart(one: Found, other: Found) -> tuple[float, float]:
    """The largest differences of matrices, and of the weights that AdamW updates."""
    assert one.weights.keys() == other.weights.keys()
    apart = {name: float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights}
    others = {name for name in apart if "norm" in name or "embed" in name or name.endswith("mlp.gate.weight")}
    return max(apart[name] for name in apart.keys() - others), max(apart[name] for name in others)


def _same(found: Found, one: Found, *, matrices: float = MATRICES, others: float = OTHERS) -> None:
    assert found.losses == pytest.approx(one.losses, rel=1e-5)
    assert [far < most for far, most in zip(_apart(found, one), (matrices, others), strict=True)] == [True, True]
    for ours, theirs in zip(found.routing, one.routing, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.balancing_loss == pytest.approx(theirs.balancing_loss, rel=1e-4)


@pytest.mark.parametrize("run", [("dp2", "muon"), ("tp2", "muon"), ("dp2", "global")], ids=" ".join)
def test_experts_train_the_same_on_every_layout(run: Run) -> None:
    _same(RUNS[run], RUNS["one rank", run[1]])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "run", [("pp2", "muon"), ("cp2", "muon"), ("tp2 dp2", "muon"), ("tp2 dp2", "global")], ids=" ".join
)
def test_experts_train_the_same_on_further_layouts(run: Run) -> None:
    _same(RUNS[run], RUNS["one rank", run[1]])


def test_adamw_trains_the_same_on_two_ranks() -> None:
    """AdamW turns rounding of tiny gradients into steps of the learning rate's size."""
    _same(RUNS["dp2", "adamw"], RUNS["one rank", "adamw"], matrices=1e-3, others=1e-3)


def test_recomputation_counts_no_token_twice() -> None:
    _same(RUNS["one rank", "recompute"], RUNS["one rank", "muon"])


def test_megatrons_own_muon_leaves_the_router_to_adamw() -> None:
    """Else it would orthogonalise the router's update, and differ from canzona's by hundredths."""
    assert max(_apart(RUNS["one rank", "sc"], RUNS["one rank", "qkv"])) < 1e-6


def test_every_token_goes_to_two_experts_of_each_layer() -> None:
    config, layout = _resolve(("dp2", "muon"))
    tokens = layout.global_batch_size * config.train.seq_length
    for routing in RUNS["dp2", "muon"].routing:
        assert [sum(layer) for layer in routing.tokens] == [2 * tokens] * config.model.num_layers
        assert 0.9 < routing.balancing_loss < 1.5
        assert 1 <= routing.load <= config.model.num_experts / 2


def test_every_expert_and_router_moves() -> None:
    first = _initial()
    after = RUNS["one rank", "muon"].weights
    moved = [name for name in after if "experts" in name or "mlp.gate." in name]
    assert len(moved) == 2 * (8 * 3 + 1)
    assert [name for name in moved if torch.equal(first[name], after[name])] == []


def _initial() -> Weights:
    run = ("one rank", "muon")
    config, layout = _resolve(run)

    def work(_: str, world: World) -> Part:
        return part_of(assemble(config, world, planned(config, layout)).chunks, world)

    return whole.assemble(on_ranks({"start": (config, layout)}, work)["start"], config.model)
