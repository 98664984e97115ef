"""The steps that the breakdown of a run averages over."""

import pytest

from canzona_cli.core.megatron.timers import StepTiming
from canzona_cli.training.measure import WARM_UP_STEPS, measured_steps


def launch(first: int, last: int) -> list[StepTiming]:
    return [StepTiming(number=number, step_s=1.0, phases={}) for number in range(first, last + 1)]


@pytest.mark.parametrize(
    ("first", "profiled", "measured"),
    [
        (1, None, [3, 4, 5]),
        (1, (4, 4), [3, 5]),
        (101, (4, 4), [103, 104, 105]),  # the run's fourth step was in an earlier launch
        (101, (104, 105), [103]),
        (101, (103, 200), [103, 104, 105]),  # every step is profiled
    ],
)
def test_the_warm_up_and_profiled_steps_are_left_out(
    first: int, profiled: tuple[int, int] | None, measured: list[int]
) -> None:
    assert WARM_UP_STEPS == 2
    assert [step.number for step in measured_steps(launch(first, first + 4), profiled)] == measured


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_left_of_a_short_launch(count: int) -> None:
    assert [step.number for step in measured_steps(launch(1, count), None)] == [count]
