"""A slow rank is found by its own work; noise, a plan's imbalance and pipeline stages are no stragglers."""

import random
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.training.measure import LIMITS, WINDOW, StragglerWatch, find_stragglers
from canzona_cli.training.records import Journal


def noisy(seed: int, *, ranks: int = 4, slow: dict[int, float] | None = None, spread: float = 0.5) -> list[list[float]]:
    """[rank][step] seconds: 0.1, now and then longer by up to `spread`, as on busy cores; `slow` ranks by a factor."""
    random_numbers = random.Random(seed)
    return [
        [0.1 * (slow or {}).get(rank, 1.0) * (1 + spread * random_numbers.random()) for _ in range(WINDOW)]
        for rank in range(ranks)
    ]


def found(
    own: list[list[float]], stages: list[int] | None = None, *, step_s: float = 0.5, device: str = "cpu"
) -> dict[int, float]:
    return find_stragglers(own, stages or [0] * len(own), step_s=step_s, limit=LIMITS[device])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_raises_no_alarm(ranks: int) -> None:
    # Steps up to 2.5 times as long as others, on every rank by chance: far more than was measured on crowded cores.
    alarms = [found(noisy(seed, ranks=ranks, spread=1.5)) for seed in range(500)]
    assert not any(alarms)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("factor", [2.5, 5.0])
def test_a_slow_rank_is_named_in_spite_of_noise(ranks: int, factor: float) -> None:
    for seed in range(100):
        [(rank, times)] = found(noisy(seed, ranks=ranks, slow={1: factor})).items()
        assert rank == 1
        assert times > LIMITS["cpu"]


def test_devices_of_their_own_are_held_to_less() -> None:
    slow = [noisy(seed, slow={1: 1.4}, spread=0.05) for seed in range(100)]
    assert all([*found(own, device="cuda")] == [1] for own in slow)
    assert not any(found(own, device="cpu") for own in slow)
    assert not any(found(noisy(seed, spread=0.2), device="cuda") for seed in range(100))


@pytest.mark.parametrize("device", LIMITS)
def test_a_watch_has_the_limits_of_its_ranks_devices(device: str) -> None:
    told: list[str] = []
    world = cast(World, SimpleNamespace(device=torch.device(device)))
    journal = cast(Journal, SimpleNamespace(incident=lambda name, **facts: told.append(f"{name}: {facts['detail']}")))
    watch = StragglerWatch(world, PhaseTimer(torch.device("cpu")), journal)
    watch._judge(WINDOW, 0.5, [fact for row in noisy(0, slow={1: 1.4}, spread=0.0) for fact in (*row, 0.0)])
    detail = "rank 1 is slow: its data, forward and backward take 1.4 times its peers' time"
    assert told == ([f"straggler: {detail}"] if device == "cuda" else [])


def test_ranks_that_are_slow_together_are_all_named() -> None:
    # A slow machine, or on GPUs the whole tensor-parallel group of a slow one.
    assert [*found(noisy(0, ranks=8, slow={4: 3.0, 5: 3.0}))] == [4, 5]


def test_stages_of_a_pipeline_have_different_work() -> None:
    own = noisy(0, slow={2: 3.0, 3: 3.0})
    assert not found(own, [0, 0, 1, 1])
    assert [*found(noisy(0, slow={2: 3.0, 3: 9.0}), [0, 0, 1, 1])] == [3]
    assert not found(noisy(0, ranks=2, slow={1: 3.0}), [0, 1]), "nobody to be compared with"


def test_what_costs_the_job_nothing_is_not_worth_a_word() -> None:
    assert not found(noisy(0, slow={1: 3.0}), step_s=10.0)


def test_one_long_pause_is_no_slow_rank() -> None:
    own = noisy(0)
    own[1][5] += 10.0
    assert not found(own)
