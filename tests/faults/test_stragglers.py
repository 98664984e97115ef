"""A slow rank is distinguished from the ranks that wait for it, in whatever collective they wait."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from canzona_cli.core.planner.make import make_plan
from canzona_cli.launch.run_dir import predict_here
from canzona_cli.records.breakdown import load_breakdown
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import describe, event_of
from canzona_cli.training import measure
from canzona_cli.training.data import BatchStream, build_datasets
from canzona_cli.training.measure import StragglerWatch, gather_breakdown
from canzona_cli.training.process import count_host_waits
from canzona_cli.training.records import Journal
from canzona_cli.training.step import train_step
from tests.dist.jobs import build, prepare
from tests.dist.ranks import run_ranks

WINDOW = 4


def train_with_a_slow_rank(
    cache: Path, run: Path, overrides: tuple[str, ...], slow: int
) -> tuple[list[tuple[float, float]], float]:
    """(own, waited) seconds of this rank's steps, and how long the slow one sleeps in each of its forward passes: as
    long as all of a step took at first. Rank 0 writes the run's events."""
    rank = int(os.environ["RANK"])
    config, layout, corpus = prepare(*overrides)
    trainee = build(config, layout)
    count_host_waits(trainee.timer)
    measure.WINDOW = WINDOW  # type: ignore[misc]
    journal = Journal(RunFiles(run), writes=rank == 0)
    datasets = build_datasets(config, corpus, cache=cache / "indices")
    batches = BatchStream(datasets.train, trainee.world)
    train_step(trainee, batches)
    sleep_s = max(0.4, trainee.timer.timings()[-1].step_s)
    if rank == slow:
        trainee.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    watch = StragglerWatch(trainee.world, trainee.timer, journal)
    for step in range(2, trainee.setup.train.steps + 1):
        train_step(trainee, batches)
        watch.after_step(step)
    torch.distributed.barrier()
    breakdown = gather_breakdown(config, trainee.world, trainee.timer.timings())
    if breakdown is not None:
        journal.breakdown(breakdown)
    return [(timing.own_s, timing.waited_s) for timing in trainee.timer.timings()[1:]], sleep_s


@pytest.mark.parametrize(("tp", "slow"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.sweep)])
def test_a_slow_rank_is_named_once_and_by_the_breakdown(corpus_cache: Path, tmp_path: Path, tp: int, slow: int) -> None:
    overrides = ("gpus=4", f"parallel.tp={tp}", f"train.steps={2 * WINDOW + 3}", "train.batch_tokens=512")
    config, layout, _ = prepare(*overrides)
    ranks = run_ranks(4, partial(train_with_a_slow_rank, corpus_cache, tmp_path, overrides, slow))
    files = RunFiles(tmp_path)
    events = [json.loads(line) for line in files.events.read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "straggler"]
    assert event["rank"] == slow
    assert event["factor"] > measure.LIMITS["cpu"]
    read = event_of(event)
    assert read is not None
    note = describe(read)
    assert note is not None
    assert note.warning
    assert note.text.startswith(f"rank {slow} is slow: ")
    if tp == 2:
        # Its tensor-parallel partner waits for it inside of forward and backward, in each of two micro-batches.
        steps, sleep_s = ranks[slow ^ 1][0], ranks[slow][1]
        assert sum(waited for _, waited in steps) > sleep_s * 2 * len(steps) * 0.9
        return
    save(files.predicted, predict_here(config, layout, make_plan(config.setup, layout)))
    why = load_breakdown(tmp_path).why
    assert why is not None
    assert f"rank {slow}" in why.text
