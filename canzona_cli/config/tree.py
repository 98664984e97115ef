"""Composes the files of a run into a tree of values with Hydra, and applies the command line's values to the
tree."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from canzona_cli.config.overrides import text_value
from canzona_cli.config.recipes import (
    FROM_FILES,
    GROUPS,
    WRITTEN,
    builtin_recipes_dir,
    closest_option,
    group_options,
    shadows_builtin,
    user_recipes_dirs,
)
from canzona_cli.config.secrets import REFERENCE, content_problems
from canzona_cli.config.settings import leaves, sections, settings, tree_of
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.reading import display_path, read_yaml
from canzona_cli.core.setup import ModelConfig

SCHEME = "canzona"
"""The URL scheme of the folders that Hydra reads through `_folder_source`."""
_LONGEST = 10_000
"""The maximum number of characters in a value after its references are resolved. A path has at most 4,096."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")
_UNLOADED = re.compile(r"Could not load 'recipe/([^']+)'")
"""Hydra's message about a recipe that `defaults:` names but that does not exist."""
_MISSING = "???"
_PRIMARY = "_canzona_"
_DROP_HYDRA_GROUPS = [f"~hydra/{group}" for group in ("launcher", "sweeper", "help", "hydra_help", "output")]
_DROP_HYDRA_GROUPS += ["~hydra/hydra_logging", "~hydra/job_logging"]
"""The overrides that drop Hydra's own groups. canzona does not use them, and composing them would take a
quarter of the time."""
# The name under which Hydra finds the chosen option of a group. Because the option is not named after its file, a
# recipe can build on a built-in recipe with the same name as its file.
_CHOSEN = "_chosen_"
# The setting that names a section's contents. A section without it only adjusts the file of its group.
_NAMED_BY = {"model": "name", "optimizer": "name", "engine": "strategy", "cluster": "name", "data": "source"}


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """A recipe in `canzona recipes list`."""

    name: str
    path: Path
    builtin: bool
    shadows: bool
    """True if this is a user's recipe that hides a built-in recipe with the same name."""
    model: ModelConfig | None
    """The model; None if the recipe does not define it completely."""
    gpus: int | None
    cluster: str
    optimizer: str
    description: str
    error: str = ""
    """The reason why the recipe could not be read; most other fields are then empty. An empty text if it was
    read."""


def list_recipes(recipes_dirs: Sequence[Path] = ()) -> list[RecipeInfo]:
    """Returns the user's recipes by name, then the built-in ones.

    Raises:
        ConfigError: a folder in `recipes_dirs` or $CANZONA_RECIPES_DIR does not exist.
    """
    builtin = builtin_recipes_dir()
    dirs = (*user_recipes_dirs(recipes_dirs), builtin)
    recipes = []
    for name, path in group_options("recipe", dirs).items():
        tree: dict[str, object] = {}
        error = ""
        try:
            tree, _ = compose_files({"recipe": path}, dirs)
        except ConfigError as problem:
            error = problem.problems[0].reason
        gpus = tree.get("gpus")
        recipes.append(
            RecipeInfo(
                name=name,
                path=path,
                builtin=path.parent.parent == builtin,
                shadows=shadows_builtin("recipe", path),
                model=_read_model(tree),
                gpus=gpus if isinstance(gpus, int) else None,
                cluster=_section_name(tree.get("cluster")),
                optimizer=_section_name(tree.get("optimizer")),
                description=str(tree.get("description", "")),
                error=error,
            )
        )
    return sorted(recipes, key=lambda info: (info.builtin, info.name))


def compose_files(chosen: Mapping[str, Path], dirs: Sequence[Path]) -> tuple[dict[str, object], list[Path]]:
    """Composes a tree of values from files with Hydra, without resolving references to other settings.

    Args:
        chosen: the files of the chosen options by group, among them a recipe.
        dirs: the folders to search for the options that these files name; the first folder takes precedence.

    Returns:
        The tree, and the files from which it was composed, in the order of application.

    Raises:
        ConfigError: a file cannot be read or composed, names code to run, or refers to environment variables.
    """
    contents = _contents(chosen)
    composed = _compose_plainly(contents, chosen, dirs) or _compose_with_hydra(contents, chosen, dirs)
    refuse(content_problems(composed[0], display_path(chosen["recipe"])))
    return composed


