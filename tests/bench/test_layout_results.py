"""The errors of predicted layouts, in the field's words and by phase, for numbers that nothing was fitted to."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from canzona_cli.bench.layouts import LayoutBench, TuneResult, content_of
from canzona_cli.bench.lineup import entrant_name
from canzona_cli.bench.results import Measured, Predicted
from canzona_cli.config.schema import Layout
from canzona_cli.report.tune import TuneView
from canzona_cli.run.breakdown import CALIBRATE
from canzona_cli.run.statistics import OverRanks
from tests.report.terminal import printed
from tests.sizes import layout


def one(
    mesh: Layout,
    *seconds: float,
    predicted: float,
    fitted: bool = False,
    phases: Mapping[str, tuple[float, float]] | None = None,
) -> LayoutBench:
    """Returns a result with steps by round and with measured and predicted phases."""
    shares = {"forward": (seconds[0], predicted)} if phases is None else phases
    turns = [
        Measured(
            iteration_s=(step,),
            optimizer_s=(step / 4,),
            processor_s=(2 * step,),
            phases={name: OverRanks.of([0.9 * found, 1.1 * found]) for name, (found, _) in shares.items()},
            load_balance=1.0,
            losses=(6.0, 5.9),
            tensor_bytes=(1 << 20,),
        )
        for step in seconds
    ]
    said = Predicted(
        iteration_s=predicted,
        optimizer_s=predicted / 4,
        phases={name: planned for name, (_, planned) in shares.items()},
        load_balance=1.0,
        tensor_bytes=None,
        memory_bytes=1 << 30,
    )
    return LayoutBench(layout=mesh, measured=tuple(turns), predicted=said, fitted=fitted)


DP4, TP4 = layout(dp=4), layout(tp=4, count=4)
MIXED, PP2 = layout(tp=2, dp=2, count=2), layout(pp=2, dp=2, count=2)


def result(*layouts: LayoutBench, chosen: Layout = DP4) -> TuneResult:
    return TuneResult(
        recipe="qwen3-tiny",
        overrides=("recipe=tiny", "gpus=4"),
        optimizer="muon",
        gpus=4,
        device="cpu",
        profile="here",
        calibrated=True,
        fitted_on="DP2, TP2 DP2",
        machine={"processor": "A", "cores": 2, "load_average": 0.1},
        rounds=len(layouts[0].measured),
        steps=3,
        warm_up_steps=2,
        legal=117,
        everything=False,
        chosen=entrant_name(chosen),
        layouts={entrant_name(found.layout): found for found in layouts},
        failed={},
    )


def test_errors_are_those_of_layouts_that_nothing_was_fitted_to() -> None:
    found = result(
        one(DP4, 1.0, 1.1, 0.9, predicted=1.1),  # +10% of the median
        one(TP4, 2.0, predicted=1.5),  # -25%
        one(PP2, 1.05, predicted=1.05),
        one(MIXED, 1.0, predicted=9.0, fitted=True),
    ).accuracy
    assert found is not None
    assert found.step.layouts == 3
    assert found.step.mape == pytest.approx((0.1 + 0.25 + 0.0) / 3)
    assert found.step.mean == pytest.approx((0.1 - 0.25 + 0.0) / 3)
    assert found.step.worst == pytest.approx(-0.25)
    assert found.step.worst_layout == entrant_name(TP4)


def test_without_such_layouts_there_is_no_error_to_tell() -> None:
    assert result(one(DP4, 1.0, predicted=1.0, fitted=True)).accuracy is None


def test_orders_count_where_layouts_are_more_than_a_tenth_apart() -> None:
    found = result(
        one(DP4, 1.00, predicted=1.00),
        one(PP2, 1.05, predicted=0.90),  # not apart from the first; apart from the third
        one(TP4, 1.20, predicted=0.95),  # behind the second by prediction too, before the first
    ).accuracy
    assert found is not None
    assert (found.pairs, found.in_order) == (2, 1)


def test_layouts_are_compared_by_sequence() -> None:
    twice = layout(dp=4, micro=2)
    assert twice.global_batch_size == 2 * DP4.global_batch_size
    found = result(one(DP4, 1.0, predicted=1.0), one(twice, 1.5, predicted=1.5))
    assert found.best == entrant_name(twice)
    assert found.slower(entrant_name(DP4)) == pytest.approx(1.0 / 0.75 - 1)


def test_errors_of_a_phase_are_told_of_steps_that_spend_time_there() -> None:
    found = result(
        one(DP4, 1.0, predicted=1.0, phases={"forward": (0.4, 0.5), "exchange": (0.005, 0.9)}),
        one(TP4, 1.0, predicted=1.0, phases={"forward": (0.5, 0.5), "exchange": (0.2, 0.1)}),
    ).accuracy
    assert found is not None
    assert found.phases.keys() == {"forward", "exchange"}
    assert found.phases["forward"].mape == pytest.approx((0.25 + 0.0) / 2)
    exchange = found.phases["exchange"]
    assert exchange.layouts == 1
    assert (exchange.mape, exchange.share) == pytest.approx((0.5, 0.2))


ROUNDS = (1.0, 1.2, 1.1, 1.15, 1.05)
"""The seconds of a layout's rounds."""


