"""Lists the removed settings, values and options with their replacements, and updates stored configurations
that have them.

To remove a setting, add an entry here. Anyone who uses the setting gets a message with the replacement. Older
run directories and recipes still work if the entry says what the old value means now.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from canzona_cli.errors import Problem


@dataclass(frozen=True, kw_only=True)
class RemovedSetting:
    """A setting that no longer exists."""

    instead: str
    """The fix, as a complete phrase."""
    without_effect: tuple[object, ...] | None = None
    """The values that a stored configuration can lose without changing training; None if it can lose any
    value."""


@dataclass(frozen=True, kw_only=True)
class RemovedValue:
    """A value that a setting no longer accepts."""

    instead: str
    """The fix, as a complete phrase."""
    stored_as: object
    """The value that replaces the removed one in stored configurations; it gives the same loss curve."""


REMOVED_SETTINGS: Mapping[str, RemovedSetting] = {
    "optimizer.highest_lr": RemovedSetting(instead="leave it out: canzona warns if a learning rate is too high"),
    "checkpoint.failure_hours": RemovedSetting(
        instead="use checkpoint.every_minutes; a good value is sqrt(2 x seconds a save stalls x hours between failures)"
    ),
    "run.log_interval": RemovedSetting(instead="leave it out: metrics.jsonl has a line for every step"),
}
"""The removed settings, by dotted key."""

_BY_OWNER_OR_RING = "use engine.reduction=reduce or ring, or leave it out to use the faster one for each bucket"
_SEARCHED = "use engine.grouping=auto (searched), or greedy (the paper's)"

REMOVED_VALUES: Mapping[tuple[str, str], RemovedValue] = {
    ("engine.mode", "rows"): RemovedValue(instead="use engine.mode=shared, the new name of rows", stored_as="shared"),
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
"""The removed command-line options, with their replacements."""


def removed_setting_problem(key: str, value: object, *, where: str) -> Problem | None:
    """Returns a problem with the replacement of a removed setting; None for any other key."""
    removed = REMOVED_SETTINGS.get(key)
    if removed is None:
        return None
    return Problem(key=key, value=value, reason=f"no longer exists{where}", fix=removed.instead)


def bring_up_to_date(tree: dict[str, object]) -> None:
    """Updates a stored configuration in place: drops removed settings whose values have no effect, and
    replaces removed values.

    A removed setting whose value has an effect stays, and is later refused like any unknown key.

    Args:
        tree: sections and settings, changed in place.
    """
    for key, removed in REMOVED_SETTINGS.items():
        section, name = _find_setting(tree, key)
        harmless = removed.without_effect
        if section is not None and (harmless is None or section.get(name) in harmless):
            del section[name]
    for (key, value), replaced in REMOVED_VALUES.items():
        section, name = _find_setting(tree, key)
        if section is not None and section.get(name) == value:
            section[name] = replaced.stored_as


def _find_setting(tree: dict[str, object], key: str) -> tuple[dict[str, object] | None, str]:
    """Returns the section that contains a setting (None if the setting is not set), and the setting's bare
    name."""
    first, dot, name = key.partition(".")
    section = tree.get(first) if dot else tree
    name = name if dot else first
    return (section, name) if isinstance(section, dict) and name in section else (None, name)
