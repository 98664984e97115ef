"""Help, version and misuse: quick to import, clear, and with the right exit code."""

import pytest

from canzona_cli import __version__
from canzona_cli.app import COMMANDS
from tests.commands.support import canzona, imports_none_of

HEAVY = ("torch", "megatron", "numpy")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command_in_full(flag: str) -> None:
    result = canzona(flag)
    assert result.returncode == 0
    for name, meaning in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert meaning in result.stdout, "not cut off at 80 columns"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = canzona(command, "-h")
    assert result.returncode == 0, result.stderr
    assert f"Usage: canzona {command}" in result.stdout


def test_version() -> None:
    result = canzona("--version")
    assert (result.returncode, result.stdout) == (0, f"canzona {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "'train'"),
        (["recipes", "lst"], "'list'"),
        (["--versoin"], "--version"),
        (["validate", "--x"], "--x"),
    ],
)
def test_misuse_is_exit_code_2_with_a_hint(arguments: list[str], hint: str) -> None:
    result = canzona(*arguments)
    assert result.returncode == 2
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], (*HEAVY, "hydra", "omegaconf", "pydantic", "yaml", "rich.table", "canzona_cli.config.schema")),
        (["--version"], (*HEAVY, "hydra", "omegaconf", "pydantic", "yaml", "rich.table", "canzona_cli.config.schema")),
        (["recipes", "list"], HEAVY),
        (["recipes", "show", "tiny"], HEAVY),
        (["validate", "recipe=tiny"], HEAVY),
        (["slurm", "recipe=tiny"], HEAVY),
    ],
)
def test_imports_only_what_it_needs(arguments: list[str], unneeded: tuple[str, ...]) -> None:
    imports_none_of(unneeded, *arguments)
