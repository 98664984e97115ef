"""A sudden rise of the loss is told once, with what to do; noise, the descent and the first steps are none."""

import math
import random
from dataclasses import replace

import pytest

from canzona_cli.config.schema import LossSpike as Policy
from canzona_cli.config.schema import TrainConfig
from canzona_cli.errors import ExitCode
from canzona_cli.training.guards import ENOUGH, NEW_LEVEL, WINDOW, LossSpike, Spike, SpikeGuard

SETTINGS = TrainConfig(steps=1000, seq_length=32, batch_tokens=64)


def guard(policy: Policy = "warn", sigmas: float = 8.0) -> SpikeGuard:
    return SpikeGuard(replace(SETTINGS, loss_spike=policy, loss_spike_sigmas=sigmas))


def found(losses: list[float], watching: SpikeGuard | None = None) -> list[Spike]:
    watching = watching or guard()
    return [spike for step, loss in enumerate(losses, start=1) if (spike := watching.notice(step, loss)) is not None]


def descent(steps: int, *, noise: float, seed: int) -> list[float]:
    """From 6 to 2 nats, as runs of small models go."""
    numbers = random.Random(seed)
    return [2 + 4 * math.exp(-step / 80) + numbers.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_goes_well_sets_off_nothing(noise: float, seed: int) -> None:
    assert found(descent(3000, noise=noise, seed=seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02, 0.1])
def test_a_jump_is_told_once_at_its_first_step_and_so_is_the_next(noise: float) -> None:
    losses = descent(600, noise=noise, seed=1)
    for start in (300, 400):
        losses[start : start + 10] = [loss + 3 for loss in losses[start : start + 10]]
    first, second = found(losses)
    assert (first.step, second.step) == (301, 401)
    assert first.loss == losses[300]
    assert first.mean == pytest.approx(math.fsum(losses[300 - WINDOW : 300]) / WINDOW)
    assert first.mean < first.limit < first.loss
    assert "jumped to" in first.words
    assert "step 301" in first.words


def test_the_second_step_of_a_spike_is_not_hidden_by_the_first() -> None:
    """A spike that entered the statistics would raise the limit for what comes after it."""
    losses = descent(300, noise=0.02, seed=2)
    lone, pair = list(losses), list(losses)
    lone[220] += 3
    pair[200] += 3
    pair[220] += 3
    (alone,), (_, after) = found(lone), found(pair)
    assert after.step == alone.step
    assert after.limit == pytest.approx(alone.limit, rel=0.02)


def test_a_loss_that_stays_high_is_told_once_and_is_then_the_level() -> None:
    losses = [2.0] * 100 + [4.0] * 200 + [6.0] * 3
    first, second = found(losses)
    assert (first.step, second.step) == (101, 301)
    assert second.mean == 4.0
    assert ENOUGH <= NEW_LEVEL <= WINDOW, "the new level is watched at once"


def test_the_first_steps_may_do_anything() -> None:
    assert found([2.0] * (ENOUGH - 1) + [50.0]) == []
    assert [spike.step for spike in found([2.0] * ENOUGH + [50.0])] == [ENOUGH + 1]


def test_a_small_rise_is_none_however_smooth_the_curve() -> None:
    assert found([2.0] * 100 + [2.09]) == []
    assert len(found([2.0] * 100 + [2.11])) == 1


def test_fewer_deviations_notice_smaller_rises() -> None:
    losses = [2.0 + 0.1 * (-1) ** step for step in range(100)] + [2.7]
    assert found(losses, guard(sigmas=8.0)) == []
    assert len(found(losses, guard(sigmas=4.0))) == 1


def test_nothing_is_said_where_nobody_asked_or_there_is_no_number() -> None:
    assert found([2.0] * 100 + [50.0], guard("ignore")) == []
    watching = guard()
    assert found([2.0] * 50 + [math.nan, math.inf] + [2.0] * 50, watching) == []
    assert len(found([50.0], watching)) == 1


def test_the_error_names_step_loss_mean_and_says_how_to_go_on() -> None:
    (spike,) = found([2.0] * 100 + [5.25])
    error = LossSpike(spike)
    assert error.exit_code == ExitCode.CRASH
    (problem,) = error.problems
    assert problem.key == "train.loss_spike"
    for word in ("step 101", "5.2500", "2.0000"):
        assert word in problem.reason
    assert "optimizer.lr" in problem.fix
    assert error.since == 101
