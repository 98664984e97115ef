"""The simulated tables: what a cell says, and documents that are replace_table and checked in place."""

import re
import sys
from pathlib import Path

import figures
import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.simulate.compare import study_run
from canzona_cli.core.simulate.predict import simulate_plan
from canzona_cli.records.words import milliseconds, predicted_overhead, step_time


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_without_pipeline_stages_is_what_plan_says() -> None:
    table = figures.plain_table([64], []).markdown()
    command = re.findall(r"`canzona plan -v ([^`]*) gpus=GPUS`", table)[0]
    config, chosen = resolve(compose_run([*command.split(), "gpus=64"], training=False).config)
    study = study_run(config.setup, chosen)
    gpus, layout, canzona, _, layerwise, sc, shares = _cells(table.splitlines()[-1])
    assert (gpus, layout) == ("64", "TP 4 × DP 16")
    assert canzona == step_time(study.result("canzona").optimizer_s)
    assert layerwise == step_time(study.result("layerwise").optimizer_s)
    assert sc == "-", "it does not fit"
    assert shares == ", ".join(predicted_overhead(study.overhead(name)) for name in ("canzona", "layerwise")) + ", -"


@pytest.mark.sweep
def test_yardsticks_stand_in_their_own_best_layouts_and_what_does_not_fit_has_a_dash() -> None:
    adamw, studied = figures.best("qwen3-32b", 8, "adamw"), figures.study("qwen3-32b", 8)
    assert studied is not None
    assert adamw is not None
    assert (figures.words(studied.layout), figures.words(adamw.layout)) == (
        "TP 8 × DP 1",
        "TP 4 × PP 2 (3 chunks each) × DP 1",
    )
    rows = figures.best_table([8], []).rows
    assert [row[1] for row in rows] == ["1 M", "4 M", "16 M"]
    assert rows[0][3] == step_time(adamw.iteration_s)
    assert rows[0][5] == predicted_overhead(figures.relative_overhead(studied, adamw))
    assert figures.best_table([1], []).rows[0] == ["1", "1 M", *["-"] * 5]


def test_a_larger_batch_has_its_own_layout_and_is_what_a_run_with_so_many_tokens_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "MODEL", "qwen3-0.6b")
    rows = figures.best_table([8], []).rows
    for row, tokens in zip(rows, (1 << 20, 4 << 20, 16 << 20), strict=True):
        resolved = figures.run("qwen3-0.6b", 8, () if tokens == 1 << 20 else (f"train.batch_tokens={tokens}",))
        assert resolved is not None
        config, layout = resolved
        assert layout.global_batch_size * config.train.seq_length == tokens
        result = simulate_plan(config.setup, layout, make_plan(config.setup, layout))
        assert row[2] == f"{step_time(result.iteration_s)} ({step_time(result.optimizer_s)})"


def test_balance_is_compared_in_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "BALANCED", ("qwen3-0.6b",))
    (row,) = figures.balance_table([64], []).rows
    study = figures.study("qwen3-0.6b", 64)
    assert study is not None
    times = [study.result(name).iteration_s for name in ("canzona", "paper", "asc")]
    assert [row[place].split()[0] for place in (3, 4, 5)] == [milliseconds(seconds) for seconds in times]
    assert row[6:] == [f"{100 * (seconds / times[0] - 1):+.1f}%" for seconds in times[1:]]


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
    assert "TP 8 × DP 32" in after
    assert "old" not in after
    assert after.startswith("Before.\n\n<!-- figures: plain -->\n")
    assert after.endswith("|\n\n<!-- /figures -->\n\nBehind.\n")
    assert run("--check") == 0
    document.write_text("No markers.\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="occur 0 times"):
        run("--write")
