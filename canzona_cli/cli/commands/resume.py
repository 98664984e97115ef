"""`canzona resume`: continues a run with the settings in its directory."""

from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from canzona_cli.cli.commands.output import AsJson, RecipesDirs, key_values
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.recipes import WRITTEN
from canzona_cli.core.errors import Problem, refuse

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
    from canzona_cli.cli.commands.train import train
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
