"""Loads the configuration of one run, in three stages, and reads and writes the config.yaml of a run directory.

1. read: `overrides` parses the command line, and `recipes` finds the files that it names;
2. compose: `tree` merges the files as Hydra does; values that the command line overrules are dropped;
3. check: `typed` converts the tree to a `RunConfig`, and `checks` and `unused` find what cannot work or has no effect.

All problems of all stages are reported together."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Final

from canzona_cli.config.checks import config_problems
from canzona_cli.config.overrides import Overrides, key_of, parse_overrides
from canzona_cli.config.recipes import (
    WRITTEN,
    builtin_recipes_dir,
    find_options,
    is_file_name,
    shadows_builtin,
    user_recipes_dirs,
)
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import consent_problems, content_problems
from canzona_cli.config.settings import leaves, sections, settings, tree_of
from canzona_cli.config.tree import compose_files, is_of_run, with_values
from canzona_cli.config.typed import build, concerns, type_problems
from canzona_cli.config.unused import config_warnings, unused_problems
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.reading import display_path, expanded, read_yaml
from canzona_cli.core.setup import OPTIMIZERS, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A checked configuration and the files from which it was composed. Its null values are filled in later,
    by `canzona_cli.core.simulate.fit`."""

    config: RunConfig
    explicit: frozenset[str]
    """The dotted keys and the groups that the command line sets."""
    warnings: tuple[str, ...]
    recipe_file: Path
    files: tuple[Path, ...]
    """The files from which the configuration was composed, in the order of application."""


def compose_run(overrides: Sequence[str], *, recipes_dirs: Sequence[Path] = (), training: bool = True) -> Composed:
    """Composes and checks the configuration of a run.

    Recipes and the options of other groups are searched for in `recipes_dirs`, then in $CANZONA_RECIPES_DIR,
    then among the built-in ones. A value that is not valid does not hide other problems: the rest is checked
    with the recipe's value in its place.

    Args:
        overrides: the settings as `KEY=VALUE`. Without `recipe=...`, the settings of the run in `run.dir` are
            used, if there is such a run.
        training: False for plans; skips the checks that only a training run needs.

    Raises:
        ConfigError: the recipe, overrides, types or combinations have problems. The error lists all problems
            that can be detected in spite of the others.
    """
    try:
        return _compose(overrides, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir()), training=training)
    except ConfigError as error:
        # Reversed, so that a key that is typed twice has the position of the first.
        order = {key_of(override): position for position, override in reversed(list(enumerate(overrides)))}
        problems = sorted(_distinct(error.problems), key=lambda problem: order.get(problem.key, len(order)))
        raise ConfigError(*problems) from error.__cause__


