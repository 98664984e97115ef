"""Loads the configuration of one run: Hydra composes recipe, groups and overrides; then the values are
converted to their types and checked together."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Final

from canzona_cli.config.checks import config_problems, config_warnings
from canzona_cli.config.overrides import Overrides, key_of, parse_overrides
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
from canzona_cli.config.removed import bring_up_to_date
from canzona_cli.config.schema import OPTIMIZERS, RunConfig
from canzona_cli.config.secrets import content_problems, unasked_problems
from canzona_cli.config.settings import leaves, settings
from canzona_cli.config.tree import composed, put, with_values
from canzona_cli.config.typed import build
from canzona_cli.config.unused import unused_problems
from canzona_cli.config.written import choose_again, is_written, with_written_recipe
from canzona_cli.errors import ConfigError, Problem, refuse


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A checked configuration and the files it came from. `canzona_cli.cluster.fit` resolves its null values
    later."""

    config: RunConfig
    explicit: frozenset[str]
    """The dotted keys and the groups that the command line sets."""
    warnings: tuple[str, ...]
    recipe_file: Path
    files: tuple[Path, ...]
    """The files it was composed from, in the order of application."""


def compose_run(overrides: Sequence[str], *, recipes_dirs: Sequence[Path] = (), training: bool = True) -> Composed:
    """Composes and checks the run that `overrides` (`KEY=VALUE`, one of them `recipe=...`) ask for.

    Without a recipe, the settings of the run in `run.dir` are used, if there is one. Recipes and the options
    of other groups are searched in `recipes_dirs`, then in $CANZONA_RECIPES_DIR, then among the built-in ones.
    A bad value does not hide other problems: the remaining values are checked with the recipe's value in its
    place. Without `training`, checks of what only a run needs are skipped.

    Raises:
        ConfigError: every problem at once, of the recipe, of single overrides, of types, and of combinations.
    """
    try:
        return _compose(overrides, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir()), training=training)
    except ConfigError as error:
        order = {key_of(argument): place for place, argument in reversed(list(enumerate(overrides)))}
        problems = sorted(_distinct(error.problems), key=lambda problem: order.get(problem.key, len(order)))
        raise ConfigError(*problems) from error.__cause__


