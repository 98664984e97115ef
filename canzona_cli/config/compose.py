"""One run's configuration: recipe, groups and overrides composed by Hydra, then checked as a whole."""

import warnings as python_warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canzona_cli.config.checks import config_problems, config_warnings
from canzona_cli.config.overrides import Overrides, parse_overrides
from canzona_cli.config.paths import (
    GROUPS,
    builtin_recipes_dir,
    full_name,
    group_options,
    shown,
    user_recipes_dirs,
)
from canzona_cli.config.safety import unasked_problems
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import sections, settings
from canzona_cli.config.source import (
    FILE_OPTION,
    RecipeSource,
    content_problems,
    find_cluster,
    find_recipe,
    is_file_name,
    nearest_recipe,
    read_yaml,
    shadowed,
    staged,
    unknown_option,
)
from canzona_cli.config.typed import build
from canzona_cli.errors import ConfigError, Problem

_MISSING = "???"


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

    A recipe, model, ... is looked for in `recipes_dirs`, then $CANZONA_RECIPES_DIR, then among the built-in ones.
    Raises ConfigError with every problem at once: of the recipe, of each override, of types, and of how values
    go together. A bad value does not hide the others: the rest is checked with the recipe's own in its place.
    Without `training` it is for planning only, and what only a run needs is not asked for.
    """
    try:
        return _compose(overrides, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir()), training=training)
    except ConfigError as error:
        order = {argument.partition("=")[0].strip(): place for place, argument in reversed(list(enumerate(overrides)))}
        problems = sorted(_distinct(error.problems), key=lambda problem: order.get(problem.key, len(order)))
        raise ConfigError(*problems) from error.__cause__


def load_resolved(path: Path) -> RunConfig:
    """Reads a run directory's config.yaml. Raises ConfigError with every problem."""
    tree = read_yaml(path)
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
    groups = dict(_known_groups(asked, dirs, problems))
    cluster_file = _cluster_file(asked, dirs, problems)
    if cluster_file is not None:
        groups["cluster"] = FILE_OPTION
    source = _recipe(asked.groups.get("recipe"), dirs, problems)
    if source is None:
        # Nothing to lay the overrides over: what can be told without a recipe is what is wrong with each by itself.
        problems += _checked_alone(asked)
        raise ConfigError(*problems)
    if source.is_file:
        unsafe = list(content_problems(read_yaml(source.path), shown(source.path)))
        if unsafe:
            raise ConfigError(*problems, *unsafe)
    try:
        base, files = _composed(source, groups, dirs, cluster_file)
        tree = _with_values(base, asked.values, problems)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    where = shown(source.path) if cluster_file is None else f"{shown(source.path)} with {shown(cluster_file)}"
    config = build(tree, texts=asked.texts, where=where)
    if isinstance(config, list):
        told = {problem.key for problem in problems}
        problems += [problem for problem in config if problem.key not in told]
        bad = {problem.key for problem in config}
        stand_in = _stand_in(base, asked, bad)
        if stand_in is not None:
            problems += [p for p in config_problems(stand_in, training=training) if p.key not in bad]
        raise ConfigError(*problems)
    problems += config_problems(config, training=training)
    explicit = frozenset(asked.values) | frozenset(asked.groups)
    problems += unasked_problems(config, explicit, training=training)
    if problems:
        raise ConfigError(*problems)
    by_name = [file for file in files if file != cluster_file and not (source.is_file and file == source.path)]
    notes = [f"{group} {name} from {shown(file)} shadows the built-in" for group, name, file in shadowed(by_name)]
    builtin_names = group_options("recipe", [builtin_recipes_dir()])
    if source.is_file and source.name in builtin_names and source.path != builtin_names[source.name]:
        notes.append(f"recipe {source.name} is read from {shown(source.path)}, not the built-in of that name")
    return Composed(
        config=config,
        explicit=explicit,
        warnings=(*asked.warnings, *notes, *config_warnings(config, explicit, training=training)),
        recipe_file=source.path,
        files=tuple(files),
    )


