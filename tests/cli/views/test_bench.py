"""The bench's reports: they keep their widths, show what was measured beside what was predicted, and claim no more."""

from dataclasses import replace

import pytest
from rich.console import RenderableType

from canzona_cli.cli.views.bench import BenchView, error_text, quartiles, speedup_text
from canzona_cli.cli.views.document import document
from canzona_cli.records.breakdown import CALIBRATE
from canzona_cli.records.statistics import Quartiles
from canzona_cli.records.words import plural
from tests.bench.benches import bench, of_rounds, with_measured
from tests.cli.views.terminal import line_of, printed


def shown(view: RenderableType, width: int = 120) -> str:
    return printed(view, width)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_every_strategy_is_there(width: int) -> None:
    text = shown(BenchView(bench()), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())
    for name in ("canzona", "asc", "layerwise", "sc", "adamw"):
        assert name in text


def test_measured_predicted_and_error_stand_side_by_side() -> None:
    text = shown(BenchView(bench(("canzona",))))
    assert line_of(text, "matrix update").split() == ["matrix", "update", "151", "166", "+10%"]
    result = bench(("canzona",))
    middle = Quartiles.of(result.strategies["canzona"].measured.optimizer_s).median
    assert line_of(text, "optimizer step").split()[2:4] == [f"{1e3 * middle:.0f}", "219"]
    assert line_of(text, "exposed communication").split()[2:] == ["43.0", "40.8", "-5%"]


def test_errors_of_phases_that_take_no_time_are_left_out() -> None:
    text = shown(BenchView(bench(("canzona",))))
    assert line_of(text, "data").split() == ["data", "0.300", "0.285"]


def test_a_phase_a_strategy_does_not_have_is_a_dash() -> None:
    text = shown(BenchView(bench(("sc",))))
    assert "exchange" not in text.replace("X exchange", "")
    both = shown(BenchView(bench(("canzona", "sc"))))
    assert line_of(both, "exchange").split()[-2:] == ["-", "-"]


def test_a_speedup_has_its_quartiles_and_the_prediction_beside_it() -> None:
    text = shown(BenchView(bench(("canzona", "sc"))))
    row = line_of(text.partition("Compared")[2], "sc")
    speedup = bench(("canzona", "sc")).optimizer_speedup("sc").ratio
    assert f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}] 3.24x" in row


def test_no_speedup_is_printed_where_it_is_not_significant() -> None:
    text = shown(BenchView(bench(("canzona", "asc"))))
    row = line_of(text.partition("Compared")[2], "asc")
    assert row.count("not significant") == 2
    assert "[" not in row
    assert "not significant: with equal times, rounds would differ as much" in text


def test_nothing_is_said_of_significance_where_all_are_distinct() -> None:
    assert "significan" not in shown(BenchView(bench(("canzona", "sc"))))


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_few_rounds_are_shown_with_numbers_and_no_verdict(rounds: int) -> None:
    view = BenchView(of_rounds(bench(), rounds))
    page = document("canzona bench", view).text()
    for text in (shown(view), page):
        assert "not significant" not in text
        assert f"{plural(rounds, 'round')}: no verdict on significance, which needs 5: --rounds 5" in text
    row = line_of(shown(view).partition("Compared")[2], "asc")
    assert row.count("x [") == 2
    assert "no verdict" not in shown(BenchView(of_rounds(bench(), 5)))


def test_more_ranks_than_cores_are_said_to_count_repeated_work() -> None:
    result = bench()
    assert "4 ranks share 2 cores, so these times count the work of all ranks" in shown(BenchView(result))
    assert "6 rounds of 2 measured steps" in shown(BenchView(result))
    for fine in (replace(result, device="cuda"), replace(result, machine={**result.machine, "cores": 4})):
        assert "share" not in shown(BenchView(fine)).partition("phase")[0]


def test_overhead_is_over_adamws_iteration() -> None:
    result = bench(("canzona", "sc", "adamw"))
    found, planned = result.overhead("sc"), result.predicted_overhead("sc")
    assert found is not None
    assert planned is not None
    row = line_of(shown(BenchView(result)).partition("Compared")[2], "sc")
    assert row.endswith(f"{100 * (found.ratio.median - 1):+.1f}% {100 * planned:+.0f}%")
    assert result.overhead("adamw") is None
    assert bench(("canzona", "sc")).overhead("sc") is None


