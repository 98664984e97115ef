"""Loads the configuration of one run, in three stages:

1. read: `overrides` parses the command line, and `recipes` finds the files that it names;
2. compose: `tree` merges the files as Hydra does, and `replaced` drops values that the command line overrules;
3. check: `typed` converts the tree to a `RunConfig`, and `checks` and `unused` find what cannot work or has no effect.

All problems of all stages are reported together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.checks import config_problems
from canzona_cli.config.overrides import key_of, parse_overrides
from canzona_cli.config.recipes import (
    WRITTEN,
    builtin_recipes_dir,
    find_options,
    is_file_name,
    shadows_builtin,
    user_recipes_dirs,
)
from canzona_cli.config.replaced import drop_replaced, overruling_settings, with_rates
from canzona_cli.config.run_file import choose_again, is_of_run, other_version
from canzona_cli.config.run_file import dump_resolved as dump_resolved
from canzona_cli.config.run_file import load_resolved as load_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import consent_problems
from canzona_cli.config.settings import leaves, tree_of
from canzona_cli.config.tree import compose_files, with_values
from canzona_cli.config.typed import build, concerns, type_problems
from canzona_cli.config.unused import config_warnings, unused_problems
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.reading import display_path, expanded


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
    try:
        base, files = compose_files(chosen, dirs)
        tree = with_values(base, parsed.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    recipe_file = chosen["recipe"]
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
        warnings=(*parsed.warnings, *shadowing, *config_warnings(config, explicit, training=training)),
        recipe_file=recipe_file,
        files=tuple(files),
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
