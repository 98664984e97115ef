"""Settings, values and options that canzona had once: what to use instead,
and how a stored configuration is read.

An entry here is all that a removal needs. Whoever types it is told what to use; a run directory or a recipe
that was written before keeps working where the entry says what its value means today.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from canzona_cli.errors import Problem


@dataclass(frozen=True, kw_only=True)
class RemovedSetting:
    """A setting that no longer exists."""

    instead: str
    """The fix: a whole phrase."""
    without_effect: tuple[object, ...] | None = None
    """Values that a stored configuration may have: leaving them out changes nothing that is trained. None: any."""


@dataclass(frozen=True, kw_only=True)
class RemovedValue:
    """A value that a setting no longer has."""

    instead: str
    """The fix: a whole phrase."""
    stored_as: object
    """The value that a stored configuration is read with; the loss curve is the same with it."""


REMOVED_SETTINGS: Mapping[str, RemovedSetting] = {
    "optimizer.highest_lr": RemovedSetting(instead="leave it out: a learning rate that is too high is a warning"),
    "checkpoint.failure_hours": RemovedSetting(
        instead="leave it out; for minutes between saves: sqrt(seconds a save stalls x hours between failures x 2)"
    ),
    "run.log_interval": RemovedSetting(instead="leave it out: metrics.jsonl has a line for every step"),
}
"""The removed settings, by dotted key."""

_BY_OWNER_OR_RING = "use engine.reduction=reduce or ring, or leave it out: the fastest is chosen for each bucket"
_SEARCHED = "use engine.grouping=auto (searched), or greedy (the paper's)"

REMOVED_VALUES: Mapping[tuple[str, str], RemovedValue] = {
    ("engine.mode", "rows"): RemovedValue(instead="use engine.mode=shared, which is what rows was", stored_as="shared"),
    ("engine.layout", "aligned"): RemovedValue(
        instead="use engine.layout=owner: buckets whose owners have equal shares need no padding", stored_as="owner"
    ),
    ("engine.grouping", "registration"): RemovedValue(instead=_SEARCHED, stored_as="auto"),
    ("engine.grouping", "balanced"): RemovedValue(instead=_SEARCHED, stored_as="auto"),
    ("engine.reduction", "all_to_all"): RemovedValue(instead=_BY_OWNER_OR_RING, stored_as=None),
    ("engine.reduction", "padded"): RemovedValue(instead=_BY_OWNER_OR_RING, stored_as=None),
    ("engine.reduction", "even"): RemovedValue(instead=_BY_OWNER_OR_RING, stored_as=None),
}
"""The removed values, by dotted key and value."""

REMOVED_OPTIONS: Mapping[str, str] = {
    "--plot": "write --html FILE.html: the page has every chart",
}
"""The removed options, with what to use instead."""


def removed_setting_problem(key: str, value: object, *, where: str = "") -> Problem | None:
    """Explains a setting that was removed; None for any other key."""
    removed = REMOVED_SETTINGS.get(key)
    if removed is None:
        return None
    return Problem(key=key, value=value, reason=f"no longer exists{where}", fix=removed.instead)


def bring_up_to_date(tree: dict[str, object]) -> None:
    """Reads a stored configuration as today's: drops removed settings that have no effect,
    and maps removed values.

    A removed setting with another value stays, and is refused like any unknown key.

    Args:
        tree: sections and settings, changed in place.
    """
    for key, removed in REMOVED_SETTINGS.items():
        section, name = _place(tree, key)
        harmless = removed.without_effect
        if section is not None and (harmless is None or section.get(name) in harmless):
            del section[name]
    for (key, value), replaced in REMOVED_VALUES.items():
        section, name = _place(tree, key)
        if section is not None and section.get(name) == value:
            section[name] = replaced.stored_as


def _place(tree: dict[str, object], key: str) -> tuple[dict[str, object] | None, str]:
    """The section that holds a setting, None where it does not, and the setting's bare name."""
    first, dot, name = key.partition(".")
    section = tree.get(first) if dot else tree
    name = name if dot else first
    return (section, name) if isinstance(section, dict) and name in section else (None, name)
