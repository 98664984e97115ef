"""The runs of a sweep, all composed and fitted to the machine before any of them starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import Layout, OptimizerConfig, RunConfig
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.errors import CanzonaError, Problem
from canzona_cli.run.words import plural

MIN_LR_RATIO = "optimizer.min_lr_ratio"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, composed and fitted to the machine."""

    combination: Combination
    config: RunConfig
    layout: Layout


def swept_runs(arguments: Sequence[str], recipes_dirs: Sequence[Path]) -> tuple[SweptRun, ...]:
    """Compose every run of a sweep, so that none of them is refused hours later.

    Raises:
        CanzonaError: what is wrong with any of them; of a mistake that not all have, with the values that have it.
    """
    found: list[SweptRun] = []
    failed: list[tuple[Combination, CanzonaError]] = []
    wanted = combinations(arguments)
    recipe_of = cache(lambda others: compose_run(others, recipes_dirs=recipes_dirs).config.optimizer)
    for plain in wanted:
        one = plain
        try:
            one = _with_own_minimum(plain, recipe_of)
            config, layout = resolve(compose_run(one.overrides, recipes_dirs=recipes_dirs).config)
        except CanzonaError as error:
            failed.append((one, error))
        else:
            found.append(SweptRun(combination=one, config=config, layout=layout))
    if not failed:
        return tuple(found)
    told: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for one, failure in failed:
        for problem in failure.problems:
            told.setdefault((problem.key, problem.reason), []).append((problem, one.words))
    raise type(failed[0][1])(*(_once(having, len(wanted)) for having in told.values()))


def _with_own_minimum(one: Combination, recipe_of: Callable[[tuple[str, ...]], OptimizerConfig]) -> Combination:
    """Keeps the recipe's ratio of the minimum to swept learning rates, so that all curves have one form.

    Said as an override: a run of the sweep is repeated by what is printed.
    """
    typed = {key_of(override) for override in one.overrides}
    if "optimizer.lr" not in one.values or typed & {"optimizer.min_lr", MIN_LR_RATIO}:
        return one
    recipe = recipe_of(tuple(override for override in one.overrides if key_of(override) != "optimizer.lr"))
    if recipe.min_lr_ratio is not None or recipe.min_lr == 0:
        return one
    return replace(one, overrides=(*one.overrides, f"{MIN_LR_RATIO}={recipe.min_lr / recipe.lr:.6g}"))


def _once(having: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """A problem that some of the runs have, or all."""
    (problem, words), *more = having
    if len(having) == runs:
        return problem
    others = f" and {plural(len(more), 'other')}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
