"""`canzona bench`: measures strategies side by side and compares them with predictions."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from canzona_cli.commands.output import (
    AsJson,
    HtmlFile,
    JsonFile,
    RecipesDirs,
    key_values,
    progress,
    show,
    warn,
    write_out,
    write_page,
)
from canzona_cli.errors import collect_problems, refuse
from canzona_cli.run.words import json_text

if TYPE_CHECKING:
    from canzona_cli.bench.options import Options, SweepKind
    from canzona_cli.bench.results import BenchResult
    from canzona_cli.report.page import Page


def bench(
    overrides: Annotated[list[str] | None, key_values("recipe=qwen3-mini gpus=4 parallel.tp=2 ...")] = None,
    strategies: Annotated[
        list[str] | None,
        Option(
            metavar="NAME,NAME",
            help="Strategies to compare, out of canzona, paper, asc, layerwise, sc and adamw. "
            "[default: all that support the run]",
        ),
    ] = None,
    rounds: Annotated[
        int,
        Option(
            metavar="N", help="Measured rounds; each strategy runs once per round. Differences are judged from 5 on."
        ),
    ] = 6,
    steps_per_turn: Annotated[
        int, Option(metavar="K", help="Training steps per strategy and round; the first is not measured.")
    ] = 3,
    as_json: AsJson = False,
    out: JsonFile = None,
    html: HtmlFile = None,
    sweep: Annotated[
        Literal["gpus", "optimizer", "alpha", "c_max"] | None,
        Option(help="Run a bench (with --simulate: predict) for each value of a setting."),
    ] = None,
    values: Annotated[
        list[str] | None, Option(metavar="VALUE,VALUE", help="The values for --sweep. [default: chosen for the run]")
    ] = None,
    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            help="Run nothing: predict the given recipe, or every Qwen3 size, for each GPU count in --gpus.",
        ),
    ] = False,
    gpus: Annotated[
        str | None, Option(metavar="8..1024", help="With --simulate: GPU counts; 8..1024 means 8, 16, 32, ...")
    ] = None,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Compare speed, memory and prediction error of strategies that run interleaved on the same data.

    Results, configurations, plans and logs are written to bench/RECIPE-TIME. Ctrl-C stops after the current
    step, a second Ctrl-C at once.
    """
    from canzona_cli.bench.options import read_options

    options = read_options(
        strategies=strategies or (),
        rounds=rounds,
        steps_per_turn=steps_per_turn,
        out=out,
        html=html,
        sweep=sweep,
        values=values or (),
        simulate=simulate,
        gpus=gpus,
    )
    settings, dirs = overrides or [], recipes_dir or []
    if sweep is None:
        (_simulate if simulate else _bench_once)(settings, options, dirs, as_json=as_json)
    else:
        (_simulate_sweep if simulate else _sweep)(sweep, settings, options, dirs, as_json=as_json)


def _bench_once(overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool) -> None:
    from canzona_cli.bench.results import content_of
    from canzona_cli.bench.session import prepare, run
    from canzona_cli.report.bench import BenchView

    session = prepare(
        overrides,
        strategies=options.strategies,
        rounds=options.rounds,
        steps_per_turn=options.steps_per_turn,
        recipes_dirs=recipes_dirs,
        problems=options.problems,
    )
    warn(session.warnings)
    result, folder = run(session, progress)
    _conclude("canzona bench", content_of(result), options, BenchView(result), [result], as_json=as_json)
    if not as_json:
        typer.echo(f"\nbench directory: {folder}")


def _sweep(
    kind: "SweepKind", overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool
) -> None:
    from canzona_cli.bench.results import content_of
    from canzona_cli.bench.session import prepare_sweep, run
    from canzona_cli.report.bench_sweep import SweepView

    sessions = prepare_sweep(overrides, options, kind, recipes_dirs)
    warn(line for session in sessions.values() for line in session.warnings)
    results = {}
    for value, session in sessions.items():
        progress(f"{kind} {value}")
        results[value], _ = run(session, progress)
    contents = {value: content_of(result) for value, result in results.items()}
    content = {"version": 1, "sweep": kind, "results": contents}
    view = SweepView(kind, results)
    _conclude("canzona bench --sweep", content, options, view, results.values(), as_json=as_json)


def _simulate(overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool) -> None:
    from canzona_cli.bench.simulated import run_simulation
    from canzona_cli.report.bench_simulated import SimulationView

    problems = [*options.problems]
    with collect_problems(problems):
        simulation = run_simulation(overrides, options.gpus, recipes_dirs=recipes_dirs)
    refuse(problems)
    view = SimulationView(simulation)
    _conclude("canzona bench --simulate", simulation.as_json(), options, view, as_json=as_json)


def _simulate_sweep(
    kind: "SweepKind", overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool
) -> None:
    from canzona_cli.bench.options import simulate_sweep
    from canzona_cli.report.bench_simulated import SimulatedSweepView

    simulations = simulate_sweep(overrides, options, kind, recipes_dirs)
    results = {value: simulation.as_json() for value, simulation in simulations.items()}
    content = {"version": 1, "simulated": True, "sweep": kind, "results": results}
    view = SimulatedSweepView(kind, simulations)
    _conclude("canzona bench --simulate --sweep", content, options, view, as_json=as_json)


def _conclude(
    kind: str,
    content: Mapping[str, object],
    options: "Options",
    view: "Page",
    measured: "Iterable[BenchResult]" = (),
    *,
    as_json: bool,
) -> None:
    """Writes a result, checks its losses, and shows it.

    If the losses of strategies differ, `check_losses` raises after the JSON has been printed or written, so
    that no page shows a speed-up.

    Args:
        kind: the command, which is the title of the HTML page.
        content: the output of `--json`.
        view: the result as a page.
        measured: the results whose losses are checked.
    """
    from canzona_cli.bench.results import check_losses

    if as_json:
        show(content)
    if options.out is not None:
        fix = "bench.json in the bench directory has the same content"
        write_out(options.out, json_text(content) + "\n", fix)
    for result in measured:
        check_losses(result)
    if options.html is not None:
        from canzona_cli.report.document import document

        write_page(options.html, document(kind, view))
    if not as_json:
        show(view)