def test_a_faster_layout_is_certain_where_rounds_differ_significantly() -> None:
    slow = one(DP4, *ROUNDS, predicted=1.0)
    near, far = (one(TP4, *(by * step for step in reversed(ROUNDS)), predicted=2.0) for by in (0.97, 0.7))
    assert result(slow, near).best == result(slow, far).best == entrant_name(TP4)
    assert (result(slow, near).certain, result(slow, far).certain) == (False, True)
    said = [" ".join(printed(TuneView(result=result(slow, fast)), 120).split()) for fast in (near, far)]
    assert ["which is not significant (paired t-test)" in text for text in said] == [True, False]
    assert result(slow, far, chosen=TP4).certain is None, "of what was chosen there is nothing to doubt"
    assert result(slow, far, chosen=MIXED).certain is None, "it was not measured"


def test_the_fastest_of_many_layouts_needs_a_clearer_difference() -> None:
    """The same times, alone and beside four more layouts."""
    slow = one(DP4, *ROUNDS, predicted=1.0)
    fast = one(TP4, *(by * step for by, step in zip((0.9, 0.99, 0.91, 0.98, 0.92), ROUNDS, strict=True)), predicted=2.0)
    others = [one(layout(dp=4, micro=2**n), *(99 * step for step in ROUNDS), predicted=9.0) for n in range(1, 5)]
    assert (result(slow, fast).certain, result(slow, fast, *others).certain) == (True, False)


def test_three_rounds_give_no_verdict_on_layouts() -> None:
    found = result(one(DP4, *ROUNDS[:3], predicted=1.0), one(TP4, 0.1, 0.1, 0.1, predicted=2.0))
    assert found.certain is None
    assert json.loads(json.dumps(content_of(found, None)))["certain"] is None
    text = " ".join(printed(TuneView(result=found), 120).split())
    assert "(3 rounds: no verdict on significance, which needs 5: --rounds 5)" in text


@pytest.mark.parametrize("width", [80, 140])
def test_what_is_shown_keeps_its_width_and_has_what_json_has(width: int) -> None:
    shown = result(
        one(DP4, 1.0, predicted=1.1), one(TP4, 0.9, predicted=1.5), one(MIXED, 1.3, predicted=1, fitted=True)
    )
    text = printed(TuneView(result=shown), width)
    assert max(map(len, text.splitlines())) <= width
    content = json.loads(json.dumps(content_of(shown, "mine.yaml")))
    assert f"{content['accuracy']['step']['mape']:.1%}" in text
    assert "+11.1% slower" in " ".join(text.split())
    assert content["chosen_slower"] == pytest.approx(1 / 0.9 - 1)
    assert (content["best"], content["recipe_file"]) == (entrant_name(TP4), "mine.yaml")
    assert len(content["result"]["layouts"][entrant_name(DP4)]["measured"]) == 1, "raw numbers are kept"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_all_columns_of_a_layout_are_in_one_line(width: int) -> None:
    """The last column is left out where there is no room for it: the fastest layout is first, and a sentence names the
    choice."""
    slow = one(replace(MIXED, recompute="selective"), 12.3, 12.4, predicted=1.1)
    text = printed(TuneView(result=result(one(DP4, 10.1, 10.2, predicted=1.5), slow)), width)
    lines = text.splitlines()
    assert [head.split() for head, below in pairwise(lines) if below.startswith("───")] == [
        ["batch", "recompute", "ms/step", "plan", "error", "slower"],
        ["layouts", "share", "of", "step", "MAPE", "mean", "worst", *(["layout"] if width > 80 else [])],
    ], "no table is continued below"
    assert ("fastest, simulator's choice" in text) is (width == 140)


def test_the_order_of_predictions_is_judged_where_there_are_pairs() -> None:
    alone, two = (one(DP4, 1.0, predicted=1.1),), (one(DP4, 1.0, predicted=1.1), one(TP4, 0.8, predicted=0.9))
    said = [" ".join(printed(TuneView(result=result(*layouts)), 120).split()) for layouts in (alone, two)]
    assert ["Predicted in the right order" in text for text in said] == [False, True]
    assert "order: 1 of 1 pair of layouts whose measured times differ by more than 10%." in said[1]


@pytest.mark.parametrize(("fitted_on", "said"), [("DP2", "fitted to steps of DP2"), ("", "not fitted to whole steps")])
def test_what_the_profile_was_fitted_to_is_named(fitted_on: str, said: str) -> None:
    found = replace(result(one(DP4, 1.0, predicted=1.1)), fitted_on=fitted_on)
    assert f"by profile here, {said}" in printed(TuneView(result=found), 120)


def test_predictions_of_a_cpu_profile_that_nobody_measured_are_not_shown() -> None:
    layouts = one(DP4, 1.0, predicted=1.1), one(TP4, 0.9, predicted=1.5)
    guessed = replace(result(*layouts), calibrated=False)
    text = printed(TuneView(result=guessed), 120)
    assert CALIBRATE in " ".join(text.split())
    assert not {"plan:", "error", "error:", "Errors"} & set(text.split())
    assert "Errors of the predictions" in printed(TuneView(result=replace(guessed, device="cuda")), 120)


def test_layouts_that_differ_in_their_model_chunks_alone_have_names_of_their_own() -> None:
    assert entrant_name(layout(pp=2, dp=2, count=2)) == "tp1-pp2-cp1-dp2-mb1-none"
    assert entrant_name(layout(pp=2, vpp=2, dp=2, count=2)) == "tp1-pp2-vpp2-cp1-dp2-mb1-none"
