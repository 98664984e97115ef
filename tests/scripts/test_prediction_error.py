"""Errors and orders of predictions, from results by hand with known answers."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.results import BenchResult, save
from canzona_cli.config.execution import AnyStrategy
from tests.bench.benches import bench, with_measured
from tests.commands.support import ran

SCRIPT = Path(__file__).parents[2] / "scripts" / "prediction_error.py"
_NAMES = runpy.run_path(str(SCRIPT))
APART, cells, pairs, share_good = (_NAMES[name] for name in ("APART", "cells", "pairs", "share_good"))


def timed(**optimizer_s: tuple[float, float]) -> BenchResult:
    """A bench in which each strategy's optimizer step has (measured, predicted) seconds."""
    names: tuple[AnyStrategy, ...] = tuple(optimizer_s)  # type: ignore[arg-type]
    result = bench(names)
    for name in names:
        found, planned = optimizer_s[name]
        result = with_measured(result, name, optimizer_s=(found,) * 6)
        strategy = result.strategies[name]
        changed = replace(strategy, predicted=replace(strategy.predicted, optimizer_s=planned))
        result = replace(result, strategies={**result.strategies, name: changed})
    return result


def test_a_cell_for_each_strategy_of_each_bench() -> None:
    found = cells([timed(canzona=(1.0, 1.1), sc=(4.0, 2.0)), bench(("adamw",), tp=1, dp=2)], "optimizer")
    assert [(cell.bench, cell.strategy) for cell in found] == [
        ("qwen3-mini muon TP2 DP2", "canzona"),
        ("qwen3-mini muon TP2 DP2", "sc"),
        ("qwen3-mini muon DP2", "adamw"),
    ]
    assert [cell.error for cell in found[:2]] == pytest.approx([0.1, -0.5])
    assert [cell.good for cell in found[:2]] == [True, False]
    assert share_good(found[:2]) == 0.5
    assert share_good([]) == 1.0


def test_the_iteration_is_judged_by_its_own_times() -> None:
    result = bench()
    found = cells([result], "iteration")
    assert [cell.error for cell in found] == [result.iteration_error(cell.strategy) for cell in found]


def test_a_pair_in_the_wrong_order_is_found() -> None:
    found = list(pairs([timed(canzona=(1.0, 2.0), asc=(1.5, 1.4), sc=(4.0, 5.0))], "optimizer"))
    assert [(pair.faster, pair.slower, pair.right) for pair in found] == [
        ("canzona", "asc", False),
        ("canzona", "sc", True),
        ("asc", "sc", True),
    ]
    assert found[0].measured == pytest.approx(1.5)
    assert found[0].predicted == pytest.approx(0.7)


def test_pairs_that_measured_alike_have_no_order() -> None:
    almost = 1 + 0.99 * APART
    assert not list(pairs([timed(canzona=(1.0, 2.0), asc=(almost, 1.0))], "optimizer"))
    assert len(list(pairs([timed(canzona=(1.0, 2.0), asc=(1 + 1.01 * APART, 1.0))], "optimizer"))) == 1


def test_a_prediction_of_equal_times_is_no_order() -> None:
    (pair,) = pairs([timed(canzona=(1.0, 1.0), sc=(2.0, 1.0))], "optimizer")
    assert not pair.right


def test_strategies_of_two_sittings_are_compared_by_way_of_the_reference() -> None:
    """The machine has slowed down by half in the second sitting: sc only seems slower than asc."""
    result = timed(canzona=(1.0, 1.0), asc=(1.5, 1.5), sc=(2.0, 1.2))
    slow = replace(result.references[0], optimizer_s=(2.0,) * 6)
    sc = replace(result.strategies["sc"], sitting=1)
    result = replace(result, references=(result.references[0], slow), strategies={**result.strategies, "sc": sc})
    found = {(pair.faster, pair.slower) for pair in pairs([result], "optimizer")}
    assert found == {("canzona", "asc"), ("sc", "asc")}


def test_the_output_has_every_cell_the_share_and_the_wrong_pairs_and_fails_where_predictions_do(tmp_path: Path) -> None:
    save(timed(canzona=(1.0, 1.1), asc=(1.5, 1.0)), tmp_path / "a.json")
    save(bench(("canzona", "sc"), dp=4), tmp_path / "b.json")
    results = (tmp_path / "a.json", tmp_path / "b.json")
    done = ran(sys.executable, SCRIPT, *results, environment={"COLUMNS": "80"}, code=1)
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = " ".join(done.stdout.split())
    assert "3 of 4 results (75%) within 20%" in words
    assert "canzona 2/2, asc 0/1, sc 1/1" in words
    wrong = "wrong order: qwen3-mini muon TP2 DP2: asc took 1.50 times as long as canzona, but 0.91 times was predicted"
    assert wrong in words


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    done = ran(sys.executable, SCRIPT, tmp_path / "a.json", code=2)
    assert "it has no version" in " ".join(done.stderr.split())
