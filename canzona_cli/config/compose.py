"""Loads the configuration of one run: composes the recipe, groups and overrides with Hydra, then converts the
values to their types and checks them together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from canzona_cli.config.checks import config_problems
from canzona_cli.config.overrides import key_of, parse_overrides
from canzona_cli.config.recipes import (
    WRITTEN,
    builtin_recipes_dir,
    find_options,
    is_file_name,
    is_of_run,
    shadows_builtin,
    user_recipes_dirs,
)
from canzona_cli.config.replaced import choose_again, drop_replaced, overruling_settings, with_rates
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import consent_problems, content_problems
from canzona_cli.config.settings import leaves, sections, settings, tree_of
from canzona_cli.config.tree import compose_files, with_values
from canzona_cli.config.typed import build, stand_in, type_problems
from canzona_cli.config.unused import config_warnings, unused_problems
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.reading import display_path, expanded, read_yaml


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


def load_resolved(path: Path) -> RunConfig:
    """Reads the config.yaml of a run directory.

    Raises:
        ConfigError: the file has problems; all are reported at once.
    """
    tree = read_yaml(path)
    refuse(_other_version(tree, path))
    unsafe = list(content_problems(tree, display_path(path)))
    config = build(tree, texts={}, where=display_path(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def _other_version(tree: Mapping[str, object], path: Path) -> list[Problem]:
    """Returns a problem if the config.yaml of a run has a setting that this version of canzona does not have."""
    unknown = [key for key, _ in leaves(tree) if key not in settings() and key not in sections()]
    if not unknown:
        return []
    reason = f"was made by another version of canzona, or edited: this version has no setting {unknown[0]}"
    fix = "use the version of canzona that made it, or start a new run from a recipe"
    return [Problem(display_path(path), reason, fix)]


def dump_resolved(config: RunConfig) -> str:
    """Returns the configuration as YAML, which `load_resolved` reads back unchanged."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


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
    if (of_run := is_of_run(recipe_file)) and (other := _other_version(base, recipe_file)):
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
        if (valid := stand_in(base, parsed.values, bad)) is not None:
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


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Drops problems that repeat the key and the reason of an earlier problem."""
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())
