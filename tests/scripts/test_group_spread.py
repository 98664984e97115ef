"""The spread of ratios over process groups, from results by hand with known answers."""

import runpy
from pathlib import Path

import pytest

from canzona_cli.bench.results import BenchResult, save
from tests.bench.benches import bench, with_measured

SCRIPT = Path(__file__).parents[2] / "scripts" / "group_spread.py"
_NAMES = runpy.run_path(str(SCRIPT))
spreads, main = _NAMES["spreads"], _NAMES["main"]


def timed(sc: tuple[float, ...]) -> BenchResult:
    """A bench of three rounds in which canzona's steps take 1 s."""
    result = with_measured(bench(("canzona", "sc")), "canzona", optimizer_s=(1.0,) * 3, iteration_s=(1.0,) * 3)
    reference = result.strategies["canzona"].measured
    result = with_measured(result, "sc", optimizer_s=sc, iteration_s=tuple(time / 2 for time in sc))
    return BenchResult(**{**vars(result), "references": (reference,)})


def test_each_bench_counts_once() -> None:
    rows = spreads([timed((4.0, 4.0, 9.0)), timed((5.0, 5.0, 5.0)), timed((1.0, 6.0, 6.0))])
    assert [(row.bench, row.strategy) for row in rows] == [("qwen3-mini muon TP2 DP2", "sc")]
    assert rows[0].optimizer == pytest.approx((4.0, 5.0, 6.0))
    assert rows[0].iteration == pytest.approx((2.0, 2.5, 3.0))


def test_the_table_has_quartiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    files = []
    for number, seconds in enumerate((4.0, 5.0, 6.0)):
        files.append(tmp_path / f"{number}.json")
        save(timed((seconds,) * 3), files[-1])
    assert main(files) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "median and quartiles over process groups" in shown
    assert "qwen3-mini muon TP2 DP2 sc 3 5.00x [4.50, 5.50] 2.50x [2.25, 2.75]" in shown
