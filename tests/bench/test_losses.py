"""Strategies that compute the same must learn the same, and nothing else is held against each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from canzona_cli.bench.results import (
    COMPARED_STEPS,
    FIRST_STEP,
    LATER_STEPS,
    BenchResult,
    StrategiesDisagree,
    check_losses,
    disagreements,
)
from canzona_cli.core.errors import ExitCode
from canzona_cli.core.setup.execution import AnyStrategy
from tests.bench.benches import bench, with_measured

LOSSES = (5.7, 5.6, 5.0, 4.4)


def result_of(
    losses: Mapping[AnyStrategy, Sequence[float]], arithmetic: Mapping[str, str] | None = None
) -> BenchResult:
    result = bench(tuple(losses))
    for name, values in losses.items():
        result = with_measured(result, name, losses=tuple(values))
    strategies = {
        name: replace(found, arithmetic=(arithmetic or {}).get(name, "")) for name, found in result.strategies.items()
    }
    return replace(result, strategies=strategies)


def found(losses: Mapping[AnyStrategy, Sequence[float]], **arithmetic: str) -> list[str]:
    """Keys of the problems."""
    return [problem.key for problem in disagreements(result_of(losses, arithmetic=arithmetic))]


def scaled(step: int, factor: float) -> tuple[float, ...]:
    return tuple(loss * factor if number == step else loss for number, loss in enumerate(LOSSES, 1))


def test_equal_losses_agree_and_adamw_is_another_rule() -> None:
    assert found({"canzona": LOSSES, "sc": LOSSES, "adamw": (5.7, 5.0, 4.0, 3.0)}) == []


def test_each_strategy_that_parts_is_told_at_its_first_wrong_step() -> None:
    losses: dict[AnyStrategy, Sequence[float]]
    losses = {
        "canzona": LOSSES,
        "asc": scaled(3, 1 + 2 * LATER_STEPS),
        "layerwise": LOSSES,
        "sc": scaled(2, 1 - 2 * LATER_STEPS),
    }
    assert found(losses) == ["asc, step 3", "sc, step 2"]


def test_the_first_loss_is_before_any_update_and_leaves_no_room_for_rounding_of_updates() -> None:
    half = (FIRST_STEP + LATER_STEPS) / 2
    assert found({"canzona": LOSSES, "sc": scaled(1, 1 + half)}) == ["sc, step 1"]
    assert found({"canzona": LOSSES, "sc": scaled(2, 1 + half)}) == []


def test_a_loss_that_is_no_number_agrees_with_nothing() -> None:
    assert found({"canzona": LOSSES, "sc": scaled(4, float("nan"))}) == ["sc, step 4"]


def test_strategies_that_update_other_matrices_are_compared_among_themselves() -> None:
    other = tuple(0.9 * loss for loss in LOSSES)
    losses: dict[AnyStrategy, Sequence[float]]
    losses = {"canzona": LOSSES, "asc": LOSSES, "layerwise": other, "sc": other}
    assert found(losses, canzona="split", asc="split", layerwise="qkv", sc="qkv") == []
    assert found({**losses, "sc": LOSSES}, canzona="split", asc="split", layerwise="qkv", sc="qkv") == ["sc, step 1"]


def test_late_losses_part_by_rounding_and_are_not_compared() -> None:
    early = tuple(5.0 for _ in range(COMPARED_STEPS))
    assert found({"canzona": (*early, 2.0), "sc": (*early, 3.0)}) == []


def test_the_error_names_strategy_step_and_both_losses() -> None:
    with pytest.raises(StrategiesDisagree) as caught:
        check_losses(result_of({"canzona": LOSSES, "sc": scaled(3, 2.0)}))
    assert caught.value.exit_code == ExitCode.CRASH
    (problem,) = caught.value.problems
    assert problem.key == "sc, step 3"
    assert problem.value == "loss 10.00000"
    assert "canzona has loss 5.00000 at this step" in problem.reason
    check_losses(result_of({"canzona": LOSSES, "sc": LOSSES}))
