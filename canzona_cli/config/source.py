"""Finding the recipe a user asks for, and laying out the folder Hydra composes from."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from canzona_cli.config.hints import closest
from canzona_cli.config.overrides import resolver_problem, target_problem, unknown_key
from canzona_cli.config.paths import GROUPS, builtin_recipes_dir, full_name, group_options, shown
from canzona_cli.config.settings import sections
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem

# What is given as a file takes this place in its group: a name of its own, so that a recipe may build on a built-in
# one it is named after.
FILE_OPTION = "from_file"
# The setting that tells a section which is whole from one that adjusts its group's file.
_TELLS_WHOLE = {"model": "name", "optimizer": "name", "engine": "strategy", "cluster": "name", "data": "source"}


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """Where a recipe comes from."""

    name: str
    path: Path
    is_file: bool
    """Whether the user named a file instead of an option of the recipe group."""


def find_recipe(asked: str, dirs: Sequence[Path]) -> RecipeSource:
    """The recipe of this name in the first folder that has it, or the file at this path.

    Raises ConfigError with the nearest name when there is none.
    """
    if is_file_name(asked):
        path = Path(asked).expanduser()
        if path.is_file():
            return RecipeSource(name=path.stem, path=path.resolve(), is_file=True)
        raise ConfigError(_no_such_file("recipe", asked, path, dirs))
    options = group_options("recipe", dirs)
    name = full_name(asked, options)
    if name is not None:
        return RecipeSource(name=name, path=options[name], is_file=False)
    raise ConfigError(unknown_option("recipe", asked, dirs))


def is_file_name(asked: str) -> bool:
    """Whether an option is the path of a file rather than a name."""
    return asked.endswith((".yaml", ".yml"))


def find_cluster(asked: str, dirs: Sequence[Path]) -> Path:
    """The cluster profile at this path, as `canzona calibrate` writes it or as the cluster group has them.

    Raises ConfigError when there is none, or it has settings that a profile has not.
    """
    path = Path(asked).expanduser()
    if not path.is_file():
        raise ConfigError(_no_such_file("cluster", asked, path, dirs))
    content = read_yaml(path)
    where = f" (in {shown(path)})"
    known = sections()["cluster"]
    strange = [unknown_key(f"cluster.{key}", value, where=where) for key, value in content.items() if key not in known]
    unsafe = list(content_problems(content, shown(path), "cluster"))
    if strange or unsafe:
        raise ConfigError(*(unsafe or strange))
    return path.resolve()


def nearest_recipe(asked: str, dirs: Sequence[Path]) -> RecipeSource | None:
    """The recipe a misspelt name was probably meant to be."""
    options = group_options("recipe", dirs)
    name = _closest_option(asked, options)
    return None if name is None else RecipeSource(name=name, path=options[name], is_file=False)


def unknown_option(group: str, asked: str, dirs: Sequence[Path]) -> Problem:
    """An option its group does not have: the nearest one, and all of them."""
    options = group_options(group, dirs)
    if group == "recipe" and Path(asked).expanduser().is_dir() and (Path(asked) / "config.yaml").is_file():
        return Problem(key=group, value=asked, reason="is a folder", fix=f"write recipe={Path(asked) / 'config.yaml'}")
    meant = _closest_option(asked, options)
    there = f"there are {', '.join(options)}"
    return Problem(
        key=group,
        value=asked,
        reason=f"there is no such {group}",
        fix=f"did you mean {meant}? ({there})" if meant else there,
    )


def read_yaml(path: Path) -> dict[str, object]:
    """One YAML file of settings. Raises ConfigError when it cannot be read or is no mapping."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(Problem(key=shown(path), reason=f"is not valid YAML: {_one_line(error)}")) from error
    except OSError as error:
        raise ConfigError(Problem(key=shown(path), reason=f"cannot be read: {error.strerror}")) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(Problem(key=shown(path), reason="holds no settings", fix="write `key: value` lines"))
    return {str(key): value for key, value in content.items()}


