"""Where recipes are looked for."""

import os
from collections.abc import Sequence
from pathlib import Path

from canzona_cli.errors import ConfigError, Problem

RECIPES_DIR_VARIABLE = "CANZONA_RECIPES_DIR"
GROUPS = ("recipe", "model", "optimizer", "engine", "cluster", "data")


def builtin_recipes_dir() -> Path:
    """The recipes that came with canzona: inside the package in a wheel, beside it in an editable install."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_recipes", package.parent / "recipes"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        Problem(
            key="recipes",
            value=str(package / "_recipes"),
            reason="this installation of canzona has no recipes",
            fix="reinstall it: pip install --force-reinstall --no-deps canzona",
        )
    )


def user_recipes_dirs(recipes_dirs: Sequence[Path] = ()) -> tuple[Path, ...]:
    """The user's own recipe folders as absolute paths: `--recipes-dir` first, then $CANZONA_RECIPES_DIR.

    Raises ConfigError naming every folder that is not there.
    """
    from_environment = [part for part in os.environ.get(RECIPES_DIR_VARIABLE, "").split(os.pathsep) if part]
    named = [("--recipes-dir", path) for path in recipes_dirs]
    named += [(RECIPES_DIR_VARIABLE, Path(part)) for part in from_environment]
    problems = [
        Problem(
            key=origin,
            value=str(path),
            reason="there is no such folder",
            fix=f"give a folder that holds one or more of {', '.join(f'{group}/' for group in GROUPS)}",
        )
        for origin, path in named
        if not path.expanduser().is_dir()
    ]
    if problems:
        raise ConfigError(*problems)
    return tuple(dict.fromkeys(path.expanduser().resolve() for _, path in named))


def group_options(group: str, dirs: Sequence[Path]) -> dict[str, Path]:
    """Options of one group by name, each with the file that provides it; the first folder wins. Sorted by name."""
    found: dict[str, Path] = {}
    for folder in dirs:
        for file in sorted((folder / group).glob("*.yaml")):
            found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def full_name(option: str, options: Sequence[str] | dict[str, Path]) -> str | None:
    """The option that a user means by `option`: itself, or with `qwen3-` in front (`8b`, `tiny`); case is free."""
    lowered = {name.lower(): name for name in options}
    for candidate in (option.lower(), f"qwen3-{option.lower()}"):
        if candidate in lowered:
            return lowered[candidate]
    return None


def shown(path: Path) -> str:
    """A path as the user would write it: relative to here when it lies below, else absolute."""
    try:
        return f"./{path.resolve().relative_to(Path.cwd())}"
    except ValueError:
        return str(path)
