"""Locates recipes and the options of other groups in their folders, and writes recipe files."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, closest, collect_problems, refuse
from canzona_cli.core.reading import display_path, expanded, read_yaml

if TYPE_CHECKING:
    from canzona_cli.config.schema import RunConfig

RECIPES_DIR_VARIABLE = "CANZONA_RECIPES_DIR"
GROUPS = ("recipe", "model", "optimizer", "engine", "cluster", "data")
_FAMILIES = ("qwen3-", "llama3-")
"""The prefixes that users may omit from names. The first prefix that gives an existing name is used."""
FROM_FILES = ("recipe", "cluster")
"""The groups whose option may also be the path of a file."""
REMOVED_OPTIMIZERS: Final[Mapping[str, str]] = {
    "kl-shampoo": "use soap or shampoo, or optimizer=custom with emerging_optimizers.soap:REKLS (recipes/README.md)",
    "soap-muon": "use soap or muon, or optimizer=custom with your own class (recipes/README.md)",
}
"""The fix for each optimizer that canzona no longer has."""

WRITTEN: Final = "config.yaml"
"""The file in a run directory that records the settings of the run, with all automatic choices filled in."""


def installed_file(folder: str, name: str) -> Path:
    """Returns the path of a file that is installed with canzona: inside the package in a wheel, next to the
    package in an editable install.

    Raises:
        EnvironmentProblem: the installation lacks the file.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / f"_{folder}", package.parent / folder):
        if (place / name).is_file():
            return place / name
    reason = "this installation of canzona lacks the file"
    fix = "reinstall it: pip install --force-reinstall --no-deps FOLDER, with the folder of its pyproject.toml"
    raise EnvironmentProblem(Problem(folder, reason, fix, value=str(package / f"_{folder}" / name)))


@cache
def builtin_recipes_dir() -> Path:
    """Returns the folder of built-in recipes."""
    return installed_file("recipes", "config.yaml").parent


