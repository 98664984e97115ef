"""`canzona checkpoint`: list checkpoints, verify them, and show what one contains."""

from pathlib import Path
from typing import Annotated

import typer

from canzona_cli.commands.arguments import AsJson
from canzona_cli.commands.output import show as show_page

app = typer.Typer(no_args_is_help=True, add_completion=False)

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_OR_CHECKPOINT]",
        help="A run directory or one of its checkpoints. [default: the run under ./runs that was saved last]",
        show_default=False,
    ),
]


@app.callback()
def checkpoint() -> None:
    """List, verify and show checkpoints."""


@app.command("list")
def list_(where: Where = None, as_json: AsJson = False) -> None:
    """List checkpoints, and say whether each is complete.

    Reads manifests and file sizes only; `canzona checkpoint verify` reads the content.
    """
    from canzona_cli.checkpoint.choose import choose
    from canzona_cli.report.checkpoint import Listing

    listing = Listing(choose(where))
    show_page(listing.as_json() if as_json else listing)


@app.command()
def verify(where: Where = None, as_json: AsJson = False) -> None:
    """Read every byte and compare it with the hashes.

    Of one checkpoint, or of all of a run. Names each missing, truncated or damaged file; exit code 5 if there is one.
    """
    from canzona_cli.checkpoint.choose import choose
    from canzona_cli.checkpoint.verify import shortened
    from canzona_cli.errors import CheckpointInvalid, ExitCode
    from canzona_cli.report.checkpoint import verify_all

    verified = verify_all(choose(where).required())
    show_page(verified.as_json() if as_json else verified)
    if verified.problems:
        if as_json:
            raise typer.Exit(ExitCode.CHECKPOINT)
        raise CheckpointInvalid(*shortened(verified.problems))


@app.command()
def show(where: Where = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint contains: the newest one, or the one named."""
    from canzona_cli.checkpoint.choose import choose
    from canzona_cli.errors import CheckpointInvalid
    from canzona_cli.report.checkpoint import Content

    found = choose(where).newest
    if found.manifest is None:
        raise CheckpointInvalid(*found.problems)
    content = Content(found=found, manifest=found.manifest)
    show_page(content.as_json() if as_json else content)