def _compose_plainly(
    contents: Mapping[str, Mapping[str, object]], chosen: Mapping[str, Path], dirs: Sequence[Path]
) -> tuple[dict[str, object], list[Path]] | None:
    """Composes a recipe whose `defaults:` list only chooses options of groups, as Hydra would. To import Hydra and to
    compose with it takes 0.2 s, and the built-in recipes need nothing else of it.

    Args:
        contents: see `_contents`.
        chosen: see `compose_files`.
        dirs: see `compose_files`.

    Returns:
        The tree and its files, as of `compose_files`; None if a file needs more of Hydra, or has a mistake, which
        Hydra then reports.
    """
    defaults = read_yaml(builtin_recipes_dir() / "config.yaml")["defaults"]
    entries = contents["recipe"]["defaults"]
    assert isinstance(defaults, list)
    assert isinstance(entries, list)
    options = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    overrides = {str(key): option for entry in entries[:-1] if isinstance(entry, dict) for key, option in entry.items()}
    known = {f"override /{group}" for group in GROUPS[1:]}
    if len(overrides) != len(entries) - 1 or entries[-1] != "_self_" or not overrides.keys() <= known:
        return None
    options |= {key.removeprefix("override /"): option for key, option in overrides.items()}
    tree: dict[str, object] = {}
    files = []
    for group, option in options.items():
        if group not in chosen and option is None:
            continue
        places = (folder / group / f"{option}.yaml" for folder in dirs if "/" not in str(option))
        file = chosen[group] if group in chosen else next((place for place in places if place.is_file()), None)
        if file is None or (group != "recipe" and _package(file) is not None):
            return None
        content = dict(contents[group] if group in chosen else read_yaml(file))
        is_plain = not any(mark in str(content) for mark in ("${", _MISSING))
        if (content.pop("defaults", None) is None) is (group == "recipe") or not is_plain:
            return None
        tree = _merged(tree, content if group == "recipe" else {group: content})
        files.append(file)
    return tree, files


