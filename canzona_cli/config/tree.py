"""The tree of values that a run's files come to: Hydra composes it,
and the command line's values are laid over it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from canzona_cli.config.overrides import text_value
from canzona_cli.config.recipes import (
    GROUPS,
    builtin_recipes_dir,
    group_options,
    lies_flat,
    read_yaml,
    shadowed,
    shown,
    user_recipes_dirs,
)
from canzona_cli.config.removed import bring_up_to_date
from canzona_cli.config.schema import ModelConfig
from canzona_cli.config.secrets import REFERENCE, content_problems
from canzona_cli.config.settings import leaves, sections, settings
from canzona_cli.errors import ConfigError, Problem, refuse

SCHEME = "canzona"
"""Marks the folders that Hydra reads by `_folder_source`."""
_LONGEST = 10_000
"""Characters that references may come to; a path has 4,096."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")
_MISSING = "???"
_PRIMARY = "_canzona_"
# What is given as a file takes this place in its group: a name of its own, so that a recipe may build on a
# built-in one it is named after.
_GIVEN = "_given_"
# The setting that distinguishes a section that is complete from one that adjusts its group's file.
_COMPLETE = {"model": "name", "optimizer": "name", "engine": "strategy", "cluster": "name", "data": "source"}


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """One line of `canzona recipes list`."""

    name: str
    path: Path
    builtin: bool
    shadows: bool
    """A user's recipe that hides a built-in one of its name."""
    model: ModelConfig | None
    """None when the recipe leaves the shape open."""
    gpus: int | None
    cluster: str
    optimizer: str
    description: str
    error: str = ""
    """The reason why the file could not be read; the other fields then say little."""


def list_recipes(recipes_dirs: Sequence[Path] = ()) -> list[RecipeInfo]:
    """The user's own recipes by name, then the built-in ones.
    Raises ConfigError for a folder that is not there."""
    builtin = builtin_recipes_dir()
    dirs = (*user_recipes_dirs(recipes_dirs), builtin)
    recipes = []
    for name, path in group_options("recipe", dirs).items():
        try:
            given = {"recipe": path} if lies_flat(path) else {}
            (tree, _), error = composed({"recipe": name} if not given else {}, given, dirs), ""
        except ConfigError as problem:
            tree, error = {}, problem.problems[0].reason
        gpus = tree.get("gpus")
        ours = path.parent.parent == builtin
        recipes.append(
            RecipeInfo(
                name=name,
                path=path,
                builtin=ours,
                shadows=any(shadowed([path])) or (lies_flat(path) and (builtin / "recipe" / path.name).is_file()),
                model=_model(tree),
                gpus=gpus if isinstance(gpus, int) else None,
                cluster=_named(tree.get("cluster")),
                optimizer=_named(tree.get("optimizer")),
                description=str(tree.get("description", "")),
                error=error,
            )
        )
    return sorted(recipes, key=lambda info: (info.builtin, info.name))


def composed(
    options: Mapping[str, str], given: Mapping[str, Path], dirs: Sequence[Path]
) -> tuple[dict[str, object], list[Path]]:
    """Composes a tree by Hydra from files alone; returns it with these files in their order of application.

    References to other settings are not resolved yet.

    Args:
        options: the options that are asked for by name, by group.
        given: the recipe, and the cluster profile, that are given as files.
        dirs: where options are looked for; the first folder wins.

    Raises:
        ConfigError: a file cannot be read or composed, or asks for code or environment variables.
    """
    from hydra import compose, initialize
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    recipe = given["recipe"] if "recipe" in given else group_options("recipe", dirs)[options["recipe"]]
    where = shown(recipe)
    folders = ",".join(text_value(f"{SCHEME}://{folder}") for folder in dirs)
    overrides = [f"{group}='{name}'" for group, name in {**options, **dict.fromkeys(given, _GIVEN)}.items()]
    # A `defaults:` list is resolved while Hydra composes, before what it leads to can be looked at.
    OmegaConf.clear_resolver("oc.env")
    read = _folder_source()
    read.clear()
    with _stored(options, given), initialize(config_path=None, version_base="1.3"):
        try:
            merged = compose(_PRIMARY, overrides=[f"hydra.searchpath=[{folders}]", *overrides])
            container = OmegaConf.to_container(merged, resolve=False)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_composition_problem(error, where)) from error
        except RecursionError as error:  # Hydra follows a defaults list that leads back to its own file for ever
            reason = "builds on itself: its `defaults:` name a recipe, or group file, that leads back to it"
            fix = "give the file another name than what it builds on, or run it by its path: recipe=./FILE.yaml"
            raise ConfigError(Problem(key=where, reason=reason, fix=fix)) from error
    assert isinstance(container, dict)
    tree = {str(key): value for key, value in container.items()}
    refuse(content_problems(tree, where))
    # Hydra reads a recipe before those that it builds on, and applies it after them; group files come before
    # recipes.
    files = {group: [path for path in reversed(read) if path.parent.name == group] for group in GROUPS}
    for group, path in given.items():
        files[group].append(path)
    return tree, [path for group in (*GROUPS[1:], GROUPS[0]) for path in files[group]]


