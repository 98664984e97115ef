"""Scaling on paper: every size, strategy and number of GPUs, those that are impossible with the reason."""

import json
import math
from dataclasses import asdict, replace

import pytest

from canzona_cli.bench.simulated import MOST_GPUS, Simulation, parse_gpus, run_simulation
from canzona_cli.cli.views.bench import SimulationView
from canzona_cli.cli.views.document import document
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.simulate.compare import assumptions, study_run
from canzona_cli.records.words import MISSING, json_text, layout_code
from tests.cli.commands.support import loads_none_of
from tests.cli.views.html_page import read_page
from tests.cli.views.terminal import line_of
from tests.cli.views.test_bench import shown
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("8..1024", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("8,64,256", (8, 64, 256)),
        ("256, 8, 8", (8, 256)),
        ("6..24,8", (6, 8, 12, 24)),
        ("4..4", (4,)),
        ("1", (1,)),
    ],
)
def test_numbers_of_gpus(text: str, gpus: tuple[int, ...]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8..1000", "doubling 8 gives 512 and 1024, but not 1000"),
        ("64..8", "ends below its first number"),
        ("0..8", "at least 1"),
        ("8..", "neither a number of GPUs"),
        ("eight", "neither a number of GPUs"),
        ("8,,16", "neither a number of GPUs"),
        ("٨", "neither a number of GPUs"),
        (f"1..{2 * MOST_GPUS}", "more than 65,536"),
    ],
)
def test_bad_numbers_of_gpus(text: str, reason: str) -> None:
    (problem,) = refused(parse_gpus, text)
    assert problem.key == "--gpus"
    assert reason in problem.reason
    assert problem.fix


def test_every_bad_number_is_told_at_once() -> None:
    problems = refused(parse_gpus, "x,8,0,9..8")
    assert [problem.value for problem in problems] == ["x", "0", "9..8"]


@pytest.fixture(scope="module")
def muon() -> Simulation:
    return run_simulation([], (8, 256), ["0.6b", "32b"])


def test_a_cell_is_what_the_plan_of_that_very_run_says(muon: Simulation) -> None:
    config, layout = resolve(compose_run(["recipe=32b", "gpus=256"], training=False).config)
    study = study_run(config.setup, layout)
    cell = muon.cells_of("qwen3-32b")[1]
    assert cell.study is not None
    assert cell.study.layout == layout
    assert {name for name in cell.study.strategies if "/" not in name} == set(STRATEGIES)
    assert cell.study.strategies == study.strategies
    for name in STRATEGIES:
        assert cell.study.figures(name) == study.figures(name)
    assert cell.ratio("sc") == study.optimizer_speedup("sc")
    assert cell.study.overhead("adamw") == 0


def test_yardsticks_have_the_layout_that_is_fastest_for_themselves(muon: Simulation) -> None:
    cell = muon.cells_of("qwen3-32b")[1]
    study, adamw, layerwise = cell.study, cell.yardsticks["adamw"], cell.yardsticks["layerwise"]
    assert study is not None
    assert adamw is not None
    assert layerwise is not None
    # What does not fit in the plan's layout is compared in one in which it does.
    assert not study.strategies["layerwise"].fits
    assert layerwise.layout != study.layout
    config = compose_run(["recipe=32b", "gpus=256", "engine.strategy=layerwise"], training=False).config
    assert estimate(config.setup, layerwise.layout).fits
    assert resolve(config)[1] == layerwise.layout
    assert adamw.iteration_s <= study.result("adamw").iteration_s
    assert study.layout.global_batch_size == layerwise.layout.global_batch_size
    assert cell.overhead("layerwise") == pytest.approx(study.result("canzona").iteration_s / layerwise.iteration_s - 1)
    text = shown(SimulationView(muon)).partition("qwen3-32b")[2]
    assert any(line.startswith("256 ") and layout_code(layerwise.layout) in line for line in text.splitlines())
    found = json.loads(json_text(cell.as_json()))["yardsticks"]
    assert found["adamw"]["canzona_over_it"] == cell.overhead("adamw")
    assert found["layerwise"]["layout"] == asdict(layerwise.layout)


def test_a_yardstick_that_fits_in_no_layout_has_no_figures() -> None:
    """AdamW's state is larger than Muon's."""
    settings = ("recipe=32b", "parallel.tp=8", "parallel.pp=1", "train.recompute=none", "train.micro_batch_size=1")
    simulation = run_simulation(settings, (8,))
    cell = simulation.cells[0]
    assert cell.study is not None
    assert cell.yardsticks["adamw"] is None
    assert cell.overhead("adamw") is None
    assert json.loads(json_text(cell.as_json()))["yardsticks"]["adamw"] is None
    *_, last = (line for line in shown(SimulationView(simulation)).splitlines() if line.startswith("8 "))
    assert last.split()[1] == MISSING


@pytest.mark.sweep  # a plan of every size
def test_all_of_qwen3_is_the_default_and_a_recipe_names_one() -> None:
    assert run_simulation(["recipe=1.7b"], (8,)).recipes == ("qwen3-1.7b",)
    # Little is left to search.
    assert len(run_simulation(["train.micro_batch_size=1", "train.recompute=full"], (64,)).recipes) == 6


def test_what_does_not_fit_is_said_not_dropped() -> None:
    simulation = run_simulation(["recipe=8b"], (1, 8))
    impossible, possible = simulation.cells
    assert impossible.study is None
    assert "needs at least" in impossible.reason
    assert impossible.ratio("sc") is None
    assert possible.study is not None
    text = shown(SimulationView(simulation))
    assert "1: no layout: gpus: qwen3-8b needs at least" in text
    assert line_of(text, "1 ").split()[1] == "-"


