"""The JSON of a bench: the figures of the issue, speed-ups only where they may be told, and all raw data."""

import json
from pathlib import Path

import pytest

from canzona_cli.bench.results import BenchResult, content_of, save
from canzona_cli.core.reading import parse
from canzona_cli.records.statistics import Quartiles
from tests.bench.benches import bench, of_rounds, with_measured


def test_what_is_saved_has_all_raw_data(tmp_path: Path) -> None:
    result = bench()
    save(result, tmp_path / "new" / "bench.json")
    saved = json.loads((tmp_path / "new" / "bench.json").read_text(encoding="utf-8"))
    assert parse(BenchResult, saved["result"]) == result


def test_speedups_are_the_ratios_round_by_round() -> None:
    result = bench()
    content = json.loads(json.dumps(content_of(result)))
    ratios = [
        theirs / ours
        for theirs, ours in zip(
            result.strategies["sc"].measured.optimizer_s, result.strategies["canzona"].measured.optimizer_s, strict=True
        )
    ]
    told = content["speedup"]["optimizer_vs_sc"]
    assert (told["low"], told["median"], told["high"]) == pytest.approx(tuple(vars(Quartiles.of(ratios)).values()))
    assert content["overhead_over_adamw"]["median"] > 0
    for name in ("canzona", "asc", "layerwise", "sc", "adamw"):
        assert content["strategies"][name].keys() >= {"phases", "iteration_s", "optimizer_s", "loss", "spread"}
        assert content["predicted"][name].keys() >= {"iteration_s", "optimizer_s", "optimizer_error"}


def test_a_speedup_that_is_not_significant_is_withheld_with_the_reason() -> None:
    content = json.loads(json.dumps(content_of(bench())))
    assert content["speedup"]["optimizer_vs_asc"] is None
    assert "not significant: " in content["withheld"]["optimizer_vs_asc"]
    assert content["speedup"]["optimizer_vs_sc"]["distinct"] is True
    assert content["speedup"]["optimizer_vs_sc"]["p"] < 0.05


def test_speedups_of_two_rounds_have_numbers_and_are_not_judged() -> None:
    result = of_rounds(bench(), 2)
    content = json.loads(json.dumps(content_of(result)))
    ran = {name: speedup for name, speedup in content["speedup"].items() if not name.endswith("paper")}
    assert len(ran) == 6
    for judged in (*ran.values(), content["overhead_over_adamw"]):
        assert judged["low"] <= judged["median"] <= judged["high"]
        assert (judged["distinct"], judged["p"]) == (None, None)
    assert not set(ran) & set(content["withheld"])


def test_strategies_that_disagree_have_no_speedup_at_all_and_keep_their_numbers() -> None:
    result = with_measured(bench(), "sc", losses=tuple(3.0 for _ in range(8)))
    content = content_of(result)
    assert set(content["speedup"].values()) == {None}  # type: ignore[attr-defined]
    assert content["overhead_over_adamw"] is None
    assert "sc, step 1" in content["disagreements"][0]  # type: ignore[index]
    assert content["strategies"]["sc"]["optimizer_s"]  # type: ignore[index]


def test_what_did_not_run_is_said_to_be_missing() -> None:
    content = content_of(bench(("canzona", "sc")))
    assert content["withheld"].keys() >= {"optimizer_vs_layerwise", "iteration_vs_layerwise", "overhead_over_adamw"}  # type: ignore[attr-defined]
