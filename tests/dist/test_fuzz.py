"""No layout, plan, strategy or checkpoint between two layouts changes the model: see `tests.dist.fuzz`.

Any seed by hand: `python scripts/fuzz.py 17`; many: `make fuzz`.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.dist.fuzz import draw, judge

STARTS = (0, 20)
"""The first seed of each batch, whose cases share ranks; the last batch ends before seed 40."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "end"),
    pairwise((*STARTS, 40)),
)
def test_random_runs_end_where_one_rank_does(first: int, end: int, tmp_path: Path) -> None:
    judged = judge([draw(seed) for seed in range(first, end)], tmp_path)
    wrong = ["\n  ".join((str(one.case), *one.wrong)) for one in judged if one.wrong]
    assert not wrong, "\n".join(wrong)
