"""Prints the output of commands (JSON, pages of text, warnings on standard error), and defines the options
that commands share.

Imports rich only to print, so that help stays fast.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option
from typer.models import ArgumentInfo

from canzona_cli.config.completion import complete_override
from canzona_cli.core.errors import Problem, write_error
from canzona_cli.core.host import existing_folder
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.words import json_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from canzona_cli.cli.views.document import Document
    from canzona_cli.config.compose import Composed
    from canzona_cli.config.schema import RunConfig
    from canzona_cli.core.setup import Layout
    from canzona_cli.records.corpus import DataPlan, PreparedCorpus


def show(content: "Mapping[str, object] | RenderableType") -> None:
    """Prints a mapping as JSON, and anything else with rich."""
    if isinstance(content, Mapping):
        typer.echo(json_text(content))
        return
    from rich.console import Console

    from canzona_cli.cli.views.page import Page

    Console(highlight=False).print(content, soft_wrap=isinstance(content, Page))


def warn(
    warnings: Iterable[str], printed: set[str] | None = None, *, kind: Literal["warning", "note"] = "warning"
) -> None:
    """Prints each distinct warning or note as a line on standard error.

    Args:
        printed: the warnings that have already been printed, which are not repeated. The new warnings are
            added to the set.
    """
    printed = set() if printed is None else printed
    for warning in warnings:
        if warning not in printed:
            tell(f"{kind}: {warning}", "yellow" if kind == "warning" else "dim")
            printed.add(warning)


def warn_about(composed: "Composed", *notes: str, training: bool = True, printed: set[str] | None = None) -> None:
    """Prints the warnings about a composed run and its cluster profile, and the `notes`, except those in
    `printed`."""
    from canzona_cli.config.profiles import profile_warnings

    from_profile = profile_warnings(composed.config.cluster, training=training)
    warn((*composed.warnings, *from_profile, *notes), printed)


def check_inputs(
    config: "RunConfig",
    layout: "Layout",
    *,
    samples: int | None = None,
    saved: "DataPlan | None" = None,
    printed: set[str] | None = None,
) -> "PreparedCorpus | None":
    """Checks a run's data before training and prints warnings about it. Returns the corpus; None for the
    standard library's sources, of which only the file of a tokenizer that is not built in is checked.

    For a custom optimizer, also prints a note that its code is not tested here.

    Args:
        samples: the number of samples of a resumed run; None for a run that starts at its first step.
        saved: the data of the checkpoint that the run starts from; None without one.
        printed: the warnings that have already been printed.

    Raises:
        ConfigError: see `canzona_cli.data.corpus.check_data`.
    """
    from canzona_cli.core.setup import CustomConfig
    from canzona_cli.records.corpus import data_warnings

    corpus = None
    if config.data.source != "stdlib" or config.data.tokenizer not in ("byte", "bpe"):
        from canzona_cli.data.corpus import check_data  # imports numpy

        corpus = check_data(config, announce, saved=saved)
    warn(data_warnings(config, layout, corpus, samples=samples), printed)
    if isinstance(config.optimizer, CustomConfig) and not config.optimizer.built_in:
        source = config.optimizer.source
        progress(f"note: {source} is not tested here; a run tests it before training")
    return corpus


def tell_batch(composed: "RunConfig", layout: "Layout") -> None:
    """Prints a note if the global batch differs from `train.batch_tokens`, because it must be a multiple of
    DP x micro-batch, and of PP too with several model chunks.

    Args:
        composed: the composed configuration, before its nulls are resolved.
    """
    exact = composed.train.batch_tokens / composed.train.seq_length
    if composed.train.global_batch_size is None and layout.global_batch_size != exact:
        stages = f" x PP {layout.pp}" if layout.vpp > 1 else ""
        progress(
            f"note: the batch has {layout.global_batch_size} sequences instead of {exact:g}: "
            f"it must be a multiple of DP {layout.dp} x micro-batch {layout.micro_batch_size}{stages}"
        )


def progress(line: str) -> None:
    """Prints a dim line on standard error, for example about the work of a long command."""
    tell(line, "dim")


def announce(what: str, share: float) -> None:
    """Prints what a long preparation does, but only when it begins, with a completed share of 0."""
    if share == 0:
        progress(what)


def tell(line: str, style: str = "") -> None:
    """Prints a line on standard error without wrapping or interpreting markup."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(line, style=style, markup=False, soft_wrap=True)


def write_out(path: Path, text: str, fix: str, *, key: str = "--out") -> None:
    """Writes the file of `--out` or of another option, and creates missing parent folders.

    Args:
        fix: the fix to show if the file cannot be written.
        key: the option.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except OSError as error:
        raise write_error(key, path, error, fix=fix) from None


def write_page(path: Path, page: "Document") -> None:
    """Writes the page of `--html` and prints its path and title.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    write_out(path, page.text(), "give another file with --html FILE.html", key="--html")
    progress(f"{path}: {page.title}")


def page_problems(html: Path | None) -> Iterator[Problem]:
    """Yields a problem if the page cannot be written to `html`, the path of --html."""
    if html is None:
        return
    existing = existing_folder(html.absolute())
    if html.suffix.lower() != ".html":
        yield Problem("--html", "must end in .html", f"use --html {html.stem}.html", html)
        return
    reason = "" if os.access(existing, os.W_OK) else f"{existing} is not writable"
    if html.is_dir():
        reason = "is a directory"
    elif not html.exists() and not existing.is_dir():
        reason = f"{existing} is a file, not a folder"
    if reason:
        yield Problem("--html", reason, "choose a file in a writable folder: --html FILE", html)


def key_values(help: str) -> ArgumentInfo:
    """Returns the command-line argument `KEY=VALUE ...`, with shell completion."""
    argument: ArgumentInfo = Argument(
        metavar="KEY=VALUE", help=help, autocompletion=complete_override, show_default=False
    )
    return argument


def option_argument(group: str, help: str) -> ArgumentInfo:
    """Returns the command-line argument `NAME`, an option of a recipe group such as `cluster`, with shell
    completion."""

    def complete(incomplete: str) -> list[str]:
        return [word.removeprefix(f"{group}=") for word in complete_override(f"{group}={incomplete}")]

    argument: ArgumentInfo = Argument(metavar="NAME", help=help, autocompletion=complete)
    return argument


RecipesDirs = Annotated[
    list[Path] | None,
    Option("--recipes-dir", metavar="DIR", help="Search this folder for recipes first; may be repeated."),
]
RunOrCheckpoint = Annotated[
    Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory or one of its checkpoints.")
]
Step = Annotated[int | None, Option("--step", metavar="N", help="The step of the checkpoint. [default: the newest]")]
Destination = Annotated[Path, Argument(metavar="DEST.yaml", help="The file to write.")]
Force = Annotated[bool, Option("--force", help="Replace the file if it exists.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
HtmlFile = Annotated[
    Path | None, Option("--html", metavar="FILE.html", help="Also write a self-contained page for a browser.")
]
