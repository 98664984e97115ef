"""The runs of a sweep, all composed and fitted to the machine before any of them starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.errors import CanzonaError, Problem
from canzona_cli.run.words import plural


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
    for one in wanted:
        try:
            config, layout = resolve(compose_run(one.overrides, recipes_dirs=recipes_dirs).config)
        except CanzonaError as error:
            failed.append((one, error))
        else:
            found.append(SweptRun(combination=one, config=config, layout=layout))
    if not failed:
        return tuple(found)
    told: dict[tuple[str, str], list[tuple[Problem, str]]] = {}
    for one, error in failed:
        for problem in error.problems:
            told.setdefault((problem.key, problem.reason), []).append((problem, one.words))
    raise type(failed[0][1])(*(_once(having, len(wanted)) for having in told.values()))


def _once(having: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """A problem that some of the runs have, or all."""
    (problem, words), *more = having
    if len(having) == runs:
        return problem
    others = f" and {plural(len(more), 'other')}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
