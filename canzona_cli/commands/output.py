"""The output of commands: JSON for programs, a page for people, warnings on standard error.

Imports rich only when it prints, so that help stays quick.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from canzona_cli.config.compose import Composed
    from canzona_cli.config.schema import Layout, RunConfig
    from canzona_cli.report.document import Document
    from canzona_cli.run.corpus import PreparedCorpus
from typing import Annotated

from typer.models import ArgumentInfo

from canzona_cli.config.completion import complete_override


def show(content: "Mapping[str, object] | RenderableType") -> None:
    """Print a mapping as JSON, anything else as a page."""
    if isinstance(content, Mapping):
        from canzona_cli.run.words import json_text

        typer.echo(json_text(content))
        return
    from rich.console import Console

    from canzona_cli.report.page import Page

    Console(highlight=False).print(content, soft_wrap=isinstance(content, Page))


def warn(warnings: Iterable[str]) -> None:
    """A yellow line for each warning, each once."""
    for warning in dict.fromkeys(warnings):
        tell(f"warning: {warning}", "yellow")


def warn_about(composed: "Composed", *notes: str, training: bool = True) -> None:
    """Warn of what composing a run found, of what its cluster profile is not good for, and of `notes`."""
    from canzona_cli.cluster.profiles import profile_warnings

    warn((*composed.warnings, *profile_warnings(composed.config.cluster, training=training), *notes))


def checked_inputs(config: "RunConfig", layout: "Layout") -> "PreparedCorpus | None":
    """Check what a run will open as far as it is there; warn of what its data is not good for, and say what
    only running somebody's code would tell.

    Raises:
        ConfigError: as `canzona_cli.data.corpus.look_at_data`.
    """
    from canzona_cli.config.schema import CustomConfig
    from canzona_cli.run.corpus import data_warnings

    corpus = None
    if config.data.source != "stdlib" or config.data.tokenizer not in ("byte", "bpe"):
        from canzona_cli.data.corpus import look_at_data  # imports numpy

        corpus = look_at_data(config, lambda what, share: progress(what) if share == 0 else None)
    warn(data_warnings(config, layout, corpus))
    if isinstance(config.optimizer, CustomConfig) and not config.optimizer.built_in:
        source = config.optimizer.source
        progress(f"note: not tried here: whether {source} can update matrices; a run tries it before it trains")
    return corpus


def tell_batch(asked: "RunConfig", layout: "Layout") -> None:
    """Say so where the number of ranks does not divide the batch that the recipe aims for.

    Args:
        asked: as composed, its nulls not chosen yet.
    """
    exact = asked.train.batch_tokens / asked.train.seq_length
    if asked.train.global_batch_size is None and layout.global_batch_size != exact:
        progress(
            f"note: the batch has {layout.global_batch_size} sequences instead of {exact:g}: "
            f"it is a multiple of DP {layout.dp} x micro-batch {layout.micro_batch_size} near train.batch_tokens"
        )


def progress(line: str) -> None:
    """A dim line on standard error: what a long command is doing."""
    tell(line, "dim")


def tell(line: str, style: str = "") -> None:
    """A line on standard error, whole however long it is, and never read as markup."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(line, style=style, markup=False, soft_wrap=True)


def write_out(path: Path, text: str, fix: str) -> None:
    """Write what `--out` asks for.

    Raises:
        EnvironmentProblem: the file cannot be written; `fix` says what to do then.
    """
    from canzona_cli.errors import unwritable
    from canzona_cli.run.files import write_text_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except OSError as error:
        raise unwritable("--out", path, error, fix=fix) from None


def write_page(path: Path, page: "Document") -> None:
    """Write what `--html` asks for, and say so.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    page.write(path)
    progress(f"{path}: {page.title}")


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
