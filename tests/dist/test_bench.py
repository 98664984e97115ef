"""Strategies that take turns on real ranks: each trains as if it were alone, and one that computes something else is
found out by its losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import pytest

from canzona_cli.bench.lineup import LineUp, line_up
from canzona_cli.bench.results import BenchResult, Samples, StrategyBench, Turns, disagreements, summarise
from canzona_cli.bench.turns import RunningStrategy, gather_samples, take_turns
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.phases import IN_STEP
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.bench.benches import bench
from tests.dist.jobs import SMALL
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens

ROUNDS, STEPS = 2, 2
TOTAL = ROUNDS * STEPS
Configs = Mapping[str, RunConfig]


@dataclass(frozen=True, kw_only=True)
class Held:
    """All that happens on the ranks, one after another, as rank 0 has it."""

    together: dict[str, Samples]
    alone: tuple[float, ...]
    """The losses of canzona when it never pauses."""
    faster: dict[str, Samples]
    """Samples of sc with another learning rate."""


@pytest.fixture(scope="module")
def lined() -> LineUp:
    """All five strategies on TP 2 x DP 2."""
    overrides = [
        "gpus=4",
        "parallel.tp=2",
        "parallel.pp=1",
        "train.micro_batch_size=4",
        "schedule.warmup_steps=0",
        "model.num_layers=1",
    ]
    return line_up(compose_run([*SMALL, *overrides]), None, steps=TOTAL)


@pytest.fixture(scope="module")
def held(lined: LineUp) -> Held:
    every = configs(lined)
    sc = every["sc"]
    faster = replace(sc, optimizer=replace(sc.optimizer, lr=2 * sc.optimizer.lr, adamw_lr=None))

    def rank() -> Held:
        world = join(lined.reference.config, lined.layout)
        (alone,) = running(lined, {"canzona": every["canzona"]}, world).values()
        return Held(
            together=take_all_turns(lined, every, world),
            alone=tuple(train_step(alone.trainee, alone.batches).loss for _ in range(TOTAL)),
            faster=take_all_turns(lined, {"sc": faster}, world),
        )

    return run_ranks(lined.layout.world_size, rank)[0]


@pytest.fixture(scope="module")
def together(held: Held) -> dict[str, Samples]:
    return held.together


def configs(lined: LineUp) -> dict[str, RunConfig]:
    return {strategy.name: strategy.config for strategy in lined.strategies}


def running(lined: LineUp, chosen: Configs, world: World) -> dict[str, RunningStrategy]:
    """Builds the running strategies as a worker does; each reads the same samples for itself."""
    first = lined.reference.config
    # Four of the 384 tokens there are: it shows at once in the losses how fast that is learnt.
    samples = TOTAL * lined.layout.global_batch_size
    data = RandomTokens(samples=samples, seq_length=first.train.seq_length, vocab_size=4)
    plans = {strategy.name: strategy.plan for strategy in lined.strategies}
    return {
        name: RunningStrategy(trainee=assemble(config, world, plans[name]), batches=BatchStream(data, world))
        for name, config in chosen.items()
    }


def take_all_turns(lined: LineUp, chosen: Configs, world: World) -> dict[str, Samples]:
    """A whole bench of these strategies; what rank 0 gathered."""
    order = tuple(strategy.name for strategy in lined.strategies if strategy.name in chosen)
    taking_part = running(lined, chosen, world)
    turns = Turns(names=order, rounds=ROUNDS, steps_per_turn=STEPS)
    assert take_turns(turns, taking_part, stop_requested=lambda: False, on_turn=lambda *_: None)
    return gather_samples(taking_part)


def result_of(lined: LineUp, found: Mapping[str, Samples]) -> BenchResult:
    """These measurements in a result."""
    result = bench([cast(AnyStrategy, strategy.name) for strategy in lined.strategies])
    strategies: dict[str, StrategyBench] = {
        strategy.name: replace(
            result.strategies[strategy.name],
            measured=summarise(found[strategy.name], warm_up_rounds=1, steps_per_turn=STEPS),
            arithmetic=strategy.arithmetic,
        )
        for strategy in lined.strategies
    }
    return replace(result, strategies=strategies)


def test_turns_change_nothing_of_what_a_strategy_learns(held: Held) -> None:
    assert held.together["canzona"].losses == held.alone


def test_ranks_and_steps_are_recorded_in_the_breakdowns_phases(lined: LineUp, together: dict[str, Samples]) -> None:
    assert list(together) == ["canzona", "paper", "asc", "layerwise", "sc", "adamw"]
    for name, samples in together.items():
        assert len(samples.losses) == TOTAL
        assert [len(steps) for steps in samples.ranks] == [TOTAL] * lined.layout.world_size
        for step in (step for steps in samples.ranks for step in steps):
            in_step = sum(seconds for phase, seconds in step.phases.items() if phase in IN_STEP)
            assert in_step == pytest.approx(step.step_s, rel=1e-6)
            assert step.processor_s > 0
        found = summarise(samples, warm_up_rounds=1, steps_per_turn=STEPS)
        assert len(found.iteration_s) == len(found.optimizer_s) == len(found.processor_s) == ROUNDS - 1
        assert all(0 < own < whole for own, whole in zip(found.optimizer_s, found.iteration_s, strict=True))
        assert (sum(found.update_s) > 0) == (name != "adamw")


def test_ranks_hold_what_the_plan_says(lined: LineUp, together: dict[str, Samples]) -> None:
    for strategy in lined.strategies[:2]:
        assert strategy.tensor_bytes is not None
        # Beside what is planned stand step counters and the few bytes that buffers are padded by.
        assert max(together[strategy.name].tensor_bytes) == pytest.approx(strategy.tensor_bytes, rel=0.01)
    assert len(set(together["sc"].tensor_bytes)) == 1  # every rank keeps everything of its fragments


def test_strategies_agree_unless_one_computes_something_else(lined: LineUp, held: Held) -> None:
    assert disagreements(result_of(lined, held.together)) == []
    (problem,) = disagreements(result_of(lined, {**held.together, **held.faster}))
    assert problem.key.startswith("sc, step ")
    assert problem.key != "sc, step 1"  # before any update all are equal


def test_a_stop_ends_the_turn_after_the_step_at_hand_on_every_rank(lined: LineUp) -> None:
    turns = Turns(names=("canzona",), rounds=ROUNDS, steps_per_turn=STEPS)

    def rank() -> tuple[bool, int]:
        world = join(lined.reference.config, lined.layout)
        taking_part = running(lined, {"canzona": lined.reference.config}, world)
        (own,) = taking_part.values()
        stop = take_turns(
            turns,
            taking_part,
            stop_requested=lambda: world.rank == 0 and len(own.losses) == STEPS,
            on_turn=lambda *_: None,
        )
        return stop, len(own.losses)

    assert run_ranks(lined.layout.world_size, rank) == [(False, STEPS + 1)] * lined.layout.world_size