def _compose(overrides: Sequence[str], dirs: tuple[Path, ...], *, training: bool) -> Composed:
    parsed = parse_overrides(overrides)
    problems = list(parsed.problems)
    run_dir = parsed.values.get("run.dir")
    if "recipe" not in parsed.groups and isinstance(run_dir, str) and (saved := expanded(run_dir) / WRITTEN).is_file():
        parsed = replace(parsed, groups={"recipe": str(saved.absolute()), **parsed.groups})
    chosen = find_options(parsed.groups, dirs, problems)
    if "recipe" not in chosen:
        # Without a recipe, only the problems of single overrides can be reported.
        raise ConfigError(*problems, *type_problems(tree_of(parsed.values), parsed.texts))
    recipe_file = chosen["recipe"]
    try:
        own = _own_optimizer(recipe_file) if "optimizer" in chosen else {}
        if own and own["name"] == parsed.groups["optimizer"]:
            chosen = {group: path for group, path in chosen.items() if group != "optimizer"}
        base, files = compose_files(chosen, dirs)
        tree = with_values(base, parsed.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    if (of_run := is_of_run(recipe_file)) and (other := other_version(base, recipe_file)):
        raise ConfigError(*problems, *other)
    recipes = [file for file in files if file.parent.name == "recipe" or file == recipe_file]
    set_keys = {*parsed.values, *overruling_settings(recipes, parsed)}
    drop_replaced(tree, parsed, set_keys, problems)
    if of_run:
        choose_again(tree, base, parsed)
    typed_files = [path for group, path in chosen.items() if is_file_name(parsed.groups[group])]
    where = " with ".join(map(display_path, dict.fromkeys([recipe_file, *typed_files])))
    built = build(tree, texts=parsed.texts, where=where)
    if isinstance(built, list):
        reported_keys = {problem.key for problem in problems}
        bad = {problem.key for problem in built}
        problems += [problem for problem in built if problem.key not in reported_keys]
        if (valid := _stand_in(base, parsed.values, bad)) is not None:
            problems += [problem for problem in config_problems(valid, training=training) if problem.key not in bad]
        raise ConfigError(*problems)
    config = with_rates(built)
    problems += config_problems(config, training=training)
    explicit = frozenset(parsed.values) | frozenset(parsed.groups)
    problems += consent_problems(config, explicit, training=training)
    problems += unused_problems(config, explicit, training=training)
    refuse(problems)
    groups = {file: file.parent.name for file in files} | {path: group for group, path in chosen.items()}
    shadowing = [
        f"{group} {file.stem} from {display_path(file)} shadows the built-in"
        for file, group in groups.items()
        if shadows_builtin(group, file) and (group == "recipe" or file not in typed_files)
    ]
    return Composed(
        config=config,
        explicit=explicit,
        warnings=(
            *parsed.warnings,
            *shadowing,
            *_replaced_rates(own, config, explicit),
            *config_warnings(config, explicit, training=training),
        ),
        recipe_file=recipe_file,
        files=tuple(files),
    )


def _own_optimizer(recipe_file: Path) -> Mapping[str, object]:
    """Returns the optimizer's values in a recipe that depends on no other file, such as a complete copy or the
    `config.yaml` of a run; an empty mapping for other recipes.

    If the command line chooses the same optimizer, they stay as they are. Another one has values of its own."""
    recipe = read_yaml(recipe_file)
    values = recipe.get("optimizer")
    return values if isinstance(values, dict) and "name" in values and "defaults" not in recipe else {}


def _replaced_rates(own: Mapping[str, object], config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Yields a warning if another optimizer than the recipe's own has another learning rate, which nobody typed."""
    optimizer = config.optimizer
    if own and own["name"] != optimizer.name and own.get("lr") != optimizer.lr and "optimizer.lr" not in explicit:
        yield (
            f"optimizer={optimizer.name} has values of its own, lr {optimizer.lr:g}; the recipe's, lr {own.get('lr')}, "
            f"are for {own['name']}: set optimizer.lr and optimizer.adamw_lr"
        )


def _stand_in(base: Mapping[str, object], values: Mapping[str, object], bad: Collection[str]) -> RunConfig | None:
    """Returns the run with the recipe's values in place of those that are not valid, so that the other values
    can be checked together.

    If the recipe's values are bad too, defaults replace them. Returns None if the run is still not valid.

    Args:
        base: the recipe's values, as a tree.
        values: the command line's values by dotted key.
        bad: the keys with problems.
    """
    good = {key: value for key, value in values.items() if not concerns(key, bad)}
    without_bad = tree_of({key: value for key, value in leaves(base) if key not in bad})
    for tree in (base, without_bad):
        config = build(with_values(tree, good, []), texts={}, where="")
        if isinstance(config, RunConfig):
            return config
    return None


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Drops problems that repeat the key and the reason of an earlier problem."""
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())


_OVERRULED_BY: Final = {
    "optimizer.lr": "optimizer.lrs",
    "optimizer.adamw_lr": "optimizer.adamw_lr_ratio",
    "train.batch_tokens": "train.global_batch_size",
}
"""Pairs of settings: a value of the second takes precedence over the first. But if a recipe sets the first and
builds on a recipe that sets the second, the first is meant to apply."""


def overruling_settings(recipes: Sequence[Path], parsed: Overrides) -> Iterator[str]:
    """Yields the settings of a recipe that would have no effect because it builds on a recipe that sets the
    second setting of a pair (`_OVERRULED_BY`).

    `optimizer.lr` is not yielded if the command line chooses an optimizer: a recipe's learning rate is meant
    for its own optimizer.

    Args:
        recipes: the files of the recipe and of those that it builds on, in the order of application.
    """
    chain = [dict(leaves(read_yaml(file))) for file in recipes] if len(recipes) > 1 else []

    def last_recipe_with(name: str) -> int:
        """Returns the index of the last recipe that sets `name`; -1 if none does. An empty mapping adds nothing."""
        return max((index for index, tree in enumerate(chain) if tree.get(name, {}) != {}), default=-1)

    for key, overruling in _OVERRULED_BY.items():
        replaced = overruling in parsed.values or (key == "optimizer.lr" and "optimizer" in parsed.groups)
        if last_recipe_with(key) > last_recipe_with(overruling) >= 0 and not replaced:
            yield key


def drop_replaced(
    tree: Mapping[str, object], parsed: Overrides, set_keys: Collection[str], problems: list[Problem]
) -> None:
    """Drops the second setting of each pair in `_OVERRULED_BY` from a recipe's values if the first is set, and
    changes the data source if there is a data path or a blend, but the command line sets no source.

    If the command line sets both settings of a pair, `lr` takes precedence over `lrs`, and `global_batch_size`
    over `batch_tokens`, about which `config_warnings` warns.

    Args:
        tree: the recipe's values, overridden by the command line's; changed in place.
        set_keys: the settings that the command line sets, and those that `overruling_settings` yields.
        problems: gets a problem if the command line sets `adamw_lr` and its ratio.
    """
    for key, overruling in _OVERRULED_BY.items():
        section, _, name = overruling.partition(".")
        values = tree.get(section)
        if key not in set_keys or not isinstance(values, dict):
            continue
        if name == "lrs":
            values[name] = {}
        elif parsed.values.get(overruling) is None:
            values[name] = None
        elif section == "optimizer":
            reason = f"cannot be combined with {key}"
            problems.append(Problem(overruling, reason, "keep one of them", value=parsed.texts[overruling]))
    _choose_source(tree, parsed)


def _choose_source(tree: Mapping[str, object], parsed: Overrides) -> None:
    """Changes `data.source` from stdlib to prepared if there is a path or a blend, but the command line sets no
    data group or source, so that users and recipes may leave out `data=prepared`. The tokenizer is dropped."""
    data = tree.get("data")
    if "data" in parsed.groups or "data.source" in parsed.values or not isinstance(data, dict):
        return
    if data.get("source") == "stdlib" and (data.get("path") or data.get("blend")):
        data["source"] = "prepared"
        if "data.tokenizer" not in parsed.values:
            data.pop("tokenizer", None)


def with_rates(config: RunConfig) -> RunConfig:
    """Resolves `optimizer.lr` from `lrs`, and `adamw_lr` from its ratio, as a product of decimals.

    Raises:
        ConfigError: `lrs` has a rate for an unknown optimizer.
    """
    optimizer = config.optimizer
    for name in optimizer.lrs.keys() - OPTIMIZERS.keys():
        fix = f"use {', '.join(OPTIMIZERS)}"
        raise ConfigError(Problem("optimizer.lrs", f"{name} is not a known optimizer", fix, value=optimizer.lrs))
    # A recipe's rate is meant for Muon, but most custom optimizers are closer to AdamW.
    default_lr = optimizer.lrs.get("adamw", optimizer.lr) if optimizer.name == "custom" else optimizer.lr
    lr = optimizer.lrs.get(optimizer.name, default_lr)
    adamw_lr, ratio = optimizer.adamw_lr, optimizer.adamw_lr_ratio
    if ratio is not None:
        adamw_lr = float(Decimal(repr(ratio)) * Decimal(repr(lr)))
    return replace(config, optimizer=replace(optimizer, lr=lr, lrs={}, adamw_lr=adamw_lr))


CHOSEN: Final = (
    *("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "parallel.sequence_parallel"),
    *("train.micro_batch_size", "train.recompute", "cluster.nodes"),
)
"""The settings that depend on the number of GPUs and on the cluster. A run's `config.yaml` has the values
chosen for the GPUs with which it was started."""
OTHER_VERSION: Final = "was made by another version of canzona, or edited: this version has no setting"
"""The reason why a config.yaml cannot be used in full; it ends with the names of settings."""


def load_resolved(path: Path) -> RunConfig:
    """Reads the config.yaml of a run directory, to go on with the run.

    Raises:
        ConfigError: the file has problems; all are reported at once.
    """
    tree = read_yaml(path)
    refuse(other_version(tree, path))
    return _build(tree, path)


def load_known(path: Path) -> tuple[RunConfig, Mapping[str, object]]:
    """Reads the config.yaml of a run directory, to report the run. Returns its configuration, and the settings that
    this version of canzona does not have.

    Raises:
        ConfigError: the file has other problems.
    """
    tree = read_yaml(path)
    unknown = _unknown(tree)
    known = {
        name: {key: each for key, each in part.items() if f"{name}.{key}" not in unknown}
        if name in sections() and isinstance(part, Mapping)
        else part
        for name, part in tree.items()
        if name not in unknown
    }
    return _build(known, path), unknown


def _build(tree: dict[str, object], path: Path) -> RunConfig:
    unsafe = list(content_problems(tree, display_path(path)))
    config = build(tree, texts={}, where=display_path(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def other_version(tree: Mapping[str, object], path: Path) -> list[Problem]:
    """Returns a problem if the config.yaml of a run has a setting that this version of canzona does not have."""
    if not (unknown := _unknown(tree)):
        return []
    fix = "use the version of canzona that made it, or start a new run from a recipe"
    return [Problem(display_path(path), f"{OTHER_VERSION} {next(iter(unknown))}", fix)]


def _unknown(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that this version of canzona does not have."""
    return {key: value for key, value in leaves(tree) if key not in settings() and key not in sections()}


def dump_resolved(config: RunConfig) -> str:
    """Returns the configuration as YAML, which `load_resolved` reads back unchanged."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def choose_again(tree: dict[str, object], stored: Mapping[str, object], parsed: Overrides) -> None:
    """Drops values of a run's `config.yaml` that were derived from settings that the command line changes: the
    layout if it sets GPUs or a cluster, the schedule if it sets the number of steps, and the batch if it sets
    the sequence length.

    Args:
        tree: the stored values, overridden by the command line's; changed in place.
        stored: the values stored in the run directory or the checkpoint.
    """
    if "gpus" in parsed.values or "cluster" in parsed.groups:
        for key in CHOSEN:
            section, _, name = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and key not in parsed.values:
                values[name] = None
    if "train.steps" in parsed.values and not any(key.startswith("schedule.") for key in parsed.values):
        _choose_schedule(tree, stored)
    if "train.seq_length" in parsed.values and not {"train.batch_tokens", "train.global_batch_size"} & {*parsed.values}:
        _choose_batch(tree, stored, parsed)


def _choose_batch(tree: Mapping[str, object], stored: Mapping[str, object], parsed: Overrides) -> None:
    """Sets the batch and the micro-batch to null if the stored batch has exactly the tokens of
    `batch_tokens`, from which it was derived."""
    train, before = tree.get("train"), stored.get("train")
    if not isinstance(train, dict) or not isinstance(before, Mapping):
        return
    batch, length = before.get("global_batch_size"), before.get("seq_length")
    if isinstance(batch, int) and isinstance(length, int) and batch * length == before.get("batch_tokens"):
        for name in ("global_batch_size", "micro_batch_size"):
            if f"train.{name}" not in parsed.values:
                train[name] = None


def _choose_schedule(tree: dict[str, object], stored: Mapping[str, object]) -> None:
    """Sets the schedule's numbers of steps to null if they have the values that replaced nulls when the run
    started."""
    schedule, train = tree.get("schedule"), stored.get("train")
    steps = train.get("steps") if isinstance(train, Mapping) else None
    if not isinstance(schedule, dict) or not isinstance(steps, int) or schedule.get("decay_steps") != steps:
        return
    nulls = ScheduleConfig(decay=schedule["decay"]).complete(steps)
    schedule["decay_steps"] = None
    for name in ("warmup_steps", "wsd_decay_steps"):
        if schedule.get(name) == getattr(nulls, name):
            schedule[name] = None
