"""`canzona calibrate`: measures this machine and writes a cluster profile for plans and predictions."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import AsJson, RecipesDirs, key_values, progress, show, warn_about


def calibrate(
    overrides: Annotated[
        list[str] | None,
        key_values(
            "The matrices and ranks to measure: recipe=qwen3-mini gpus=4; the profile to start from: cluster=NAME."
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE.yaml", help="The profile to write. [default: ./BASE-calibrated.yaml]")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing profile.")] = False,
    quick: Annotated[
        bool, Option("--quick", help="Fewer repetitions and sizes, and no training steps: half a minute, but noisier.")
    ] = False,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Measure this machine and write a cluster profile.

    Measures matmuls, memory, updates of the recipe's matrices, collectives and training steps in one to three
    minutes. Any command can use the profile: `cluster=./FILE.yaml`. Ctrl-C keeps the measurements so far.
    """
    from functools import partial

    from rich.console import Console

    from canzona_cli.bench.calibrate.calibrate import (
        ShortBenches,
        check_writable,
        content_of,
        default_path,
        prepare_run,
        with_steps,
        write_profile,
    )
    from canzona_cli.bench.calibrate.calibrate import calibrate as measure
    from canzona_cli.bench.calibrate.profile import FULL, QUICK
    from canzona_cli.cli.views.calibrate import CalibrationView, Progress
    from canzona_cli.config.compose import compose_run

    composed = compose_run(overrides or (), recipes_dirs=recipes_dir or (), training=False)
    warn_about(composed, training=False)
    config, layout = prepare_run(composed.config)
    path = out or default_path(config.cluster.name)
    check_writable(path, force=force)
    progress_view = Progress(Console(stderr=True, highlight=False))
    calibration = measure(config, layout, progress_view, name=path.stem, effort=QUICK if quick else FULL)
    written = path if calibration.record.measurements else None
    if written is not None:
        write_profile(written, calibration)
        if calibration.outcome.exit_code == 0 and not quick:
            benches = ShortBenches(overrides or (), config, written, progress, recipes_dir or ())
            calibration = with_steps(calibration, benches, partial(write_profile, written))
    view = CalibrationView(calibration=calibration, config=config, written=written)
    show(content_of(calibration, written) if as_json else view)
    if calibration.outcome.exit_code:
        raise typer.Exit(calibration.outcome.exit_code)
