"""The line that says how a step differs from its plan: the phase that differs most, by what factor, at which rank."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.phases import IN_STEP
from canzona_cli.records.breakdown import Why, why
from canzona_cli.records.statistics import OverRanks

PLAN = {
    "forward": 0.100,
    "backward": 0.200,
    "grad_reduce": 0.010,
    "grad_reduce_total": 0.100,
    "norm_clip": 0.010,
    "exchange": 0.005,
    "exchange_total": 0.050,
    "matrix_update": 0.100,
    "adamw_update": 0.010,
    "param_gather": 0.005,
    "param_gather_total": 0.040,
    "other": 0.005,
}
Rank = Mapping[str, float]


def over(ranks: Sequence[Rank]) -> dict[str, OverRanks]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    values = {name: [rank.get(name, 0.0) for rank in ranks] for name in names}
    return {name: OverRanks.of(times) for name, times in values.items()}


def difference(ranks: Sequence[Rank], *, named: bool = True) -> Why:
    found = why(over(ranks), PLAN, ranks if named else ())
    assert found is not None
    return found


def four(*changes: Rank) -> list[Rank]:
    """Four ranks that do as planned but for the changes of the first ones."""
    return [PLAN | dict(change) for change in (*changes, *({} for _ in range(4 - len(changes))))]


def test_a_step_as_planned_is_told_to_be() -> None:
    assert difference(four()).text.startswith("as planned")


def test_the_phase_its_factor_and_the_slow_rank_are_named() -> None:
    found = difference(four({}, {}, {"backward": 0.5, "forward": 0.2}))
    assert (found.phase, found.predicted_s) == ("backward", 0.2)
    assert found.measured_s == pytest.approx(0.275)
    assert found.text == "backward took 275 ms, planned 200 ms (1.4 times); rank 2 took 1.8 times the mean"
    assert "rank" not in difference(four({}, {}, {"backward": 0.5}), named=False).text


def test_no_rank_is_named_where_all_are_slow() -> None:
    assert "rank" not in difference([{**PLAN, "backward": 0.9}, *[{**PLAN, "backward": 0.8}] * 3]).text


def test_who_waits_least_is_the_one_that_is_waited_for() -> None:
    found = difference(four({"norm_clip": 0.2}, {"norm_clip": 0.2}, {"norm_clip": 0.2}))
    assert found.phase == "norm_clip"
    assert "rank 3 arrives last, and the others wait for it" in found.text
    assert "wait" not in difference([{**PLAN, "norm_clip": 0.2}] * 4).text


def test_without_a_measured_step_there_is_nothing_to_explain() -> None:
    assert why({}, PLAN) is None


@given(
    ranks=st.lists(
        st.dictionaries(st.sampled_from([*IN_STEP, "exchange_total", "grad_reduce_total"]), st.floats(0, 2)),
        min_size=1,
        max_size=5,
    ),
    predicted=st.dictionaries(st.sampled_from([*IN_STEP, "exchange_total", "grad_reduce_total"]), st.floats(0, 2)),
    named=st.booleans(),
)
def test_whatever_was_measured_the_largest_difference_is_named(
    ranks: list[dict[str, float]], predicted: dict[str, float], named: bool
) -> None:
    measured = over(ranks)
    found = why(measured, predicted, ranks if named else ())
    step = sum(seconds.mean_s for name, seconds in measured.items() if name in IN_STEP)
    assert (found is None) == (step <= 0)
    if found is None:
        return
    apart: dict[str, float] = {
        name: abs((measured[name].mean_s if name in measured else 0.0) - predicted.get(name, 0.0)) for name in IN_STEP
    }
    assert apart[found.phase] == max(apart.values())
    assert found.text
    assert "nan" not in found.text
