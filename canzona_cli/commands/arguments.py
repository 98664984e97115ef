"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer
from typer.models import ArgumentInfo

from canzona_cli.config.completion import complete_override


def overrides_argument(help: str) -> ArgumentInfo:
    """`KEY=VALUE ...`, completed as it is typed."""
    argument: ArgumentInfo = typer.Argument(
        metavar="KEY=VALUE", help=help, autocompletion=complete_override, show_default=False
    )
    return argument


def option_argument(group: str, help: str) -> ArgumentInfo:
    """`NAME` of an option of a group, completed as it is typed."""

    def complete(incomplete: str) -> list[str]:
        return [offer.removeprefix(f"{group}=") for offer in complete_override(f"{group}={incomplete}")]

    argument: ArgumentInfo = typer.Argument(metavar="NAME", help=help, autocompletion=complete)
    return argument


RecipesDirs = Annotated[
    list[Path] | None,
    typer.Option("--recipes-dir", metavar="DIR", help="Look for recipes here first; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", help="Also write it as a page for a browser: one file, no network."),
]
