"""`canzona tune`: measures the simulator's best layouts on real ranks, and writes a recipe with the
fastest."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from canzona_cli.commands.output import AsJson, RecipesDirs, key_values, progress, show, warn
from canzona_cli.config.reading import display_path
from canzona_cli.config.recipes import check_destination, write_recipe


def tune(
    overrides: Annotated[list[str] | None, key_values("recipe=qwen3-mini gpus=4 cluster=./here.yaml ...")] = None,
    count: Annotated[
        int,
        Option(
            "--candidates",
            metavar="N",
            help="Measure the N layouts that are fastest in simulation, and the one that an untuned run would use.",
        ),
    ] = 4,
    everything: Annotated[bool, Option("--all", help="Measure every valid layout that fits in memory.")] = False,
    rounds: Annotated[
        int, Option(metavar="N", help="Rounds; each layout runs once per round. Differences are judged from 5 on.")
    ] = 3,
    steps: Annotated[
        int, Option(metavar="K", help="Measured steps per layout and round, after at least two warm-up steps.")
    ] = 3,
    out: Annotated[
        Path | None, Option(metavar="FILE.yaml", help="The recipe to write. [default: ./RECIPE-GPUS-tuned.yaml]")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the recipe if it exists.")] = False,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Measure the simulator's best layouts, and write a recipe with the fastest.

    The layouts run interleaved and are shown with their predictions. Overrides apply to all layouts. Raw
    numbers are written to tune/RECIPE-TIME. Ctrl-C stops after the current step.
    """
    from canzona_cli.bench.layouts import content_of, prepare, run, tuned_recipe
    from canzona_cli.report.tune import TuneView

    tuning = prepare(
        overrides or (),
        count=None if everything else count,
        rounds=rounds,
        steps=steps,
        recipes_dirs=recipes_dir or (),
    )
    config = tuning.config
    path = out or Path(f"{config.name}-{config.gpus}-tuned.yaml")
    check_destination(path, force=force, key="--out")
    warn(tuning.warnings)
    result, folder = run(tuning, progress)
    write_recipe(path, tuned_recipe(config, result, name=path.stem), force=force)
    if as_json:
        show(content_of(result, str(path)))
        return
    show(TuneView(result=result))
    typer.echo(f"\nWrote {display_path(path)}. Train it with: canzona train recipe={display_path(path)}")
    typer.echo(f"raw numbers: {folder}/tune.json")
