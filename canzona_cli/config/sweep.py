"""Expands a command line with Hydra's sweeps (`A,B`, `range(1,4)`) into one run for each combination of
values."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.overrides import key_of
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.settings import setting_of
from canzona_cli.core.errors import ConfigError, Problem, refuse

MOST_RUNS = 1000
"""The maximum number of runs in a sweep: Slurm's default limit for an array."""
_LONGEST_NAME = 120
"""The maximum number of characters in a run's directory name, without an index that makes it unique. File
systems allow 255 bytes."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One run of a sweep."""

    name: str
    """The name of the run's directory, unique in the sweep: `lr=0.001_seed=2`."""
    values: Mapping[str, str]
    """This run's values of the swept settings, as text."""
    overrides: tuple[str, ...]
    """All arguments of the run, each with a single value."""

    @property
    def words(self) -> str:
        """The swept settings and their values: `optimizer.lr=0.001 train.seed=2`."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def combinations(arguments: Sequence[str]) -> tuple[Combination, ...]:
    """Returns the runs of a sweep, always in the same order; the last swept setting varies fastest.

    Arguments that are not sweeps, or that cannot be parsed, are passed on to all runs, and are checked when a
    run is composed.

    Raises:
        ConfigError: no setting is swept, a setting is swept twice, the values of a sweep repeat or cannot be
            listed, `run.dir` is swept, or there are more than `MOST_RUNS` runs.
    """
    problems: list[Problem] = []
    choices = [_expand(argument, problems) for argument in arguments]
    swept = [key_of(argument) for argument, values in zip(arguments, choices, strict=True) if values]
    if not swept and not problems:
        reason, fix = "no setting has several values", "for example optimizer.lr=1e-3,3e-3, or train.seed='range(1,5)'"
        problems.append(Problem("--sweep", reason, fix))
    problems += [
        Problem(key, "is swept twice", "write all values in one argument")
        for key, count in Counter(swept).items()
        if count > 1
    ]
    refuse(problems)
    runs = []
    value_lists = [values or (argument,) for argument, values in zip(arguments, choices, strict=True)]
    for overrides in itertools.islice(itertools.product(*value_lists), MOST_RUNS + 1):
        swept_here = (override for override, values in zip(overrides, choices, strict=True) if values)
        chosen = dict(override.split("=", 1) for override in swept_here)
        runs.append(Combination(name=_directory_name(chosen), values=chosen, overrides=overrides))
    if len(runs) > MOST_RUNS:
        reason = f"asks for more than {MOST_RUNS:,} runs"
        raise ConfigError(Problem("--sweep", reason, "sweep fewer values at a time"))
    return tuple(_with_unique_names(runs))


def is_sweep(argument: str) -> bool:
    """Returns True if an argument gives a setting several values, listed or not."""
    problems: list[Problem] = []
    return bool(_expand(argument, problems) or problems)


def _expand(argument: str, problems: list[Problem]) -> tuple[str, ...]:
    """Returns the overrides to which a sweep expands; empty if the argument is not a sweep or cannot be
    expanded. Adds problems with the sweep to `problems`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, text = argument.partition("=")
    key, text = key.strip(), text.strip()
    if key not in GROUPS and setting_of(key) is None:
        return ()
    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except (HydraException, RecursionError, ValueError):
        return ()
    if not override.is_sweep_override():
        return ()
    shuffled = getattr(override.value(), "shuffle", False)
    try:
        values = () if shuffled else tuple(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))
    except HydraException:  # the values of intervals and globs cannot be listed
        values = ()
    if not values:
        reason = "is not a fixed list of values"
        problems.append(Problem(key, reason, f"list the values: {key}=A,B,C", value=text))
        return ()
    repeated = sorted(value for value, count in Counter(values).items() if count > 1)
    if repeated:
        reason = f"lists the same value several times: {', '.join(repeated)}"
        problems.append(Problem(key, reason, "list each value once", value=text))
    if key == "run.dir":
        reason = "all runs of a sweep are in subdirectories of one directory"
        problems.append(Problem(key, reason, "write run.dir=DIR, or leave it out", value=text))
    return tuple(f"{key}={value}" for value in values)


def _directory_name(values: Mapping[str, str]) -> str:
    """Returns the directory name of a run: `lr=0.001_seed=2`, with full keys if bare names are ambiguous."""
    bare = {key: key.rpartition(".")[2] for key in values}
    count = Counter(bare.values())
    short = {key: name if count[name] == 1 else key for key, name in bare.items()}
    name = "_".join(f"{short[key]}={value.strip('\'"')}" for key, value in values.items())
    return re.sub(r"[^\w.+=-]", "-", name, flags=re.ASCII)[:_LONGEST_NAME]


def _with_unique_names(combinations: Sequence[Combination]) -> list[Combination]:
    """Makes the runs' names unique: adds the runs' indices to names that became equal when unsafe characters were
    replaced or long names were cut."""
    count = Counter(run.name for run in combinations)
    return [
        run if count[run.name] == 1 else replace(run, name=f"{run.name}_{index}")
        for index, run in enumerate(combinations)
    ]