def _merged(tree: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Returns a tree with changes, merged as OmegaConf merges mappings."""
    merged = dict(tree)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _compose_with_hydra(
    contents: Mapping[str, Mapping[str, object]], chosen: Mapping[str, Path], dirs: Sequence[Path]
) -> tuple[dict[str, object], list[Path]]:
    """Composes a tree of values with Hydra; arguments and result are those of `_compose_plainly`."""
    from hydra import compose, initialize
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    where = display_path(chosen["recipe"])
    folders = ",".join(text_value(f"{SCHEME}://{folder}") for folder in dirs)
    overrides = [f"{group}={_CHOSEN}" for group in chosen]
    # Hydra resolves `defaults:` lists while it composes, before the content can be checked. They must not be
    # able to read environment variables.
    OmegaConf.clear_resolver("oc.env")
    files_read = _folder_source()
    files_read.clear()
    with _in_config_store(contents, chosen), initialize(config_path=None, version_base="1.3"):
        try:
            merged = compose(_PRIMARY, overrides=[f"hydra.searchpath=[{folders}]", *_DROP_HYDRA_GROUPS, *overrides])
            container = OmegaConf.to_container(merged, resolve=False)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_composition_problem(error, chosen, dirs)) from error
        except RecursionError as error:  # Hydra follows a cycle of `defaults:` lists forever
            reason = "builds on itself: its `defaults:` lead back to the same file"
            fix = "give the file a different name from the recipe it builds on, or give its path: recipe=./FILE.yaml"
            raise ConfigError(Problem(where, reason, fix)) from error
    assert isinstance(container, dict)
    tree = {str(key): value for key, value in container.items()}
    # Hydra reads a recipe before the recipes that it builds on, but applies it after them. Files of the other
    # groups are applied before recipes.
    files = {group: [path for path in reversed(files_read) if path.parent.name == group] for group in GROUPS}
    for group, path in chosen.items():
        files[group].append(path)
    return tree, [path for group in (*GROUPS[1:], GROUPS[0]) for path in files[group]]


@cache
def _folder_source() -> list[Path]:
    """Registers a Hydra config source that reads folders with `read_yaml` and its limits; returns the list to
    which the source appends each file that it reads."""
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult, ConfigSource
    from omegaconf import OmegaConf

    files_read: list[Path] = []

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
            files_read.append(file)
            return ConfigResult(
                provider=self.provider,
                path=str(file),
                config=OmegaConf.create(content),
                header={"package": _package(file)},
            )

        def _file(self, config_path: str) -> Path:
            return Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")

    Plugins.instance().register(Folder)
    return files_read


def _package(file: Path) -> str | None:
    """Returns the package that the `# @package` header of a file names; None without a header."""
    with file.open(encoding="utf-8") as text:
        header = _PACKAGE.match(text.read(512))
    return None if header is None else header[1]


def _contents(chosen: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Returns the contents of the chosen files, by group, as options that Hydra can compose."""
    contents = {group: read_yaml(path) for group, path in chosen.items()}
    for group in contents.keys() & set(FROM_FILES):
        contents[group].setdefault("name", chosen[group].stem)
    run = contents["recipe"].get("run")
    if isinstance(run, dict) and is_of_run(chosen["recipe"]):
        run["dir"] = None  # another run with these settings must not reuse the directory
    contents["recipe"] = _as_option(contents["recipe"], chosen)
    return contents


def is_of_run(file: Path) -> bool:
    """Returns True if a file is the resolved configuration of a run or a checkpoint: it lies beside the layout that
    was chosen for it, or in the run directory that it names."""
    if file.name != WRITTEN or (file.parent / "layout.json").is_file():
        return file.name == WRITTEN
    run = read_yaml(file).get("run")
    return isinstance(run, Mapping) and Path(str(run.get("dir"))).name == file.parent.name


@contextmanager
def _in_config_store(contents: Mapping[str, Mapping[str, object]], chosen: Mapping[str, Path]) -> Iterator[None]:
    """Adds the primary configuration and the chosen files to Hydra's ConfigStore during the block."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    stored = dict(store.repo)
    store.store(_PRIMARY, read_yaml(builtin_recipes_dir() / "config.yaml"), package="")
    try:
        for group, path in chosen.items():
            store.store(_CHOSEN, contents[group], group, package="_global_" if group == "recipe" else _package(path))
        yield
    finally:
        store.repo = stored


def _as_option(content: dict[str, object], chosen: Collection[str]) -> dict[str, object]:
    """Converts the contents of a recipe file to an option of the recipe group, by completing its `defaults:`
    list.

    A complete section (in a run's config.yaml or a copied recipe) replaces the file of its group. If the
    command line chooses an option of this group, a section with a name is removed instead.

    Args:
        content: the contents of the file, changed in place.
        chosen: the groups for which the command line chooses an option.
    """
    defaults = content.pop("defaults", [])
    entries: list[object] = list(defaults) if isinstance(defaults, list) else [defaults]
    overridden = {str(key) for entry in entries if isinstance(entry, Mapping) for key in entry}
    for group, name in _NAMED_BY.items():
        section = content.get(group)
        if not isinstance(section, Mapping) or name not in section:
            continue
        if group in chosen:
            del content[group]
        elif _is_complete(group, section) and f"override /{group}" not in overridden:
            entries.append({f"override /{group}": None})
    if "_self_" not in entries:
        entries.append("_self_")
    return {"defaults": entries, **content}


def _is_complete(group: str, section: Mapping[str, object]) -> bool:
    """Returns True if a section has all settings without a default, so that it needs no file of its group."""
    optimizer = str(section.get("name"))
    for name in sections()[group]:
        setting = settings()[f"{group}.{name}"]
        applies = not setting.optimizers or optimizer in setting.optimizers
        if setting.required and applies and name not in section:
            return False
    return True


def _composition_problem(error: Exception, chosen: Mapping[str, Path], dirs: Sequence[Path]) -> Problem:
    """Converts Hydra's error about a recipe's files to a problem, without the search path and Hydra's own
    hints.

    Args:
        chosen: the chosen files, by group.
        dirs: the folders of recipes.
    """
    where = display_path(chosen["recipe"])
    lines = [line.strip() for line in str(error).splitlines()]
    hints = ("Available options", "Config search path", "provider=", "To append")
    message = [line for line in lines if line and not line.startswith(hints)]
    text = " ".join(message[:4]).replace(f"In '{_PRIMARY}': ", "")
    for group, path in chosen.items():
        text = text.replace(f"{group}/{_CHOSEN}", display_path(path))
    if (unknown := _UNLOADED.search(text)) is not None:
        name = unknown[1]
        recipes = group_options("recipe", dirs)
        bare = name.rpartition("/")[2]
        near = bare if bare in recipes else closest_option(bare, recipes)
        reason = f"builds on recipe {name} in its `defaults:`, but there is no such recipe"
        return Problem(where, reason, f"write `- {near or 'qwen3-tiny'}`; there are {', '.join(recipes)}")
    fix = "see `canzona recipes show qwen3-tiny` for the files a recipe is made of"
    return Problem(where, f"cannot be composed: {text.rstrip('.')}", fix)


def with_values(base: Mapping[str, object], values: Mapping[str, object], problems: list[Problem]) -> dict[str, object]:
    """Returns a tree with the command line's values applied and references to other settings resolved.

    Adds a problem to `problems` for each setting whose references cannot be resolved, and drops the setting.
    """
    tree = _with_defaults(base)
    for key, value in values.items():
        if key == "data.blend":  # on the command line, it replaces the recipe's blend instead of adding to it
            tree = _merged(tree, tree_of({key: None}))
        tree = _merged(tree, tree_of({key: value}))
    resolved = {key: value for key, value in leaves(tree) if value != _MISSING}
    texts = {key: f"{value}" for key, value in resolved.items()}
    for key in [key for key, text in texts.items() if "${" in text]:
        value = resolved.pop(key)
        if _resolved_length(key, texts, ()) > _LONGEST:
            reason = "its references form a cycle or expand to a text that is too long"
            problems.append(Problem(key, reason, "write the value itself", value=value))
            continue
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            filled = OmegaConf.select(OmegaConf.create(tree), key, throw_on_resolution_failure=True)
            resolved[key] = OmegaConf.to_container(filled, resolve=True) if OmegaConf.is_config(filled) else filled
        except OmegaConfBaseException as error:
            reason = f"the reference cannot be resolved: {str(error).splitlines()[0]}"
            fix = "refer to a setting by its full key, for example ${train.seq_length}"
            problems.append(Problem(key, reason, fix, value=value))
    return tree_of(resolved)


def _resolved_length(name: str, texts: Mapping[str, str], open_keys: tuple[str, ...]) -> int:
    """Returns an upper bound for the number of characters of a setting or section after its references are
    resolved; for a cycle, a number above `_LONGEST`. Only texts with references, and the texts that they refer
    to, are counted.

    Args:
        name: the key of the setting or section.
        open_keys: the keys whose references are being resolved. A reference to one of these keys closes a cycle.
    """
    length = 0
    for key in (name,) if name in texts else [key for key in texts if key.startswith(f"{name}.")]:
        text = texts[key]
        length += len(text) if "${" in text or open_keys else 0
        for reference in REFERENCE.findall(text):
            if key in open_keys or length > _LONGEST:
                return _LONGEST + 1
            length += _resolved_length(reference, texts, (*open_keys, key))
    return length


def _with_defaults(tree: Mapping[str, object]) -> dict[str, object]:
    """Adds the schema's defaults to a tree, so that `${train.seed}` works even if no file sets the seed.

    A missing section with required settings is not added; it is reported later.
    """
    all_settings = settings()
    with_defaults: dict[str, object] = dict(tree)
    for section, names in sections().items():
        in_section = [all_settings[f"{section}.{name}"] for name in sorted(names)]
        values = with_defaults.get(section, None if any(setting.required for setting in in_section) else {})
        if isinstance(values, Mapping):
            optimizer = str(values.get("name"))
            defaults = {
                setting.key.rpartition(".")[2]: setting.default
                for setting in in_section
                if not setting.required and (not setting.optimizers or optimizer in setting.optimizers)
            }
            with_defaults[section] = {**defaults, **_defaults_with_experts(tree, defaults), **values}
    return with_defaults


def _defaults_with_experts(tree: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Returns the defaults that differ for a model with experts: `max_preconditioner_dim` is the width of an
    expert, but at least 1024. Every expert has its own factors, and factors as large as the hidden size would
    take more memory than everything else."""
    model = tree.get("model")
    width = model.get("ffn_hidden_size") if isinstance(model, Mapping) and model.get("num_experts") else None
    if "max_preconditioner_dim" not in defaults or not isinstance(width, int):
        return {}
    return {"max_preconditioner_dim": max(1024, width)}


def _read_model(tree: Mapping[str, object]) -> ModelConfig | None:
    import json

    from pydantic import ValidationError

    from canzona_cli.core.reading import adapter

    try:
        return adapter(ModelConfig).validate_json(json.dumps(tree.get("model")), strict=True)
    except ValidationError:
        return None


def _section_name(section: object) -> str:
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else ""
