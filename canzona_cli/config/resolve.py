"""Resolves configurations: the core chooses a layout, which is filled into the settings of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.core.errors import CanzonaError, Problem
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate import fit, possible


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
    for combination in requested:
        try:
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


def _merge(occurrences: Sequence[tuple[Problem, str]], runs: int) -> Problem:
    """Merges occurrences of the same problem in several runs. If not all of the `runs` have the problem, the
    reason names the swept values of the first run that has it."""
    (problem, words), *more = occurrences
    if len(occurrences) == runs:
        return problem
    others = f" and {len(more)} other{'s' * (len(more) > 1)}" if more else ""
    return replace(problem, reason=f"{problem.reason}, in the run with {words}{others}")