def _known_groups(asked: Overrides, dirs: Sequence[Path], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """Group choices of the command line that exist, by their full names."""
    for group, option in asked.groups.items():
        if group == "recipe" or (group == "cluster" and is_file_name(option)):
            continue
        name = full_name(option, group_options(group, dirs))
        if name is None:
            problems.append(unknown_option(group, option, dirs))
        else:
            yield group, name


def _cluster_file(asked: Overrides, dirs: Sequence[Path], problems: list[Problem]) -> Path | None:
    """The profile that the command line gives as a file."""
    option = asked.groups.get("cluster", "")
    if not is_file_name(option):
        return None
    try:
        return find_cluster(option, dirs)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _recipe(asked: str | None, dirs: Sequence[Path], problems: list[Problem]) -> RecipeSource | None:
    """The recipe to compose; for a misspelt one, which is reported, the one that was probably meant."""
    if asked is None:
        if any(problem.key == "recipe" for problem in problems):
            return None
        names = ", ".join(group_options("recipe", dirs))
        problems.append(Problem(key="recipe", reason="no recipe is given", fix=f"write recipe=NAME: {names}"))
        return None
    try:
        return find_recipe(asked, dirs)
    except ConfigError as error:
        problems.extend(error.problems)
        return nearest_recipe(asked, dirs)


def _composed(
    source: RecipeSource, groups: Mapping[str, str], dirs: Sequence[Path], cluster_file: Path | None = None
) -> tuple[dict[str, object], list[Path]]:
    """The tree that Hydra composes from files alone, and the files. References are not resolved yet."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # A `defaults:` list is resolved while Hydra composes, before what it leads to can be looked at.
    OmegaConf.clear_resolver("oc.env")
    given = {f"recipe/{FILE_OPTION}": source.path if source.is_file else None, f"cluster/{FILE_OPTION}": cluster_file}
    with staged(source, groups, cluster_file) as (stage, option):
        search = ",".join("'file://" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in dirs)
        overrides = [f"recipe='{option}'", *(f"{group}='{name}'" for group, name in groups.items())]
        overrides.append(f"hydra.searchpath=[{search}]")
        try:
            with (
                python_warnings.catch_warnings(),
                initialize_config_dir(config_dir=str(stage), version_base="1.3", job_name="canzona"),
            ):
                python_warnings.simplefilter("ignore")  # Hydra's notes about how recipes are written are ours to heed
                loader = GlobalHydra.instance().config_loader()
                used = loader.compute_defaults_list("config", overrides, RunMode.RUN).defaults
                composed = OmegaConf.to_container(compose("config", overrides), resolve=False)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(_composition_problem(error, source, stage, option)) from error
        except RecursionError as error:  # Hydra follows a defaults list that leads back to its own file for ever
            reason = "builds on itself: its `defaults:` name a recipe, or group file, that leads back to it"
            fix = "give the file another name than what it builds on, or run it by its path: recipe=./FILE.yaml"
            raise ConfigError(Problem(key=shown(source.path), reason=reason, fix=fix)) from error
        files = [
            given.get(part.config_path) or _provider(part.config_path, dirs)
            for part in used
            if part.config_path is not None and part.config_path.partition("/")[0] in GROUPS
        ]
    assert isinstance(composed, dict)
    tree = {str(key): value for key, value in composed.items()}
    unsafe = list(content_problems(tree, shown(source.path)))
    if unsafe:
        raise ConfigError(*unsafe)
    return tree, files


def _provider(config_path: str, dirs: Sequence[Path]) -> Path:
    candidates = [folder / f"{config_path}.yaml" for folder in dirs]
    return next((file for file in candidates if file.is_file()), candidates[-1])


def _composition_problem(error: Exception, source: RecipeSource, stage: Path, option: str) -> Problem:
    """Hydra's message about a recipe's files, without its hint to add keys and without our temporary folder."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [
        line
        for line in lines
        if line and not line.startswith(("Available options", "Config search path", "provider=", "To append"))
    ]
    text = " ".join(kept[:4]).replace(f"{stage}/", "").replace(f"recipe/{option}", shown(source.path))
    return Problem(
        key=shown(source.path),
        reason=f"cannot be composed: {text.rstrip('.')}",
        fix="see `canzona recipes show qwen3-tiny` for the files a recipe is made of",
    )


