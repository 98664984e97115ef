"""The README's figures that a command makes without training are what that command prints today."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.commands.support import canzona

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_has_the_plan_that_the_readme_shows() -> None:
    (demo,) = re.findall(r"^\t\$\(BIN\)/canzona train (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    printed = _printed(f"train {demo} --dry-run")
    assert re.findall(r"^plan +(.*)$", README, re.M) == re.findall(r"^plan +(.*)$", printed, re.M)


def test_the_simulated_table_has_the_rows_that_its_command_makes() -> None:
    (command,) = re.findall(r"^canzona (bench --simulate --gpus .*)$", README, re.M)
    simulated = json.loads(_printed(f"{command} --json"))
    rows = [_row(cell) for cell in simulated["cells"]]
    assert rows == re.findall(r"^\| \d+ \| TP \d+ × DP .*$", README, re.M)


def _printed(command: str) -> str:
    done = canzona(*shlex.split(command), environment={"COLUMNS": "160"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _row(cell: Mapping[str, dict[str, dict[str, float]]]) -> str:
    """A row as the README writes it: three digits of a time, two of a share."""
    strategies = [cell["strategies"][name] for name in ("canzona", "layerwise", "sc")]
    times = " | ".join(_time(strategy["optimizer_s"]) for strategy in strategies)
    shares = ", ".join(_share(100 * strategy["overhead_over_adamw"]) for strategy in strategies)
    layout = f"TP {cell['layout']['tp']} × DP {cell['layout']['dp']}"
    return f"| {cell['gpus']} | {layout} | {times} | {shares} |"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _share(percent: float) -> str:
    return f"{percent:+.1f}%" if abs(percent) < 10 else f"{percent:+.0f}%"
