"""The steps that the breakdown of a run averages over."""

import pytest

from canzona_cli.megatron.timers import StepTiming
from canzona_cli.training.measure import WARM_UP_STEPS, measured_steps

STEPS = [StepTiming(step_s=float(number), phases={}) for number in range(1, 6)]
"""The steps of one launch; each takes as many seconds as its number in this launch."""


@pytest.mark.parametrize(
    ("first", "profiled", "measured"),
    [
        (1, None, [3, 4, 5]),
        (1, (4, 4), [3, 5]),
        (101, (4, 4), [3, 4, 5]),  # the run's fourth step was in an earlier launch
        (101, (104, 105), [3]),
        (101, (103, 200), [3, 4, 5]),  # every step is profiled
    ],
)
def test_the_warm_up_and_profiled_steps_are_left_out(
    first: int, profiled: tuple[int, int] | None, measured: list[int]
) -> None:
    assert WARM_UP_STEPS == 2
    assert [step.step_s for step in measured_steps(STEPS, first, profiled)] == measured


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_left_of_a_short_launch(count: int) -> None:
    assert [step.step_s for step in measured_steps(STEPS[:count], 1, None)] == [count]
