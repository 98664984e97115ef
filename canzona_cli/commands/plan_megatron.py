"""`canzona plan --from-megatron`: shows the optimizer's cost in a run of Megatron-LM, next to canzona's
plan."""

from collections.abc import Sequence
from pathlib import Path

from canzona_cli.commands.output import show, warn_about
from canzona_cli.errors import ConfigError


def show_beside_megatron(
    path: Path, user_overrides: Sequence[str], recipes_dirs: Sequence[Path], *, json: bool, verbose: bool
) -> None:
    """Shows a run of Megatron-LM next to canzona's plan.

    Args:
        path: the file with the run's script, command line or printed arguments.
        user_overrides: the overrides on the command line, which take precedence over the file.

    Raises:
        ConfigError: the file cannot be read or translated, or its arguments are impossible. The problems name
            the arguments.
    """
    from canzona_cli.cluster.search import candidates, fill
    from canzona_cli.config.compose import compose_run
    from canzona_cli.config.megatron_translation import read_megatron_run
    from canzona_cli.planner.make import plannable
    from canzona_cli.simulate.beside_megatron import compare_with_megatron

    run = read_megatron_run(path, user_overrides)
    overrides = [*(f"{key}={value}" for key, value in run.overrides.items()), *user_overrides]
    try:
        composed = compose_run(overrides, recipes_dirs=recipes_dirs, training=False)
        config, notes = plannable(composed.config, composed.explicit)
        layout = candidates(config)[0].layout
    except ConfigError as error:
        raise ConfigError(*map(run.by_argument, error.problems)) from None
    warn_about(composed, *notes, training=False)
    command = run.command(composed.config, user_overrides, recipes_dirs)
    comparison = compare_with_megatron(run, fill(config, layout), layout, command)
    if json:
        show(comparison.as_json())
        return
    from canzona_cli.report.beside_megatron import BesideMegatronView

    show(BesideMegatronView(beside=comparison, verbose=verbose))
