"""No layout, plan, strategy or checkpoint between two layouts changes the model: see `tests.dist.fuzz`.

Any seed by hand: `python scripts/fuzz.py 17`; many: `make fuzz`.
"""

from pathlib import Path

import pytest

from tests.dist.fuzz import draw, judge


@pytest.mark.sweep
def test_random_runs_end_where_one_rank_does(tmp_path: Path) -> None:
    judged = judge([draw(seed) for seed in range(20)], tmp_path)
    wrong = ["\n  ".join((str(one.case), *one.wrong)) for one in judged if one.wrong]
    assert not wrong, "\n".join(wrong)
