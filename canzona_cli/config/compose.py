"""Loads one run's configuration: recipe, groups and overrides composed by Hydra, typed,
and checked as a whole."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import get_type_hints

from pydantic import ValidationError

from canzona_cli.config.checks import config_problems, config_warnings, unused_problems
from canzona_cli.config.overrides import Overrides, key_of, parse_overrides, unknown_key
from canzona_cli.config.reading import adapter
from canzona_cli.config.recipes import (
    FROM_FILES,
    builtin_recipes_dir,
    closest_option,
    find_file,
    find_option,
    group_options,
    is_file_name,
    lies_flat,
    read_yaml,
    shadowed,
    shown,
    user_recipes_dirs,
)
from canzona_cli.config.removed import REMOVED_VALUES, bring_up_to_date
from canzona_cli.config.schema import OPTIMIZERS, RunConfig
from canzona_cli.config.secrets import content_problems, unasked_problems
from canzona_cli.config.settings import Setting, leaves, sections, setting_of, settings
from canzona_cli.config.tree import composed, put, with_values
from canzona_cli.errors import ConfigError, Problem, closest, refuse
from canzona_cli.fields import bound_words


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A checked configuration, and where it came from. Values that are null are still to be fitted."""

    config: RunConfig
    explicit: frozenset[str]
    """Dotted keys, and groups, that the command line sets."""
    warnings: tuple[str, ...]
    recipe_file: Path
    files: tuple[Path, ...]
    """Everything it was composed from, in the order of application."""


def compose_run(overrides: Sequence[str], *, recipes_dirs: Sequence[Path] = (), training: bool = True) -> Composed:
    """Composes and checks the run that `overrides` (`KEY=VALUE`, one of them `recipe=...`) ask for.

    A recipe, model, ... is looked for in `recipes_dirs`, then $CANZONA_RECIPES_DIR, then among the built-in
    ones. Raises ConfigError with every problem at once: of the recipe, of each override, of types, and of how
    values go together. A bad value does not hide the others: the rest is checked with the recipe's own in its
    place. Without `training` it is for planning only, and what only a run needs is not asked for.
    """
    try:
        return _compose(overrides, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir()), training=training)
    except ConfigError as error:
        order = {key_of(argument): place for place, argument in reversed(list(enumerate(overrides)))}
        problems = sorted(_distinct(error.problems), key=lambda problem: order.get(problem.key, len(order)))
        raise ConfigError(*problems) from error.__cause__


