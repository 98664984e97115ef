"""The README's figures that a command makes without training are what that command prints today."""

import re
import shlex
from pathlib import Path

from tests.cli.commands.support import canzona

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_has_the_plan_that_the_readme_shows() -> None:
    (demo,) = re.findall(r"^\t\$\(BIN\)/canzona train (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    printed = _printed(f"train {demo} --dry-run")
    assert re.findall(r"^plan +(.*)$", README, re.M) == re.findall(r"^plan +(.*)$", printed, re.M)


def _printed(command: str) -> str:
    done = canzona(*shlex.split(command), environment={"COLUMNS": "160"}, code=0)
    return done.stdout
