"""`canzona train`, and `canzona resume`, which continues a run with the settings in its directory: parse the options.
`train_run`, which is imported later, does the work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer import Argument, Option

from canzona_cli.cli.commands.output import AsJson, RecipesDirs, key_values, show, tell
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.recipes import WRITTEN
from canzona_cli.core.errors import CanzonaError, Problem, refuse
from canzona_cli.records.protection import mark_training_run

if TYPE_CHECKING:
    from canzona_cli.cli.views.train_dry_run import DryRun


def train(
    overrides: Annotated[
        list[str] | None, key_values("recipe=qwen3-tiny gpus=4 parallel.tp=2 train.steps=100 ...")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check the run and print it; start nothing.")] = False,
    prepare_only: Annotated[
        bool, Option("--prepare-only", help="Write the run directory and print the torchrun command; start nothing.")
    ] = False,
    show_config: Annotated[
        bool,
        Option(
            "--config",
            help="With --dry-run or --prepare-only: also print all settings and the torchrun command.",
        ),
    ] = False,
    sweep: Annotated[
        bool,
        Option(
            "--sweep",
            help="Start a run for each combination of values (optimizer=muon,adamw "
            "optimizer.lr=muon:5e-3,1e-2,adamw:1e-3,3e-3).",
        ),
    ] = False,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print only warnings, errors and one line at the end.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run or --prepare-only: print JSON.")] = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Train a model, or resume the run in run.dir.

    Ctrl-C saves after the current step; a second Ctrl-C stops at once.
    """
    from canzona_cli.launch.stop import Preempted, Requests, early_stop_outcome, handle_signals

    printed = dry_run or prepare_only
    problems = []
    if prepare_only and dry_run:
        reason = "writes the run directory, but --dry-run writes nothing"
        problems.append(Problem("--prepare-only", reason, "leave out one of the two"))
    if as_json and not printed:
        fix = "add --dry-run; for the results of a run: canzona report --json"
        problems.append(Problem("--json", "needs --dry-run or --prepare-only", fix))
    if as_json and sweep:
        problems.append(Problem("--json", "shows only one run", "leave out --json, or --sweep"))
    if show_config and not printed:
        files = [text for text in overrides or () if "=" not in text]
        fix = f"write recipe={files[0]}" if files else "add --dry-run"
        problems.append(Problem(key="--config", reason="needs --dry-run or --prepare-only", fix=fix))
    refuse(problems)
    if not printed:
        mark_training_run()
    requests = Requests(raising=True)
    with handle_signals(requests.add, to_the_end=True):
        try:
            # These imports take a while, and signals that arrive meanwhile must be handled.
            if sweep:
                from canzona_cli.cli.commands.train_sweep import sweep as train_swept

                options = {"dry_run": dry_run, "prepare_only": prepare_only, "show_config": show_config}
                train_swept(overrides or [], recipes_dir or [], requests, **options)
            else:
                from canzona_cli.cli.commands.train_run import run

                with _refusals_as_json() if as_json else nullcontext(show) as present:
                    run(
                        overrides or [],
                        recipes_dir or [],
                        requests,
                        dry_run=dry_run,
                        prepare_only=prepare_only,
                        show_config=show_config,
                        quiet=quiet and not printed,
                        present=present,
                    )
        except Preempted as request:
            outcome = early_stop_outcome(None, request)
            tell(outcome.message)
            raise typer.Exit(outcome.exit_code) from None


_KEPT = "a resumed run keeps its directory and its settings"
_FIXED: Final = {
    "recipe": _KEPT,
    "run.dir": _KEPT,
    "checkpoint.weights_from": "a resumed run continues from its own checkpoint, so other weights would not be used",
}
"""The settings that cannot change when a run is resumed, with the reasons."""


def resume(
    run_dir: Annotated[Path, Argument(metavar="RUN", help="The run directory that `canzona train` printed.")],
    overrides: Annotated[
        list[str] | None, key_values("Settings to change: gpus=8 train.steps=2000 optimizer.lr=1e-3 ...")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the resolved run and the checkpoint to resume; start nothing.")
    ] = False,
    show_config: Annotated[
        bool, Option("--config", help="With --dry-run: also print all settings and the torchrun command.")
    ] = False,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print only warnings, errors and one line at the end.")
    ] = False,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Resume a run from its newest checkpoint.

    Uses the settings that the run was started with, except for those that overrides replace. If overrides set
    gpus or the cluster, canzona chooses the layout again, so a run can resume on another machine or number of
    GPUs. Ctrl-C saves after the current step.
    """
    from canzona_cli.checkpoint.manifest import step_of
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.records.summary import suggest_run_dir

    problems = []
    if not (run_dir / WRITTEN).is_file():
        not_a_run = f"has no {WRITTEN}, so it is not a run directory"
        reason = not_a_run if run_dir.is_dir() else "there is no such directory"
        problems.append(Problem(key="RUN", value=run_dir, reason=reason, fix=suggest_run_dir(run_dir)))
    for override in overrides or ():
        if (key := key_of(override)) in _FIXED:
            value = override.partition("=")[2]
            problems.append(
                Problem(key=key, value=value, reason=_FIXED[key], fix="leave it out, or write canzona train")
            )
    refuse(problems)
    arguments = [f"run.dir={text_value(str(run_dir))}", *(overrides or ())]
    # A run that resumed from a named step has newer checkpoints by now.
    if step_of(load_resolved(run_dir / WRITTEN).checkpoint.resume) is not None:
        arguments.insert(1, "checkpoint.resume=auto")
    train(arguments, dry_run=dry_run, show_config=show_config, quiet=quiet, as_json=as_json, recipes_dir=recipes_dir)


@contextmanager
def _refusals_as_json() -> "Iterator[Callable[[DryRun], None]]":
    """Provides a function that prints a run as JSON. An error that is raised before that is printed as JSON too."""
    shown: list[DryRun] = []

    def present(description: "DryRun") -> None:
        shown.append(description)
        show(description.as_json())

    try:
        yield present
    except CanzonaError as error:
        if shown:
            raise
        from canzona_cli.cli.views.train_dry_run import refused_json

        show(refused_json(error))
        raise typer.Exit(error.exit_code) from None
