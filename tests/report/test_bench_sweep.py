"""Sweeps: every value of the setting has its row, measured beside predicted, and what the setting is about."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from canzona_cli.bench.options import SweepKind
from canzona_cli.bench.results import BenchResult
from canzona_cli.report.bench_sweep import SweepView
from canzona_cli.report.document import document
from canzona_cli.run.breakdown import CALIBRATE
from tests.bench.benches import bench, of_rounds
from tests.report.html_page import read_page
from tests.report.terminal import line_of
from tests.report.test_bench import shown

SWEEPS: Mapping[SweepKind, Mapping[str, BenchResult]] = {
    "alpha": {f"{alpha:g}": bench(("canzona",), scale=2 - alpha) for alpha in (0.0, 0.5, 1.0)},
    "c_max": {str(mib): bench(("canzona",), scale=1 + 1 / mib) for mib in (1, 2, 4)},
    "gpus": {str(ranks): bench(("canzona", "sc", "adamw"), dp=ranks // 2, scale=4 / ranks) for ranks in (2, 4, 8)},
    "optimizer": {name: bench(("canzona", "asc", "sc"), optimizer=name) for name in ("muon", "soap", "shampoo")},
}


@pytest.mark.parametrize("kind", list(SWEEPS))
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_every_value_has_a_row(kind: SweepKind, width: int) -> None:
    text = shown(SweepView(kind, SWEEPS[kind]), width)
    assert max(map(len, text.splitlines())) <= width
    for value in SWEEPS[kind]:
        assert any(line.split()[:1] == [value] for line in text.splitlines())


@pytest.mark.parametrize("kind", list(SWEEPS))
def test_a_page_draws_every_sweep_measured_beside_predicted(kind: SweepKind) -> None:
    """Curves over numbers; bars where the values are names."""
    results = SWEEPS[kind]
    page = read_page(document("canzona bench --sweep", SweepView(kind, results)).text())
    if kind == "optimizer":
        assert len(page.all("svg", class_="bar")) == 2 * sum(len(result.strategies) for result in results.values())
        return
    assert len(page.all("svg", class_="plot")) == 3
    measured = page.curves("optimizer step, ms")
    assert [step for step, _ in measured["canzona"]] == [float(value) for value in results]
    assert measured["canzona"][0][1] != measured["canzona, predicted"][0][1]


@pytest.mark.parametrize("kind", list(SWEEPS))
def test_no_prediction_is_drawn_of_a_cpu_profile_that_nobody_measured(kind: SweepKind) -> None:
    results = {value: replace(result, calibrated=False) for value, result in SWEEPS[kind].items()}
    view = SweepView(kind, results)
    text = shown(view).replace(CALIBRATE, "")
    assert not {"plan", "plan:", "error", "error:", "predicted"} & set(text.split())
    page = read_page(document("canzona bench --sweep", view).text())
    if kind == "optimizer":
        assert len(page.all("svg", class_="bar")) == sum(len(result.strategies) for result in results.values())
    else:
        assert not any(name.endswith("predicted") for name in page.curves("optimizer step, ms"))


def test_alpha_shows_balance_steps_and_traffic() -> None:
    text = shown(SweepView("alpha", SWEEPS["alpha"]))
    for title in ("load balance", "optimizer step, ms", "iteration, ms", "total reduction, ms"):
        assert title in text
    assert line_of(text, "0.5 ").split()[1:3] == ["1.04", "1.02"]


def test_c_max_shows_the_exchange_and_memory() -> None:
    text = shown(SweepView("c_max", SWEEPS["c_max"]))
    for title in ("exposed exchange, ms", "total exchange, ms", "fullest rank, MiB"):
        assert title in text


def test_efficiency_is_of_sequences_by_second_and_rank() -> None:
    """Four times the ranks do each step in a quarter of the time: no loss."""
    batches = {n: bench(("canzona",), dp=int(n) // 2, scale=4 / int(n)) for n in ("2", "8")}
    rate = {n: result.layout.global_batch_size / result.layout.world_size * int(n) / 4 for n, result in batches.items()}
    for order in (("2", "8"), ("8", "2")):
        text = shown(SweepView("gpus", {n: batches[n] for n in order}))
        assert f"{100 * rate['8'] / rate['2']:.0f}%" in line_of(text, "8 ")
        assert "100%" in line_of(text, "2 ")
    assert "share 2 cores" in text


def test_what_varies_is_not_in_the_heading() -> None:
    first = shown(SweepView("optimizer", SWEEPS["optimizer"])).splitlines()[0]
    assert "muon" not in first
    assert "DP 2" in first
    first = shown(SweepView("gpus", SWEEPS["gpus"])).splitlines()[0]
    assert "muon" in first
    assert "DP" not in first


def test_speedups_that_are_not_significant_are_not_printed() -> None:
    text = shown(SweepView("optimizer", SWEEPS["optimizer"]))
    asc = [line for line in text.splitlines() if line.strip().startswith("asc ")]
    assert asc
    assert all("not significant" in line and "x [" not in line for line in asc)
    assert "not significant: with equal times, rounds would differ as much" in text


def test_a_sweep_of_few_rounds_has_numbers_and_no_verdict() -> None:
    text = shown(SweepView("optimizer", {name: of_rounds(one, 2) for name, one in SWEEPS["optimizer"].items()}))
    assert all(line.count("x [") == 2 for line in text.splitlines() if line.strip().startswith("asc "))
    assert "2 rounds: no verdict on significance, which needs 5: --rounds 5" in text
    assert "not significant" not in text


def test_a_note_on_one_value_names_it() -> None:
    first, *_ = SWEEPS["c_max"].values()
    results = {**SWEEPS["c_max"], "2": replace(first, notes=(*first.notes, "the machine was busy"))}
    notes = shown(SweepView("c_max", results)).partition("Notes")[2]
    assert notes.count("splitting qkv") == 1
    assert "  - splitting qkv" in notes
    assert "  - 2: the machine was busy" in notes
