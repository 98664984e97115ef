"""`canzona validate`: checks that a recipe with overrides can run, and shows the resolved run."""

from typing import Annotated

import typer

from canzona_cli.cli.commands.output import (
    AsJson,
    RecipesDirs,
    check_inputs,
    key_values,
    show,
    tell_batch,
    warn,
    warn_about,
)
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.reading import display_path


def validate(
    overrides: Annotated[
        list[str] | None, key_values("The recipe (recipe=NAME or recipe=FILE.yaml), and settings to change.")
    ] = None,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Check a recipe and its overrides, and show all mistakes at once.

    Also checks the cluster, the plan, prepared data and the checkpoint to resume from. The exit code is 0 if
    `canzona train` can run with these arguments, 2 if the configuration is wrong, 4 if the model does not fit
    in the cluster's memory, and 5 if the checkpoint cannot be used.
    """
    from rich.console import Console
    from rich.text import Text

    from canzona_cli.checkpoint.huggingface.folder import compose_with_weights
    from canzona_cli.cli.views.header import header_rows
    from canzona_cli.cli.views.page import labelled_rows
    from canzona_cli.cli.views.train_dry_run import refused_json, resolved_json
    from canzona_cli.config.resolve import resolve
    from canzona_cli.core.costs.sharing import mode_warnings
    from canzona_cli.core.planner.plan_file import obtain_plan
    from canzona_cli.launch.resume import choose_resumption

    try:
        composed = compose_with_weights(overrides or (), recipes_dir or ())
        warn_about(composed)
        config, layout = resolve(composed.config)
        warn(mode_warnings(config.setup, layout))
        tell_batch(composed.config, layout)
        plan = obtain_plan(config.setup, layout)
        corpus = check_inputs(config, layout)
        checkpoint = choose_resumption(config, layout)
        if checkpoint is not None and corpus is not None:
            from canzona_cli.launch.resumed_data import check_tokenizer  # imports numpy

            check_tokenizer(checkpoint.data, checkpoint.origin, config, corpus)
    except CanzonaError as error:
        if not as_json:
            raise
        show(refused_json(error))
        raise typer.Exit(error.exit_code) from None
    if as_json:
        show({**resolved_json(config, layout, plan), "ok": True, "file": str(composed.recipe_file)})
        return

    console = Console(highlight=False)
    console.print(Text("OK", style="bold green"))
    rows = [
        ("file", display_path(composed.recipe_file)),
        *header_rows(config, layout, corpus=corpus, plan=plan),
        ("recompute", layout.recompute),
    ]
    console.print(*labelled_rows(rows, 11, indent=0), sep="", soft_wrap=True)
