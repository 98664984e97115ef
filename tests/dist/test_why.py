"""Real ranks, one of which is slow: the breakdown names it."""

import time

import pytest
import torch

from canzona_cli.launch.run_dir import prediction_here
from canzona_cli.planner.make import make_plan
from canzona_cli.run.breakdown import load_breakdown
from canzona_cli.run.codec import save
from canzona_cli.run.files import RunFiles
from canzona_cli.training.data import BatchStream
from canzona_cli.training.measure import gather_breakdown
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import SMALL, build
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens

SLOW, STEPS = 1, 5


def test_a_slow_rank_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Late before its forward by as much as a step takes at first: that dwarfs what a profile may be wrong by."""
    files = RunFiles(tmp_path_factory.mktemp("run"))
    config, shape = jobs.resolve(*SMALL, "gpus=2", "parallel.tp=1", f"train.steps={STEPS}")
    samples = RandomTokens(
        samples=STEPS * shape.global_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=config.model.vocab_size,
    )

    def rank() -> None:
        trainee = build(config, shape)

        def late(*_: object) -> None:
            if trainee.world.rank == SLOW and trainee.chunks[0].training:
                time.sleep(late_s / shape.num_microbatches)

        torch.nn.Module.register_forward_pre_hook(trainee.chunks[0], late)
        batches, late_s = BatchStream(samples, trainee.world), 0.0
        for _ in range(STEPS):
            train_step(trainee, batches)
            late_s = late_s or max(0.4, trainee.timer.timings()[-1].step_s)
        breakdown = gather_breakdown(config, trainee.world, trainee.timer.timings())
        if breakdown is not None:
            save(files.breakdown, breakdown)

    run_ranks(2, rank)
    save(files.predicted, prediction_here(config, shape, make_plan(config, shape)))
    why = load_breakdown(files.root).why
    assert why is not None
    assert f"rank {SLOW}" in why.text
