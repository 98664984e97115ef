"""The user's command that gets the outcome of a run, and can change nothing about it."""

import json
import sys
from pathlib import Path

import pytest

from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.processes import ON_END, alert
from canzona_cli.records.files import read_json
from tests.cli.commands.support import canzona
from tests.launch.test_restarts import TYPED, stand_in

__all__ = ["stand_in"]  # the fixture

FAILED = Outcome(status="failed", exit_code=71, step=7, message="rank 1 hung", rank=1, machine="n2")


def said_about(command: str, limit_s: float = 30.0) -> list[str]:
    """Returns what the user reads after a run with this command."""
    said: list[str] = []
    alert(FAILED, Path("runs/r"), say=said.append, limit_s=limit_s, environment={ON_END: command})
    return said


def test_the_command_gets_the_outcome_on_its_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "with spaces"
    assert said_about(f"tee '{file}'") == []
    told = json.loads(file.read_text())
    expected = {"status": "failed", "exit_code": 71, "step": 7, "message": "rank 1 hung", "machine": "n2"}
    assert {key: told[key] for key in expected} == expected
    assert told["run_dir"] == "runs/r"


def test_words_are_not_for_a_shell(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    said_about(f"echo $(touch {marker}) ; touch {marker}")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("false", "ended with code 1"),
        ("/no/such/program", "cannot be executed (No such file or directory)"),
        ("echo 'open", "cannot be executed (No closing quotation)"),
        ("sleep 1000", "took longer than 0 s and was stopped"),
    ],
)
def test_what_goes_wrong_is_only_said_and_without_the_words(command: str, expected: str) -> None:
    limit_s = 0.2 if command.startswith("sleep") else 30.0
    said = said_about(command, limit_s)
    assert said == [f"warning: the command in {ON_END} {expected}; the run's exit code stays 71"]


@pytest.mark.parametrize(("ends", "code"), [("done", 0), ("crash@3,done", 70)])
def test_a_run_calls_it_once_and_keeps_its_exit_code(tmp_path: Path, stand_in: None, ends: str, code: int) -> None:
    hook, told = tmp_path / "hook.py", tmp_path / "told"
    hook.write_text(f"import sys\nopen({str(told)!r}, 'a').write(sys.stdin.read())\nsys.exit(9)\n")
    environment = {"STAND_IN": ends, ON_END: f"{sys.executable} {hook}"}
    done = canzona("train", *TYPED, f"run.dir={tmp_path}/run", environment=environment, code=code)
    assert f"the command in {ON_END} ended with code 9; the run's exit code stays {code}" in done.stderr
    (line,) = told.read_text().splitlines()
    assert json.loads(line) == {**(read_json(tmp_path / "run" / "result.json") or {}), "run_dir": f"{tmp_path}/run"}


def test_a_run_that_cannot_start_calls_it_too(tmp_path: Path, stand_in: None) -> None:
    environment = {"STAND_IN": "done", ON_END: f"tee {tmp_path}/told"}
    typed = ("train", *TYPED, f"run.dir={tmp_path}/run", "checkpoint.resume=step-00000030")
    code = canzona(*typed, environment=environment).returncode
    told = json.loads((tmp_path / "told").read_text())
    assert (told["status"], told["exit_code"]) == ("failed", code)
    assert told["message"].startswith("checkpoint.resume: ")


def test_a_dry_run_does_not_call_it(tmp_path: Path) -> None:
    environment = {ON_END: f"tee {tmp_path}/told"}
    canzona("train", *TYPED, f"run.dir={tmp_path}/run", "--dry-run", environment=environment, code=0)
    assert not (tmp_path / "told").exists()
