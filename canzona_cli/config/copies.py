"""A recipe of the user's own to start from: one file that says everything, each setting with its meaning."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from canzona_cli.config.recipes import shown
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import settings
from canzona_cli.errors import ConfigError, Problem

_WIDTH = 120


def recipe_text(config: RunConfig, *, origin: str, notes: Sequence[str] = ()) -> str:
    """The configuration as a recipe file that depends on no other file. Null settings are chosen at the start of a run.

    Args:
        config: what to write.
        origin: the recipe it was copied from.
        notes: more to say of it, a line each.
    """
    import yaml

    lines = [
        "# @package _global_",
        f"# Copied from the recipe {origin}. It is complete: it depends on no other file.",
        "# Settings that are null are chosen when a run starts.",
        *(f"# {note}" for note in notes),
    ]
    explained = {key: setting.meaning for key, setting in settings().items()}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            lines += ["", f"{name}:"]
            for own, inner in value.items():
                lines += _setting(own, inner, explained.get(f"{name}.{own}", ""), indent="  ")
        else:
            lines += _setting(name, value, explained.get(name, ""), indent="")
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text) == json.loads(json.dumps(asdict(config)))  # whose tuples are lists
    return text


def write_recipe(destination: Path, text: str, *, force: bool, what: str = "a recipe") -> None:
    """Writes the file. Raises ConfigError when it exists and `force` is off, or when it cannot be written."""
    check_destination(destination, force=force, what=what)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        fix = "choose a folder you may write to"
        raise ConfigError(Problem(key="DEST", value=str(destination), reason=reason, fix=fix)) from error


def check_destination(destination: Path, *, force: bool, what: str = "a recipe", key: str = "DEST") -> None:
    """Raises ConfigError for a file that `write_recipe` would not write, before it costs anything to have its text.

    Args:
        key: where the user named it.
    """
    reason = fix = ""
    if destination.suffix not in (".yaml", ".yml"):
        reason, fix = f"{what} file ends in .yaml", f"name it {destination.with_suffix('.yaml')}"
    elif destination.is_dir():
        reason, fix = "is a folder", "name a file in it"
    elif destination.exists() and not force:
        reason, fix = "already exists", "choose another name, or replace it with --force"
    if reason:
        raise ConfigError(Problem(key=key, value=shown(destination), reason=reason, fix=fix))


def _setting(name: str, value: object, meaning: str, *, indent: str) -> list[str]:
    import yaml

    if isinstance(value, list | tuple | dict):  # a table stays on one line
        line = f"{indent}{name}: " + yaml.safe_dump(value, width=10_000, default_flow_style=True).rstrip("\n")
    else:
        line = indent + yaml.safe_dump({name: value}, width=10_000).rstrip("\n")
    if not meaning:
        return [line]
    if len(line) + len(meaning) + 4 <= _WIDTH:
        return [f"{line}  # {meaning}"]
    return [f"{indent}# {meaning}", line]
