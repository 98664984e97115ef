"""The paper's claims beside ours, on a small cell."""

import sys
from pathlib import Path

import pytest

from tests.commands.support import ran

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).parents[2]


def _tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by the heading above it."""
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            found[heading] = []
        elif line.startswith("| ") and not line.startswith("| ---"):
            found[heading].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.fixture(scope="module")
def printed() -> str:
    asked = ("--recipe", "qwen3-0.6b", "--gpus", "16", "--tp", "2")
    return ran(sys.executable, "scripts/paper.py", *asked, cwd=ROOT).stdout


def test_every_claim_has_ours_beside_it_at_both_model_points(printed: str) -> None:
    claims = [row for row in _tables(printed)["Claims"] if row[0] != "claim"]
    assert [row[2] for row in claims] == ["1.57x", "1.57x", "5.8x", "5.8x", "over 30x", "over 30x"]
    assert all(cell == "-" or float(cell.rstrip("x!")) > 0 for row in claims for cell in row[3:])


def test_strategies_and_both_curves_are_there_and_what_is_not_known_is_said(printed: str) -> None:
    tables = _tables(printed)
    points = [rows for heading, rows in tables.items() if "tokens a step" in heading]
    assert [len(rows) - 1 for rows in points] == [7, 7]
    for heading, values in (("alpha on 16 GPUs", 5), ("C_max on 16 GPUs", 5), ("C_max on 4 GPUs", 5)):
        (rows,) = (rows for name, rows in tables.items() if name.startswith(heading))
        assert len(rows) - 1 == 2 * values, "the paper's engine and canzona"
    assert "were not at hand" in printed
    assert "ours are simulated" in printed


def test_alpha_balances_the_papers_engine_and_small_groups_are_more(printed: str) -> None:
    tables = _tables(printed)
    (alphas,) = (rows for name, rows in tables.items() if name.startswith("alpha"))
    balances = [float(row[4]) for row in alphas if row[1] == "`paper`"]
    assert balances[-1] == min(balances)
    for name, rows in tables.items():
        if name.startswith("C_max"):
            groups = [int(row[6]) for row in rows if row[1] == "`paper`" and row[0] != "null"]
            assert groups == sorted(groups, reverse=True)
            assert groups[0] > groups[-1]
