"""`--html`: one file that a browser shows alone, with the numbers of the files and the words of the terminal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.compose import dump_resolved
from canzona_cli.core.planner.make import make_plan
from canzona_cli.launch.run_dir import predict_here
from canzona_cli.records.codec import read_lines, save
from canzona_cli.records.files import RunFiles, append_json_line, write_json_atomic
from canzona_cli.records.records import Incident, RankError, RankResult, StageEvent, StepMetrics
from tests.cli.commands.support import canzona
from tests.cli.commands.test_report import FIXTURE, make_run
from tests.cli.views.html_page import Page, read_page
from tests.cli.views.test_timelines import timeline
from tests.records.runs import CONFIG, LAYOUT

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted' \x1b[31m"


def whole_run(root: Path, *, calibrated: bool = True) -> RunFiles:
    """A run with everything that a page shows. Without `calibrated`, its prediction describes no real machine."""
    files = make_run(root)
    shutil.copy(FIXTURE, files.breakdown)
    plan = make_plan(CONFIG.setup, LAYOUT)
    files.plan.write_text(plan.to_json())
    save(files.predicted, replace(predict_here(CONFIG, LAYOUT, plan), calibrated=calibrated))
    files.timelines.mkdir()
    for rank in range(4):
        write_json_atomic(files.timeline(rank), timeline(rank, transfers=[("grad_reduce", 3, 4)]))
    return files


def page_of(*arguments: str | Path, to: Path) -> Page:
    return page_and_output(*arguments, to=to)[0]


def page_and_output(*arguments: str | Path, to: Path) -> tuple[Page, str]:
    """The page, and what the command printed beside it."""
    done = canzona(*arguments, "--html", to, environment={"COLUMNS": "300"}, code=0)
    assert str(to) in done.stderr
    return read_page(to.read_text(encoding="utf-8")), done.stdout


def test_a_run_as_a_page(tmp_path: Path) -> None:
    files = whole_run(tmp_path / "run")
    for step, loss in ((100, 6.5), (200, None)):
        append_json_line(files.validation, {"step": step, "loss": loss, "sets": {"code": loss}})
    page = page_of("report", files.root, to=tmp_path / "new" / "run.html")
    wanted = ("Loss", "Summary", "Curves", "Step-time breakdown", "Load map", "Memory", "Timeline", "Settings")
    assert tuple(element.text for element in page.all("h2")) == wanted
    lines, _ = read_lines(files.metrics, StepMetrics)
    curves = page.curves("loss")
    assert curves["training"] == [(line.step, f"{line.loss:.4g}") for line in lines]
    assert curves["validation"] == [(0, "9.721"), (300, "4.812"), (100, "6.5")], (
        "as they come; not where it is no number"
    )
    assert curves["validation on code"] == [(100, "6.5")]
    assert len(page.curves("learning rate")["learning rate"]) == len(lines)

    breakdown = json.loads(files.breakdown.read_text())
    (update,) = (row for row in page.rows() if row[0] == "matrix update")
    of_ranks = [rank["phases"]["matrix_update"] for rank in breakdown["ranks"]]
    assert update[2] == f"{1e3 * breakdown['phases']['matrix_update']['mean_s']:.1f}"
    cells = [element.text for element in page.all("rect", class_="cell")]
    assert len(cells) == 8, "two maps of 2 x 2 ranks"
    for rank, seconds in enumerate(of_ranks):
        assert f"DP {rank // 2}, TP {rank % 2}: {1e3 * seconds:.1f} ms" in cells[rank]
    measured = page.all("rect", class_="p-matrix_update")[0]
    assert measured.text == f"matrix update: {update[2]} ms"
    assert "rank 3 (TP 1, DP 1)" in page.words
    assert "optimizer.lr 0.003" in page.words
    assert "planned, profile cpu" in page.words


def test_a_page_shows_no_planned_times_that_the_terminal_hides(tmp_path: Path) -> None:
    """An uncalibrated CPU profile describes no real machine, on a page as in a terminal."""
    page = page_of("report", whole_run(tmp_path / "run", calibrated=False).root, to=tmp_path / "run.html")
    assert len(page.all("rect", class_="cell")) == 4, "the measured loads alone"
    assert "planned, profile cpu" not in page.words
    assert "canzona calibrate" in page.words


def test_the_page_says_what_the_terminal_says(tmp_path: Path) -> None:
    """Whatever the terminal prints of a plan, but for what it draws of characters, is on the page word for word."""
    arguments = ("plan", "recipe=qwen3-0.6b", "gpus=16", "--dry-run", "-v", "--assumptions")
    page, printed = page_and_output(*arguments, to=tmp_path / "plan.html")
    said = printed.partition("Memory of the fullest")[0] + printed.partition("Assumptions")[2]
    on_page = _words(page.words)
    missing = _words(said.partition("--html FILE")[0]) - on_page
    assert len(on_page) > 300
    assert missing == set()
    assert len(page.all("rect", class_="cell")) == 3 * 16
    assert {"canzona", "asc", "layerwise"} <= {element.text for element in page.all("b")}


def _words(text: str) -> set[str]:
    """Returns the words, without separators and rules of tables."""
    return {word.strip("─-,;:()") for word in text.split()} - {""}


def test_runs_compared(tmp_path: Path) -> None:
    one, two = whole_run(tmp_path / "one"), make_run(tmp_path / "two", steps=200)
    two.config.write_text(dump_resolved(replace(CONFIG, optimizer=replace(CONFIG.optimizer, lr=1e-3))))
    page = page_of("report", "--compare", one.root, two.root, to=tmp_path / "both.html")
    curves = page.curves("training loss")
    assert {name: points[-1][0] for name, points in curves.items()} == {"0.003": 300, "0.001": 200}
    assert {points[0][0] for points in curves.values()} == {150}, "what is above the second half is not drawn"
    assert ["optimizer.lr", "0.003", "0.001"] in page.rows()
    three = make_run(tmp_path / "three", steps=1)
    several = page_of("report", "--compare", one.root, two.root, three.root, to=tmp_path / "several.html")
    assert [rate for rate, _ in several.curves("loss by optimizer.lr")["loss"]] == [0.001, 0.003]
    assert "Differences" not in [element.text for element in several.all("h2")]


def test_markup_in_names_and_events_is_text(tmp_path: Path) -> None:
    """Markup comes from somebody else's recipe or from an error that quotes data."""
    files = whole_run(tmp_path / "<img src=x onerror=alert(1)>")
    config = replace(CONFIG, description=HOSTILE, data=replace(CONFIG.data, path=f"/data/{HOSTILE[:-6]}"))
    files.config.write_text(dump_resolved(config))
    append_json_line(files.events, Incident(time=1.0, event=HOSTILE, detail=HOSTILE, level="warning").line())
    append_json_line(files.events, {"time": 2.0, **vars(StageEvent(stage=HOSTILE, detail=HOSTILE)), "event": "stage"})
    append_json_line(files.events, {"time": 3.0, "event": "sample", "step": 1, "prompt": HOSTILE, "text": HOSTILE})
    error = RankError(type=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    save(files.rank(0), RankResult(rank=0, status="failed", error=error, time=1.0))
    write_json_atomic(files.environment, {"host": HOSTILE})
    page = page_of("report", files.root, to=tmp_path / "page.html")
    assert [element.name for element in page.elements].count("script") == 1
    assert not page.all("img")
    assert page.source.count("\x1b") == 0
    visible = HOSTILE.replace("\x1b", "\\x1b")
    assert page.words.count(" ".join(visible.split())) >= 6, "shown as it is written"
    again = make_run(tmp_path / "<script>")
    page_of("report", "--compare", files.root, again.root, to=tmp_path / "both.html")


@pytest.mark.parametrize("status", [None, "failed"])
def test_whatever_a_run_left_makes_a_page(tmp_path: Path, status: str | None) -> None:
    """Nothing but settings and a few lines, or damaged files."""
    files = make_run(tmp_path / "run", status=None, steps=1)
    if status is not None:
        for path in (files.breakdown, files.plan, files.predicted, files.layout, files.config):
            path.write_text("{")
        files.timelines.mkdir()
        files.timeline(0).write_text("{")
    page = page_of("report", files.root, to=tmp_path / "page.html")
    assert "running or stopped" in page.words
    assert "there is no result.json" in page.words
    assert "MFU" not in page.words, "what is not known has no tile"
    for note in ("no layout: layout.json is not JSON", "no plan: plan.json is not JSON"):
        assert (note in page.words) is (status is not None)


def test_mistakes_are_told_before_anything_is_done(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    for arguments, fix in (
        (("report", "run", "--html", "page.htm"), "use --html page.html"),
        (("plan", "recipe=tiny", "--dry-run", "--html", "page.png"), "use --html page.html"),
        (("bench", "recipe=tiny", "--html", "file/page.html"), "choose a file in a writable folder"),
    ):
        done = canzona(*arguments, cwd=tmp_path, code=2)
        assert fix in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]
