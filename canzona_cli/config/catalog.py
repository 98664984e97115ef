"""What recipes there are, read from their YAML alone: no Hydra, so that listing them is instant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.config.paths import builtin_recipes_dir, group_options, user_recipes_dirs


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """One line of `canzona recipes list`."""

    name: str
    path: Path
    builtin: bool
    shadows: bool
    """A user's recipe that hides a built-in one of its name."""
    parameters: int | None
    """Of the whole model; None when the recipe leaves the shape open."""
    gpus: int | None
    cluster: str
    optimizer: str
    description: str
    error: str = ""
    """Why the file could not be read; the other fields then say little."""


def list_recipes(recipes_dirs: Sequence[Path] = ()) -> list[RecipeInfo]:
    """The user's own recipes, then the built-in ones by size. Raises ConfigError for a folder that is not there."""
    builtin = builtin_recipes_dir()
    dirs = (*user_recipes_dirs(recipes_dirs), builtin)
    builtin_names = group_options("recipe", [builtin])
    found = []
    for name, path in group_options("recipe", dirs).items():
        ours = path.parent.parent == builtin
        found.append(_read(name, path, dirs, builtin=ours, shadows=not ours and name in builtin_names))
    return sorted(found, key=lambda info: (info.builtin, info.parameters or 0, info.name))


def _read(name: str, path: Path, dirs: Sequence[Path], *, builtin: bool, shadows: bool) -> RecipeInfo:
    import yaml

    try:
        tree = _tree("recipe", name, path, dirs, seen=())
        parameters, error = _parameters(tree.get("model")), ""
    except (OSError, ValueError, yaml.YAMLError) as problem:
        tree, parameters, error = {}, None, " ".join(str(problem).split())
    gpus = tree.get("gpus")
    return RecipeInfo(
        name=name,
        path=path,
        builtin=builtin,
        shadows=shadows,
        parameters=parameters,
        gpus=gpus if isinstance(gpus, int) else None,
        cluster=_named(tree.get("cluster")),
        optimizer=_named(tree.get("optimizer")),
        description=str(tree.get("description", "")),
        error=error,
    )


def _tree(group: str, name: str, path: Path, dirs: Sequence[Path], seen: tuple[Path, ...]) -> dict[str, object]:
    """One recipe with the groups and recipes its defaults list names: what Hydra would compose, short of references."""
    import yaml

    if path in seen:
        raise ValueError(f"{path} builds on itself")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings")
    defaults = content.pop("defaults", None) or []
    tree: dict[str, object] = {}
    for entry in defaults if isinstance(defaults, list) else []:
        if isinstance(entry, str) and entry != "_self_":
            target_group, option = group, entry
        elif isinstance(entry, Mapping) and len(entry) == 1:
            ((key, value),) = entry.items()
            target_group, option = str(key).removeprefix("override").strip().strip("/"), str(value)
        else:
            continue
        file = group_options(target_group, dirs).get(option)
        if file is not None:
            below = _tree(target_group, option, file, dirs, (*seen, path))
            _merge(tree, below if target_group == group else {target_group: below})
    _merge(tree, content)
    return tree


def _merge(tree: dict[str, object], above: Mapping[str, object]) -> None:
    for key, value in above.items():
        own = tree.get(key)
        if isinstance(own, dict) and isinstance(value, Mapping) and not _replaces(own, value):
            _merge(own, value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _replaces(own: Mapping[str, object], value: Mapping[str, object]) -> bool:
    """Another option of the same group stands in place of the first one; adjustments carry no name."""
    return "name" in own and "name" in value and own["name"] != value["name"]


def _parameters(model: object) -> int | None:
    from canzona_cli.config.schema import ModelConfig
    from canzona_cli.model.qwen3 import parameter_count

    if not isinstance(model, Mapping):
        return None
    shape = {key: value for key, value in model.items() if key in ModelConfig.__dataclass_fields__}
    try:
        return parameter_count(ModelConfig(**shape)).total
    except TypeError:
        return None


def _named(section: object) -> str:
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else ""
