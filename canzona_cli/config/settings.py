"""The table of all settings, derived from the schema: dotted keys, types, defaults and annotations."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.fields import Affects, Example, Range, affects_of
from canzona_cli.core.setup import OPTIMIZERS

Kind = Literal["integer", "number", "boolean", "text", "choice", "list", "mapping", "other"]

_UNITS = {
    "_gib": "GiB",
    "_mib": "MiB",
    "_tflops": "TFLOP/s",
    "_gb_per_s": "GB/s (1e9 bytes)",
    "_us": "microseconds",
    "_ns": "nanoseconds",
    "_timeout_s": "seconds",
}
"""The units of settings, by the ends of their names."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run."""

    key: str
    """The dotted key: `train.steps`."""
    kind: Kind
    choices: tuple[str, ...] = ()
    """The allowed values, if the kind is `choice`."""
    optional: bool
    """True if null is allowed."""
    required: bool
    """True if there is no default, so that the recipe or the command line must set a value."""
    default: object = None
    """The default value; None if a value is required."""
    range: Range
    """The allowed range; unlimited if the setting is not a number."""
    help: str
    """The help text. A test requires one for every setting."""
    affects: Affects | None
    """The effects of a change; None if neither the field nor its class declares them. A test requires every
    setting to have them."""
    example: str
    optimizers: frozenset[str] = frozenset()
    """The optimizers that have this `optimizer.*` setting."""

    @property
    def meaning(self) -> str:
        """The help text and the unit in one line."""
        unit = next((unit for ending, unit in _UNITS.items() if self.key.endswith(ending)), None)
        return f"{self.help} In {unit}." if unit else self.help


@cache
def settings() -> Mapping[str, Setting]:
    """Returns every setting by dotted key, in the order of the schema."""
    known_settings: dict[str, Setting] = {}
    top_level = {setting.key: setting for setting in _settings_of(RunConfig, "")}
    for name, hint in get_type_hints(RunConfig).items():
        if name == "optimizer":
            known_settings.update(_optimizer_settings())
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            known_settings.update({setting.key: setting for setting in _settings_of(hint, f"{name}.")})
        else:
            known_settings[name] = top_level[name]
    return known_settings


def _optimizer_settings() -> dict[str, Setting]:
    """Returns the settings of all optimizers by dotted key, each with the optimizers that have it."""
    by_key: dict[str, Setting] = {}
    for optimizer, variant in OPTIMIZERS.items():
        for setting in _settings_of(variant, "optimizer."):
            earlier = by_key[setting.key].optimizers if setting.key in by_key else frozenset()
            choices = tuple(OPTIMIZERS) if setting.key == "optimizer.name" else setting.choices
            by_key[setting.key] = replace(setting, optimizers=earlier | {optimizer}, choices=choices)
    return by_key


def setting_of(key: str) -> Setting | None:
    """Returns the setting with a dotted key; None for an unknown key. For an entry of a mapping such as
    `optimizer.options.momentum`, returns the setting `optimizer.options`."""
    return settings().get(mapping_key(key) or key)


def mapping_key(key: str) -> str | None:
    """Returns the key of the mapping that has `key` as an entry; None if there is no such mapping."""
    return next(
        (name for name, known in settings().items() if known.kind == "mapping" and key.startswith(f"{name}.")), None
    )


@cache
def sections() -> Mapping[str, frozenset[str]]:
    """Returns the bare names of the settings by section (`train`, `model`, ...)."""
    names_by_section: dict[str, set[str]] = {}
    for key in settings():
        section, dot, name = key.partition(".")
        if dot:
            names_by_section.setdefault(section, set()).add(name)
    return {section: frozenset(names) for section, names in names_by_section.items()}


@cache
def settings_affecting(effect: Affects, section: str = "") -> tuple[str, ...]:
    """Returns the settings whose changes have this effect, in the order of the schema.

    Args:
        section: limits the result to the settings of this section, with bare names; empty for all settings,
            with dotted keys.
    """
    prefix = f"{section}." if section else ""
    return tuple(
        key.removeprefix(prefix)
        for key, setting in settings().items()
        if key.startswith(prefix) and setting.affects is not None and effect in setting.affects
    )


def leaves(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of every setting in a tree of sections.

    The mapping of a setting such as `optimizer.options` is yielded as one value.
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and name in sections():
            yield from ((f"{name}.{inner_name}", inner) for inner_name, inner in value.items())
        else:
            yield name, value


def tree_of(values: Mapping[str, object]) -> dict[str, object]:
    """Converts values by dotted key to a tree of sections. This is the inverse of `leaves`."""
    tree: dict[str, object] = {}
    for key, value in values.items():
        section: dict[str, Any] = tree
        *section_names, name = key.split(".")
        for part in section_names:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def override_text(value: object) -> str:
    """Formats a value as in an override, without quotes: `null`, `true`, `0.1`, `[5,7]`."""
    if value is None:
        return "null"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(override_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings_of(owner: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        kind, choices, optional, marks = _kind(hints[field.name])
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Setting(
            key=prefix + field.name,
            kind=kind,
            choices=choices,
            optional=optional,
            required=default is MISSING,
            default=None if default is MISSING else default,
            range=next((mark for mark in marks if isinstance(mark, Range)), Range()),
            help=next((mark for mark in marks if isinstance(mark, str)), ""),
            affects=affects_of(owner, hints[field.name]),
            example=next((mark.value for mark in marks if isinstance(mark, Example)), ""),
        )


def _kind(hint: object) -> tuple[Kind, tuple[str, ...], bool, tuple[object, ...]]:
    """Returns the kind of a setting with this type hint, its choices, True if None is allowed, and the
    annotations."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        kind, choices, optional, inner_marks = _kind(inner)
        return kind, choices, optional, (*marks, *inner_marks)
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        kind, choices, _, inner_marks = _kind(rest[0])
        if len(rest) > 1 and kind == "choice":  # "auto" with a shared alias, or with a boolean
            choices = tuple(choice for part in rest for choice in get_args(part) or ("true", "false"))
        return kind, choices, len(rest) < len(get_args(hint)), inner_marks
    if get_origin(hint) is Literal:
        return "choice", get_args(hint), False, ()
    kinds: dict[object, Kind] = {
        bool: "boolean", int: "integer", float: "number", str: "text", tuple: "list", dict: "mapping"
    }  # fmt: skip
    return kinds.get(get_origin(hint) or hint, "other"), (), False, ()
