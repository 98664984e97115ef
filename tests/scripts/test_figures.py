"""The simulated tables: what a cell says, and documents that are replace_table and checked in place."""

import re
import sys
from pathlib import Path

import figures
import pytest

from canzona_cli.bench.simulated import run_simulation
from canzona_cli.run.words import predicted_overhead, step_time


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_without_pipeline_stages_is_what_bench_simulate_says() -> None:
    table = figures.plain_table([64], []).markdown()
    command = re.findall(r"`canzona bench --simulate --gpus 64 ([^`]*)`", table)[0]
    (cell,) = run_simulation(command.split(), (64,)).cells
    study = cell.study
    assert study is not None
    gpus, layout, canzona, _, layerwise, sc, shares = _cells(table.splitlines()[-1])
    assert (gpus, layout) == ("64", "TP 4 × DP 16")
    assert canzona == step_time(study.result("canzona").optimizer_s)
    assert layerwise == step_time(study.result("layerwise").optimizer_s)
    assert sc == "-", "it does not fit"
    assert shares == ", ".join(predicted_overhead(study.overhead(name)) for name in ("canzona", "layerwise")) + ", -"


@pytest.mark.sweep
def test_yardsticks_stand_in_their_own_best_layouts_and_what_does_not_fit_has_a_dash() -> None:
    cells = _cells(figures.best_table([8], []).markdown().splitlines()[-1])
    mine, adamw, same_layout = cells[1].partition(":")[0], cells[2].partition(":")[0], cells[4]
    assert (mine, adamw) == ("TP 8 × DP 1", "TP 4 × PP 2 (3 chunks each) × DP 1")
    assert same_layout == "-", "AdamW does not fit in canzona's layout"
    assert figures.relative_overhead(figures.study("qwen3-32b", 8), figures.best("qwen3-32b", 8, "adamw")) is not None
    assert _cells(figures.best_table([1], []).markdown().splitlines()[-1]) == ["1", *["-"] * 6]


def test_every_size_is_also_simulated_at_pessimistic_rates() -> None:
    table = figures.sizes_table([8], ["qwen3-0.6b"])
    ((model, gpus, layout, plain, *_, pessimistic),) = table.rows
    assert (model, gpus, layout) == ("0.6b", "8", "DP 8")
    assert pessimistic.endswith("%")
    usual, slower = (figures.study("qwen3-0.6b", 8, *rates) for rates in ((), figures.PESSIMISTIC))
    assert usual is not None
    assert slower is not None
    assert plain == step_time(usual.planned.result.iteration_s)
    assert slower.planned.result.iteration_s > 1.02 * usual.planned.result.iteration_s


def test_every_table_stands_in_its_document_once_and_no_others() -> None:
    for path in (figures.README, figures.MANUAL):
        text = path.read_text(encoding="utf-8")
        names = [name for name, (where, *_) in figures.TABLES.items() if where == path]
        assert re.findall(r"<!-- figures: (\w+) -->", text) == names
        assert all(len(figures.marker_pattern(name).findall(text)) == 1 for name in names)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", "optimizers"])
def test_the_documents_have_the_tables_as_they_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are made in seconds; `python scripts/figures.py --check` has all."""
    monkeypatch.setattr(sys, "argv", ["figures.py", "--only", name, "--check"])
    assert figures.main() == 0


def test_a_document_is_refreshed_between_its_markers_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "README.md"
    before = "Before.\n\n<!-- figures: plain -->\n| old |\n<!-- /figures -->\n\nBehind.\n"
    document.write_text(before, encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "TABLES", {"plain": (document, (256,), figures.plain_table)})

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
        return figures.main()

    assert run("--check") == 1
    assert "Out of date (run make figures): plain in README.md" in capsys.readouterr().out
    assert document.read_text(encoding="utf-8") == before
    assert run("--write") == 0
    after = document.read_text(encoding="utf-8")
    assert "TP 4 × DP 64" in after
    assert "old" not in after
    assert after.startswith("Before.\n\n<!-- figures: plain -->\n")
    assert after.endswith("|\n\n<!-- /figures -->\n\nBehind.\n")
    assert run("--check") == 0
    with pytest.raises(SystemExit):
        run("--check", "--gpus", "8")
    document.write_text("No markers.\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="occur 0 times"):
        run("--write")
