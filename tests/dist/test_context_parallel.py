"""Sequences cut over context-parallel ranks train the model that whole ones train."""

import logging
import math
from dataclasses import dataclass
from functools import cache

import pytest

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.planner.planner import make_plan
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import train_step, validate
from tests.dist import jobs, whole
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens
from tests.dist.synthetic import finish_gathering
from tests.dist.trained import FIXED, different
from tests.dist.whole import Part, Weights, part_of

STEPS = 4
LAYOUTS = {
    "one rank": ("gpus=1",),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "cp2 tp2": ("gpus=4", "parallel.cp=2", "parallel.tp=2"),
    "cp2 dp2": ("gpus=4", "parallel.cp=2"),
    "cp2 pp2": ("gpus=4", "parallel.cp=2", "parallel.pp=2"),
}
SETTINGS = {
    "muon": ("optimizer=muon",),
    "adamw": ("optimizer=adamw",),
    "muon bf16 selective": ("optimizer=muon", "train.precision=bf16", "train.recompute=selective"),
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What adding up in another order may come to in four steps, relative."""

    loss: float
    grad_norm: float
    weights: float


# Seen: 2e-7, 8e-6, 1e-4; and 1e-4, 7e-4, 0.05.
FP32 = Bounds(loss=2e-6, grad_norm=3e-5, weights=5e-4)
BF16 = Bounds(loss=5e-4, grad_norm=3e-3, weights=0.15)


class MaskedTokens(RandomTokens):
    """The loss leaves some tokens out, more of a sample's first quarter than of the rest: ranks that share a sequence
    count differently many."""

    def __getitem__(self, index: int) -> Batch:
        sample = super().__getitem__(index)
        sample["loss_mask"][: len(sample["tokens"]) // 4 + index % 5] = 0.0
        return sample


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a run."""

    losses: list[float]
    grad_norms: list[float]
    validation: float
    before: Part
    after: Part


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all ranks of a run agree on."""

    losses: list[float]
    grad_norms: list[float]
    validation: float
    before: Weights
    after: Weights


def _resolve(where: str, how: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, "train.micro_batch_size=4", *SETTINGS[how], *LAYOUTS[where])


def _train(config: RunConfig, world: World) -> Seen:
    logging.disable(logging.WARNING)
    plan = make_plan(config, world.layout) if execution_of(config) is Execution.PLANNED else None
    trainee = assemble(config, world, plan)
    before = part_of(trainee.model, world)
    samples = MaskedTokens(
        samples=STEPS * world.layout.global_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=config.model.vocab_size,
    )
    batches = BatchStream(samples, world)
    steps = [train_step(trainee, batches) for _ in range(STEPS)]
    validation = validate(trainee, BatchStream(samples, world), global_batches=2)
    finish_gathering(trainee)
    return Seen(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        validation=validation,
        before=before,
        after=part_of(trainee.model, world),
    )


@cache
def _found(where: str) -> dict[str, Found]:
    """Every setting's run on the layout's ranks, one after another in the same processes."""
    runs = {how: _resolve(where, how) for how in SETTINGS}
    config, layout = runs["muon"]

    def rank() -> list[Seen]:
        world = join(config, layout)
        return [_train(config, world) for config, _ in runs.values()]

    found = {}
    for how, ranks in zip(SETTINGS, zip(*run_ranks(layout.world_size, rank), strict=True), strict=True):
        facts = {(*seen.losses, *seen.grad_norms, seen.validation) for seen in ranks}
        assert len(facts) == 1, "ranks disagree"
        found[how] = Found(
            losses=ranks[0].losses,
            grad_norms=ranks[0].grad_norms,
            validation=ranks[0].validation,
            before=whole.assemble([seen.before for seen in ranks], config.model),
            after=whole.assemble([seen.after for seen in ranks], config.model),
        )
    return found


def _apart(found: Found, reference: Found) -> float:
    """How far apart two runs ended over how far they went, in norms over all weights."""
    apart, way = (
        sum(float((found.after[name] - other[name]).square().sum()) for name in other)
        for other in (reference.after, reference.before)
    )
    return math.sqrt(apart / way)


@pytest.mark.parametrize("where", [where for where in LAYOUTS if where != "one rank"])
@pytest.mark.parametrize("how", SETTINGS)
def test_cut_sequences_train_what_whole_ones_train(how: str, where: str) -> None:
    one, found, bounds = _found("one rank")[how], _found(where)[how], BF16 if "bf16" in how else FP32
    assert min(one.grad_norms) > 0.25, "clipping is not active"
    assert different(found.before, one.before) == []
    assert (*found.losses, found.validation) == pytest.approx((*one.losses, one.validation), rel=bounds.loss)
    assert found.grad_norms == pytest.approx(one.grad_norms, rel=bounds.grad_norm)
    assert _apart(found, one) < bounds.weights
