"""Converts a tree of values to the typed configuration of a run, or reports all problems with the values."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import get_type_hints

from pydantic import ValidationError

from canzona_cli.config.recipes import REMOVED_OPTIMIZERS
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import Setting, leaves, sections, setting_of, settings
from canzona_cli.config.unknown_keys import unknown_key
from canzona_cli.core.errors import Problem, closest
from canzona_cli.core.fields import _BOUNDS, bound_text
from canzona_cli.core.reading import adapter
from canzona_cli.core.setup import OPTIMIZERS

_EXAMPLE_OPTIONS = {
    "model": "qwen3-0.6b",
    "cluster": "cpu",
    "optimizer": "muon",
    "engine": "canzona",
    "data": "stdlib-bpe",
}
_OR_NULL = ", or null to let canzona choose"
_NO_VALUE = "has no value"


def build(tree: Mapping[str, object], *, texts: Mapping[str, str], where: str) -> RunConfig | list[Problem]:
    """Returns the typed configuration, or all problems of the tree.

    Args:
        tree: sections and settings, as JSON values.
        texts: the values on the command line as text, by dotted key, for messages.
        where: the file of all other values, for messages.
    """
    hints = get_type_hints(RunConfig, include_extras=True)
    problems = list(_unknown_key_problems(tree, where))
    parts: dict[str, object] = {}
    for field in fields(RunConfig):
        name, value = field.name, tree.get(field.name)
        kind = OPTIMIZERS.get(str(_optimizer(tree))) if name == "optimizer" else hints[name]
        if name not in tree or (name == "optimizer" and _optimizer(tree) is None):
            if field.default is MISSING and field.default_factory is MISSING:
                problems.append(_missing_section(name) if name in sections() else _missing_value(name, where))
        elif kind is None:
            setting = settings()["optimizer.name"]
            problems.append(_not_a_choice(setting, texts.get(setting.key, _optimizer(tree))))
        elif is_dataclass(kind) and not isinstance(value, Mapping):
            problems.append(Problem(name, f"must be a section of settings (in {where})", value=value))
        else:
            try:
                parts[name] = adapter(kind).validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                problems += _section_problems(name, value, error, texts, where)
    return _merge_missing_values(problems, where) or RunConfig(**parts)  # type: ignore[arg-type]


def type_problems(tree: dict[str, object], texts: Mapping[str, str]) -> list[Problem]:
    """Returns the problems with the types of the command line's values, which can be checked without a
    recipe.

    Args:
        tree: the values. If they include optimizer settings but no optimizer, the name of an optimizer that
            has these settings is added.
        texts: see `build`.
    """
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        supporting = [settings()[f"optimizer.{name}"].optimizers for name in optimizer if name != "name"]
        optimizer.setdefault("name", next(iter(sorted(frozenset.intersection(*supporting) or {"muon"})), "muon"))
    built = build(tree, texts=texts, where="the command line")
    return [problem for problem in built if concerns(problem.key, texts)] if isinstance(built, list) else []


def concerns(key: str, keys: Collection[str]) -> bool:
    """Returns True if `keys` contains `key`, the mapping that has `key` as an entry, or an entry of the mapping
    `key`."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _merge_missing_values(problems: list[Problem], where: str) -> list[Problem]:
    """Merges all problems about missing values into one if even the model is missing, because the recipe then
    probably lacks its `defaults:` list; otherwise returns the problems unchanged."""
    absent = [problem for problem in problems if problem.reason.startswith(_NO_VALUE)]
    if not any(problem.key == "model" for problem in absent):
        return problems
    names = ", ".join(problem.key for problem in absent)
    fix = "begin the recipe with `# @package _global_` and `defaults: [qwen3-tiny]`, or the name of another recipe"
    return [
        Problem(where, f"has no value for {names}", fix),
        *(problem for problem in problems if problem not in absent),
    ]


def _section_problems(
    name: str, value: object, error: ValidationError, texts: Mapping[str, str], where: str
) -> Iterator[Problem]:
    """Yields a problem for each value of a section that pydantic refused. A list, or an entry of a mapping,
    gets only one problem."""
    reported = set()
    for detail in error.errors(include_url=False):
        location, entry = detail["loc"], detail["input"]
        key = ".".join([name, *(str(part) for part in location[:1])])
        setting = setting_of(key)
        if len(location) <= 1 or (setting is not None and setting.kind == "choice"):
            yield _explain(key, detail["type"], entry, texts, where)
            continue
        inner = value[location[0]] if isinstance(value, Mapping) else value
        if isinstance(inner, Mapping):
            key, inner = f"{key}.{location[1]}", inner[location[1]]
        if key not in reported:
            reported.add(key)
            bound = bound_text(detail["type"], detail.get("ctx", {}), entry)
            reason = f"contains {entry}, which must be {bound}" if bound else ""
            yield _bad_entry(key, inner, reason, texts, where)


