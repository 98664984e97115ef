"""Expands a command line with Hydra's sweeps (`A,B`, `range(1,4)`) into one run for each combination of
values.

A numeric setting of the optimizer may have values for each optimizer: in `optimizer=muon,soap,adamw
optimizer.lr=1e-3,2e-3,muon:5e-3,1e-2`, muon has two rates, and the others have the two before the first name.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.overrides import key_of, plain_value
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.settings import setting_of
from canzona_cli.core.errors import ConfigError, Problem, refuse

MOST_RUNS = 1000
"""The maximum number of runs in a sweep: Slurm's default limit for an array."""
_OPTIMIZER = re.compile(r"(?:^|,)\s*([A-Za-z_]\w*)\s*:")
"""The name in front of an optimizer's own values, as in `optimizer.lr=muon:5e-3,1e-2,adamw:2e-3`."""
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
    run is composed. An optimizer without values of its own keeps the recipe's.

    Raises:
        ConfigError: no setting is swept, a setting is swept twice, the values of a sweep repeat or cannot be
            listed, values are for an optimizer that is not swept, `run.dir` is swept, or there are more than
            `MOST_RUNS` runs.
    """
    problems: list[Problem] = []
    named = [_split_at_optimizers(argument) for argument in arguments]
    choices = [() if names else _expand(argument, problems) for argument, names in zip(arguments, named, strict=True)]
    optimizers = [
        override.partition("=")[2].strip()
        for argument, overrides in zip(arguments, choices, strict=True)
        if key_of(argument) == "optimizer"
        for override in overrides or (argument,)
    ]
    # For each argument with values of single optimizers, the optimizers of each override; else empty.
    users: list[Mapping[str, Sequence[str]]] = [{} for _ in arguments]
    for place, names in enumerate(named):
        if names:
            users[place] = _users_of_values(arguments[place], names, optimizers, problems)
            choices[place] = tuple(users[place])
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
    whole = (overrides for overrides in itertools.product(*value_lists) if _belong_together(overrides, users))
    for overrides in itertools.islice(whole, MOST_RUNS + 1):
        swept_here = (override for override, values in zip(overrides, choices, strict=True) if values and override)
        chosen = dict(override.split("=", 1) for override in swept_here)
        given = tuple(override for override, listed in zip(overrides, users, strict=True) if override or not listed)
        runs.append(Combination(name=_directory_name(chosen), values=chosen, overrides=given))
    if len(runs) > MOST_RUNS:
        reason = f"asks for more than {MOST_RUNS:,} runs"
        raise ConfigError(Problem("--sweep", reason, "sweep fewer values at a time"))
    return tuple(_with_unique_names(runs))


def is_sweep(argument: str) -> bool:
    """Returns True if an argument gives a setting several values, listed or not."""
    problems: list[Problem] = []
    return bool(_expand(argument, problems) or problems)


def _split_at_optimizers(argument: str) -> Sequence[str]:
    """Returns the values in front of the first optimizer's name, then each name and its values; empty for any other
    argument than a numeric setting of the optimizer with names."""
    key, _, text = argument.partition("=")
    setting = setting_of(key.strip())
    if not key.strip().startswith("optimizer.") or setting is None or setting.kind != "number":
        return ()
    parts = _OPTIMIZER.split(text.strip())
    return parts if len(parts) > 1 else ()


def _users_of_values(
    argument: str, parts: Sequence[str], optimizers: Sequence[str], problems: list[Problem]
) -> dict[str, list[str]]:
    """Returns the optimizers that have each override of an argument. Optimizers without values have an empty override.
    Adds problems to `problems`.

    Args:
        parts: the result of `_split_at_optimizers`, not empty.
    """
    key, text = key_of(argument), argument.partition("=")[2].strip()
    for_others, *named = parts
    values = {name: _values_of(key, listed, problems) for name, listed in zip(named[::2], named[1::2], strict=True)}
    for name in [*values]:
        if name not in optimizers:
            swept = f"swept are {', '.join(optimizers)}" if optimizers else f"write optimizer={','.join(values)} too"
            problems.append(Problem(key, f"has values for {name}, which is not swept", swept, value=text))
    for name, count in Counter(named[::2]).items():
        if count > 1:
            problems.append(Problem(key, f"names {name} twice", f"write {name}:A,B once", value=text))
    others = _values_of(key, for_others, problems) if for_others.strip() else ("",)
    users: dict[str, list[str]] = {}
    for name in optimizers:
        for override in values.get(name, others):
            users.setdefault(override, []).append(name)
    return users


def _values_of(key: str, listed: str, problems: list[Problem]) -> tuple[str, ...]:
    """Returns the overrides of one optimizer's values. A single value is a list of one."""
    argument = f"{key}={listed.strip()}"
    return _expand(argument, problems) or _expand(f"{key}=choice({listed.strip()})", problems) or (argument,)


def _belong_together(overrides: Sequence[str], users: Sequence[Mapping[str, Sequence[str]]]) -> bool:
    """Returns True if the run's optimizer has all values that are listed for optimizers."""
    of_optimizer = [names[override] for override, names in zip(overrides, users, strict=True) if names]
    if not of_optimizer:
        return True
    optimizer = next(override.partition("=")[2].strip() for override in overrides if key_of(override) == "optimizer")
    return all(optimizer in names for names in of_optimizer)


def _expand(argument: str, problems: list[Problem]) -> tuple[str, ...]:
    """Returns the overrides to which a sweep expands; empty if the argument is not a sweep or cannot be
    expanded. Adds problems with the sweep to `problems`."""
    key, _, text = argument.partition("=")
    key, text = key.strip(), text.strip()
    if key not in GROUPS and setting_of(key) is None:
        return ()
    words = tuple(text.split(","))
    if all(isinstance(plain_value(word), str | int) for word in words):  # Hydra writes a float in its own way
        values = words if len(words) > 1 else None
    else:
        values = _expand_with_hydra(key, text)
    if values is None:
        return ()
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


def _expand_with_hydra(key: str, text: str) -> tuple[str, ...] | None:
    """Returns the values of a sweep; empty if they cannot be listed, and None if the text is not a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except (HydraException, RecursionError, ValueError):
        return None
    if not override.is_sweep_override():
        return None
    shuffled = getattr(override.value(), "shuffle", False)
    try:
        return () if shuffled else tuple(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))
    except HydraException:  # the values of intervals and globs cannot be listed
        return ()


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
