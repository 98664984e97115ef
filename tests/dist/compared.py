"""Runs whose layouts differ, trained from the same samples on real ranks, and how far apart they end."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.planner.make import make_plan
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import train_step, validate
from tests.dist import whole
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens
from tests.dist.synthetic import finish_gathering
from tests.dist.trained import different
from tests.dist.whole import Part, Weights, part_of

STEPS = 4


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


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What adding up in another order may come to in `STEPS` steps, relative."""

    loss: float
    grad_norm: float
    weights: float


def assert_close(one: Found, reference: Found, bounds: Bounds) -> None:
    """Asserts that two runs began with the same weights and differ by no more than rounding."""
    assert different(one.before, reference.before) == []
    losses = pytest.approx((*reference.losses, reference.validation), rel=bounds.loss)
    assert (*one.losses, one.validation) == losses
    assert one.grad_norms == pytest.approx(reference.grad_norms, rel=bounds.grad_norm)
    assert _apart(one, reference) < bounds.weights


def found(runs: Mapping[str, tuple[RunConfig, Layout]]) -> dict[str, Found]:
    """Runs of one layout, one after another in the same processes, by name."""
    config, layout = next(iter(runs.values()))

    def rank() -> list[Seen]:
        world = join(config, layout)
        return [_train(config, world) for config, _ in runs.values()]

    agreed = {}
    for how, ranks in zip(runs, zip(*run_ranks(layout.world_size, rank), strict=True), strict=True):
        facts = {(*seen.losses, *seen.grad_norms, seen.validation) for seen in ranks}
        assert len(facts) == 1, "ranks disagree"
        agreed[how] = Found(
            losses=ranks[0].losses,
            grad_norms=ranks[0].grad_norms,
            validation=ranks[0].validation,
            before=whole.assemble([seen.before for seen in ranks], config.model),
            after=whole.assemble([seen.after for seen in ranks], config.model),
        )
    return agreed


def _apart(one: Found, reference: Found) -> float:
    """How far apart two runs ended over how far they went, in norms over all weights."""
    between, way = (
        sum(float((one.after[name] - other[name]).square().sum()) for name in other)
        for other in (reference.after, reference.before)
    )
    return math.sqrt(between / way)


def _train(config: RunConfig, world: World) -> Seen:
    logging.disable(logging.WARNING)
    plan = make_plan(config, world.layout) if execution_of(config) is Execution.PLANNED else None
    trainee = assemble(config, world, plan)
    before = part_of(trainee.chunks, world)
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
        after=part_of(trainee.chunks, world),
    )