def load_resolved(path: Path) -> RunConfig:
    """Reads the config.yaml of a run directory, even one that an older version wrote.

    Raises ConfigError with every problem.
    """
    tree = read_yaml(path)
    run = tree.get("run")
    if isinstance(run, dict) and "tensorboard" in run:  # older runs have this switch instead of `trackers`
        run["trackers"] = ["tensorboard"] if run.pop("tensorboard") else []
    bring_up_to_date(tree)
    unsafe = list(content_problems(tree, shown(path)))
    config = build(tree, texts={}, where=shown(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def dump_resolved(config: RunConfig) -> str:
    """Returns the configuration as YAML; `load_resolved` and `recipe=FILE` read an equal configuration from
    it."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def _compose(overrides: Sequence[str], dirs: tuple[Path, ...], *, training: bool) -> Composed:
    asked = with_written_recipe(parse_overrides(overrides))
    problems = list(asked.problems)
    options, given = _choices(asked, dirs, problems)
    if "recipe" not in {*options, *given}:
        # Without a recipe, only the problems of single overrides can be reported.
        problems += _checked_alone(asked)
        raise ConfigError(*problems)
    try:
        base, files = composed(options, given, dirs)
        tree = with_values(base, asked.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    typed = {*asked.values, *_overruling(files, given, asked)}
    _choose_min_lr(tree, asked, typed, problems)
    _choose_batch(tree, asked, typed)
    _choose_source(tree, asked)
    recipe_file = given["recipe"] if "recipe" in given else group_options("recipe", dirs)[options["recipe"]]
    if is_written(recipe_file, asked):
        choose_again(tree, base, asked)
    where = " with ".join(
        shown(path) for path in (recipe_file, *(given[group] for group in given if group == "cluster"))
    )
    config = build(tree, texts=asked.texts, where=where)
    if isinstance(config, list):
        reported = {problem.key for problem in problems}
        problems += [problem for problem in config if problem.key not in reported]
        bad = {problem.key for problem in config}
        stand_in = _stand_in(base, asked, bad)
        if stand_in is not None:
            problems += [p for p in config_problems(stand_in, training=training) if p.key not in bad]
        raise ConfigError(*problems)
    config = _with_rates(config, typed)
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


_OVERRULES: Final = {
    "optimizer.lr": "optimizer.lrs",
    "optimizer.min_lr": "optimizer.min_lr_ratio",
    "train.batch_tokens": "train.global_batch_size",
}
"""The settings that only count while another setting is not set, with that other setting. A recipe that sets
one of them on top of a recipe with the other is meant to change the value."""


def _overruling(files: Sequence[Path], given: Mapping[str, Path], asked: Overrides) -> Iterator[str]:
    """Yields the settings of a recipe that one of the recipes below it would overrule, see `_OVERRULES`.

    A recipe's learning rate is meant for its own optimizer, so it is not yielded if the command line chooses
    another one.
    """
    recipes = [file for file in files if file.parent.name == "recipe" or file == given.get("recipe")]
    chain = [dict(leaves(read_yaml(file))) for file in recipes] if len(recipes) > 1 else []
    for key, other in _OVERRULES.items():
        last, last_other = (
            max((n for n, tree in enumerate(chain) if name in tree), default=-1) for name in (key, other)
        )
        chosen = other in asked.values or (key == "optimizer.lr" and "optimizer" in asked.groups)
        if last > last_other >= 0 and not chosen:
            yield key


def _choose_min_lr(tree: dict[str, object], asked: Overrides, typed: Collection[str], problems: list[Problem]) -> None:
    """Drops the recipe's `min_lr_ratio` if `min_lr` is typed.

    Adds a problem if the command line sets both.
    """
    ratio = "optimizer.min_lr_ratio"
    if "optimizer.min_lr" not in typed:
        return
    if asked.values.get(ratio) is not None:
        reason, fix = "is set by optimizer.min_lr, too", "keep one of them"
        problems.append(Problem(key=ratio, value=asked.texts[ratio], reason=reason, fix=fix))
    elif isinstance(optimizer := tree.get("optimizer"), dict):
        optimizer["min_lr_ratio"] = None


def _choose_batch(tree: dict[str, object], asked: Overrides, typed: Collection[str]) -> None:
    """Drops the recipe's number of sequences if only the number of tokens is typed.

    If the command line sets both, the number of sequences takes precedence; `config_warnings` mentions it.
    """
    if "train.batch_tokens" not in typed or asked.values.get("train.global_batch_size") is not None:
        return
    if isinstance(train := tree.get("train"), dict):
        train["global_batch_size"] = None


def _choose_source(tree: dict[str, object], asked: Overrides) -> None:
    """Switches `data.source` from stdlib to prepared if the command line gives a path or a blend, but no data
    group or source.

    So users may leave out `data=prepared`. The recipe's tokenizer settings are dropped.
    """
    typed = asked.values.get("data.path") or asked.values.get("data.blend")
    data = tree.get("data")
    if not typed or "data" in asked.groups or "data.source" in asked.values or not isinstance(data, dict):
        return
    if data.get("source") == "stdlib":
        data["source"] = "prepared"
        for key in ("tokenizer", "tokenizer_vocab_size"):
            if f"data.{key}" not in asked.values:
                data.pop(key, None)


def _with_rates(config: RunConfig, typed: Collection[str]) -> RunConfig:
    """Resolves `optimizer.lr` from `lrs`, if it was not typed, and `min_lr` from `min_lr_ratio`.

    The minimum is the decimal product, so that 0.1 of 0.0003 is exactly the float 0.00003.
    """
    optimizer = config.optimizer
    for name in optimizer.lrs.keys() - OPTIMIZERS.keys():
        fix = f"use {', '.join(OPTIMIZERS)}"
        raise ConfigError(
            Problem(key="optimizer.lrs", value=optimizer.lrs, reason=f"{name} is not an optimizer", fix=fix)
        )
    # A recipe's rate is Muon's. Most rules of a user's own are closer to AdamW.
    listed = optimizer.lrs.get("adamw", optimizer.lr) if optimizer.name == "custom" else optimizer.lr
    lr = optimizer.lr if "optimizer.lr" in typed else optimizer.lrs.get(optimizer.name, listed)
    ratio = optimizer.min_lr_ratio
    least = optimizer.min_lr if ratio is None else float(Decimal(repr(ratio)) * Decimal(repr(lr)))
    return replace(config, optimizer=replace(optimizer, lr=lr, lrs={}, min_lr=least))


def _choices(asked: Overrides, dirs: Sequence[Path], problems: list[Problem]) -> tuple[dict[str, str], dict[str, Path]]:
    """Returns the chosen options by group, under their full names, and the files given instead of options.

    Options and files that do not exist are added to `problems`. A misspelt recipe is replaced by the closest
    one, so that the other values can still be checked.
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
    reported = any(problem.key == "recipe" or problem.fix.startswith("write recipe=") for problem in problems)
    if "recipe" not in asked.groups and not reported:
        names = ", ".join(group_options("recipe", dirs))
        problems.append(Problem(key="recipe", reason="no recipe is given", fix=f"write recipe=NAME: {names}"))
    return options, given


def _stand_in(base: Mapping[str, object], asked: Overrides, bad: Collection[str]) -> RunConfig | None:
    """Returns the run with the recipe's values in place of bad ones, so that the others can be checked
    together.

    If the recipe's values are bad as well, the defaults replace them; None if that does not make a valid run.
    """
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
    """Returns the type errors of the overrides, which can be detected without a recipe."""
    tree: dict[str, object] = {}
    for key, value in asked.values.items():
        put(tree, key, value)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        supporting = [settings()[f"optimizer.{name}"].optimizers for name in optimizer if name != "name"]
        optimizer.setdefault("name", next(iter(sorted(frozenset.intersection(*supporting) or {"muon"})), "muon"))
    built = build(tree, texts=asked.texts, where="the command line")
    return [problem for problem in built if _among(problem.key, asked.values)] if isinstance(built, list) else []


def _among(key: str, keys: Collection[str]) -> bool:
    """Returns True if a key is one of `keys`, or if the key and one of `keys` are a mapping and an entry of
    it."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())
