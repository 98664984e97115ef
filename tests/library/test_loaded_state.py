"""A checkpoint that Megatron-core writes and reads brings back all of the optimizer's state."""

import pickle
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed import distributed_c10d

from canzona_cli.core.engine.stored_state import SHARDING
from canzona_cli.core.megatron.model import Trainee, unwrap
from canzona_cli.core.megatron.parallel import World
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.dist.samples import samples_of
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import named_parameters
from tests.library.loops import by_canzona, optimizer_config, trainee_of

SAVED, STEPS = 2, 4
FORMAT = {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True}


def _entries(trainee: Trainee, *, loading: bool) -> dict[str, Any]:
    chunk: Any = unwrap(trainee.chunks[0])
    model = chunk.sharded_state_dict(metadata=FORMAT)
    optimizer: Any = trainee.optimizer
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=FORMAT)}


def _train(trainee: Trainee, first: int, end: int) -> list[float]:
    """Trains steps [first, end); returns their losses."""
    batch = trainee.world.layout.global_batch_size
    batches = BatchStream(samples_of(trainee.setup, STEPS * batch), trainee.world, first_sample=first * batch)
    losses = [train_step(trainee, batches).loss for _ in range(first, end)]
    finish_gathering(trainee)
    return losses


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in bf16, where masters are more than the weights, with SOAP, which counts the steps of each matrix."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)  # which Megatron calls before it writes
    # Megatron's own queue lives in a process of its own, which would outlive ranks that are killed.
    monkeypatch.setattr(filesystem_async, "_results_queue", queue.Queue())
    config, layout = jobs.resolve(*SMALL, "optimizer.lr=0.01", "schedule.warmup_steps=0", "gpus=2")

    def work(_: str, world: World) -> tuple[list[float], list[float], bool]:
        distributed_c10d._unpickler = pickle.Unpickler  # Megatron's ranks exchange objects by pickles

        def build() -> Trainee:
            megatron = optimizer_config(config, bf16=True, muon_fp32_matmul_prec="medium")
            return trainee_of(config, world, lambda chunks: by_canzona(chunks, megatron, world, None, "optimizer=soap"))

        whole, loaded = build(), build()
        _train(whole, 0, SAVED)
        dist_checkpointing.save(_entries(whole, loading=False), tmp_path)
        losses = _train(whole, SAVED, STEPS)

        state = dist_checkpointing.load(_entries(loaded, loading=True), tmp_path)
        unwrap(loaded.chunks[0]).load_state_dict(state["model"])
        loaded.optimizer.load_state_dict(state["optimizer"])
        loaded.schedule.step(SAVED)
        again = _train(loaded, SAVED, STEPS)
        equal = all(
            np.array_equal(one.detach().float(), other.detach().float())
            for (_, one), (_, other) in zip(*map(named_parameters, (whole.chunks, loaded.chunks)), strict=True)
        )
        return losses, again, equal

    for losses, again, equal in jobs.on_ranks({"": (config, layout)}, work)[""]:
        assert again == losses
        assert equal
