"""`canzona eval RUN`: computes the loss of a checkpoint on prepared data, without training."""

from typing import Annotated, Literal

from typer import Option

from canzona_cli.checkpoint.store import choose
from canzona_cli.cli.commands.output import AsJson, RecipesDirs, RunOrCheckpoint, Step, key_values


def eval(
    where: RunOrCheckpoint,
    overrides: Annotated[
        list[str] | None, key_values("Settings that replace the run's: data=prepared data.path=PREFIX gpus=2 ...")
    ] = None,
    step: Step = None,
    documents: Annotated[
        Literal["held-out", "all"] | None,
        Option(
            help="held-out: only documents that the run does not train on. [default: held-out for the run's data, "
            "all for other data]"
        ),
    ] = None,
    all_sequences: Annotated[
        bool, Option("--all-sequences", help="Read every sequence once, not only train.eval_sequences of them.")
    ] = False,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Compute loss, perplexity and bits per byte of a checkpoint.

    Without settings, it repeats the run's own validation: same samples, layout and arithmetic, and therefore
    the same loss. Any other layout that fits can be set. The checkpoint is not changed.
    """
    from canzona_cli.cli.commands.output import announce, progress, show, warn
    from canzona_cli.cli.views.checkpoint import EvaluationView
    from canzona_cli.launch import evaluation

    prepared = evaluation.prepare(
        choose(where).find(step),
        overrides or [],
        recipes_dirs=recipes_dir or [],
        documents=documents,
        all_sequences=all_sequences,
        on_progress=announce,
    )
    warn(prepared.notes)
    evaluated, folder = evaluation.run(prepared, progress)
    progress(f"logs: {folder}")
    show(evaluated.as_json() if as_json else EvaluationView(evaluation=evaluated))