@cache
def _folder_source() -> list[Path]:
    """Teaches Hydra to read folders by `read_yaml`, which knows bounds; the files that it has read."""
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult, ConfigSource
    from omegaconf import OmegaConf

    read: list[Path] = []

    class Folder(ConfigSource):  # type: ignore[misc]
        @staticmethod
        def scheme() -> str:
            return SCHEME

        def available(self) -> bool:
            return Path(self.path).is_dir()

        def is_group(self, config_path: str) -> bool:
            return Path(self.path, config_path).is_dir()

        def is_config(self, config_path: str) -> bool:
            return self._file(config_path).is_file()

        def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
            return sorted(file.stem for file in Path(self.path, config_path).glob("*.yaml"))

        def load_config(self, config_path: str) -> ConfigResult:
            file = self._file(config_path)
            content = read_yaml(file)
            read.append(file)
            with file.open(encoding="utf-8") as text:
                package = _PACKAGE.match(text.read(512))
            return ConfigResult(
                provider=self.provider,
                path=str(file),
                config=OmegaConf.create(content),
                header={"package": None if package is None else package[1]},
            )

        def _file(self, config_path: str) -> Path:
            return Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")

    Plugins.instance().register(Folder)
    return read


@contextmanager
def _stored(options: Mapping[str, str], given: Mapping[str, Path]) -> Iterator[None]:
    """Keeps in Hydra's memory what is not an option in a folder:
    the primary configuration and the given files."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    before = dict(store.repo)
    store.store(_PRIMARY, read_yaml(builtin_recipes_dir() / "config.yaml"), package="")
    try:
        for group, path in given.items():
            content = read_yaml(path)
            content.setdefault("name", path.stem)
            if group == "recipe":
                bring_up_to_date(content)
                _leave_home(content, path)
                store.store(_GIVEN, _as_option(content, {*options, *given}), group, package="_global_")
            else:
                store.store(_GIVEN, content, group)
        yield
    finally:
        store.repo = before


def _leave_home(content: Mapping[str, object], path: Path) -> None:
    """Takes its own directory out of a run's config.yaml: as a recipe it repeats the run somewhere else."""
    run = content.get("run")
    if isinstance(run, dict) and path.name == "config.yaml" and Path(str(run.get("dir"))).name == path.parent.name:
        run["dir"] = None


def _as_option(content: dict[str, object], chosen: set[str]) -> dict[str, object]:
    """The content of a recipe file as an option of the recipe group.

    A section that is complete (a run's config.yaml, a copied recipe) replaces its group's file, unless the
    command line chooses an option of that group, which then replaces the section.
    """
    defaults = content.pop("defaults", [])
    entries: list[object] = list(defaults) if isinstance(defaults, list) else [defaults]
    for group, mark in _COMPLETE.items():
        section = content.get(group)
        if not isinstance(section, Mapping) or mark not in section:
            continue
        if group in chosen:
            del content[group]
        elif not any(isinstance(entry, Mapping) and f"override /{group}" in entry for entry in entries):
            entries.append({f"override /{group}": None})
    if "_self_" not in entries:
        entries.append("_self_")
    return {"defaults": entries, **content}


