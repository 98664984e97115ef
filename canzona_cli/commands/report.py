"""`canzona report RUN_DIR`: how a run went, from the files it left."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory that `canzona train` named.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show how a run went: status, loss, validation, step-time breakdown. Works on failed and unfinished runs too."""
    from canzona_cli.report.summary import load_summary, render_summary

    summary = load_summary(run_dir)
    if json:
        from canzona_cli.report.text import json_text

        typer.echo(json_text(summary.as_json()))
        return
    from rich.console import Console

    Console(highlight=False).print(render_summary(summary))
