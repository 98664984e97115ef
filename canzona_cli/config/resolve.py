"""Resolves configurations: the core chooses a layout, which is filled into the settings of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.core.errors import CanzonaError, Problem
from canzona_cli.core.setup import Layout, OptimizerConfig
from canzona_cli.core.simulate import fit, possible

MIN_LR_RATIO = "optimizer.min_lr_ratio"


def resolve(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Returns the configuration with a value for every layout setting that is null, and its layout
    (`core.simulate.fit.resolve`).

    Resolving the returned configuration again changes nothing.

    Raises:
        ConfigError: the settings are impossible; all mistakes are listed.
        DoesNotFit: no possible layout fits the profile's memory; the error lists changes that would make one
            fit.
    """
    setup, layout = fit.resolve(config.setup)
    return config.with_setup(setup), layout


def fill(config: RunConfig, layout: Layout) -> RunConfig:
    """Returns the configuration with this layout, and what follows from it, filled in."""
    return config.with_setup(possible.fill(config.setup, layout))


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, with its resolved configuration and layout."""

    combination: Combination
    config: RunConfig
    layout: Layout


def swept_runs(arguments: Sequence[str], recipes_dirs: Sequence[Path]) -> tuple[SweptRun, ...]:
    """Composes and resolves every run of a sweep, so that none is refused hours later.

    Raises:
        CanzonaError: at least one run is refused. If only some runs have a problem, the error names the swept
            values of the first of them.
    """
    runs: list[SweptRun] = []
    failed: list[tuple[Combination, CanzonaError]] = []
    requested = combinations(arguments)
    recipe_of = cache(lambda overrides: compose_run(overrides, recipes_dirs=recipes_dirs).config.optimizer)
    for combination in requested:
        try:
            combination = _with_scaled_minimum(combination, recipe_of)
            config, layout = resolve(compose_run(combination.overrides, recipes_dirs=recipes_dirs).config)
        except CanzonaError as error:
            failed.append((combination, error))
        else:
            runs.append(SweptRun(combination=combination, config=config, layout=layout))
    if not failed:
        return tuple(runs)
    reported: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for combination, failure in failed:
        for problem in failure.problems:
            reported.setdefault((problem.key, problem.reason), []).append((problem, combination.words))
    _, first_failure = failed[0]
    raise type(first_failure)(*(_merge(occurrences, len(requested)) for occurrences in reported.values()))


def _with_scaled_minimum(
    combination: Combination, recipe_of: Callable[[tuple[str, ...]], OptimizerConfig]
) -> Combination:
    """Gives swept learning rates the recipe's ratio of minimum to peak, so that all schedules have the same
    shape. The ratio is added as an override, so that the printed overrides reproduce the run.
    """
    overrides = combination.overrides
    keys = {key_of(override) for override in overrides}
    if "optimizer.lr" not in combination.values or keys & {"optimizer.min_lr", MIN_LR_RATIO}:
        return combination
    recipe = recipe_of(tuple(override for override in overrides if key_of(override) != "optimizer.lr"))
    if recipe.min_lr_ratio is not None or recipe.min_lr == 0:
        return combination
    return replace(combination, overrides=(*overrides, f"{MIN_LR_RATIO}={recipe.min_lr / recipe.lr:.6g}"))


def _merge(occurrences: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """Merges occurrences of the same problem in several runs. If not all of the `runs` have the problem, the
    reason names the swept values of the first run that has it."""
    (problem, words), *more = occurrences
    if len(occurrences) == runs:
        return problem
    others = f" and {len(more)} other{'s' * (len(more) > 1)}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