def _composition_problem(error: Exception, where: str) -> Problem:
    """Hydra's message about a recipe's files, without its search path and its hint to add keys."""
    lines = [line.strip() for line in str(error).splitlines()]
    meant = [
        line
        for line in lines
        if line and not line.startswith(("Available options", "Config search path", "provider=", "To append"))
    ]
    text = " ".join(meant[:4]).replace(f"recipe/{_GIVEN}", where)
    fix = "see `canzona recipes show qwen3-tiny` for the files a recipe is made of"
    return Problem(key=where, reason=f"cannot be composed: {text.rstrip('.')}", fix=fix)


def with_values(base: Mapping[str, object], values: Mapping[str, object], problems: list[Problem]) -> dict[str, object]:
    """The tree with the command line's values laid over it and references to other settings filled in.

    References that lead nowhere are added to `problems`, and their settings left out.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(_with_defaults(base))
    for key, value in values.items():
        try:
            # A blend that is typed is the whole of it: no share of a recipe's sets is left over.
            merge = isinstance(value, Mapping) and key != "data.blend"
            OmegaConf.update(config, key, value, merge=merge, force_add=True)
        except OmegaConfBaseException as error:
            problems.append(Problem(key=key, value=value, reason=f"cannot be set: {str(error).splitlines()[0]}"))
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    resolved: dict[str, object] = {}
    written = dict(leaves({str(name): part for name, part in raw.items()}))
    texts = {key: f"{value}" for key, value in written.items()}
    for key, value in written.items():
        if value == _MISSING:
            continue
        if _stands_for(key, texts, ()) > _LONGEST:
            reason = "its references lead back to it, or stand for a text too long to read"
            problems.append(Problem(key=key, value=value, reason=reason, fix="write the value itself"))
            continue
        try:
            filled = OmegaConf.select(config, key, throw_on_resolution_failure=True)
            if OmegaConf.is_config(filled):
                filled = OmegaConf.to_container(filled, resolve=True)
        except OmegaConfBaseException as error:
            reason = f"the reference cannot be followed: {str(error).splitlines()[0]}"
            fix = "refer to a setting by its whole name, for example ${train.seq_length}"
            problems.append(Problem(key=key, value=value, reason=reason, fix=fix))
            continue
        put(resolved, key, filled)
    return resolved


def _stands_for(name: str, texts: Mapping[str, str], within: tuple[str, ...]) -> int:
    """Characters of a setting, or of a section, once its references are filled in;
    too many where that has no end.

    Args:
        within: the names that are being filled in with it.
    """
    length = 0
    for key in (name,) if name in texts else [key for key in texts if key.startswith(f"{name}.")]:
        text = texts[key]
        length += len(text) if "${" in text or within else 0
        for reference in REFERENCE.findall(text):
            if key in within or length > _LONGEST:
                return _LONGEST + 1
            length += _stands_for(reference, texts, (*within, key))
    return length


def _with_defaults(tree: Mapping[str, object]) -> dict[str, object]:
    """The tree with the schema's defaults below it, so that `${train.seed}` works where no file sets the seed.

    A section that lacks what only a recipe can say is not begun here: it is reported as missing.
    """
    known = settings()
    full: dict[str, object] = dict(tree)
    for section, names in sections().items():
        in_section = [known[f"{section}.{name}"] for name in sorted(names)]
        given = full.get(section, None if any(setting.required for setting in in_section) else {})
        if isinstance(given, Mapping):
            optimizer = given.get("name")
            defaults = {
                setting.key.rpartition(".")[2]: setting.default
                for setting in in_section
                if not setting.required and (not setting.optimizers or optimizer in setting.optimizers)
            }
            full[section] = {**defaults, **given}
    return full


def put(tree: dict[str, object], key: str, value: object) -> None:
    """Sets the value of a dotted key, making its sections."""
    *sections_above, name = key.split(".")
    for section in sections_above:
        below = tree.setdefault(section, {})
        assert isinstance(below, dict)
        tree = below
    tree[name] = value


def _model(tree: Mapping[str, object]) -> ModelConfig | None:
    import json

    from pydantic import ValidationError

    from canzona_cli.config.reading import adapter

    try:
        return adapter(ModelConfig).validate_json(json.dumps(tree.get("model")), strict=True)
    except ValidationError:
        return None


def _named(section: object) -> str:
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else ""
