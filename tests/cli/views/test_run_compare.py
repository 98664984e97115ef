"""Two runs side by side: settings that differ, losses at the same steps, ratios of times."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canzona_cli.cli.views.compare import RunPairView
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.records.codec import save
from canzona_cli.records.compare import compare_two, load_runs, run_figures
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.records import RunResult, StepMetrics, ValidationLoss
from canzona_cli.records.summary import load_summary
from tests.cli.views.terminal import printed
from tests.records.runs import CONFIG
from tests.refusals import refused

FIXTURE = Path(__file__).parent / "breakdown.json"
SC = replace(
    CONFIG,
    engine=replace(CONFIG.engine, strategy="sc"),
    parallel=replace(CONFIG.parallel, tp=2),
    run=replace(CONFIG.run, dir="elsewhere", profile_steps=(3, 4)),
)


def make_run(root: Path, config: RunConfig, losses: dict[int, float], *, slower: float = 1.0) -> Path:
    files = RunFiles(root)
    root.mkdir()
    files.config.write_text(dump_resolved(config))
    for step, loss in losses.items():
        append_json_line(files.metrics, asdict(StepMetrics(step=step, loss=loss)))
    for step, loss in ((0, 6.0), (2, losses[max(losses)] + 0.5), (4, losses[max(losses)] + 1)):
        append_json_line(files.validation, asdict(ValidationLoss(step=step, loss=loss)))
    save(files.result, RunResult(status="done", exit_code=0, step=max(losses)))
    content = json.loads(FIXTURE.read_text())
    for name, value in content["step"].items():
        content["step"][name] = value * slower
    for phase in content["phases"].values():
        for name in ("min_s", "mean_s", "max_s"):
            phase[name] *= slower
    content["tokens_per_s"] /= slower
    files.breakdown.write_text(json.dumps(content))
    return root


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    one = make_run(tmp_path / "one", CONFIG, {1: 5.0, 2: 4.5, 4: 4.0})
    other = make_run(tmp_path / "other", SC, {2: 4.5, 3: 4.3, 4: 4.2, 5: 4.1}, slower=2.0)
    RunFiles(one).plan.write_text(json.dumps({"hash": "0123456789abcdef"}))
    return one, other


def shown(paths: tuple[Path, Path], width: int = 100) -> list[str]:
    text = printed(RunPairView(compared=compare_two(load_runs(paths))), width)
    return [line.rstrip() for line in text.splitlines()]


def test_settings_that_differ_are_listed_and_no_others(runs: tuple[Path, Path]) -> None:
    both = compare_two(load_runs(runs))
    assert both.settings == {
        "engine.strategy": ("canzona", "sc"),
        "parallel.tp": (None, 2),
        "run.profile_steps": (None, (3, 4)),
    }
    lines = shown(runs)
    assert any(line.split() == ["engine.strategy", "canzona", "sc"] for line in lines)
    assert any(line.split() == ["run.profile_steps", "null", "[3,4]"] for line in lines)


def test_losses_are_compared_at_steps_that_both_logged(runs: tuple[Path, Path]) -> None:
    both = compare_two(load_runs(runs))
    assert both.first is not None
    assert both.last is not None
    assert (both.first.step, both.first.change) == (2, 0.0)
    assert (both.last.step, both.last.a, both.last.b) == (4, 4.0, 4.2)
    assert both.last.change == pytest.approx(0.05)
    assert both.best_validation == pytest.approx((4.5, 4.6))
    text = "\n".join(shown(runs))
    assert "+5.00%" in text


def test_times_have_ratios_and_plans_are_named(runs: tuple[Path, Path]) -> None:
    both = compare_two(load_runs(runs))
    assert both.plans == ("0123456789abcdef", None)
    content = json.loads(json.dumps(both.as_json()))
    assert content["phases"]["step"]["ratio"] == pytest.approx(2)
    assert content["phases"]["backward"]["ratio"] == pytest.approx(2)
    assert content["tokens_per_s"]["ratio"] == pytest.approx(0.5)
    lines = shown(runs)
    assert "plan 01234567" in " ".join(" ".join(lines).split()), "on a line of its own where the path is long"
    assert any(line.split()[:1] == ["step"] and line.split()[-1] == "2.00" for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_width(runs: tuple[Path, Path], width: int) -> None:
    lines = shown(runs, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_runs_without_common_steps_or_breakdowns_are_still_compared(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one", CONFIG, {1: 5.0}), make_run(tmp_path / "other", CONFIG, {2: 4.0})
    RunFiles(one).breakdown.unlink()
    RunFiles(other).config.write_text("{")
    both = compare_two(load_runs((one, other)))
    assert (both.first, both.last, both.settings) == (None, None, {})
    assert both.phases["forward"][0] is None
    text = " ".join(" ".join(shown((one, other))).split())
    assert "settings: not compared" in text
    assert "A: no breakdown" in text


def test_what_is_no_run_is_left_out_if_two_runs_remain(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The arguments include a folder of something else and a file, as `runs/*` would."""
    (tmp_path / "other things").mkdir()
    (tmp_path / "notes.txt").touch()
    besides = (tmp_path / "other things", tmp_path / "notes.txt")
    several = load_runs((besides[0], *runs, besides[1]))
    assert [run.run_dir for run in several.runs] == [*runs]
    assert several.skipped == besides
    problems = refused(load_runs, (runs[0], *besides))
    assert [problem.value for problem in problems] == [*besides]


@pytest.mark.parametrize(("calibrated", "shown"), [(True, 0.05), (False, None)])
def test_a_share_of_an_unmeasured_peak_is_no_figure(tmp_path: Path, calibrated: bool, shown: float | None) -> None:
    files = RunFiles(make_run(tmp_path / "one", CONFIG, {1: 5.0}))
    files.breakdown.write_text(json.dumps(json.loads(FIXTURE.read_text()) | {"device": "cpu", "mfu": 0.05}))
    prediction = Prediction(
        strategy="canzona",
        profile="cpu",
        calibrated=calibrated,
        iteration_s=1.0,
        optimizer_s=0.1,
        phases={},
        load_balance=1.0,
        memory_bytes=1,
    )
    save(files.predicted, prediction)
    assert run_figures(load_summary(files.root))["mfu"] == shown
