"""Several runs from one command line: every combination of the values of Hydra's sweeps (`A,B`, `range(1,4)`)."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.overrides import key_of
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.settings import setting_of
from canzona_cli.errors import ConfigError, Problem, refuse

MOST_RUNS = 1000
"""Slurm's own limit for an array, unless a cluster sets another."""
_LONGEST_NAME = 120
"""Characters of a directory's name, of the 255 that file systems take."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One run of a sweep."""

    name: str
    """The name of its directory, unique in the sweep: `lr=0.001_seed=2`."""
    values: Mapping[str, str]
    """The swept settings with this run's values, as typed."""
    overrides: tuple[str, ...]
    """All of its arguments, none of them a sweep."""

    @property
    def words(self) -> str:
        """`optimizer.lr=0.001 train.seed=2`."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def combinations(arguments: Sequence[str]) -> tuple[Combination, ...]:
    """The runs that `arguments` ask for; the last setting that is swept changes fastest.
    The same ones each time.

    What is no sweep, and what cannot be read, stays as it is: composing a run says what is wrong with it.

    Raises:
        ConfigError: nothing is swept, or what cannot be listed is, or there are too many or equal runs.
    """
    problems: list[Problem] = []
    choices = [_values(argument, problems) for argument in arguments]
    swept = [key_of(argument) for argument, swept_values in zip(arguments, choices, strict=True) if swept_values]
    if not swept and not problems:
        reason, fix = "no setting has several values", "for example optimizer.lr=1e-3,3e-3, or train.seed='range(1,5)'"
        problems.append(Problem(key="--sweep", reason=reason, fix=fix))
    problems += [
        Problem(key=key, reason="is swept twice", fix="write all its values at once")
        for key, count in Counter(swept).items()
        if count > 1
    ]
    refuse(problems)
    swept_values = []
    lists = [values or (argument,) for argument, values in zip(arguments, choices, strict=True)]
    for overrides in itertools.islice(itertools.product(*lists), MOST_RUNS + 1):
        values = {
            key: text
            for override, several in zip(overrides, choices, strict=True)
            if several
            for key, _, text in [override.partition("=")]
        }
        swept_values.append(Combination(name=_name(values), values=values, overrides=overrides))
    if len(swept_values) > MOST_RUNS:
        reason = f"asks for more than {MOST_RUNS:,} runs"
        raise ConfigError(Problem(key="--sweep", reason=reason, fix="sweep fewer values at a time"))
    return tuple(_distinct(swept_values))


def _values(argument: str, problems: list[Problem]) -> tuple[str, ...]:
    """The overrides that a sweep stands for; none where the argument is no sweep, or a wrong one."""
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
    except HydraException:  # of intervals and globs
        values = ()
    if not values:
        reason = "is no list of values that comes out the same each time"
        problems.append(Problem(key=key, value=text, reason=reason, fix=f"name the values: {key}=A,B,C"))
        return ()
    twice = sorted(value for value, count in Counter(values).items() if count > 1)
    if twice:
        reason = f"asks for the same run several times: {', '.join(twice)}"
        problems.append(Problem(key=key, value=text, reason=reason, fix="name each value once"))
    if key == "run.dir":
        reason = "the runs of a sweep lie in one directory, each below it"
        problems.append(Problem(key=key, value=text, reason=reason, fix="run.dir=DIR, or leave it out"))
    return tuple(f"{key}={value}" for value in values)


def _name(values: Mapping[str, str]) -> str:
    """Joins the last words of the settings, where those tell them apart."""
    last = Counter(key.rpartition(".")[2] for key in values)
    short = {key: bare if last[bare := key.rpartition(".")[2]] == 1 else key for key in values}
    name = "_".join(f"{short[key]}={value.strip('\'"')}" for key, value in values.items())
    return re.sub(r"[^\w.+=-]", "-", name, flags=re.ASCII)[:_LONGEST_NAME]


def _distinct(combinations: Sequence[Combination]) -> list[Combination]:
    """Names that are alike, once what no directory is called was replaced, get their run's number."""
    count = Counter(run.name for run in combinations)
    return [
        run if count[run.name] == 1 else replace(run, name=f"{run.name}_{number}")
        for number, run in enumerate(combinations)
    ]