def test_a_number_of_gpus_that_cannot_share_the_batch_is_said() -> None:
    simulation = run_simulation(["recipe=tiny"], (2, 11))
    assert simulation.cells[0].study is not None
    assert simulation.cells[1].study is None
    assert simulation.cells[1].reason


def test_a_mistake_is_no_cell() -> None:
    problems = refused(run_simulation, ["recipe=0.6b", "optimizer.lrr=1"], (8, 16))
    assert [problem.key for problem in problems] == ["optimizer.lrr"]
    assert refused(run_simulation, ["recipe=0.6b", "gpus=8"], (8, 16))[0].fix == "use --gpus 8"
    with pytest.raises(ConfigError, match="no matrices to plan"):
        run_simulation(["recipe=0.6b", "optimizer=adamw"], (8,))
    with pytest.raises(ConfigError, match="twice"):
        run_simulation(["recipe=0.6b", "recipe=8b"], (8,))


@pytest.mark.parametrize("optimizer", ["soap", pytest.param("shampoo", marks=pytest.mark.sweep)])
def test_preconditioners_gain_most(optimizer: str) -> None:
    """Their updates take longer than Muon's, so what repeating them on TP ranks costs weighs more."""
    paper = ("parallel.tp=8", "parallel.pp=1")
    simulation = run_simulation(["recipe=32b", f"optimizer={optimizer}", *paper], (256,))
    cell = simulation.cells[0]
    ratio = cell.ratio("layerwise")
    assert ratio is not None
    assert ratio > 5
    text = shown(SimulationView(simulation))
    assert f"{ratio:.1f}x" in text
    assert "Megatron supports it only for muon" in text
    # On all ranks their state does not even fit.
    assert cell.ratio("sc") is None


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(muon: Simulation, width: int) -> None:
    text = shown(SimulationView(muon), width)
    assert max(map(len, text.splitlines())) <= width
    assert "not measured" in text.splitlines()[0]


def test_what_the_numbers_rest_on_is_counted_in_a_terminal_and_listed_elsewhere(muon: Simulation) -> None:
    text = shown(SimulationView(muon), 400)
    assert muon.assumptions == assumptions()
    assert f"under {len(muon.assumptions)} assumptions; --html and --json list them" in text
    assert not any(line[:60] in text for line in muon.assumptions)
    assert muon.as_json()["assumptions"] == list(muon.assumptions)
    page = read_page(document("canzona bench --simulate", SimulationView(muon)).text())
    assert all(line in page.words for line in muon.assumptions)
    assert "not calibrated" in text


def test_strategies_that_do_not_fit_are_marked(muon: Simulation) -> None:
    text = shown(SimulationView(muon))
    study = muon.cells_of("qwen3-32b")[1].study
    assert study is not None
    assert not study.strategies["sc"].fits
    assert "!" in line_of(text.partition("qwen3-32b")[2], "256")
    assert "! does not fit in memory" in text


def test_nothing_is_compared_with_what_does_not_fit(muon: Simulation) -> None:
    """Not its optimizer step, nor its iteration; AdamW's is no yardstick either where it does not fit."""
    cell = muon.cells_of("qwen3-32b")[1]
    study = cell.study
    assert study is not None
    assert {name for name in STRATEGIES if not study.strategies[name].fits} == {"layerwise", "sc"}
    for name in ("layerwise", "sc"):
        assert (study.optimizer_speedup(name), study.iteration_speedup(name), study.overhead(name)) == (None,) * 3
        assert study.figures(name)["overhead_over_adamw"] is None
    assert study.overhead("canzona") is not None
    table = shown(SimulationView(muon), 200).partition("qwen3-32b")[2]
    assert MISSING in line_of(table, "256").split()
    without = replace(study.strategies["adamw"], fits=False)
    assert replace(study, strategies={**study.strategies, "adamw": without}).overhead("canzona") is None


def test_json_holds_every_cell(muon: Simulation) -> None:
    found = json.loads(json_text(muon.as_json()))
    assert found["simulated"] is True
    assert [(cell["recipe"], cell["gpus"]) for cell in found["cells"]] == [
        (name, gpus) for name in ("qwen3-0.6b", "qwen3-32b") for gpus in (8, 256)
    ]
    for cell in found["cells"]:
        for name, ratio in cell["optimizer_over_canzona"].items():
            strategy, mine = cell["strategies"][name], cell["strategies"]["canzona"]["optimizer_s"]
            assert (ratio is not None) == strategy["fits"]
            assert ratio is None or math.isclose(ratio, strategy["optimizer_s"] / mine)
    assert found["cells"][-1]["optimizer_over_canzona"]["sc"] is None


def test_a_page_draws_iteration_optimizer_and_overhead_of_every_size(muon: Simulation) -> None:
    page = read_page(document("canzona bench --simulate", SimulationView(muon)).text())
    assert len(page.all("svg", class_="plot")) == 3 * len(muon.recipes)
    steps = page.curves("optimizer step, ms")["canzona"]
    assert [gpus for gpus, _ in steps] == [
        cell.gpus for cell in muon.cells_of(muon.recipes[0]) if cell.study is not None
    ]
    assert page.all("circle", class_="hollow"), "what does not fit in memory"
    nothing = document("canzona bench --simulate", SimulationView(run_simulation(["recipe=32b"], (1,))))
    assert not read_page(nothing.text()).all("svg", class_="plot")


def test_simulating_needs_no_torch() -> None:
    reports = "canzona_cli.bench.simulated, canzona_cli.cli.views.bench"
    loads_none_of(("torch", "megatron", "jinja2", "numpy"), f"import {reports}")