def user_recipes_dirs(recipes_dirs: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Returns the user's recipe folders as absolute paths: first those of `--recipes-dir`, then those in
    $CANZONA_RECIPES_DIR.

    Raises:
        ConfigError: folders do not exist; all of them are reported.
    """
    from_environment = [part for part in os.environ.get(RECIPES_DIR_VARIABLE, "").split(os.pathsep) if part]
    folders = [("--recipes-dir", path) for path in recipes_dirs]
    folders += [(RECIPES_DIR_VARIABLE, Path(part)) for part in from_environment]
    fix = f"give a folder of recipes, or a folder with some of {', '.join(f'{group}/' for group in GROUPS)}"
    refuse(
        Problem(origin, "there is no such folder", fix, value=str(path))
        for origin, path in folders
        if not expanded(path).is_dir()
    )
    return tuple(dict.fromkeys(expanded(path).resolve() for _, path in folders))


def group_options(group: str, dirs: Sequence[Path]) -> dict[str, Path]:
    """Returns the files of a group's options, sorted by name. If several folders have an option with the same
    name, the first folder takes precedence. A folder without group folders is itself a folder of recipes."""
    options: dict[str, Path] = {}
    for folder in dirs:
        flat = group == "recipe" and not any((folder / name).is_dir() for name in GROUPS)
        for file in sorted((folder if flat else folder / group).glob("*.yaml")):
            options.setdefault(file.stem, file)
    return dict(sorted(options.items()))


def _named_option(name: str, options: Mapping[str, Path]) -> Path | None:
    """Returns the file of an option; None if there is no such option. `name` may omit the prefix of the model
    family (`8b`, `tiny`, `405b`), and its case is ignored."""
    lowered = {option.lower(): path for option, path in options.items()}
    candidates = [f"{family}{name.lower()}" for family in ("", *_FAMILIES)]
    return next((lowered[candidate] for candidate in candidates if candidate in lowered), None)


def is_file_name(choice: str) -> bool:
    """Returns True if an option is the path of a file rather than a name."""
    return choice.endswith((".yaml", ".yml"))


def find_option(group: str, choice: str, dirs: Sequence[Path]) -> Path:
    """Returns the file of the group's option that `choice` names. For a recipe or cluster, `choice` may also be
    the path of the file.

    Raises:
        ConfigError: there is no such option or file (the error suggests the closest name), or the file is not
            a YAML mapping, names code to run, or refers to environment variables.
    """
    if group not in FROM_FILES or not is_file_name(choice):
        option = _named_option(choice, group_options(group, dirs))
        if option is None:
            raise ConfigError(_unknown_option(group, choice, dirs))
        return option
    path = expanded(choice)
    if not path.is_file():
        raise ConfigError(_no_such_file(group, choice, path, dirs))
    from canzona_cli.config.secrets import content_problems  # imports the schema, which help and completion do not need

    refuse(content_problems(read_yaml(path), display_path(path), "" if group == "recipe" else group))
    return path.resolve()


def find_options(chosen: Mapping[str, str], dirs: Sequence[Path], problems: list[Problem]) -> dict[str, Path]:
    """Returns the files of the chosen options by group.

    Adds a problem to `problems` for each option or file that cannot be used, and if there is no recipe. A
    misspelt recipe is replaced by the closest one, so that the other values can still be checked.
    """
    files: dict[str, Path] = {}
    for group, choice in chosen.items():
        with collect_problems(problems):
            files[group] = find_option(group, choice, dirs)
    recipes = group_options("recipe", dirs)
    if "recipe" in chosen and "recipe" not in files:
        nearest = closest_option(chosen["recipe"], recipes)
        files |= {"recipe": recipes[nearest]} if nearest is not None else {}
    reported = any(problem.key == "recipe" or problem.fix.startswith("write recipe=") for problem in problems)
    if "recipe" not in chosen and not reported:
        fix = f"write recipe=NAME: {', '.join(recipes)}"
        problems.append(Problem("recipe", "no recipe is given", fix))
    return files


def _unknown_option(group: str, choice: str, dirs: Sequence[Path]) -> Problem:
    """Returns a problem for an unknown option. The fix names the file that `choice` seems to mean; if there is
    none, it suggests the closest option and lists all options."""
    options = group_options(group, dirs)
    if group == "optimizer" and choice in REMOVED_OPTIMIZERS:
        return Problem(group, "no longer exists", REMOVED_OPTIMIZERS[choice], value=choice)
    if group == "recipe" and (expanded(choice) / WRITTEN).is_file():
        return Problem(group, "is a folder", f"write recipe={Path(choice) / WRITTEN}", value=choice)
    for file in (f"{choice}.yaml", f"{choice}.yml") if group in FROM_FILES else ():
        if expanded(file).is_file():
            reason = f"there is no {group} of this name, but there is a file {file}"
            return Problem(group, reason, f"write {group}={display_path(Path(file))}", value=choice)
    hint = closest_option(choice, options)
    available = f"available: {', '.join(options)}"
    fix = f"did you mean {hint}? ({available})" if hint else available
    return Problem(group, f"there is no such {group}", fix, value=choice)


def shadows_builtin(group: str, file: Path) -> bool:
    """Returns True if a file has the name of one of the group's built-in options, but is not that option."""
    option = builtin_recipes_dir() / group / file.name
    return option.is_file() and file != option


def closest_option(choice: str, options: Mapping[str, Path]) -> str | None:
    """Returns the option whose name is most similar to a misspelt or shortened name; None if no name is
    similar.

    The numbers in the name are assumed to be correct: h100 may mean h100-80g, but never h200.
    """
    short = {
        name.removeprefix(family): name for family in reversed(_FAMILIES) for name in options if name.startswith(family)
    }
    longer = [name for name in options if choice and name.startswith(f"{choice.lower()}-")]
    if len(longer) == 1:
        return longer[0]
    numbers = re.findall(r"\d+", choice)
    names = [name for name in (*options, *short) if not numbers or re.findall(r"\d+", name)[-len(numbers) :] == numbers]
    hint = closest(choice, names)
    return None if hint is None else short.get(hint, hint)


def _no_such_file(group: str, choice: str, path: Path, dirs: Sequence[Path]) -> Problem:
    siblings = [file.name for file in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    hint = closest(path.name, siblings)
    if hint is not None:
        fix = f"did you mean {group}={path.parent / hint}?"
    elif _named_option(path.stem, group_options(group, dirs)) is not None:
        fix = f"the {'recipe' if group == 'recipe' else 'profile'} with this name is {group}={path.stem}"
    elif group == "recipe":
        fix = "give the path of a recipe file, or a name that `canzona recipes list` shows"
    else:
        fix = f"`canzona calibrate` writes one; there are {', '.join(group_options(group, dirs))}"
    return Problem(group, "there is no such file", fix, value=choice)


_WIDTH = 120


def recipe_text(config: "RunConfig", *, origin: str) -> str:
    """Returns the text of a self-contained recipe file, in which a comment explains each setting.

    Args:
        config: the configuration to write; null settings stay null.
        origin: the recipe that the file is a copy of.
    """
    import yaml

    from canzona_cli.config.settings import settings  # help and completion do not need it

    lines = [
        "# @package _global_",
        f"# Copied from the recipe {origin}. It is complete: it depends on no other file.",
        "# Settings that are null are chosen when a run starts.",
    ]
    explained = {key: setting.meaning for key, setting in settings().items()}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            lines += ["", f"{name}:"]
            for inner_key, inner in value.items():
                lines += _setting_lines(inner_key, inner, explained.get(f"{name}.{inner_key}", ""), indent="  ")
        else:
            lines += _setting_lines(name, value, explained.get(name, ""), indent="")
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text) == json.loads(json.dumps(asdict(config)))  # JSON turns tuples into lists, as YAML does
    return text


def short_recipe_text(name: str, recipe: str, groups: Mapping[str, str], values: Mapping[str, object]) -> str:
    """Returns the text of a recipe file that builds on another recipe and contains only the differences.

    Args:
        name: the name of the new recipe.
        recipe: the name of the recipe that it builds on.
        groups: the options chosen for the other groups.
        values: the changed settings by dotted key.
    """
    import yaml

    from canzona_cli.config.settings import tree_of

    lines = [
        "# @package _global_",
        f"# The recipe {recipe} with changes. `canzona recipes show` prints all settings.",
        "defaults:",
        f"  - {recipe}",
        *(f"  - override /{group}: {option}" for group, option in groups.items()),
        "",
        yaml.safe_dump({"name": name, **tree_of(values)}, sort_keys=False, allow_unicode=True).rstrip(),
    ]
    return "\n".join(lines) + "\n"


def write_recipe(destination: Path, text: str, *, force: bool, what: str = "a recipe") -> None:
    """Writes a recipe or profile.

    Args:
        force: True replaces an existing file.
        what: the kind of file in messages: `a recipe`, `a profile`.

    Raises:
        ConfigError: `check_destination` refuses the path, or the file cannot be written.
    """
    check_destination(destination, force=force, what=what)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        fix = "choose a writable folder"
        raise ConfigError(Problem("DEST", reason, fix, value=str(destination))) from error


def check_destination(destination: Path, *, force: bool, what: str = "a recipe", key: str = "DEST") -> None:
    """Checks that `write_recipe` would accept a path. Call this first if computing the text takes long.

    Args:
        force: True accepts an existing file.
        what: the kind of file in messages: `a recipe`, `a profile`.
        key: the option or argument with the path, for messages.

    Raises:
        ConfigError: the name does not end in .yaml or .yml, the path is a folder, or the file exists.
    """
    reason = fix = ""
    if destination.suffix not in (".yaml", ".yml"):
        reason, fix = f"the name of {what} file must end in .yaml", f"write {destination.with_suffix('.yaml')}"
        if "=" in str(destination):
            fix = f"write the file before the settings: mine.yaml {destination}"
    elif destination.is_dir():
        reason, fix = "is a folder", "give the path of a file in it"
    elif destination.exists() and not force:
        reason, fix = "already exists", "choose another name, or replace it with --force"
    if reason:
        raise ConfigError(Problem(key, reason, fix, value=display_path(destination)))


def _setting_lines(name: str, value: object, meaning: str, *, indent: str) -> list[str]:
    import yaml

    if isinstance(value, list | tuple | dict):  # on one line
        line = f"{indent}{name}: " + yaml.safe_dump(value, width=10_000, default_flow_style=True).rstrip("\n")
    else:
        line = indent + yaml.safe_dump({name: value}, width=10_000).rstrip("\n")
    if not meaning:
        return [line]
    if len(line) + len(meaning) + 4 <= _WIDTH:
        return [f"{line}  # {meaning}"]
    return [f"{indent}# {meaning}", line]
