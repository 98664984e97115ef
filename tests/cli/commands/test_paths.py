"""Paths below the home directory of a user who does not exist, wherever a path can be given."""

from pathlib import Path

import pytest

from tests.cli.commands.support import canzona

NOBODY = "~nosuchuser/x"
COMMANDS = {
    "recipe": ("train", "--dry-run", f"recipe={NOBODY}.yaml"),
    "cluster": ("train", "--dry-run", "recipe=tiny", f"cluster={NOBODY}.yaml"),
    "recipes": ("recipes", "list", "--recipes-dir", NOBODY),
    "name of a recipe": ("train", "--dry-run", f"recipe={NOBODY}"),
    "run": ("train", "recipe=tiny", f"run.dir={NOBODY}", "--dry-run", "run.nothing=1"),
    "plan": ("train", "recipe=tiny", f"engine.plan={NOBODY}", "--dry-run"),
    "data": ("train", "recipe=tiny", "data=prepared", f"data.path={NOBODY}", "--dry-run"),
    "blend": ("train", "recipe=tiny", "data=prepared", f"data.blend={{{NOBODY}:1,{NOBODY}:2}}", "--dry-run"),
    "tokenizer": ("data", "prepare", "stdlib", "--output", "d", "--tokenizer", NOBODY),
    "input": ("data", "prepare", NOBODY, "--output", "d", "--tokenizer", "byte"),
    "shown data": ("data", "show", NOBODY),
    "weights": ("train", f"init={NOBODY}", "recipe=tiny", "--dry-run"),
    "weights without a recipe": ("train", f"init={NOBODY}", "--dry-run"),
    "checkpoint": ("checkpoint", "verify", NOBODY),
    "hugging face": ("recipes", "from-hf", NOBODY, "x.yaml"),
    "resume": ("resume", NOBODY),
    "log": ("plan", "--from-megatron", NOBODY),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_home_of_nobody_is_a_path_that_does_not_exist(command: tuple[str, ...], tmp_path: Path) -> None:
    result = canzona(*command, cwd=tmp_path)
    assert "This is a bug" not in result.stderr
    assert result.returncode in (2, 3, 5)
    assert "→" in result.stderr


def test_a_home_of_nobody_is_a_directory_of_that_name_where_something_is_written(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 20)
    prepare = ("data", "prepare", "text.txt", "--output", NOBODY, "--tokenizer", "byte")
    canzona(*prepare, cwd=tmp_path, environment={"CANZONA_CACHE": NOBODY}, code=0)
