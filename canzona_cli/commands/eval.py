"""`canzona eval RUN`: computes the loss of a checkpoint on prepared data, without training."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from canzona_cli.commands.output import AsJson, RecipesDirs, overrides_argument


def eval(
    where: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory or one of its checkpoints.")
    ],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("Settings that replace the run's: data=prepared data.path=PREFIX gpus=2 ..."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step of the checkpoint. [default: the newest]")
    ] = None,
    documents: Annotated[
        Literal["held-out", "all"] | None,
        typer.Option(
            help="held-out: only documents that the run does not train on. [default: held-out for the run's data, "
            "all for other data]",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help="Global batches to evaluate; all: every sample once. [default: train.eval_batches]",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the JSON to this file.")] = None,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Compute loss, perplexity and bits per byte of a checkpoint.

    Uses any layout that fits, and does not change the checkpoint. Without settings, it repeats the run's
    own validation: same samples, layout and arithmetic, and therefore the same loss.
    """
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.commands.output import progress, show, warn, write_out
    from canzona_cli.launch import evaluation
    from canzona_cli.report.checkpoint import EvaluationView
    from canzona_cli.run.words import json_text

    prepared = evaluation.prepare(
        choose(where).find(step),
        overrides or [],
        recipes_dirs=recipes_dir or [],
        documents=documents,
        batches=_batches(batches),
        on_progress=lambda what, share: progress(what) if share == 0 else None,
    )
    warn(prepared.notes)
    evaluated, folder = evaluation.run(prepared, progress)
    progress(f"logs: {folder}")
    if out is not None:
        write_out(out, json_text(evaluated.as_json()) + "\n", "use --out FILE.json in a writable folder")
    show(evaluated.as_json() if as_json else EvaluationView(evaluation=evaluated))


def _batches(text: str | None) -> int | Literal["all"] | None:
    """Parses `--batches`: a positive number, `all`, or None.

    Raises:
        ConfigError: the text is none of these.
    """
    if text is None:
        return None
    if text == "all":
        return "all"
    if text.isdecimal() and int(text):
        return int(text)
    from canzona_cli.errors import ConfigError, Problem

    raise ConfigError(
        Problem(key="--batches", value=text, reason="is neither a positive number nor all", fix="--batches 100")
    )