def content_problems(content: object, where: str, key: str = "") -> Iterator[Problem]:
    """`_target_` keys and resolvers anywhere in a YAML tree."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            below = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield target_problem(below, f"in {where}")
            else:
                yield from content_problems(value, where, below)
    elif isinstance(content, list):
        for value in content:
            yield from content_problems(value, where, key)
    elif isinstance(content, str) and (refused := resolver_problem(key, content)) is not None:
        yield refused


@contextmanager
def staged(
    source: RecipeSource, groups: Mapping[str, str], cluster_file: Path | None = None
) -> Iterator[tuple[Path, str]]:
    """A temporary folder with the primary configuration and, where they are files, recipe and cluster profile; and the
    recipe's option.

    Hydra looks into its primary folder first, then into the search path; nothing is written beside the user's file.

    Raises:
        EnvironmentProblem: there is no room for temporary files.
    """
    with ExitStack() as leaving:
        try:
            stage = Path(leaving.enter_context(TemporaryDirectory(prefix="canzona-")))
            option = _fill(stage, source, groups, cluster_file)
        except OSError as error:
            reason = f"no temporary file can be written: {error.strerror}"
            fix = "free some space, or TMPDIR=DIR with a folder on another disk"
            raise EnvironmentProblem(Problem(key="TMPDIR", reason=reason, fix=fix)) from None
        yield stage, option


def _fill(stage: Path, source: RecipeSource, groups: Mapping[str, str], cluster_file: Path | None) -> str:
    """Write what Hydra is to find; the recipe's option."""
    shutil.copyfile(builtin_recipes_dir() / "config.yaml", stage / "config.yaml")
    if cluster_file is not None:
        (stage / "cluster").mkdir()
        (stage / "cluster" / f"{FILE_OPTION}.yaml").write_text(_as_cluster(cluster_file), encoding="utf-8")
    if not source.is_file:
        return source.name
    (stage / "recipe").mkdir()
    (stage / "recipe" / f"{FILE_OPTION}.yaml").write_text(_as_recipe(source, groups), encoding="utf-8")
    return FILE_OPTION


def _as_recipe(source: RecipeSource, groups: Mapping[str, str]) -> str:
    """The text of a recipe file as an option of the recipe group.

    A section that is whole (a run's config.yaml, a copied recipe) stands for its group: the group's own file stays
    out, unless the command line asks for an option of that group, which then stands for the section.
    """
    import yaml

    content = read_yaml(source.path)
    content.setdefault("name", source.name)
    defaults = content.pop("defaults", [])
    entries: list[object] = list(defaults) if isinstance(defaults, list) else [defaults]
    for group, mark in _TELLS_WHOLE.items():
        section = content.get(group)
        if not isinstance(section, Mapping) or mark not in section:
            continue
        if group in groups:
            del content[group]
        elif not any(isinstance(entry, Mapping) and f"override /{group}" in entry for entry in entries):
            entries.append({f"override /{group}": None})
    if "_self_" not in entries:
        entries.append("_self_")
    text: str = yaml.safe_dump({"defaults": entries, **content}, sort_keys=False)
    return f"# @package _global_\n{text}"


def _as_cluster(path: Path) -> str:
    """The text of a profile as an option of the cluster group; one without a name has its file's."""
    import yaml

    content = read_yaml(path)
    content.setdefault("name", path.stem)
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text


def shadowed(files: Sequence[Path]) -> Iterator[tuple[str, str, Path]]:
    """Of the files a configuration is made of, (group, option, file) of those that hide a built-in one."""
    builtin = builtin_recipes_dir()
    for file in files:
        group = file.parent.name
        if group in GROUPS and file.parent.parent != builtin and (builtin / group / file.name).is_file():
            yield group, file.stem, file


def _closest_option(asked: str, options: Mapping[str, Path]) -> str | None:
    short = {name.removeprefix("qwen3-"): name for name in options}
    meant = closest(asked, [*options, *short])
    return None if meant is None else short.get(meant, meant)


def _no_such_file(group: str, asked: str, path: Path, dirs: Sequence[Path]) -> Problem:
    beside = [file.name for file in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    meant = closest(path.name, beside)
    if meant is not None:
        fix = f"did you mean {group}={path.parent / meant}?"
    elif full_name(path.stem, group_options(group, dirs)) is not None:
        fix = f"the built-in {'recipe' if group == 'recipe' else 'profile'} is {group}={path.stem}"
    elif group == "recipe":
        fix = "give the path of a recipe file, or a name that `canzona recipes list` shows"
    else:
        fix = f"`canzona calibrate` writes one; there are {', '.join(group_options(group, dirs))}"
    return Problem(key=group, value=asked, reason="there is no such file", fix=fix)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
