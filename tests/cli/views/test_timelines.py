"""The timelines of ranks: lanes without overlaps, and steps of machines whose clocks differ."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.cli.views.run_page import _measured_lanes, lanes
from canzona_cli.core.phases import Interval
from canzona_cli.records.files import RunFiles, write_json_atomic
from canzona_cli.records.records import load_timelines
from tests.refusals import refused

Row = Sequence[object]


def timeline(rank: int, *, start: float = 1000.0, transfers: Sequence[Row] = ()) -> dict[str, object]:
    """Steps 5 and 6: 2 s forward, 3 s backward each."""
    steps = [
        {
            "number": number,
            "start_s": begin,
            "end_s": begin + 5,
            "phases": [["forward", begin, begin + 2], ["backward", begin + 2, begin + 5]],
            "transfers": [[name, begin + a, begin + b] for name, a, b in transfers],  # type: ignore[operator]
        }
        for number, begin in ((5, start), (6, start + 5))
    ]
    return {"version": 2, "rank": rank, "host": "here", "steps": steps}


def run(root: Path, *timelines: Mapping[str, object]) -> RunFiles:
    files = RunFiles(root)
    files.timelines.mkdir(parents=True)
    for content in timelines:
        write_json_atomic(files.timeline(int(str(content["rank"]))), content)
    return files


def test_ranks_of_machines_with_other_clocks_end_a_step_together(tmp_path: Path) -> None:
    files = run(tmp_path, timeline(0, start=1000.0), timeline(1, start=7.0))
    shown = _measured_lanes(load_timelines(files), None)
    ends = [max(interval.end_s for interval in lane.intervals) for lane in shown.rows if lane.begins]
    assert ends == pytest.approx([shown.end_s] * 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_lanes_hold_everything_and_nothing_overlaps_on_one(parts: list[tuple[int, int]]) -> None:
    intervals = [Interval(name=str(n), start_s=a, end_s=a + length) for n, (a, length) in enumerate(parts)]
    found = lanes(intervals)
    assert sorted(interval.name for lane in found for interval in lane) == sorted(i.name for i in intervals)
    for lane in found:
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(lane))
    most = max((sum(i.start_s <= t < i.end_s for i in intervals) for t in range(41)), default=0)
    assert len(found) >= most


def test_every_damaged_timeline_is_named(tmp_path: Path) -> None:
    files = run(tmp_path, timeline(0), {**timeline(1), "version": 7}, {**timeline(2), "steps": 3})
    problems = refused(load_timelines, files)
    assert [problem.value for problem in problems] == [files.timeline(1), files.timeline(2)]
