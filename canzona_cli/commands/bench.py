"""`canzona bench`: strategies side by side in one session, measured beside predicted."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from canzona_cli.config.completion import complete_override

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from canzona_cli.bench.options import Options


class Sweep(StrEnum):
    """What `--sweep` varies."""

    ALPHA = "alpha"
    C_MAX = "c_max"
    GPUS = "gpus"
    OPTIMIZER = "optimizer"
    LAYERS = "layers"


def bench(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="recipe=qwen3-mini gpus=4 parallel.tp=2 ...",
            autocompletion=complete_override,
            show_default=False,
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="NAME,NAME",
            help="Of canzona, asc, layerwise, sc, adamw; default: all that the run can have.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Measured turns of every strategy.")] = 6,
    steps_per_turn: Annotated[
        int, typer.Option("--steps-per-turn", metavar="K", help="Training steps of a turn; its first is left out.")
    ] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Write the JSON here, too.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result (needs matplotlib).")
    ] = None,
    sweep: Annotated[Sweep | None, typer.Option("--sweep", help="One bench for each of several values.")] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--values", metavar="VALUE,VALUE", help="What --sweep goes through; chosen when left out."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run nothing: predict every Qwen3 size, or the recipe's, for --gpus.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="8..1024", help="With --simulate: numbers of GPUs; 8..1024 doubles.")
    ] = None,
    recipes_dir: Annotated[
        list[Path] | None, typer.Option("--recipes-dir", metavar="DIR", help="Look for recipes here first.")
    ] = None,
) -> None:
    """Run strategies of one recipe in turns on the same data, and compare them: speed-ups, memory, prediction error.

    Everything of it stays in bench/RECIPE-TIME. Ctrl-C once stops after the step at hand, twice at once.
    """
    from rich.console import Console

    from canzona_cli.bench.options import read_options

    options = read_options(
        strategies=strategies or (),
        rounds=rounds,
        steps_per_turn=steps_per_turn,
        out=out,
        plot=plot,
        sweep=None if sweep is None else sweep.value,
        values=values or (),
        simulate=simulate,
        gpus=gpus,
    )
    errors = Console(stderr=True, highlight=False)
    show = _simulated if simulate else _one if sweep is None else _several
    show(overrides or [], options, recipes_dir or [], errors, json)


def _one(overrides: list[str], options: "Options", recipes_dirs: list[Path], errors: "Console", json: bool) -> None:
    from rich.console import Console

    from canzona_cli.bench.losses import check_losses
    from canzona_cli.bench.results_file import as_json
    from canzona_cli.bench.session import prepare, run

    session = prepare(
        overrides,
        strategies=options.strategies,
        rounds=options.rounds,
        steps_per_turn=options.steps_per_turn,
        recipes_dirs=recipes_dirs,
        problems=options.problems,
    )
    _warn(session.warnings, errors)
    result, folder = run(session, lambda line: _say(errors, line))
    # A fast wrong answer is no result: its numbers are kept, and no speed-up is told.
    hand_over(as_json(result), options, json=json)
    check_losses(result)
    if options.plot is not None:
        from canzona_cli.report.bench_plot import draw

        draw(result, options.plot)
    if not json:
        from canzona_cli.report.bench import BenchView

        console = Console(highlight=False)
        console.print(BenchView(result))
        console.print()
        console.print(f"bench directory: {folder}", markup=False, soft_wrap=True)


def _several(overrides: list[str], options: "Options", recipes_dirs: list[Path], errors: "Console", json: bool) -> None:
    from rich.console import Console

    from canzona_cli.bench.losses import check_losses
    from canzona_cli.bench.results_file import as_json
    from canzona_cli.bench.sweep import prepare_sweep, run_sweep

    sweep = prepare_sweep(overrides, options, recipes_dirs)
    _warn(list(dict.fromkeys(line for session in sweep.sessions.values() for line in session.warnings)), errors)
    results = run_sweep(sweep, lambda line: _say(errors, line))
    content = {"sweep": sweep.kind, "results": {value: as_json(result) for value, result in results.items()}}
    hand_over(content, options, json=json)
    for result in results.values():
        check_losses(result)
    if options.plot is not None:
        from canzona_cli.report.bench_sweep import draw_sweep

        draw_sweep(sweep.kind, results, options.plot)
    if not json:
        from canzona_cli.report.bench_sweep import SweepView

        Console(highlight=False).print(SweepView(sweep.kind, results))


def _simulated(
    overrides: list[str], options: "Options", recipes_dirs: list[Path], errors: "Console", json: bool
) -> None:
    from rich.console import Console

    from canzona_cli.bench.simulated import run_simulation
    from canzona_cli.errors import ConfigError

    try:
        simulation = run_simulation(overrides, options.gpus, recipes_dirs=recipes_dirs)
    except ConfigError as error:
        raise ConfigError(*options.problems, *error.problems) from None
    if options.problems:
        raise ConfigError(*options.problems)
    hand_over(simulation.as_json(), options, json=json)
    if options.plot is not None:
        from canzona_cli.report.bench_simulated import draw

        draw(simulation, options.plot)
    if not json:
        from canzona_cli.report.bench_simulated import SimulationView

        Console(highlight=False).print(SimulationView(simulation))


def hand_over(content: "Mapping[str, object]", options: "Options", *, json: bool) -> None:
    """Write and print the JSON as far as that was asked for.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    from canzona_cli.errors import EnvironmentProblem, Problem
    from canzona_cli.run.files import write_text_atomic
    from canzona_cli.run.words import json_text

    text = json_text(content)
    if json:
        typer.echo(text)
    if options.out is None:
        return
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(options.out, text + "\n")
    except OSError as error:
        raise EnvironmentProblem(
            Problem(
                key="--out",
                value=options.out,
                reason=f"cannot be written: {error.strerror or error}",
                fix="the same is in the bench directory, bench.json",
            )
        ) from None


def _warn(warnings: "Sequence[str]", errors: "Console") -> None:
    for warning in warnings:
        errors.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def _say(errors: "Console", line: str) -> None:
    errors.print(line, style="dim", markup=False, soft_wrap=True)
