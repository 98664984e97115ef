"""The settings that exist, read off the schema: dotted names, types, defaults and what each means."""

import ast
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

from canzona_cli.config import schema
from canzona_cli.config.schema import (
    AdamWConfig,
    CustomConfig,
    MuonConfig,
    OptimizerConfig,
    RunConfig,
    ShampooConfig,
    SoapConfig,
)

OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
    "shampoo": ShampooConfig,
    "soap": SoapConfig,
    "custom": CustomConfig,
}


Kind = Literal["integer", "number", "boolean", "text", "choice", "list", "mapping", "other"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run."""

    key: str
    """Dotted: `train.steps`."""
    kind: Kind
    choices: tuple[str, ...] = ()
    """For a choice."""
    optional: bool
    """Whether null (automatic) is a value of it."""
    required: bool
    """Whether composition must give it a value."""
    default: object = None
    """What it is where nobody gives one."""
    optimizers: frozenset[str] = frozenset()
    """For `optimizer.*`: the optimizers that have it."""


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by dotted key, in the schema's order."""
    found: dict[str, Setting] = {}
    own = {setting.key: setting for setting in _settings_of(RunConfig, "")}
    for name, hint in get_type_hints(RunConfig).items():
        if name == "optimizer":
            for optimizer, variant in OPTIMIZERS.items():
                for setting in _settings_of(variant, "optimizer."):
                    known = found.get(setting.key)
                    having = (known.optimizers if known else frozenset()) | {optimizer}
                    choices = tuple(OPTIMIZERS) if setting.key == "optimizer.name" else setting.choices
                    found[setting.key] = replace(setting, optimizers=having, choices=choices)
        elif isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
            found.update({setting.key: setting for setting in _settings_of(hint, f"{name}.")})
        else:
            found[name] = own[name]
    return found


def setting_of(key: str) -> Setting | None:
    """The setting a dotted key is of; `optimizer.options.momentum` is an entry of `optimizer.options`."""
    return settings().get(mapping_key(key) or key)


def mapping_key(key: str) -> str | None:
    """The mapping that a key is an entry of, if it is one."""
    return next(
        (name for name, known in settings().items() if known.kind == "mapping" and key.startswith(f"{name}.")), None
    )


@cache
def sections() -> Mapping[str, frozenset[str]]:
    """The names of the sections (`train`, `model`, ...) with the bare names of their settings."""
    found: dict[str, set[str]] = {}
    for key in settings():
        section, dot, name = key.partition(".")
        if dot:
            found.setdefault(section, set()).add(name)
    return {section: frozenset(names) for section, names in found.items()}


@cache
def meanings() -> Mapping[str, str]:
    """What each documented setting means: the docstrings under the schema's fields, by dotted key, on one line."""
    documented: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(schema.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            documented[node.name] = dict(_field_docs(node))
    section_classes = {name: (hint,) for name, hint in get_type_hints(RunConfig).items() if isinstance(hint, type)} | {
        "optimizer": tuple(OPTIMIZERS.values())
    }
    found: dict[str, str] = {}
    for key in settings():
        section, dot, name = key.rpartition(".")
        for owner in section_classes[section] if dot else (RunConfig,):
            for base in owner.__mro__:
                if name in documented.get(base.__name__, {}):
                    found.setdefault(key, documented[base.__name__][name])
    return found


def _field_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield statement.target.id, " ".join(below.value.value.split())


def _settings_of(owner: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        kind, choices, optional = _kind(hints[field.name])
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Setting(
            key=prefix + field.name,
            kind=kind,
            choices=choices,
            optional=optional,
            required=default is MISSING,
            default=None if default is MISSING else default,
        )


def _kind(hint: object) -> tuple[Kind, tuple[str, ...], bool]:
    """What sort of value a type hint asks for, the choices it names, and whether it admits None."""
    given = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    rest = [part for part in given if part is not type(None)]
    optional = len(rest) < len(given)
    if len(rest) == 1 and get_origin(rest[0]) is Literal:
        return "choice", get_args(rest[0]), optional
    if len(rest) == 1 and get_origin(rest[0]) is tuple:
        return "list", (), optional
    if len(rest) == 1 and get_origin(rest[0]) is dict:
        return "mapping", (), optional
    kinds: dict[object, Kind] = {bool: "boolean", int: "integer", float: "number", str: "text"}
    return kinds.get(rest[0], "other") if len(rest) == 1 else "other", (), optional
