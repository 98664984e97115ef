"""`canzona bench`: measures strategies side by side and compares them with predictions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import (
    AsJson,
    HtmlFile,
    RecipesDirs,
    key_values,
    page_problems,
    progress,
    show,
    warn,
    write_page,
)

if TYPE_CHECKING:
    from canzona_cli.bench.results import BenchResult


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
    html: HtmlFile = None,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Compare speed, memory and prediction error of strategies that run interleaved on the same data.

    Results, configurations, plans and logs are written to bench/RECIPE-TIME. Ctrl-C stops after the current
    step, a second Ctrl-C at once.
    """
    from canzona_cli.bench.session import prepare, run

    session = prepare(
        overrides or [],
        strategies=[name.strip() for names in strategies or () for name in names.split(",") if name.strip()],
        rounds=rounds,
        steps_per_turn=steps_per_turn,
        recipes_dirs=recipes_dir or [],
        problems=[*page_problems(html)],
    )
    warn(session.warnings)
    result, folder = run(session, progress)
    conclude(result, html, as_json=as_json)
    if not as_json:
        typer.echo(f"\nbench directory: {folder}")


def conclude(result: "BenchResult", html: Path | None, *, as_json: bool) -> None:
    """Checks the losses of a result, and shows it.

    If the losses of strategies differ, `check_losses` raises after the JSON has been printed, so that no page shows a
    speed-up.
    """
    from canzona_cli.bench.results import check_losses, content_of
    from canzona_cli.cli.views.bench import BenchView

    view = BenchView(result)
    if as_json:
        show(content_of(result))
    check_losses(result)
    if html is not None:
        from canzona_cli.cli.views.document import document

        write_page(html, document("canzona bench", view))
    if not as_json:
        show(view)
