"""`--json`: one object on standard output, with the version of its form, whatever is said besides."""

import json
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from tests.cli.commands.support import canzona

TINY = ("recipe=tiny", "gpus=3")  # a batch of 18 instead of 16, which is said on standard error


def printed(*arguments: str, cwd: Path) -> dict[str, object]:
    done = canzona(*arguments, "--json", cwd=cwd, code=0)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    assert isinstance(found["version"], int)
    assert ("18 sequences instead of 16" in done.stderr) == (arguments[0] == "train")
    return found


@pytest.mark.parametrize(
    "arguments",
    [("recipes", "list"), ("plan", "--dry-run", *TINY), ("slurm", *TINY)],
)
def test_it_is_an_object_with_a_version(arguments: tuple[str, ...], tmp_path: Path) -> None:
    printed(*arguments, cwd=tmp_path)


def test_a_dry_run_has_the_run_and_its_command(tmp_path: Path) -> None:
    dry = printed("train", "--dry-run", *TINY, cwd=tmp_path)
    assert dry["tokens_per_step"] == 18 * 256
    assert isinstance(dry["command"], list)
    assert "--nproc-per-node" in dry["command"]
    shown = printed("recipes", "show", "tiny", "gpus=3", cwd=tmp_path)["settings"]
    assert isinstance(shown, dict)
    assert shown["train"]["steps"] == compose_run(list(TINY)).config.train.steps


def test_a_refused_run_is_told_in_json(tmp_path: Path) -> None:
    done = canzona("train", "--dry-run", "recipe=tiny", "train.stesp=3", "gpus=0", "--json", cwd=tmp_path, code=2)
    found = json.loads(done.stdout)
    assert found["exit_code"] == 2
    assert [problem["key"] for problem in found["problems"]] == ["train.stesp", "gpus"]
    assert all(problem["fix"] for problem in found["problems"])


def test_a_run_itself_prints_no_json(tmp_path: Path) -> None:
    done = canzona("train", *TINY, "--json", cwd=tmp_path, code=2)
    assert "--dry-run" in done.stderr
