"""`canzona validate`: whether a recipe with these overrides can run, and what it resolves to."""

from typing import Annotated

from canzona_cli.commands.arguments import RecipesDirs, overrides_argument
from canzona_cli.commands.output import warn_about


def validate(
    overrides: Annotated[
        list[str] | None, overrides_argument("The recipe (recipe=NAME or recipe=FILE.yaml), and settings to change.")
    ] = None,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Check a recipe and its overrides, how they fit the cluster, plan and prepared data; shows all mistakes at once.

    Exit code 0 when `canzona train` with the same arguments has a sound configuration, 2 when not, 4 when the model
    does not fit in the cluster's memory.
    """

    from rich.console import Console
    from rich.text import Text

    from canzona_cli.cluster.fit import resolve
    from canzona_cli.config.compose import compose_run
    from canzona_cli.config.recipes import shown
    from canzona_cli.model.qwen3 import parameter_count
    from canzona_cli.planner.plan_file import obtain_plan
    from canzona_cli.report.header import (
        describe_batch,
        describe_data,
        describe_layout,
        describe_optimizer,
        describe_plan,
        rank_word,
    )
    from canzona_cli.report.page import labelled
    from canzona_cli.run.words import count

    composed = compose_run(overrides or (), recipes_dirs=recipes_dir or ())
    warn_about(composed)
    config, layout = resolve(composed.config)
    plan = obtain_plan(config, layout)
    corpus = None
    if config.data.source == "prepared":
        from canzona_cli.data.corpus import ensure_corpus

        corpus = ensure_corpus(config)
    elif config.data.tokenizer not in ("byte", "bpe"):
        # The built-in corpus is prepared when a run first needs it; what it is tokenised with must be here by then.
        from canzona_cli.data.corpus import check_tokenizer

        check_tokenizer(config)

    tokens = layout.global_batch_size * config.train.seq_length
    console = Console(highlight=False)
    console.print(Text("OK", style="bold green"))
    unit = rank_word(config.cluster.device)
    rows = [
        ("recipe", f"{config.name} ({shown(composed.recipe_file)})"),
        ("model", f"{config.model.name}, {count(parameter_count(config.model).total)} parameters"),
        ("optimizer", describe_optimizer(config)),
        ("layout", f"{describe_layout(layout, unit)} on {config.cluster.name}, recompute {layout.recompute}"),
        *([("plan", describe_plan(plan))] if plan is not None else []),
        ("batch", describe_batch(layout, config.train.seq_length)),
        ("steps", f"{config.train.steps:,}, {count(config.train.steps * tokens)} tokens"),
        ("data", describe_data(config, corpus)),
    ]
    for row in labelled(rows, 11, indent=0):
        console.print(row)
