"""Composes the files of a run into a tree of values, as Hydra does, and applies the command line's values to the tree.

A recipe's `defaults:` list names recipes on which it builds, and chooses options of groups (`override /model: NAME`).
Hydra would compose the same, but to import it and to compose with it takes 0.2 s.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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

_LONGEST = 10_000
"""The maximum number of characters in a value after its references are resolved. A path has at most 4,096."""
_GLOBAL = re.compile(r"\s*#\s*@package\s+_global_\b")
"""The header of a file of a group whose contents are not only the group's section."""
_MISSING = "???"
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
    """Composes a tree of values from files, without resolving references to other settings.

    Args:
        chosen: the files of the chosen options by group, among them a recipe.
        dirs: the folders to search for the options that these files name; the first folder takes precedence.

    Returns:
        The tree, and the files from which it was composed, in the order of application.

    Raises:
        ConfigError: a file cannot be read or composed, names code to run, or refers to environment variables.
    """
    contents = _contents(chosen)
    recipes = list(_layers("recipe", chosen["recipe"], contents["recipe"], dirs))
    primary = read_yaml(builtin_recipes_dir() / "config.yaml")["defaults"]
    assert isinstance(primary, list)
    options = {group: option for entry in primary if isinstance(entry, dict) for group, option in entry.items()}
    for layer in recipes:
        options |= layer.options
    layers: list[_Layer] = []
    for group in GROUPS[1:]:
        if group in chosen:
            layers += _layers(group, chosen[group], contents[group], dirs)
        elif options[group] is not None:
            file = _file_of(group, str(options[group]), dirs, chosen["recipe"])
            layers += _layers(group, file, read_yaml(file), dirs)
    tree: dict[str, object] = {}
    for layer in (*layers, *recipes):
        tree = _merged(tree, layer.content)
    refuse(content_problems(tree, display_path(chosen["recipe"])))
    return tree, [layer.file for layer in (*layers, *recipes)]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One file of a composition."""

    file: Path
    options: dict[str, object]
    """The options of other groups that its `defaults:` list chooses."""
    content: dict[str, object]
    """The values of the file, as a tree."""


def _layers(
    group: str, file: Path, content: Mapping[str, object], dirs: Sequence[Path], above: tuple[Path, ...] = ()
) -> Iterator[_Layer]:
    """Yields a file of a group and those on which it builds, in their order of application.

    Args:
        above: the files that build on this one.

    Raises:
        ConfigError: a `defaults:` list cannot be used.
    """
    where = display_path(file)
    if file in above:
        reason = "builds on itself: its `defaults:` lead back to the same file"
        fix = "give the file a different name from the recipe it builds on, or give its path: recipe=./FILE.yaml"
        raise ConfigError(Problem(where, reason, fix))
    values = {key: value for key, value in content.items() if key != "defaults"}
    is_tree = group == "recipe" or _GLOBAL.match(file.read_text(encoding="utf-8")) is not None
    layer = _Layer(file=file, options={}, content=values if is_tree else {group: values})
    entries = _entries(content)
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        overrides = entry if group == "recipe" and isinstance(entry, Mapping) else {}
        if entry == "_self_":
            yield layer
        elif isinstance(entry, str):
            base = _file_of(group, entry.removeprefix(f"/{group}/"), dirs, file)
            yield from _layers(group, base, read_yaml(base), dirs, (*above, file))
        elif overrides and overrides.keys() <= {f"override /{other}" for other in GROUPS[1:]}:
            layer.options.update({key.removeprefix("override /"): option for key, option in overrides.items()})
        else:
            reason = f"has an entry in its `defaults:` that is neither a name nor a choice of a group: {entry}"
            raise ConfigError(Problem(where, reason, f"write `- NAME`, or `- override /{GROUPS[1]}: NAME`"))


def _entries(content: Mapping[str, object]) -> list[object]:
    defaults = content.get("defaults", [])
    return list(defaults) if isinstance(defaults, list) else [defaults]


def _file_of(group: str, name: str, dirs: Sequence[Path], where: Path) -> Path:
    """Returns the file of an option that the `defaults:` list of the file `where` names.

    Raises:
        ConfigError: there is no such option.
    """
    places = (folder / group / f"{name}.yaml" for folder in dirs if "/" not in name)
    if (file := next((place for place in places if place.is_file()), None)) is not None:
        return file
    options = group_options(group, dirs)
    bare = name.rpartition("/")[2]
    near = bare if bare in options else closest_option(bare, options) or next(iter(options))
    reason = f"builds on {group} {name} in its `defaults:`, but there is no such {group}"
    entry = near if group == "recipe" else f"override /{group}: {near}"
    raise ConfigError(Problem(display_path(where), reason, f"write `- {entry}`; there are {', '.join(options)}"))


def _merged(tree: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Returns a tree with changes, merged as OmegaConf merges mappings."""
    merged = dict(tree)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _contents(chosen: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Returns the contents of the chosen files, by group."""
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


def _as_option(content: dict[str, object], chosen: Collection[str]) -> dict[str, object]:
    """Converts the contents of a recipe file to an option of the recipe group, by completing its `defaults:`
    list.

    A complete section (in a run's config.yaml or a copied recipe) replaces the file of its group. If the
    command line chooses an option of this group, a section with a name is removed instead.

    Args:
        content: the contents of the file, changed in place.
        chosen: the groups for which the command line chooses an option.
    """
    entries = _entries(content)
    overridden = {str(key) for entry in entries if isinstance(entry, Mapping) for key in entry}
    for group, name in _NAMED_BY.items():
        section = content.get(group)
        if not isinstance(section, Mapping) or name not in section:
            continue
        if group in chosen:
            del content[group]
        elif _is_complete(group, section) and f"override /{group}" not in overridden:
            entries.append({f"override /{group}": None})
    return {**content, "defaults": entries}


def _is_complete(group: str, section: Mapping[str, object]) -> bool:
    """Returns True if a section has all settings without a default, so that it needs no file of its group."""
    optimizer = str(section.get("name"))
    for name in sections()[group]:
        setting = settings()[f"{group}.{name}"]
        applies = not setting.optimizers or optimizer in setting.optimizers
        if setting.required and applies and name not in section:
            return False
    return True


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

        OmegaConf.clear_resolver("oc.env")  # no setting may have a value of the environment
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
