"""Loads the configuration of one run: Hydra composes recipe, groups and overrides, and then the values are
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
    """A checked configuration and the files from which it was composed. `canzona_cli.cluster.fit` resolves
    its null values later."""

    config: RunConfig
    explicit: frozenset[str]
    """The dotted keys and the groups that the command line sets."""
    warnings: tuple[str, ...]
    recipe_file: Path
    files: tuple[Path, ...]
    """The files from which the configuration was composed, in the order of application."""


def compose_run(overrides: Sequence[str], *, recipes_dirs: Sequence[Path] = (), training: bool = True) -> Composed:
    """Composes and checks a run.

    Recipes and the options of other groups are searched in `recipes_dirs`, then in $CANZONA_RECIPES_DIR, then
    among the built-in ones. A bad value does not hide other problems, because the rest is checked with the
    recipe's value in its place.

    Args:
        overrides: the settings as `KEY=VALUE`. Without `recipe=...`, the settings of the run in `run.dir` are
            used, if there is one.
        training: False for plans, which skips the checks that only a run needs.

    Raises:
        ConfigError: the recipe, overrides, types or combinations have problems; all are reported at once.
    """
    try:
        return _compose(overrides, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir()), training=training)
    except ConfigError as error:
        order = {key_of(override): place for place, override in reversed(list(enumerate(overrides)))}
        problems = sorted(_distinct(error.problems), key=lambda problem: order.get(problem.key, len(order)))
        raise ConfigError(*problems) from error.__cause__


def load_resolved(path: Path) -> RunConfig:
    """Reads the config.yaml of a run directory, which an older version may have written.

    Raises:
        ConfigError: the file has problems; all are reported at once.
    """
    tree = read_yaml(path)
    run = tree.get("run")
    if isinstance(run, dict) and "tensorboard" in run:  # older runs have this setting instead of `trackers`
        run["trackers"] = ["tensorboard"] if run.pop("tensorboard") else []
    bring_up_to_date(tree)
    unsafe = list(content_problems(tree, shown(path)))
    config = build(tree, texts={}, where=shown(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def dump_resolved(config: RunConfig) -> str:
    """Returns the configuration as YAML, from which `load_resolved` and `recipe=FILE` read an equal configuration."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def _compose(overrides: Sequence[str], dirs: tuple[Path, ...], *, training: bool) -> Composed:
    parsed = with_written_recipe(parse_overrides(overrides))
    problems = list(parsed.problems)
    options, paths = _choices(parsed, dirs, problems)
    if "recipe" not in {*options, *paths}:
        # Without a recipe, only the problems of single overrides can be reported.
        problems += _checked_alone(parsed)
        raise ConfigError(*problems)
    try:
        base, files = composed(options, paths, dirs)
        tree = with_values(base, parsed.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    set_keys = {*parsed.values, *_overruling(files, paths, parsed)}
    _choose_min_lr(tree, parsed, set_keys, problems)
    _choose_batch(tree, parsed, set_keys)
    _choose_source(tree, parsed)
    recipe_file = paths["recipe"] if "recipe" in paths else group_options("recipe", dirs)[options["recipe"]]
    if is_written(recipe_file, parsed):
        choose_again(tree, base, parsed)
    where = " with ".join(
        shown(path) for path in (recipe_file, *(paths[group] for group in paths if group == "cluster"))
    )
    config = build(tree, texts=parsed.texts, where=where)
    if isinstance(config, list):
        reported = {problem.key for problem in problems}
        problems += [problem for problem in config if problem.key not in reported]
        bad = {problem.key for problem in config}
        stand_in = _stand_in(base, parsed, bad)
        if stand_in is not None:
            problems += [p for p in config_problems(stand_in, training=training) if p.key not in bad]
        raise ConfigError(*problems)
    config = _with_rates(config, set_keys)
    problems += config_problems(config, training=training)
    explicit = frozenset(parsed.values) | frozenset(parsed.groups)
    problems += unasked_problems(config, explicit, training=training)
    problems += unused_problems(config, explicit, training=training)
    refuse(problems)
    notes = [
        f"{group} {name} from {shown(file)} shadows the built-in"
        for group, name, file in shadowed([file for file in files if file not in paths.values()])
    ]
    builtin_names = group_options("recipe", [builtin_recipes_dir()])
    if "recipe" in paths and recipe_file.stem in builtin_names and recipe_file != builtin_names[recipe_file.stem]:
        notes.append(f"recipe {recipe_file.stem} is read from {shown(recipe_file)}, not the built-in of that name")
    return Composed(
        config=config,
        explicit=explicit,
        warnings=(*parsed.warnings, *notes, *config_warnings(config, explicit, training=training)),
        recipe_file=recipe_file,
        files=tuple(files),
    )


_OVERRULES: Final = {
    "optimizer.lr": "optimizer.lrs",
    "optimizer.min_lr": "optimizer.min_lr_ratio",
    "train.batch_tokens": "train.global_batch_size",
}
"""The settings that have no effect if another setting is set, each with this other setting. If a recipe
builds on a recipe with the other setting and sets the first one, the first one is meant to apply."""


def _overruling(files: Sequence[Path], paths: Mapping[str, Path], parsed: Overrides) -> Iterator[str]:
    """Yields the settings of a recipe that would have no effect because of a recipe on which it builds, see
    `_OVERRULES`.

    A recipe's learning rate is meant for the recipe's optimizer, so it is not yielded if the command line
    chooses an optimizer.
    """
    recipes = [file for file in files if file.parent.name == "recipe" or file == paths.get("recipe")]
    chain = [dict(leaves(read_yaml(file))) for file in recipes] if len(recipes) > 1 else []

    def last(name: str) -> int:
        """Returns the index of the last recipe that sets `name`; -1 if none does."""
        return max((number for number, tree in enumerate(chain) if name in tree), default=-1)

    for key, other in _OVERRULES.items():
        replaced = other in parsed.values or (key == "optimizer.lr" and "optimizer" in parsed.groups)
        if last(key) > last(other) >= 0 and not replaced:
            yield key


def _choose_min_lr(
    tree: dict[str, object], parsed: Overrides, set_keys: Collection[str], problems: list[Problem]
) -> None:
    """Drops the recipe's `min_lr_ratio` if the command line sets `min_lr`; adds a problem if it sets both."""
    ratio = "optimizer.min_lr_ratio"
    if "optimizer.min_lr" not in set_keys:
        return
    if parsed.values.get(ratio) is not None:
        reason, fix = "is set by optimizer.min_lr, too", "keep one of them"
        problems.append(Problem(key=ratio, value=parsed.texts[ratio], reason=reason, fix=fix))
    elif isinstance(optimizer := tree.get("optimizer"), dict):
        optimizer["min_lr_ratio"] = None


def _choose_batch(tree: dict[str, object], parsed: Overrides, set_keys: Collection[str]) -> None:
    """Drops the recipe's number of sequences if the command line sets only the number of tokens.

    If it sets both, the number of sequences takes precedence, and `config_warnings` warns about it.
    """
    if "train.batch_tokens" not in set_keys or parsed.values.get("train.global_batch_size") is not None:
        return
    if isinstance(train := tree.get("train"), dict):
        train["global_batch_size"] = None


def _choose_source(tree: dict[str, object], parsed: Overrides) -> None:
    """Changes `data.source` from stdlib to prepared if the command line sets a path or a blend, but no data group or
    source, so that users may leave out `data=prepared`. The recipe's tokenizer settings are dropped."""
    location = parsed.values.get("data.path") or parsed.values.get("data.blend")
    data = tree.get("data")
    if not location or "data" in parsed.groups or "data.source" in parsed.values or not isinstance(data, dict):
        return
    if data.get("source") == "stdlib":
        data["source"] = "prepared"
        for key in ("tokenizer", "tokenizer_vocab_size"):
            if f"data.{key}" not in parsed.values:
                data.pop(key, None)


def _with_rates(config: RunConfig, set_keys: Collection[str]) -> RunConfig:
    """Resolves `optimizer.lr` from `lrs`, unless the command line sets it, and `min_lr` from `min_lr_ratio`.

    The product is computed in decimals, so that 0.1 times 0.0003 is exactly the float 0.00003.
    """
    optimizer = config.optimizer
    for name in optimizer.lrs.keys() - OPTIMIZERS.keys():
        fix = f"use {', '.join(OPTIMIZERS)}"
        raise ConfigError(
            Problem(key="optimizer.lrs", value=optimizer.lrs, reason=f"{name} is not an optimizer", fix=fix)
        )
    # A recipe's rate is meant for Muon, but most custom optimizers are closer to AdamW.
    default_lr = optimizer.lrs.get("adamw", optimizer.lr) if optimizer.name == "custom" else optimizer.lr
    lr = optimizer.lr if "optimizer.lr" in set_keys else optimizer.lrs.get(optimizer.name, default_lr)
    ratio = optimizer.min_lr_ratio
    min_lr = optimizer.min_lr if ratio is None else float(Decimal(repr(ratio)) * Decimal(repr(lr)))
    return replace(config, optimizer=replace(optimizer, lr=lr, lrs={}, min_lr=min_lr))


def _choices(
    parsed: Overrides, dirs: Sequence[Path], problems: list[Problem]
) -> tuple[dict[str, str], dict[str, Path]]:
    """Returns the full names of the chosen options by group, and the files chosen instead of options.

    For options and files that do not exist, problems are added to `problems`. A misspelt recipe is replaced
    by the closest one, so that the other values can still be checked.
    """
    options: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for group, name in parsed.groups.items():
        try:
            if group in FROM_FILES and is_file_name(name):
                paths[group] = find_file(group, name, dirs)
            else:
                option = find_option(group, name, dirs)
                if group == "recipe" and lies_flat(file := group_options(group, dirs)[option]):
                    paths[group] = find_file(group, str(file), dirs)
                else:
                    options[group] = option
        except ConfigError as error:
            problems.extend(error.problems)
            meant = closest_option(name, group_options(group, dirs))
            if group == "recipe" and meant is not None:
                options[group] = meant
    reported = any(problem.key == "recipe" or problem.fix.startswith("write recipe=") for problem in problems)
    if "recipe" not in parsed.groups and not reported:
        names = ", ".join(group_options("recipe", dirs))
        problems.append(Problem(key="recipe", reason="no recipe is given", fix=f"write recipe=NAME: {names}"))
    return options, paths


def _stand_in(base: Mapping[str, object], parsed: Overrides, bad: Collection[str]) -> RunConfig | None:
    """Returns the run with the recipe's values in place of bad ones, so that the other values can be checked
    together.

    If the recipe's values are bad too, defaults replace them. Returns None if the run is still not valid.
    """
    values = {key: value for key, value in parsed.values.items() if not _among(key, bad)}
    without: dict[str, object] = {}
    for key, value in leaves(base):
        if key not in bad:
            put(without, key, value)
    for tree in (base, without):
        config = build(with_values(tree, values, []), texts=parsed.texts, where="")
        if isinstance(config, RunConfig):
            return config
    return None


def _checked_alone(parsed: Overrides) -> list[Problem]:
    """Returns the problems with the types of overrides, which need no recipe."""
    tree: dict[str, object] = {}
    for key, value in parsed.values.items():
        put(tree, key, value)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        supporting = [settings()[f"optimizer.{name}"].optimizers for name in optimizer if name != "name"]
        optimizer.setdefault("name", next(iter(sorted(frozenset.intersection(*supporting) or {"muon"})), "muon"))
    built = build(tree, texts=parsed.texts, where="the command line")
    return [problem for problem in built if _among(problem.key, parsed.values)] if isinstance(built, list) else []


def _among(key: str, keys: Collection[str]) -> bool:
    """Returns True if a key equals one of `keys`, or if one of the two is a mapping and the other an entry of
    this mapping."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())
