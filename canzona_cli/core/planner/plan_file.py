"""Plan files: finds or makes the plan of a run, reads stored plans, and compares two plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from canzona_cli.core.costs.sharing import shared_costs
from canzona_cli.core.costs.update import update_costs
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.planner.make import make_plan, planned_matrices, subject
from canzona_cli.core.planner.plan import VERSION, Plan, Subject, content_hash
from canzona_cli.core.reading import Unreadable, expanded, other_version, parse_json, read_plain
from canzona_cli.core.setup import Execution, Layout, Setup

Difference = tuple[str, object, object]
"""A key, its value in the first of two plans or subjects, and its value in the second."""
_IDENTITY: Mapping[str, tuple[str, ...]] = {
    "matrices": ("name",),
    "buckets": ("stage", "index"),
    "micro_groups": ("stage", "owner", "index"),
}
"""The fields that identify an entry in each part of a plan."""


def differences(first: Subject, second: Subject) -> list[Difference]:
    """Lists the values in which two subjects differ."""
    mine, theirs = first.flat(), second.flat()
    keys = dict.fromkeys([*mine, *theirs])
    return [(key, mine.get(key), theirs.get(key)) for key in keys if mine.get(key) != theirs.get(key)]


def first_difference(plan: Plan, other: Plan) -> Difference | None:
    """Returns the first difference between two plans, as (key, value in `plan`, value in `other`); None if
    the plans are equal.

    Parts are compared in the order in which they depend on each other, so that the first difference is likely
    the cause of the others: version, subject (`layout.tp`), matrices (`matrices[layers.3.gate].owner`),
    buckets (`buckets[stage 0, index 2].reduction`), micro-groups, bounds. A value that only one plan has is
    None in the other.
    """
    if plan.hash == other.hash:
        return None
    if plan.version != other.version:
        return "version", plan.version, other.version
    subjects = differences(plan.subject, other.subject)
    if subjects:
        return subjects[0]
    mine, theirs = plan.content(), other.content()
    for part, names in _IDENTITY.items():
        difference = _find_difference(part, _by_label(mine[part], names), _by_label(theirs[part], names))
        if difference is not None:
            return difference
    return _find_difference("lower_bounds", mine["lower_bounds"], theirs["lower_bounds"])


def _by_label(rows: object, names: Sequence[str]) -> dict[str, object]:
    """Returns the entries of a part of a plan by label. A label such as `[stage 0, index 2]` is made from the
    fields `names`."""
    assert isinstance(rows, list)
    entries: dict[str, object] = {}
    for row in rows:
        label = row[names[0]] if len(names) == 1 else ", ".join(f"{name} {row[name]}" for name in names)
        entries[f"[{label}]"] = {f".{key}": value for key, value in row.items()}
    return entries


def _find_difference(key: str, mine: object, theirs: object) -> Difference | None:
    """Returns the first difference between two values with this key; mappings and lists are compared entry by
    entry."""
    if mine == theirs:
        return None
    pairs: Sequence[tuple[str, object, object]] = ()
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs = [(name, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        pairs = [(f"[{place}]", a, b) for place, (a, b) in enumerate(zip_longest(mine, theirs))]
    differences = (_find_difference(key + name, a, b) for name, a, b in pairs)
    return next((difference for difference in differences if difference is not None), (key, mine, theirs))


FOLDER = Path("plans")
_MAKE_ANEW = "make a new one with `canzona plan`"
_SHOWN = 6
"""The largest number of differences that a message lists; two unrelated runs differ in dozens of values."""


def default_path(setup: Setup, plan: Plan) -> Path:
    """Returns `plans/<recipe>-<gpus>gpus-<hash>.json`, where `canzona train` finds the plan."""
    return FOLDER / f"{setup.name}-{setup.gpus}gpus-{plan.name}.json"


def find_plan(setup: Setup, layout: Layout, folder: Path) -> "ObtainedPlan | None":
    """Returns the plan of a run from the newest file in `folder` that `load_plan` accepts; None if there is
    no such file."""
    candidates = folder.glob(f"{setup.name}-{setup.gpus}gpus-*.json")
    for path in sorted(candidates, key=_age, reverse=True):
        try:
            return ObtainedPlan(plan=load_plan(path, setup, layout), path=path)
        except ConfigError:
            continue
    return None


def load_plan(path: Path, setup: Setup, layout: Layout) -> Plan:
    """Reads a plan and checks that it is for exactly this run.

    Raises:
        ConfigError: see `read_plan`; or the plan's `Subject` is not this run's (the first `_SHOWN`
            differences are listed); or its matrices or costs differ from this run's.
    """
    plan = read_plan(path)
    expected = subject(setup, layout)
    differing = differences(plan.subject, expected)
    if differing:
        parts = ", ".join(dict.fromkeys(key.partition(".")[0] for key, _, _ in differing))
        shown = "; ".join(
            f"{key} is {_describe(had)} in the plan, {_describe(want)} in this run"
            for key, had, want in differing[:_SHOWN]
        )
        more = len(differing) - _SHOWN
        raise _refused(
            path,
            f"plan {plan.name} is for a different {parts}: {shown}" + (f"; and {more} more" if more > 0 else ""),
            f"{_MAKE_ANEW} and this run's settings",
        )
    matrices = planned_matrices(setup, layout, None)
    possible = shared_costs(setup, plan.subject.optimizer, layout, matrices)
    if (plan.matrices, plan.costs) != (matrices, update_costs(setup, matrices)) or any(
        shared_cost != possible.get(index) for index, shared_cost in plan.assignment.shared_costs.items()
    ):
        raise _refused(path, "has different matrices or costs than this run", _MAKE_ANEW)
    return plan


def read_plan(path: Path) -> Plan:
    """Reads a plan of any run.

    Raises:
        ConfigError: the file cannot be read, is not a plan, was altered, is damaged or has another version.
    """
    try:
        content = parse_json(read_plain(path))
    except Unreadable as error:
        raise _refused(path, f"{error}", _MAKE_ANEW) from None
    if not isinstance(content, dict) or "matrices" not in content or "version" not in content:
        raise _refused(path, "is not a plan made by canzona", _MAKE_ANEW)
    if content["version"] != VERSION:
        raise _refused(path, other_version(content["version"], VERSION), _MAKE_ANEW)
    claimed, actual = content.get("hash"), content_hash(content)
    if claimed != actual:
        short = f"{claimed}"[:8]
        raise _refused(path, f"was altered: its content has hash {actual[:8]}, but the file says {short}", _MAKE_ANEW)
    try:
        return Plan.from_content(content)
    except ValueError as error:
        raise _refused(path, f"is damaged: {error}", _MAKE_ANEW) from None


def _age(path: Path) -> tuple[float, str]:
    """Returns a key that sorts files from the oldest to the newest: a file's modification time, or 0 if it
    cannot be read, and its name."""
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name


def _describe(value: object) -> str:
    return "not set" if value is None else f"{value}"


def _refused(path: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key="plan", value=path, reason=reason, fix=fix))


@dataclass(frozen=True, kw_only=True)
class ObtainedPlan:
    """A plan, and the file from which it was read; `path` is None for a new plan."""

    plan: Plan
    path: Path | None


def obtain_plan(setup: Setup, layout: Layout, folder: Path = FOLDER) -> ObtainedPlan | None:
    """Returns the plan that a resolved run executes: from the file `engine.plan` if it is set; otherwise from
    `folder`, or a new plan if no file there matches. Returns None if the run's strategy has no plan.

    Raises:
        ConfigError: the file `engine.plan` is refused, see `load_plan`; or see `make_plan`.
        DoesNotFit: see `make_plan`.
    """
    if setup.execution is not Execution.PLANNED:
        return None
    if setup.engine.plan is not None:
        path = expanded(setup.engine.plan)
        try:
            return ObtainedPlan(plan=load_plan(path, setup, layout), path=path)
        except ConfigError as error:
            raise ConfigError(*(_blame_setting(problem) for problem in error.problems)) from None
    return find_plan(setup, layout, folder) or ObtainedPlan(plan=make_plan(setup, layout), path=None)


def _blame_setting(problem: Problem) -> Problem:
    """Returns a problem with a plan file as a problem of the setting that names the file."""
    return replace(problem, key="engine.plan", fix=f"{problem.fix}, or leave engine.plan out")
