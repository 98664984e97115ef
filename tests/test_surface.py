"""The surface is frozen: every setting, command and option is a line of `surface.txt`.

Adding or removing one changes that file, so that it is seen in review. An option exists only where a plan can choose it
or a user needs it. Write the file anew: `python -m tests.test_surface`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from canzona_cli.cli.app import COMMANDS, _load
from canzona_cli.config.settings import settings

SURFACE = Path(__file__).with_name("surface.txt")


def options(command: Any, name: str) -> Iterator[str]:
    yield name
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield f"{name} {'/'.join(sorted(parameter.opts))}"
    for below, inner in sorted(getattr(command, "commands", {}).items()):
        yield from options(inner, f"{name} {below}")


def surface() -> list[str]:
    commands = [line for name in COMMANDS for line in options(_load(name), name)]
    return [f"{len(settings())} settings", *settings(), "", f"{len(commands)} commands and options", *commands]


def test_settings_commands_and_options_are_those_of_the_file() -> None:
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines(), f"write it anew: python -m {__name__}"


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
    typer.echo(f"wrote {SURFACE}")
