"""The paper's claims beside ours, on a small cell."""

import sys
from pathlib import Path

import paper
import pytest

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.planner.make import settings
from tests.cli.commands.support import ran

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


def test_every_claim_has_ours_beside_it_at_every_model_point(printed: str) -> None:
    claims = [row for row in _tables(printed)["Claims"] if row[0] != "claim"]
    assert [row[2] for row in claims] == [*["1.57x"] * 4, *["5.8x"] * 4, *["over 30x"] * 2]
    assert all(cell == "-" or float(cell.rstrip("x!")) > 0 for row in claims for cell in row[3:])


def test_strategies_and_both_curves_are_there_and_what_is_not_known_is_said(printed: str) -> None:
    tables = _tables(printed)
    points = [rows for heading, rows in tables.items() if "tokens a step" in heading]
    assert [len(rows) - 1 for rows in points] == [7] * 4
    for heading, values in (("alpha on 16 GPUs", 5), ("C_max on 16 GPUs", 5), ("C_max on 4 GPUs", 5)):
        (rows,) = (rows for name, rows in tables.items() if name.startswith(heading))
        assert len(rows) - 1 == values
    assert "not at hand" in printed


def test_the_authors_script_is_a_preset_with_a_micro_batch_that_its_batch_allows() -> None:
    """Checks the preset. On DP 32, a micro-batch of 8 would need a batch of 256."""
    for data_ranks, size in ((32, 4), (16, 8), (8, 8)):
        for splitting, words in (("split", "gate and up split"), ("fused", "nothing split")):
            overrides = paper.points_of(data_ranks)[f"`train.sh`, {words}"]
            config, layout = paper.resolved("recipe=qwen3-32b", f"gpus={8 * data_ranks}", "parallel.tp=8", *overrides)
            assert (layout.micro_batch_size, layout.global_batch_size, layout.recompute) == (size, 128, "none")
            assert (config.train.seq_length, config.engine.splitting) == (2048, splitting)
            assert bucket_elements(config, layout) == 400_000_000
            assert settings(config).capacity(config.exchange_bytes) == 400 * 1024 * 1024


def test_alpha_balances_the_papers_engine_and_small_groups_are_more(printed: str) -> None:
    tables = _tables(printed)
    (alphas,) = (rows for name, rows in tables.items() if name.startswith("alpha"))
    balances = [float(row[3]) for row in alphas[1:]]
    assert balances[-1] == min(balances)
    for name, rows in tables.items():
        if name.startswith("C_max"):
            groups = [int(row[5]) for row in rows[1:] if row[0] != "null"]
            assert groups == sorted(groups, reverse=True)
            assert groups[0] > groups[-1]
