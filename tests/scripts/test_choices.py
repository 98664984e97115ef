"""The table of choices, on two runs: a GPU plan and CPU ranks with a calibrated profile."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands.support import ran

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep
def test_every_choice_of_a_plan_is_counted_and_options_that_nobody_takes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    asked = ("--gpus", "8", "--sizes", "qwen3-0.6b", "--json", file)
    done = ran(sys.executable, "scripts/choices.py", *asked, cwd=ROOT)
    rows = {(row["profile"], row["optimizer"], row["run"]): row for row in json.loads(file.read_text())}
    h100 = rows["h100-80g", "muon", "0.6b 8"]["chosen"]
    (way,) = h100["gradients"]
    assert way in ("reduce", "ring"), "all buckets of eight ranks on one machine travel alike"
    assert sum(h100["weights"].values()) == h100["gradients"][way]
    assert h100["mode"] == {"hosted": 196}
    assert h100["launches"] == {"graph": 1}
    assert rows["h100-80g", "shampoo", "0.6b 8"]["chosen"]["roots"] == {"newton": 196}
    assert ("cpu-calibrated", "muon", "tiny 4") in rows
    plans = sum(bool(row["chosen"]) for row in rows.values())
    assert f"{plans} plans; 0 runs do not fit." in done.stdout
    *_, never = done.stdout.strip().splitlines()
    assert never.startswith("Chosen in no row: ")
    assert "products symmetric" in never
    assert f"gradients {way}" not in never
