"""The line that says why a step was not as planned: the phase that differs most, and a cause that the data shows."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.run.phases import IN_STEP
from canzona_cli.run.statistics import OverRanks
from canzona_cli.run.why import StepComparison, Why

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


def why(
    ranks: Sequence[Rank], *, calibrated: bool = True, cores: int | None = None, named: bool = True, tp: int = 2
) -> Why:
    found = StepComparison(
        measured=over(ranks),
        predicted=PLAN,
        ranks=ranks if named else (),
        calibrated=calibrated,
        cores=cores,
        world_size=len(ranks),
        tp=tp,
        load_balance=1.05,
    ).why()
    assert found is not None
    return found


def four(*changes: Rank) -> list[Rank]:
    """Four ranks that do as planned but for the changes of the first ones."""
    return [PLAN | dict(change) for change in (*changes, *({} for _ in range(4 - len(changes))))]


def test_a_step_as_planned_is_told_to_be() -> None:
    assert why(four()).text.startswith("as planned")


def test_a_slow_rank_is_named() -> None:
    found = why(four({}, {}, {"backward": 0.5, "forward": 0.2}))
    assert (found.phase, found.predicted_s) == ("backward", 0.2)
    assert found.measured_s == pytest.approx(0.275)
    assert "rank 2 takes 2.5 times as long as the others" in found.text
    assert "one rank takes" in why(four({}, {}, {"backward": 0.5}), named=False).text


def test_a_slow_rank_is_no_cause_where_all_are_slow() -> None:
    found = why([{**PLAN, "backward": 0.9}, *[{**PLAN, "backward": 0.6}] * 3])
    assert "rank 0" not in found.text


def test_uneven_updates_are_told_from_a_slow_rank() -> None:
    """Rank 1's passes are as fast as the others': it has more to update than planned."""
    found = why(four({}, {"matrix_update": 0.4}))
    assert found.phase == "matrix_update"
    assert "load balance is 2.29, planned 1.05" in found.text
    assert "rank 1 has the most to do" in found.text
    slow = why(four({}, {"matrix_update": 0.5, "forward": 0.15, "backward": 0.3}))
    assert "rank 1 takes 5 times as long" in slow.text


@pytest.mark.parametrize(
    ("phase", "hidden_under"),
    [("exchange", "matrix updates"), ("grad_reduce", "the backward pass"), ("param_gather", "the forward pass")],
)
def test_communication_that_does_not_hide_is_told_from_a_slow_link(phase: str, hidden_under: str) -> None:
    bare = [{**PLAN, phase: PLAN[f"{phase}_total"] + 0.01, f"{phase}_total": PLAN[f"{phase}_total"] + 0.01}] * 4
    found = why(bare, cores=2)
    assert found.phase == phase
    assert f"did not hide under {hidden_under}" in found.text
    assert "4 ranks share 2 cores" in found.text
    assert "cores" not in why(bare, cores=4).text
    slow = why([{**PLAN, phase: 0.3, f"{phase}_total": 0.4}] * 4)
    assert "communication is slower than the profile says" in slow.text


def test_who_waits_least_is_the_one_that_is_waited_for() -> None:
    found = why(four({"norm_clip": 0.2}, {"norm_clip": 0.2}, {"norm_clip": 0.2}))
    assert found.phase == "norm_clip"
    assert "ranks wait here for rank 3, which comes last" in found.text
    even = why([{**PLAN, "norm_clip": 0.2}] * 4)
    assert "wait" not in even.text


def test_all_computation_slower_by_one_factor_is_the_machine_or_the_profile() -> None:
    slow = [{name: 1.5 * time for name, time in PLAN.items()}] * 2
    assert "all computation took 1.5 times the plan" in why(slow).text
    assert "other load" in why(slow).text
    assert "canzona calibrate" in why(slow, calibrated=False).text
    fast = why([{name: 0.5 * time for name, time in PLAN.items()}] * 2, calibrated=False)
    assert "this machine is faster" in fast.text


def test_passes_that_are_slow_by_themselves_are_not_put_down_to_the_processor() -> None:
    """TP ranks go through a pass together: one that is slow holds all of them up, and does not show."""
    found = why([{**PLAN, "forward": 0.6, "backward": 0.5}] * 2, calibrated=False)
    assert found.phase == "forward"
    assert "6 times, and updates took 1 times theirs" in found.text
    assert "TP ranks wait for one another" in found.text
    alone = why([{**PLAN, "forward": 0.6, "backward": 0.5}] * 2, calibrated=False, tp=1)
    assert "TP" not in alone.text, "data-parallel ranks go through passes by themselves"


def test_ranks_that_share_cores_trade_updates_for_waiting() -> None:
    shared = [{**rank, "matrix_update": 0.050, "exchange": 0.058} for rank in four()]
    found = why(shared, cores=2)
    assert found.phase == "exchange"
    assert "4 ranks share 2 cores" in found.text
    assert "together took 108 ms, planned 105 ms" in found.text
    # With a core for each rank it is no such thing, nor where both took longer.
    assert "share" not in why(shared, cores=4).text
    assert "together" not in why([{**rank, "exchange": 0.200} for rank in shared], cores=2).text


def test_input_that_is_waited_for() -> None:
    assert "waits for its input" in why([{**PLAN, "data": 0.2}] * 2).text


def test_without_a_measured_step_there_is_nothing_to_explain() -> None:
    assert StepComparison(measured={}, predicted=PLAN, calibrated=True, cores=None, world_size=1, tp=1).why() is None


@given(
    ranks=st.lists(
        st.dictionaries(st.sampled_from([*IN_STEP, "exchange_total", "grad_reduce_total"]), st.floats(0, 2)),
        min_size=1,
        max_size=5,
    ),
    predicted=st.dictionaries(st.sampled_from([*IN_STEP, "exchange_total", "grad_reduce_total"]), st.floats(0, 2)),
    calibrated=st.booleans(),
    cores=st.sampled_from([None, 1, 64]),
    named=st.booleans(),
    tp=st.sampled_from([1, 2]),
)
def test_whatever_was_measured_the_largest_difference_is_named(
    ranks: list[dict[str, float]],
    predicted: dict[str, float],
    calibrated: bool,
    cores: int | None,
    named: bool,
    tp: int,
) -> None:
    measured = over(ranks)
    found = StepComparison(
        measured=measured,
        predicted=predicted,
        ranks=ranks if named else (),
        calibrated=calibrated,
        cores=cores,
        world_size=len(ranks),
        tp=tp,
        load_balance=1.0,
    ).why()
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
