"""No layout, plan, strategy or checkpoint between two layouts changes the model: see `tests.dist.fuzz`.

`FUZZED=17:18 pytest -m sweep tests/dist/test_fuzz.py` runs one seed; `make fuzz` runs many.
"""

import os
from pathlib import Path

import pytest

from tests.dist.fuzz import draw, judge

FIRST, END = map(int, os.environ.get("FUZZED", "0:20").split(":"))
BATCH = 20
"""The number of seeds that the same ranks run one after another."""


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(FIRST, END, BATCH))
def test_random_runs_end_where_one_rank_does(first: int, tmp_path: Path) -> None:
    judged = judge([draw(seed) for seed in range(first, min(first + BATCH, END))], tmp_path)
    wrong = ["\n  ".join((str(one.case), *one.wrong)) for one in judged if one.wrong]
    assert not wrong, "\n".join(wrong)
