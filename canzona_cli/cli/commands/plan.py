"""`canzona plan`: assigns matrices to ranks and simulates a step, without torch or a GPU."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from canzona_cli.cli.commands.output import (
    AsJson,
    HtmlFile,
    RecipesDirs,
    key_values,
    page_problems,
    progress,
    show,
    warn,
    warn_about,
    write_out,
    write_page,
)
from canzona_cli.core.errors import ConfigError, Problem, refuse

if TYPE_CHECKING:
    from canzona_cli.config.schema import RunConfig

SEVERAL = "several values"
_EXCLUDED = {
    "--dry-run": (("--out",), "a dry run writes no plan"),
    "--layouts": (("--out", "--html"), "--layouts only lists layouts; it does not write a plan"),
    "--from-megatron": (
        ("--out", "--html", "--shapes", "--layouts"),
        "--from-megatron shows costs on one screen; use it with the command that --from-megatron shows",
    ),
    SEVERAL: (
        ("--out", "--html", "--shapes", "--layouts", "--from-megatron"),
        "several values of a setting are shown as a table of plans, and none is written",
    ),
}
"""The options that cannot be combined with another one, and the reason."""
SHAPES_RECIPE = "qwen3-8b"
"""The recipe whose batch, sequence length and optimizer are used for `--shapes` without a recipe."""


def plan(
    overrides: Annotated[list[str] | None, key_values("recipe=qwen3-32b gpus=256 engine.mode=hosted ...")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan without writing it.")] = False,
    json: AsJson = False,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The plan file to write. [default: plans/RECIPE-GPUSgpus-HASH.json]")
    ] = None,
    html: HtmlFile = None,
    shapes: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Plan the shapes in this YAML file instead of the recipe's model; needs no recipe."
        ),
    ] = None,
    from_megatron: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Show the optimizer's cost in a Megatron-LM run, next to canzona's plan for the same layout; needs no"
            " recipe. FILE: a log, which has the arguments that Megatron prints, or a command line without shell;"
            " or, as the last option: --from-megatron -- ARGUMENTS.",
        ),
    ] = None,
    layouts: Annotated[
        bool, Option("--layouts", help="Instead of a plan, show the fastest layouts, and why the first is fastest.")
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show all details of a plan or of layouts.")] = False,
    assumptions: Annotated[bool, Option("--assumptions", help="List the assumptions of the simulation.")] = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Plan which rank updates which matrix.

    Shows load balance and its bound, traffic, memory and simulated step times. Except in a dry run, the plan
    is written to plans/, where `canzona train` looks for it. Several values (gpus=64,256) are shown as a table,
    and so are the Qwen3 sizes from 0.6B to 235B by a dry run without a recipe.
    """
    from canzona_cli.config.sweep import is_sweep

    settings, dirs = overrides or [], recipes_dir or []
    given = {"--out": out, "--html": html, "--shapes": shapes, "--from-megatron": from_megatron}
    several = any(map(is_sweep, settings))
    typed = {**given, "--layouts": layouts, "--dry-run": dry_run, SEVERAL: several}
    problems = [
        Problem(option, reason, f"leave out {option}, or {other}", None if typed[option] is True else typed[option])
        for other, (options, reason) in _EXCLUDED.items()
        for option in options
        if typed[other] and typed[option]
    ]
    refuse([*problems, *page_problems(html)])
    if several or (dry_run and not any(given.values()) and not _names_recipe(settings)):
        from canzona_cli.cli.views.layouts import overview

        plans = overview(settings, dirs)
        show(plans.as_json() if json else plans)
        return
    if from_megatron is not None:
        _show_beside_megatron(from_megatron, settings, dirs, json=json, verbose=verbose)
        return
    from canzona_cli.cli.views.header import outlook
    from canzona_cli.config.resolve import resolve
    from canzona_cli.core.costs.sharing import mode_warnings
    from canzona_cli.core.model.shapes import load_shapes
    from canzona_cli.core.simulate.compare import STRATEGIES, SUMMARY, study_run, with_shapes

    shapes_file = None if shapes is None else load_shapes(shapes)
    config = _compose_plannable(settings, dirs, shaped=shapes is not None)
    if shapes_file is not None:
        config = config.with_setup(with_shapes(config.setup, shapes_file))
    if layouts:
        from canzona_cli.cli.views.layouts import fastest_layouts

        fastest = fastest_layouts(config, verbose=verbose)
        show(fastest.as_json() if json else fastest)
        return
    config, layout = resolve(config)
    warn(mode_warnings(config.setup, layout, None if shapes_file is None else shapes_file.matrices(layout)))
    summary = not (json or verbose or html is not None)
    baselines = SUMMARY if summary else STRATEGIES
    study = study_run(config.setup, layout, shapes_file, baselines, details=not summary)
    written = None
    if not dry_run:
        from canzona_cli.core.planner.plan_file import default_path

        written = out or default_path(study.setup, study.plan)
        text = study.plan.to_json(about={"recipe": study.setup.name, "gpus": study.setup.gpus})
        write_out(written, text, fix="choose another path with --out FILE")
    figures = (
        {
            **study.as_json(),
            "outlook": asdict(outlook(config, layout, study.planned.result.iteration_s)),
            "plan_file": None if written is None else str(written),
        }
        if json
        else {}
    )
    if json and html is None:
        show(figures)  # before anything is imported for pages
        return
    from canzona_cli.cli.views.plan import PlanView

    corpus = None
    if config.data.source == "prepared":
        from canzona_cli.data.corpus import ensure_corpus  # imports numpy

        with suppress(ConfigError):  # the data may not exist yet when a run is planned
            corpus = ensure_corpus(config)
    view = PlanView(
        config=config,
        study=study,
        written=written,
        verbose=verbose,
        assumptions=assumptions,
        corpus=corpus,
    )
    if html is not None:
        from canzona_cli.cli.views.document import document

        write_page(html, document("canzona plan", replace(view, verbose=True, assumptions=True)))
    show(figures if json else view)