def _out_of_range(setting: Setting, value: object, shown: object, in_file: str) -> Problem:
    reason = f"is not a finite number{in_file}"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        reason = f"must be {setting.range.words(value)}{in_file}"
    fix = _example(setting)
    if isinstance(value, int) and setting.kind == "integer":
        is_low = value < setting.range.at_least
        bound = setting.range.at_least if is_low else min(setting.range.at_most, setting.range.below - 1)
        fix = f"use {setting.key}={bound:.0f} or {'more' if is_low else 'less'}"
    fix += _OR_NULL if setting.optional else ""
    return Problem(setting.key, reason, fix, value=shown)


def _optimizer(tree: Mapping[str, object]) -> object:
    """Returns the name of the optimizer in a tree; None if there is none."""
    section = tree.get("optimizer")
    return section.get("name") if isinstance(section, Mapping) else None


def _unknown_key_problems(tree: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Yields a problem for each key that is not a setting, or not a setting of the run's optimizer."""
    all_settings = settings()
    optimizer = str(_optimizer(tree))
    for key, value in leaves(tree):
        if key not in all_settings:
            if key not in sections():
                shown = None if "." not in key and isinstance(value, Mapping | list) else value
                yield unknown_key(key, shown, where=f" (in {where})")
        elif all_settings[key].optimizers and optimizer in OPTIMIZERS and optimizer not in all_settings[key].optimizers:
            supporting = sorted(all_settings[key].optimizers)
            reason = f"{optimizer} has no such setting; it belongs to {' or '.join(supporting)}"
            yield Problem(key, reason, f"remove it, or choose optimizer={supporting[0]}", value=value)


def _explain(key: str, error: str, value: object, texts: Mapping[str, str], where: str) -> Problem:
    """Converts a pydantic error about a setting to a problem with a reason and a fix."""
    if error == "missing":
        return _missing_value(key, where)
    setting = settings()[key]
    shown = texts.get(key, value)
    if setting.kind == "choice":
        return _not_a_choice(setting, shown)
    in_file = "" if key in texts else f" (in {where})"
    if value is None:
        return Problem(key, f"needs a value{in_file}", _example(setting), value="null")
    if error in _BOUNDS:
        return _out_of_range(setting, value, shown, in_file)
    if setting.kind == "list":
        return _bad_entry(key, value, "", texts, where)
    null = _OR_NULL if setting.optional else ""
    integral = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    expected, fix = {
        "integer": ("a whole number", f"write {key}={value:.0f}" if integral else f"give a whole number{null}"),
        "number": ("a number", _example(setting)),
        "boolean": ("true or false", f"write {key}=true or {key}=false{null}"),
        "mapping": ("a mapping of names to values", _example(setting)),
    }.get(setting.kind, ("text", f"quote it: {key}=\"'...'\""))
    return Problem(key, f"is {_type_words(value)}, not {expected}{in_file}", fix, value=shown)


def _bad_entry(key: str, value: object, reason: str, texts: Mapping[str, str], where: str) -> Problem:
    """Returns a problem with a list that has a bad entry, or with a mapping's entry that has a bad value.

    Args:
        reason: the reason, if it is more specific than a wrong type; otherwise empty.
    """
    setting = setting_of(key)
    assert setting is not None
    on_command_line = any(text == key or key.startswith(f"{text}.") for text in texts)
    expected = "a list of valid entries"
    if setting.kind == "mapping":
        expected = "a number, text, true, false, or a list of them"
    in_file = "" if on_command_line else f" (in {where})"
    shown = texts.get(key, "null" if value is None else value)
    return Problem(key, f"{reason or f'is not {expected}'}{in_file}", _example(setting), value=shown)


def _not_a_choice(setting: Setting, value: object) -> Problem:
    if setting.key == "optimizer.name" and str(value) in REMOVED_OPTIMIZERS:
        return Problem(setting.key, "no longer exists", REMOVED_OPTIMIZERS[str(value)], value=value)
    hint = closest(str(value), setting.choices)
    listed = ", ".join(setting.choices)
    null = _OR_NULL if setting.optional else ""
    fix = f"did you mean {hint}? ({listed}{null})" if hint else f"use one of {listed}{null}"
    return Problem(setting.key, "is not one of its choices", fix, value=value)


def _missing_value(key: str, where: str) -> Problem:
    return Problem(key, f"{_NO_VALUE} (in {where})", _example(settings()[key]))


def _missing_section(name: str) -> Problem:
    option = _EXAMPLE_OPTIONS.get(name)
    if option is None:
        return Problem(name, f"{_NO_VALUE} in the recipe", f"set its values: {name}.KEY=VALUE")
    fix = f"write {name}={option}, or `override /{name}: {option}` under `defaults:` in the recipe"
    return Problem(name, f"{_NO_VALUE}: the recipe does not choose one", fix)


def _example(setting: Setting) -> str:
    default = "" if setting.default in (None, (), {}) else str(setting.default)
    by_kind = {"integer": "100", "number": "0.1", "boolean": "true", "text": "NAME", "list": "[]"}
    generic = setting.choices[0] if setting.choices else by_kind.get(setting.kind, "VALUE")
    return f"for example {setting.key}={setting.example or default or generic}"


def _type_words(value: object) -> str:
    words = {bool: "a boolean", int: "a whole number", float: "a floating-point number", str: "text", list: "a list"}
    return words.get(type(value), "a mapping")
