"""The table of all settings, derived from the schema: dotted keys, types, defaults and annotations.

Also guesses the setting that a misspelt key was meant to be.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from canzona_cli.config.foreign_names import RENAMED
from canzona_cli.config.schema import OPTIMIZERS, RunConfig
from canzona_cli.errors import Problem
from canzona_cli.fields import Affects, Example, Range, Unit

Kind = Literal["integer", "number", "boolean", "text", "choice", "list", "mapping", "other"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run."""

    key: str
    """The dotted key: `train.steps`."""
    kind: Kind
    choices: tuple[str, ...] = ()
    """The allowed values of a setting of kind `choice`."""
    optional: bool
    """True if null (chosen automatically) is an allowed value."""
    required: bool
    """True if there is no default, so that composition must set a value."""
    default: object = None
    """The default value."""
    range: Range
    """The range of a number."""
    help: str
    """The help; a test refuses settings without one."""
    unit: str
    affects: Affects | None
    """The effects of a change; None if the field declares none, which a test refuses."""
    example: str
    optimizers: frozenset[str] = frozenset()
    """The optimizers that have this `optimizer.*` setting."""

    @property
    def meaning(self) -> str:
        """The help and the unit in one line."""
        return f"{self.help} In {self.unit}." if self.unit else self.help


@cache
def settings() -> Mapping[str, Setting]:
    """Returns every setting by dotted key, in the order of the schema."""
    known_settings: dict[str, Setting] = {}
    top_level = {setting.key: setting for setting in _settings_of(RunConfig, "")}
    for name, hint in get_type_hints(RunConfig).items():
        if name == "optimizer":
            for optimizer, variant in OPTIMIZERS.items():
                for setting in _settings_of(variant, "optimizer."):
                    known = known_settings.get(setting.key)
                    having = (known.optimizers if known else frozenset()) | {optimizer}
                    choices = tuple(OPTIMIZERS) if setting.key == "optimizer.name" else setting.choices
                    known_settings[setting.key] = replace(setting, optimizers=having, choices=choices)
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            known_settings.update({setting.key: setting for setting in _settings_of(hint, f"{name}.")})
        else:
            known_settings[name] = top_level[name]
    return known_settings


def setting_of(key: str) -> Setting | None:
    """Returns the setting of a dotted key; for an entry like `optimizer.options.momentum`, the setting
    `optimizer.options`. None for an unknown key."""
    return settings().get(mapping_key(key) or key)


def mapping_key(key: str) -> str | None:
    """Returns the key of the mapping that this key is an entry of; None for any other key."""
    return next(
        (name for name, known in settings().items() if known.kind == "mapping" and key.startswith(f"{name}.")), None
    )


def problem_with(config: RunConfig, key: str, reason: str, fix: str = "") -> Problem:
    """Returns a problem with a setting of a run, including the value of the setting."""
    return Problem(key=key, value=value_of(config, key), reason=reason, fix=fix)


def value_of(config: RunConfig, key: str) -> object:
    """Returns a run's value of the setting with this dotted key."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_own_values(config: RunConfig, problems: Iterable[Problem]) -> list[Problem]:
    """Returns the problems, filling in the run's value for each problem without a value."""
    return [
        problem_with(config, problem.key, problem.reason, problem.fix) if problem.value is None else problem
        for problem in problems
    ]


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
def affecting(effect: Affects, section: str = "") -> tuple[str, ...]:
    """Returns the settings whose change has this effect, in the order of the schema.

    Args:
        section: return only the settings of this section, by bare name; empty: all settings, by dotted key.
    """
    prefix = f"{section}." if section else ""
    return tuple(
        key.removeprefix(prefix)
        for key, setting in settings().items()
        if key.startswith(prefix) and setting.affects is not None and effect in setting.affects
    )


NEAR = 0.8
"""The least similarity, 0 to 1, of a key that is suggested in place of an unknown one."""


def exact_key(word: str) -> str | None:
    """Returns the setting with this dotted key, bare name, or name in another program.

    Returns None if there is none, or if several settings share the bare name.
    """
    flat = word.replace("-", "_").lower()
    if flat in RENAMED or flat in settings():
        return RENAMED.get(flat, flat)
    with_name = [key for key in settings() if key.rpartition(".")[2] == flat]
    return with_name[0] if len(with_name) == 1 else None


def closest_key(key: str) -> str | None:
    """Returns the setting that the user probably meant by `key`; None if none is similar enough.

    `tp` means `parallel.tp`, `train.lr` means `optimizer.lr`: the bare name counts more than the section.
    Omitted words cost little: `num_heads` means `num_attention_heads`, although it looks more like
    `num_layers`.
    """
    flat = key.strip("/").replace("/", ".").replace("-", "_").lower()
    last = flat.rpartition(".")[2]
    if (name := flat if flat in RENAMED else last) in RENAMED:
        return RENAMED[name]
    known = settings()
    best, best_score = None, 0.0
    for name in known:
        section, _, bare = name.rpartition(".")
        entire = SequenceMatcher(None, flat, name).ratio()
        word = SequenceMatcher(None, last, bare).ratio()
        left_out = set(bare.split("_")) - set(last.split("_"))
        if set(last.split("_")) < set(bare.split("_")):
            word = max(word, 0.95 - 0.05 * len(left_out))
        if sorted(last) == sorted(bare):  # letters in another order, such as gpsu
            word = max(word, 0.95)
        typed_section = flat.rpartition(".")[0] or section
        score = max(entire, 0.9 * word + 0.1 * SequenceMatcher(None, typed_section, section).ratio())
        if score > best_score:
            best, best_score = name, score
    return best if best_score >= NEAR else None


def leaves(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of every setting in a tree of sections.

    A mapping such as `optimizer.options` is a single value.
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and name in sections():
            yield from ((f"{name}.{inner_name}", inner) for inner_name, inner in value.items())
        else:
            yield name, value


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
            unit=next((mark.name for mark in marks if isinstance(mark, Unit)), ""),
            affects=next((mark for mark in marks if isinstance(mark, Affects)), None),
            example=next((mark.value for mark in marks if isinstance(mark, Example)), ""),
        )


def _kind(hint: object) -> tuple[Kind, tuple[str, ...], bool, tuple[object, ...]]:
    """Reads a type hint; returns the kind of value, the choices, True if None is allowed, and all
    annotations."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        kind, choices, optional, inner_marks = _kind(inner)
        return kind, choices, optional, (*marks, *inner_marks)
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        kind, choices, _, inner_marks = _kind(rest[0]) if len(rest) == 1 else ("other", (), False, ())
        if all(get_origin(part) is Literal for part in rest):  # a union of "auto" and a shared alias
            kind, choices = "choice", tuple(choice for part in rest for choice in get_args(part))
        return kind, choices, len(rest) < len(get_args(hint)), inner_marks
    if get_origin(hint) is Literal:
        return "choice", get_args(hint), False, ()
    kinds: dict[object, Kind] = {
        bool: "boolean", int: "integer", float: "number", str: "text", tuple: "list", dict: "mapping"
    }  # fmt: skip
    return kinds.get(get_origin(hint) or hint, "other"), (), False, ()
