"""Real ranks leave timelines to trust: the compute track is the step, transfers begin in it, clocks agree.

The same run is under torch's profiler for a step, which must see the phases and leave the breakdown alone.
"""

import json
import math
from dataclasses import asdict

import pytest

from canzona_cli.report.run_trace import write_trace
from canzona_cli.run.files import RunFiles, read_json, write_json_atomic
from canzona_cli.run.records import write_timeline
from canzona_cli.training.data import Datasets
from canzona_cli.training.loop import Training
from canzona_cli.training.measure import gather_breakdown
from canzona_cli.training.records import Journal, RankRecord
from tests.dist import jobs
from tests.dist.jobs import SMALL, build
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens
from tests.trace_events import Trace, read_trace

STEPS, TRACED, PROFILED = 7, (5, 6), 3
RANKS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Seven steps of canzona's Muon on TP 2; steps 5 and 6 traced, step 3 profiled."""
    files = RunFiles(tmp_path_factory.mktemp("run"))
    overrides = (f"run.trace_steps=[{TRACED[0]},{TRACED[1]}]", f"run.profile_steps=[{PROFILED},{PROFILED}]")
    config, layout = jobs.resolve(*SMALL, f"gpus={RANKS}", "parallel.tp=2", f"train.steps={STEPS}", *overrides)
    samples = RandomTokens(
        samples=STEPS * layout.global_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=config.model.vocab_size,
    )

    def rank() -> None:
        trainee = build(config, layout)
        number = trainee.world.rank
        journal = Journal(files, writes=number == 0)
        datasets = Datasets(train=samples)
        Training(trainee, datasets, files, journal, RankRecord(files, number)).run()
        write_timeline(files, number, trainee.timer.timelines())
        breakdown = gather_breakdown(config, trainee.world, trainee.timer.timings())
        if breakdown is not None:
            journal.breakdown(breakdown)

    files.ranks.mkdir()
    run_ranks(RANKS, rank)
    write_json_atomic(files.layout, asdict(layout))
    return files


@pytest.fixture(scope="module")
def trace(files: RunFiles) -> Trace:
    assert write_trace(files.root, files.trace) == RANKS
    return read_trace(files.trace)


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_compute_track_is_the_step(trace: Trace, rank: int) -> None:
    """Nothing overlaps (reading the trace checks it), and phases add up to each step within 1%."""
    (compute,), (steps,) = trace.tracks(f"rank {rank}", "compute"), trace.tracks(f"rank {rank}", "step")
    assert [step["name"] for step in steps] == [f"step {number}" for number in range(TRACED[0], TRACED[1] + 1)]
    for step in steps:
        begin, end = step["ts"], step["ts"] + step["dur"]
        inside = [event for event in compute if begin <= event["ts"] + event["dur"] / 2 <= end]
        assert math.fsum(event["dur"] for event in inside) == pytest.approx(step["dur"], rel=0.01)
        assert {"data", "forward", "backward", "norm_clip", "matrix_update"} <= {event["name"] for event in inside}


@pytest.mark.parametrize("rank", range(RANKS))
def test_transfers_begin_in_their_steps(trace: Trace, rank: int) -> None:
    (steps,) = trace.tracks(f"rank {rank}", "step")
    lanes = trace.tracks(f"rank {rank}", "exchange in flight")
    assert lanes, "two TP ranks exchange fragments"
    for event in (event for lane in lanes for event in lane):
        assert any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps)


def test_ranks_of_one_machine_share_a_clock(trace: Trace) -> None:
    """A rank cannot end a step before the others have begun it: the loss is a sum over all of them."""
    starts_ends = [
        [(step["ts"], step["ts"] + step["dur"]) for step in trace.tracks(f"rank {rank}", "step")[0]]
        for rank in range(RANKS)
    ]
    for (start_0, end_0), (start_1, end_1) in zip(*starts_ends, strict=True):
        assert max(start_0, start_1) < min(end_0, end_1)


def test_the_profiler_saw_the_phases_of_its_step_on_every_rank(files: RunFiles) -> None:
    for rank in range(RANKS):
        events = json.loads(files.rank_profile(rank).read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert {"canzona: forward", "canzona: backward", "canzona: matrix_update"} <= set(names)
        assert names.count("canzona: adamw_update") == 1, "one step"
    assert len(list(files.profile.iterdir())) == RANKS


def test_the_profiled_step_is_not_measured(files: RunFiles) -> None:
    breakdown = read_json(files.breakdown)
    assert breakdown is not None
    assert (breakdown["steps_measured"], breakdown["steps_skipped"], breakdown["steps_profiled"]) == (STEPS - 3, 2, 1)
