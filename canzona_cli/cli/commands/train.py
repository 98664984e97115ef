"""`canzona train`: parses the options. `train_run`, which is imported later, does the work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import RecipesDirs, key_values, show, tell
from canzona_cli.core.errors import CanzonaError, Clash, Problem, clashes, refuse
from canzona_cli.records.streams import mark_training_run

if TYPE_CHECKING:
    from canzona_cli.cli.views.train_dry_run import DryRun

CLASHES = (
    Clash(
        option="--prepare-only",
        excludes="--dry-run",
        reason="writes the run directory, but --dry-run writes nothing",
        fix="leave out one of the two",
    ),
    Clash(
        option="--json",
        needs="a dry run",
        reason="needs --dry-run or --prepare-only",
        fix="add --dry-run; for the results of a run: canzona report --json",
    ),
    Clash(option="--json", excludes="--sweep", reason="shows only one run", fix="leave out --json, or --sweep"),
)


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
    given = {"--prepare-only": prepare_only, "--json": as_json, "--dry-run": dry_run, "--sweep": sweep}
    problems = [*clashes({**given, "a dry run": printed}, CLASHES)]
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