def load_resolved(path: Path) -> RunConfig:
    """Reads a run directory's config.yaml. Raises ConfigError with every problem."""
    tree = read_yaml(path)
    if isinstance(own := tree.get("run"), dict) and "tensorboard" in own:  # as runs had it before they had trackers
        own["trackers"] = ["tensorboard"] if own.pop("tensorboard") else []
    bring_up_to_date(tree)
    unsafe = list(content_problems(tree, shown(path)))
    config = build(tree, texts={}, where=shown(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def dump_resolved(config: RunConfig) -> str:
    """The configuration as YAML that `load_resolved` and `recipe=FILE` read back to an equal one."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def _compose(overrides: Sequence[str], dirs: tuple[Path, ...], *, training: bool) -> Composed:
    asked = parse_overrides(overrides)
    problems = list(asked.problems)
    options, given = _choices(asked, dirs, problems)
    if "recipe" not in {*options, *given}:
        # Nothing to lay the overrides over: only what is wrong with each by itself can be reported.
        problems += _checked_alone(asked)
        raise ConfigError(*problems)
    try:
        base, files = composed(options, given, dirs)
        tree = with_values(base, asked.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    _choose_min_lr(tree, asked, problems)
    _choose_batch(tree, asked)
    _choose_source(tree, asked)
    recipe_file = given["recipe"] if "recipe" in given else group_options("recipe", dirs)[options["recipe"]]
    where = " with ".join(
        shown(path) for path in (recipe_file, *(given[group] for group in given if group == "cluster"))
    )
    config = build(tree, texts=asked.texts, where=where)
    if isinstance(config, list):
        told = {problem.key for problem in problems}
        problems += [problem for problem in config if problem.key not in told]
        bad = {problem.key for problem in config}
        stand_in = _stand_in(base, asked, bad)
        if stand_in is not None:
            problems += [p for p in config_problems(stand_in, training=training) if p.key not in bad]
        raise ConfigError(*problems)
    config = _with_rates(config, asked)
    problems += config_problems(config, training=training)
    explicit = frozenset(asked.values) | frozenset(asked.groups)
    problems += unasked_problems(config, explicit, training=training)
    problems += unused_problems(config, explicit, training=training)
    refuse(problems)
    notes = [
        f"{group} {name} from {shown(file)} shadows the built-in"
        for group, name, file in shadowed([file for file in files if file not in given.values()])
    ]
    builtin_names = group_options("recipe", [builtin_recipes_dir()])
    if "recipe" in given and recipe_file.stem in builtin_names and recipe_file != builtin_names[recipe_file.stem]:
        notes.append(f"recipe {recipe_file.stem} is read from {shown(recipe_file)}, not the built-in of that name")
    return Composed(
        config=config,
        explicit=explicit,
        warnings=(*asked.warnings, *notes, *config_warnings(config, explicit, training=training)),
        recipe_file=recipe_file,
        files=tuple(files),
    )


def _choose_min_lr(tree: dict[str, object], asked: Overrides, problems: list[Problem]) -> None:
    """A minimum learning rate on the command line counts, whatever ratio the recipe has."""
    ratio = "optimizer.min_lr_ratio"
    if "optimizer.min_lr" not in asked.values:
        return
    if asked.values.get(ratio) is not None:
        reason, fix = "is set by optimizer.min_lr, too", "keep one of them"
        problems.append(Problem(key=ratio, value=asked.texts[ratio], reason=reason, fix=fix))
    elif isinstance(optimizer := tree.get("optimizer"), dict):
        optimizer["min_lr_ratio"] = None


def _choose_batch(tree: dict[str, object], asked: Overrides) -> None:
    """A number of tokens on the command line counts, whatever number of sequences the recipe has. Where both
    are typed the number of sequences counts, and a warning says so."""
    tokens, sequences = "train.batch_tokens", "train.global_batch_size"
    if tokens not in asked.values or asked.values.get(sequences) is not None:
        return
    if isinstance(train := tree.get("train"), dict):
        train["global_batch_size"] = None


def _choose_source(tree: dict[str, object], asked: Overrides) -> None:
    """Prepared data on the command line are trained on, whatever the recipe has,
    also without `data=prepared`."""
    typed = asked.values.get("data.path") or asked.values.get("data.blend")
    data = tree.get("data")
    if not typed or "data" in asked.groups or "data.source" in asked.values or not isinstance(data, dict):
        return
    if data.get("source") == "stdlib":
        data["source"] = "prepared"
        for key in ("tokenizer", "tokenizer_vocab_size"):
            if f"data.{key}" not in asked.values:
                data.pop(key, None)


def _with_rates(config: RunConfig, asked: Overrides) -> RunConfig:
    """The optimizer's own learning rate where the recipe has one, and the minimum from its ratio: the decimal
    product, so that 0.1 of 0.0003 is 0.00003 to the bit."""
    own = config.optimizer
    for name in own.lrs.keys() - OPTIMIZERS.keys():
        fix = f"use {', '.join(OPTIMIZERS)}"
        raise ConfigError(Problem(key="optimizer.lrs", value=own.lrs, reason=f"{name} is not an optimizer", fix=fix))
    lr = own.lr if "optimizer.lr" in asked.values else own.lrs.get(own.name, own.lr)
    ratio = own.min_lr_ratio
    least = own.min_lr if ratio is None else float(Decimal(repr(ratio)) * Decimal(repr(lr)))
    return replace(config, optimizer=replace(own, lr=lr, lrs={}, min_lr=least))


def _choices(asked: Overrides, dirs: Sequence[Path], problems: list[Problem]) -> tuple[dict[str, str], dict[str, Path]]:
    """Returns the command line's choices: options by group, under their full names,
    and the files it gives instead.

    What there is not is added to `problems`. For a misspelt recipe, the one that was probably meant is
    chosen.
    """
    options: dict[str, str] = {}
    given: dict[str, Path] = {}
    for group, name in asked.groups.items():
        try:
            if group in FROM_FILES and is_file_name(name):
                given[group] = find_file(group, name, dirs)
            else:
                option = find_option(group, name, dirs)
                if group == "recipe" and lies_flat(file := group_options(group, dirs)[option]):
                    given[group] = find_file(group, str(file), dirs)
                else:
                    options[group] = option
        except ConfigError as error:
            problems.extend(error.problems)
            meant = closest_option(name, group_options(group, dirs))
            if group == "recipe" and meant is not None:
                options[group] = meant
    told = any(problem.key == "recipe" or problem.fix.startswith("write recipe=") for problem in problems)
    if "recipe" not in asked.groups and not told:
        names = ", ".join(group_options("recipe", dirs))
        problems.append(Problem(key="recipe", reason="no recipe is given", fix=f"write recipe=NAME: {names}"))
    return options, given


def _stand_in(base: Mapping[str, object], asked: Overrides, bad: Collection[str]) -> RunConfig | None:
    """The run with the recipe's own values, or else the defaults, in place of bad ones, so that the others
    can be checked together; None where neither makes a run."""
    values = {key: value for key, value in asked.values.items() if not _among(key, bad)}
    without: dict[str, object] = {}
    for key, value in leaves(base):
        if key not in bad:
            put(without, key, value)
    for tree in (base, without):
        config = build(with_values(tree, values, []), texts=asked.texts, where="")
        if isinstance(config, RunConfig):
            return config
    return None


def _checked_alone(asked: Overrides) -> list[Problem]:
    """Wrong types among the overrides, told without a recipe."""
    tree: dict[str, object] = {}
    for key, value in asked.values.items():
        put(tree, key, value)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        having = [settings()[f"optimizer.{name}"].optimizers for name in optimizer if name != "name"]
        optimizer.setdefault("name", next(iter(sorted(frozenset.intersection(*having) or {"muon"})), "muon"))
    found = build(tree, texts=asked.texts, where="the command line")
    return [problem for problem in found if _among(problem.key, asked.values)] if isinstance(found, list) else []


def _among(key: str, keys: Collection[str]) -> bool:
    """Returns True if a key is one of `keys`, or it and one of them are a mapping and its entry."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())


_EXAMPLE_OPTIONS = {
    "model": "qwen3-0.6b",
    "cluster": "cpu",
    "optimizer": "muon",
    "engine": "canzona",
    "data": "stdlib-bpe",
}


def build(tree: Mapping[str, object], *, texts: Mapping[str, str], where: str) -> RunConfig | list[Problem]:
    """The typed configuration, or everything that is wrong with the tree.

    Args:
        tree: sections and settings, as JSON values.
        texts: how values were typed on the command line, by dotted key; shown in problems.
        where: what the other values came from, for problems: a file.
    """
    hints = get_type_hints(RunConfig, include_extras=True)
    problems = list(_unknown(tree, where))
    parts: dict[str, object] = {}
    for field in fields(RunConfig):
        name = field.name
        kind: type | None = _optimizer_type(tree) if name == "optimizer" else hints[name]
        if kind is None:
            problems.append(_bad_optimizer(tree, texts))
        elif name in tree:
            value = tree[name]
            if is_dataclass(kind) and not isinstance(value, Mapping):
                problems.append(Problem(key=name, value=value, reason=f"is a section of settings (in {where})"))
                continue
            try:
                parts[name] = adapter(kind).validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    key = ".".join([name, *(str(part) for part in detail["loc"][:1])])
                    setting = setting_of(key)
                    if len(detail["loc"]) <= 1 or (setting is not None and setting.kind == "choice"):
                        problems.append(_explained(key, detail["type"], detail["input"], texts, where))
                        continue
                    whole = value[detail["loc"][0]] if isinstance(value, Mapping) else value
                    if isinstance(whole, Mapping):
                        key, whole = f"{key}.{detail['loc'][1]}", whole[detail["loc"][1]]
                    if all(problem.key != key for problem in problems):  # somewhere inside a list: said once
                        bound = _bound(detail["type"], detail.get("ctx", {}), detail["input"])
                        inside = f"has {detail['input']}, and that must be {bound}" if bound else ""
                        problems.append(_bad_inside(key, whole, inside, texts, where))
        elif name in sections():
            try:  # a section nobody mentions is made of its defaults, if it has them all
                parts[name] = adapter(kind).validate_json("{}", strict=True)
            except ValidationError:
                problems.append(_missing_section(name))
        elif settings()[name].required:
            problems.append(_missing(name, where))
    return problems or RunConfig(**parts)  # type: ignore[arg-type]


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
"""The bound that was crossed, by pydantic's name of an error: its name of the bound, and ours."""


def _bound(error: str, context: Mapping[str, float], value: float) -> str:
    """The bound that a number inside a list or a mapping is beyond; empty where something else is wrong."""
    if error not in _BOUNDS:
        return ""
    key, name = _BOUNDS[error]
    return bound_words(name, context[key], value)


def _out_of_range(setting: Setting, value: object, shown: object, place: str) -> Problem:
    reason = f"is not a finite number{place}"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        reason = f"must be {setting.range.words(value)}{place}"
    fix = _example(setting)
    if isinstance(value, int) and setting.kind == "integer":
        low = value < setting.range.at_least
        bound = setting.range.at_least if low else min(setting.range.at_most, setting.range.below - 1)
        fix = f"use {setting.key}={bound:.0f} or {'more' if low else 'less'}"
    fix += ", or null to have it chosen" if setting.optional else ""
    return Problem(key=setting.key, value=shown, reason=reason, fix=fix)


def _optimizer_type(tree: Mapping[str, object]) -> type | None:
    section = tree.get("optimizer")
    name = section.get("name") if isinstance(section, Mapping) else None
    return OPTIMIZERS.get(name) if isinstance(name, str) else None


def _bad_optimizer(tree: Mapping[str, object], texts: Mapping[str, str]) -> Problem:
    section = tree.get("optimizer")
    if not isinstance(section, Mapping) or "name" not in section:
        return _missing_section("optimizer")
    asked = texts.get("optimizer.name", section["name"])
    return _not_a_choice(settings()["optimizer.name"], asked)


def _unknown(tree: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Keys that no setting has, or not with this optimizer."""
    known, in_section = settings(), sections()
    variant = _optimizer_type(tree)
    optimizer = next((name for name, kind in OPTIMIZERS.items() if kind is variant), None)
    for name, value in tree.items():
        if name not in in_section:
            if name not in known:
                yield unknown_key(name, None if isinstance(value, Mapping | list) else value, where=f" (in {where})")
        elif isinstance(value, Mapping):
            for own, inner in value.items():
                key = f"{name}.{own}"
                if own not in in_section[name]:
                    yield unknown_key(key, inner, where=f" (in {where})")
                elif name == "optimizer" and optimizer is not None and optimizer not in known[key].optimizers:
                    having = " or ".join(sorted(known[key].optimizers))
                    reason = f"{optimizer} has no such setting; it belongs to {having}"
                    fix = f"remove it, or choose optimizer={sorted(known[key].optimizers)[0]}"
                    yield Problem(key=key, value=inner, reason=reason, fix=fix)


def _explained(key: str, error: str, value: object, texts: Mapping[str, str], where: str) -> Problem:
    """Explains one of pydantic's findings to the person who typed the value."""
    if error == "missing":
        return _missing(key, where)
    setting = settings()[key]
    shown = texts.get(key, value)
    if setting.kind == "choice":
        return _not_a_choice(setting, shown)
    place = "" if key in texts else f" (in {where})"
    if value is None:
        return Problem(key=key, value="null", reason=f"needs a value{place}", fix=_example(setting))
    if error in _BOUNDS:
        return _out_of_range(setting, value, shown, place)
    if setting.kind == "list":
        return _bad_inside(key, value, "", texts, where)
    null = ", or null to have it chosen" if setting.optional else ""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    wanted, fix = {
        "integer": ("a whole number", f"write {key}={value:.0f}" if whole else f"give a whole number{null}"),
        "number": ("a number", _example(setting)),
        "boolean": ("true or false", f"write {key}=true or {key}=false{null}"),
        "mapping": ("a mapping of names to values", _example(setting)),
    }.get(setting.kind, ("text", f"quote it: {key}=\"'...'\""))
    return Problem(key=key, value=shown, reason=f"is {_type_words(value)}, not {wanted}{place}", fix=fix)


def _bad_inside(key: str, value: object, found: str, texts: Mapping[str, str], where: str) -> Problem:
    """A list with an entry, or an entry of a mapping with a value, of the wrong type.

    Args:
        found: what is wrong with it, where more is known than that.
    """
    setting = setting_of(key)
    assert setting is not None
    typed = any(text == key or key.startswith(f"{text}.") for text in texts)
    wanted = "a list of valid entries"
    if setting.kind == "mapping":
        wanted = "a number, text, true, false, or a list of them"
    reason = f"{found or f'is not {wanted}'}{'' if typed else f' (in {where})'}"
    fix = _example(setting)
    return Problem(key=key, value=texts.get(key, "null" if value is None else value), reason=reason, fix=fix)


def _not_a_choice(setting: Setting, value: object) -> Problem:
    if (removed := REMOVED_VALUES.get((setting.key, str(value)))) is not None:
        return Problem(key=setting.key, value=value, reason="no longer exists", fix=removed.instead)
    meant = closest(str(value), setting.choices)
    listed = ", ".join(setting.choices)
    null = ", or null to have it chosen" if setting.optional else ""
    fix = f"did you mean {meant}? ({listed}{null})" if meant else f"use one of {listed}{null}"
    return Problem(key=setting.key, value=value, reason="is not one of its choices", fix=fix)


def _missing(key: str, where: str) -> Problem:
    return Problem(key=key, reason=f"has no value (in {where})", fix=_example(settings()[key]))


def _missing_section(name: str) -> Problem:
    option = _EXAMPLE_OPTIONS.get(name)
    if option is None:
        return Problem(key=name, reason="is not set by the recipe", fix=f"set its values: {name}.KEY=VALUE")
    fix = f"write {name}={option}, or `override /{name}: {option}` under `defaults:` in the recipe"
    return Problem(key=name, reason="is not chosen by the recipe", fix=fix)


def _example(setting: Setting) -> str:
    default = "" if setting.default in (None, (), {}) else str(setting.default)
    usual = {"integer": "100", "number": "0.1", "boolean": "true", "text": "NAME", "list": "[]"}
    value = setting.example or default or (setting.choices[0] if setting.choices else usual.get(setting.kind, "VALUE"))
    return f"for example {setting.key}={value}"


def _type_words(value: object) -> str:
    words = {bool: "a boolean", int: "a whole number", float: "a floating-point number", str: "text", list: "a list"}
    return words.get(type(value), "a mapping")
