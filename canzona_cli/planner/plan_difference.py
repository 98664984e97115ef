"""In what two plans differ: of ranks that made different ones, and of a plan file and the run it is wanted for."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from canzona_cli.planner.parts import Subject
from canzona_cli.planner.plan import Plan

Difference = tuple[str, object, object]
"""Key, value in one, value in the other."""
_IDENTITY: Mapping[str, tuple[str, ...]] = {
    "matrices": ("name",),
    "buckets": ("stage", "index"),
    "micro_groups": ("stage", "owner", "index"),
}
"""What identifies an entry of a part."""


def differences(had: Subject, want: Subject) -> list[Difference]:
    """(key, value in `had`, value in `want`) of everything in which two subjects differ."""
    first, second = had.flat(), want.flat()
    return [
        (key, first.get(key), second.get(key))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    ]


def first_difference(plan: Plan, other: Plan) -> Difference | None:
    """(key, value in `plan`, value in `other`); None where their hashes are equal.

    What comes first causes what follows, as far as that is so: what they were computed from (`layout.tp`), matrices
    (`matrices[layers.3.gate].owner`), buckets (`buckets[stage 0, index 2].reduction`), micro-groups, bounds. A value
    that only one of them has is None in the other.
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
        found = _compared(part, _named(mine[part], names), _named(theirs[part], names))
        if found is not None:
            return found
    return _compared("lower_bounds", mine["lower_bounds"], theirs["lower_bounds"])


def _named(rows: object, names: Sequence[str]) -> dict[str, object]:
    assert isinstance(rows, list)
    label = "{0}" if len(names) == 1 else ", ".join(f"{name} {{{place}}}" for place, name in enumerate(names))
    return {
        f"[{label.format(*(row[name] for name in names))}]": {f".{key}": value for key, value in row.items()}
        for row in rows
    }


def _compared(key: str, mine: object, theirs: object) -> Difference | None:
    if mine == theirs:
        return None
    pairs: Sequence[tuple[str, object, object]] = ()
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs = [(name, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        pairs = [(f"[{place}]", a, b) for place, (a, b) in enumerate(zip_longest(mine, theirs))]
    found = (_compared(key + name, a, b) for name, a, b in pairs)
    return next((one for one in found if one is not None), (key, mine, theirs))
