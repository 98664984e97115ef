"""`canzona bench`: measures strategies side by side and compares them with predictions."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import (
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
from canzona_cli.core.errors import collect_problems, refuse
from canzona_cli.records.words import json_text

if TYPE_CHECKING:
    from canzona_cli.bench.options import Options
    from canzona_cli.bench.results import BenchResult
    from canzona_cli.cli.views.page import Page


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
        simulate=simulate,
        gpus=gpus,
    )
    (_simulate if simulate else _measure)(overrides or [], options, recipes_dir or [], as_json=as_json)


def _measure(overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool) -> None:
    from canzona_cli.bench.results import content_of
    from canzona_cli.bench.session import prepare, run
    from canzona_cli.cli.views.bench import BenchView

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
    _conclude("canzona bench", content_of(result), options, BenchView(result), result, as_json=as_json)
    if not as_json:
        typer.echo(f"\nbench directory: {folder}")


def _simulate(overrides: list[str], options: "Options", recipes_dirs: list[Path], *, as_json: bool) -> None:
    from canzona_cli.bench.simulated import run_simulation
    from canzona_cli.cli.views.bench import SimulationView

    problems = [*options.problems]
    with collect_problems(problems):
        simulation = run_simulation(overrides, options.gpus, recipes_dirs=recipes_dirs)
    refuse(problems)
    view = SimulationView(simulation)
    _conclude("canzona bench --simulate", simulation.as_json(), options, view, as_json=as_json)


def _conclude(
    kind: str,
    content: Mapping[str, object],
    options: "Options",
    view: "Page",
    measured: "BenchResult | None" = None,
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
        measured: the result whose losses are checked; None for a simulation.
    """
    from canzona_cli.bench.results import check_losses

    if as_json:
        show(content)
    if options.out is not None:
        fix = "bench.json in the bench directory has the same content"
        write_out(options.out, json_text(content) + "\n", fix)
    if measured is not None:
        check_losses(measured)
    if options.html is not None:
        from canzona_cli.cli.views.document import document

        write_page(options.html, document(kind, view))
    if not as_json:
        show(view)