def _with_values(
    base: Mapping[str, object], values: Mapping[str, object], problems: list[Problem]
) -> dict[str, object]:
    """The tree with the command line's values laid over it and references to other settings filled in.

    References that lead nowhere are added to `problems`, and their settings left out.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(_with_defaults(base))
    for key, value in values.items():
        try:
            OmegaConf.update(config, key, value, merge=isinstance(value, Mapping), force_add=True)
        except OmegaConfBaseException as error:
            problems.append(Problem(key=key, value=value, reason=f"cannot be set: {str(error).splitlines()[0]}"))
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    resolved: dict[str, object] = {}
    for key, value in _leaves(raw):
        if value == _MISSING:
            continue
        try:
            found = OmegaConf.select(config, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            reason = f"the reference cannot be followed: {str(error).splitlines()[0]}"
            fix = "refer to a setting by its whole name, for example ${train.seq_length}"
            problems.append(Problem(key=key, value=value, reason=reason, fix=fix))
            continue
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
        _put(resolved, key, found)
    return resolved


def _with_defaults(tree: Mapping[str, object]) -> dict[str, object]:
    """The tree with the schema's defaults below it, so that `${train.seed}` works where no file sets the seed.

    A section that lacks what only a recipe can say is not begun here: it is reported as missing.
    """
    known = settings()
    full: dict[str, object] = dict(tree)
    for section, names in sections().items():
        own = [known[f"{section}.{name}"] for name in sorted(names)]
        given = full.get(section, None if any(setting.required for setting in own) else {})
        if isinstance(given, Mapping):
            optimizer = given.get("name")
            defaults = {
                setting.key.rpartition(".")[2]: setting.default
                for setting in own
                if not setting.required and (not setting.optimizers or optimizer in setting.optimizers)
            }
            full[section] = {**defaults, **given}
    return full


def _leaves(tree: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _put(tree: dict[str, object], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        assert isinstance(below, dict)
        tree = below
    tree[name] = value


def _stand_in(base: Mapping[str, object], asked: Overrides, bad: Collection[str]) -> RunConfig | None:
    """The run with the recipe's own values, or else the defaults, in place of bad ones, so that the others can be
    checked together; None where neither makes a run."""
    values = {key: value for key, value in asked.values.items() if not _among(key, bad)}
    without = {
        name: {own: value for own, value in part.items() if f"{name}.{own}" not in bad}
        if isinstance(part, Mapping)
        else part
        for name, part in base.items()
        if name not in bad
    }
    for tree in (base, without):
        config = build(_with_values(tree, values, []), texts=asked.texts, where="")
        if isinstance(config, RunConfig):
            return config
    return None


def _checked_alone(asked: Overrides) -> list[Problem]:
    """Wrong types among the overrides, told without a recipe."""
    tree: dict[str, object] = {}
    for key, value in asked.values.items():
        _put(tree, key, value)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        having = [settings()[f"optimizer.{name}"].optimizers for name in optimizer if name != "name"]
        optimizer.setdefault("name", next(iter(sorted(frozenset.intersection(*having) or {"muon"})), "muon"))
    found = build(tree, texts=asked.texts, where="the command line")
    return [problem for problem in found if _among(problem.key, asked.values)] if isinstance(found, list) else []


def _among(key: str, keys: Collection[str]) -> bool:
    """Whether a key is one of `keys`, or it and one of them are a mapping and its entry."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.key, problem.reason), problem)
    return list(seen.values())