def test_the_phase_that_differs_most_is_explained() -> None:
    result = bench(("canzona", "sc"))
    found = result.strategies["canzona"]
    forward = replace(found.measured.phases["forward"], min_s=0.5, mean_s=0.5, max_s=0.5)
    slow = with_measured(result, "canzona", phases={**found.measured.phases, "forward": forward})
    text = shown(BenchView(slow))
    assert "canzona: forward took 500 ms, planned 201 ms" in text


def test_losses_are_shown_with_how_far_they_are_from_the_references() -> None:
    text = shown(BenchView(bench(("canzona", "sc", "adamw")))).partition("Losses")[2]
    assert "9.7000 to 6.9000 in 8 steps, at most 0.00045% from canzona's" in line_of(text, "  sc")
    assert "not compared" in line_of(text, "  adamw")


def test_losses_are_compared_among_those_that_compute_the_same() -> None:
    result = bench(("canzona", "layerwise", "sc"))
    others = {name: replace(result.strategies[name], arithmetic="qkv") for name in ("layerwise", "sc")}
    text = shown(BenchView(replace(result, strategies={**result.strategies, **others}))).partition("Losses")[2]
    assert "not compared" not in line_of(text, "  layerwise")
    assert "from layerwise's" in line_of(text, "  sc")
    assert "canzona's" not in text


def test_a_gpu_profile_by_hand_is_said_to_be_one() -> None:
    assert "not calibrated" in shown(BenchView(replace(bench(), device="cuda", calibrated=False)))


def test_predictions_of_a_cpu_profile_that_nobody_measured_are_not_shown() -> None:
    """Whatever they are: neither the screen nor the page depends on them."""
    result = replace(bench(), calibrated=False)
    wrong = {
        name: replace(each, predicted=replace(each.predicted, iteration_s=9.0, phases={"dispatch": 1.0}))
        for name, each in result.strategies.items()
    }
    view, other = BenchView(result), BenchView(replace(result, strategies=wrong))
    text = shown(view)
    assert text == shown(other)
    assert document("canzona bench", view).text() == document("canzona bench", other).text()
    assert CALIBRATE in text
    assert "with activations" in shown(BenchView(bench()))
    assert "with activations" not in text
    assert not {"plan", "error", "predicted"} & set(text.replace(CALIBRATE, "").split())
    assert line_of(text, "matrix update").split()[2:] == ["151", "156", "332", "619", "-"]
    row = line_of(text.partition("Compared")[2], "sc")
    assert row.count("x [") == 2


def test_whose_arithmetic_is_compared_is_said_above_the_figures() -> None:
    text = shown(BenchView(bench(("canzona", "sc"))))
    assert "the standard form in all strategies" in text.partition("matrix update")[0]


def test_control_characters_of_users_do_not_reach_the_terminal() -> None:
    text = shown(BenchView(replace(bench(), recipe="mine\x1b[2J", notes=("a\x07b",), overrides=("data.path=\x1bc",))))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_one_strategy_alone_is_compared_with_nothing() -> None:
    text = shown(BenchView(bench(("adamw",))))
    assert "Compared" not in text
    assert "matrix update" not in text


def test_one_round_has_no_quartiles() -> None:
    assert quartiles([0.05]) == "50.0"
    result = bench(("canzona",))
    once = of_rounds(result, 1)
    assert "  quartiles" in shown(BenchView(once))
    assert "[" not in line_of(shown(BenchView(once)), "  quartiles")


def test_words_for_numbers() -> None:
    assert str(error_text(1.0, 1.25)) == "+25%"
    assert error_text(1.0, 1.25).style == "yellow"
    assert error_text(1.0, 1.1).style == "dim"
    assert str(error_text(0.0, 1.0)) == str(error_text(1.0, None)) == ""
    assert str(error_text(1.0, 0.0)) == ""
    assert str(error_text(1.0, 0.9999)) == "0%"
    assert str(error_text(0.001, 1.0)) == ">+999%"
    assert speedup_text(bench().optimizer_speedup("asc")) == "not significant"
