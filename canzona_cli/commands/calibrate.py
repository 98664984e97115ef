"""`canzona calibrate`: measure this machine into a cluster profile that plans and predictions use."""

from pathlib import Path
from typing import Annotated

import typer

from canzona_cli.config.completion import complete_override


def calibrate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="recipe=qwen3-mini gpus=4: whose matrices to measure, on how many ranks; cluster=NAME to start from.",
            autocompletion=complete_override,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.yaml", help="Write the profile here; default: ./BASE-calibrated.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is there already.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions and sizes, no whole steps: half a minute, more noise.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    recipes_dir: Annotated[
        list[Path] | None, typer.Option("--recipes-dir", metavar="DIR", help="Look for recipes here first.")
    ] = None,
) -> None:
    """Measure this machine: products, memory, updates of the recipe's matrices, collectives, whole steps.

    What comes out is a cluster profile; `cluster=./FILE.yaml` makes any command use it. Takes one to three minutes.
    Ctrl-C keeps what was measured until then.
    """
    from functools import partial

    from rich.console import Console
    from rich.text import Text

    from canzona_cli.calibrate.calibrate import as_json, prepared
    from canzona_cli.calibrate.calibrate import calibrate as measure
    from canzona_cli.calibrate.effort import FULL, QUICK
    from canzona_cli.calibrate.in_step import Steps, with_steps
    from canzona_cli.calibrate.profile_file import check_writable, default_path, write_profile
    from canzona_cli.config.compose import compose_run
    from canzona_cli.report.calibrate import CalibrationView, Progress, closing

    errors = Console(stderr=True, highlight=False)
    composed = compose_run(overrides or (), recipes_dirs=recipes_dir or (), training=False)
    for warning in composed.warnings:
        errors.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    config, layout = prepared(composed.config)
    path = out or default_path(config.cluster.name)
    check_writable(path, force=force)
    found = measure(config, layout, Progress(errors), name=path.stem, effort=QUICK if quick else FULL)
    written = path if found.record.measurements else None
    if written is not None:
        write_profile(written, found)
        if found.outcome.exit_code == 0 and not quick:
            steps = Steps(
                overrides or (), config, written, lambda line: errors.print(Text(line, style="dim")), recipes_dir or ()
            )
            found = with_steps(found, steps, partial(write_profile, written))
    if json:
        from canzona_cli.run.words import json_text

        typer.echo(json_text(as_json(found, written)))
    else:
        console = Console(highlight=False)
        console.print(CalibrationView(found=found, config=config))
        for line in closing(found, config, written):
            console.print(line, soft_wrap=True)
    if found.outcome.exit_code:
        raise typer.Exit(found.outcome.exit_code)
