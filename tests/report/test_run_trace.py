"""Chrome traces are well-formed, tell ranks and tracks apart, and lay machines' clocks over each other."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.errors import ConfigError
from canzona_cli.launch.run_dir import predict_here
from canzona_cli.planner.make import make_plan
from canzona_cli.report.run_trace import lanes, write_trace
from canzona_cli.run.codec import save
from canzona_cli.run.files import RunFiles, write_json_atomic
from canzona_cli.run.phases import Interval
from canzona_cli.run.records import load_timelines
from tests.refusals import refused
from tests.run.runs import CONFIG, LAYOUT
from tests.trace_events import Trace, read_trace

Row = Sequence[object]


def timeline(
    rank: int, *, clock: str = "here", start: float = 1000.0, transfers: Sequence[Row] = ()
) -> dict[str, object]:
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
    return {"version": 1, "rank": rank, "host": clock, "clock": clock, "steps": steps}


def run(root: Path, *timelines: Mapping[str, object]) -> RunFiles:
    files = RunFiles(root)
    files.timelines.mkdir(parents=True)
    for content in timelines:
        write_json_atomic(files.timeline(int(str(content["rank"]))), content)
    write_json_atomic(files.layout, asdict(LAYOUT))
    return files


def drawn(files: RunFiles) -> Trace:
    write_trace(files.root, files.trace)
    return read_trace(files.trace)


def test_ranks_are_processes_in_order_that_say_where_they_are(tmp_path: Path) -> None:
    trace = drawn(run(tmp_path, timeline(1), timeline(0), timeline(3), timeline(2)))
    assert list(trace.processes.values()) == [
        "rank 0 (TP 0, DP 0)",
        "rank 1 (TP 1, DP 0)",
        "rank 2 (TP 0, DP 1)",
        "rank 3 (TP 1, DP 1)",
    ]
    (compute,) = trace.tracks("rank 2", "compute")
    assert [(event["name"], event["ts"], event["dur"]) for event in compute] == [
        ("forward", 0.0, 2e6),
        ("backward", 2e6, 3e6),
        ("forward", 5e6, 2e6),
        ("backward", 7e6, 3e6),
    ]
    (steps,) = trace.tracks("rank 2", "step")
    assert [event["name"] for event in steps] == ["step 5", "step 6"]


def test_transfers_at_the_same_time_have_tracks_of_their_own(tmp_path: Path) -> None:
    transfers = [("grad_reduce", 1, 3), ("grad_reduce", 2, 4), ("grad_reduce", 3, 4), ("exchange", 4, 4.5)]
    trace = drawn(run(tmp_path, timeline(0, transfers=transfers)))
    first, second = trace.tracks("rank 0", "gradient reduction in flight")
    assert [event["ts"] for event in first] == [1e6, 3e6, 6e6, 8e6]
    assert [event["ts"] for event in second] == [2e6, 7e6]
    assert len(trace.tracks("rank 0", "exchange in flight")) == 1
    assert not trace.tracks("rank 0", "parameter gathering in flight")


def test_clocks_of_other_machines_are_laid_over_the_first_ones_by_the_ends_of_steps(tmp_path: Path) -> None:
    """Rank 1 began a little later by the shared clock, ranks 2 and 3 count from another start."""
    trace = drawn(
        run(
            tmp_path,
            timeline(0, start=1000.0),
            timeline(1, start=1000.5),
            timeline(2, clock="there", start=7.0),
            timeline(3, clock="there", start=7.5),
        )
    )
    starts = [trace.tracks(f"rank {rank}", "step")[0][0]["ts"] for rank in range(4)]
    assert starts == pytest.approx([0.0, 0.5e6, 0.0, 0.5e6])


def test_the_planned_step_stands_behind_the_measured_ranks(tmp_path: Path) -> None:
    files = run(tmp_path, *(timeline(rank) for rank in range(4)))
    planned = predict_here(CONFIG, LAYOUT, make_plan(CONFIG, LAYOUT))
    save(files.predicted, planned)
    trace = drawn(files)
    names = list(trace.processes.values())
    assert [name.startswith("planned: rank ") for name in names[:4]] == [False] * 4
    assert names[4:]
    assert all(name.startswith("planned: rank ") and "canzona, profile" in name for name in names[4:])
    compute = trace.tracks("planned", "compute")[0]
    assert {"forward", "backward", "matrix_update"} <= {event["name"] for event in compute}
    assert max(event["ts"] + event["dur"] for event in compute) <= 1e6 * planned.iteration_s * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_lanes_hold_everything_and_nothing_overlaps_on_one(parts: list[tuple[int, int]]) -> None:
    intervals = [Interval(name=str(n), start_s=a, end_s=a + length) for n, (a, length) in enumerate(parts)]
    found = lanes(intervals)
    assert sorted(interval.name for lane in found for interval in lane) == sorted(i.name for i in intervals)
    for lane in found:
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(lane))
    most = max((sum(i.start_s <= t < i.end_s for i in intervals) for t in range(41)), default=0)
    assert len(found) >= most


def test_a_run_without_timelines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no timelines"):
        write_trace(tmp_path, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_every_damaged_timeline_is_named(tmp_path: Path) -> None:
    files = run(tmp_path, timeline(0), {**timeline(1), "version": 7}, {**timeline(2), "steps": 3})
    problems = refused(load_timelines, files)
    assert [problem.value for problem in problems] == [files.timeline(1), files.timeline(2)]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    files = run(tmp_path / "run", timeline(0))
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(files.root, tmp_path / "absent" / "trace.json")