def _compose_plannable(overrides: Sequence[str], recipes_dirs: Sequence[Path], *, shaped: bool) -> "RunConfig":
    """Composes a run that has a plan, and prints the run's warnings.

    Args:
        shaped: True if the model comes from a file of shapes, so that no recipe is needed.

    Raises:
        ConfigError: the settings are impossible, or a recipe is needed and missing.
    """
    from canzona_cli.config.compose import compose_run
    from canzona_cli.core.planner.make import plannable

    if shaped and not _names_recipe(overrides):
        overrides = [f"recipe={SHAPES_RECIPE}", *overrides]
        progress(f"note: without a recipe, all settings except the model come from recipe={SHAPES_RECIPE}")
    try:
        composed = compose_run(overrides, recipes_dirs=recipes_dirs, training=False)
    except ConfigError as error:
        raise ConfigError(*map(_with_hint, error.problems)) from None
    setup, notes = plannable(composed.config.setup, composed.explicit)
    warn_about(composed, *notes, training=False)
    return composed.config.with_setup(setup)


def one_value(words: Sequence[str]) -> list[str]:
    """Joins the words after `--from-megatron --` into the value of the option, so that the parser of this command
    does not read them."""
    from canzona_cli.config.megatron_arguments import OPTION, TYPED

    place = next((place for place, pair in enumerate(pairwise(words)) if pair == (OPTION, "--")), None)
    return [*words] if place is None else [*words[: place + 1], TYPED + shlex.join(words[place + 2 :])]


def _show_beside_megatron(
    source: str, user_overrides: Sequence[str], recipes_dirs: Sequence[Path], *, json: bool, verbose: bool
) -> None:
    """Shows a run of Megatron-LM next to canzona's plan.

    Args:
        source: the run's log, a file with its command line, or its command line.
        user_overrides: the overrides on the command line, which take precedence over the run's arguments.

    Raises:
        ConfigError: the source cannot be read or translated, or its arguments are impossible. The problems
            name the arguments.
    """
    from canzona_cli.bench.beside_megatron import compare_with_megatron
    from canzona_cli.config.compose import compose_run
    from canzona_cli.config.megatron_translation import PROGRAM, read_megatron_run
    from canzona_cli.config.overrides import key_of
    from canzona_cli.core.planner.make import plannable
    from canzona_cli.core.simulate.possible import fill
    from canzona_cli.core.simulate.search import candidates

    run = read_megatron_run(source, user_overrides)
    user_overrides = [override for override in user_overrides if key_of(override) != PROGRAM]
    overrides = [*(f"{key}={value}" for key, value in run.overrides.items()), *user_overrides]
    try:
        composed = compose_run(overrides, recipes_dirs=recipes_dirs, training=False)
        setup, notes = plannable(composed.config.setup, composed.explicit)
        layout = candidates(setup)[0].layout
    except ConfigError as error:
        raise ConfigError(*map(run.by_argument, error.problems)) from None
    warn_about(composed, *notes, training=False)
    command = run.command(composed.config, user_overrides, recipes_dirs)
    comparison = compare_with_megatron(run, fill(setup, layout), layout, command)
    if json:
        show(comparison.as_json())
        return
    from canzona_cli.cli.views.plan import BesideMegatronView

    show(BesideMegatronView(beside=comparison, verbose=verbose))


def _with_hint(problem: Problem) -> Problem:
    """Adds the hint that a dry run shows all sizes to the problem of a missing recipe."""
    if problem.key != "recipe" or problem.value is not None:
        return problem
    return replace(problem, fix=f"{problem.fix}; or see a plan of every size: canzona plan --dry-run")


def _names_recipe(overrides: Sequence[str]) -> bool:
    from canzona_cli.config.overrides import key_of

    return any(key_of(override) == "recipe" for override in overrides)
