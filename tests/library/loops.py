"""A bare training loop over Megatron-core: the caller's model, wrapping, optimizer and schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from canzona_cli import Engine
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.model import Trainee, build_model
from canzona_cli.core.megatron.optimizer import Overrides, build_schedule
from canzona_cli.core.megatron.parallel import World, exchange_objects_as_json
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.setup import Layout
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import train_step
from tests.dist.samples import samples_of
from tests.dist.whole import named_parameters


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The part of training that one rank saw."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def optimizer_config(config: RunConfig, **others: object) -> OptimizerConfig:
    """The caller's settings of Megatron's Muon."""
    return OptimizerConfig(
        **{
            "optimizer": "muon",
            "lr": config.optimizer.lr,
            "min_lr": config.optimizer.min_lr,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "muon_tp_mode": "duplicated",
            "muon_fp32_matmul_prec": "highest",
            "muon_nesterov": True,
            "muon_extra_scale_factor": 0.2,
            "adam_beta2": 0.95,
        }
        | others
    )


def by_megatron(
    chunks: Sequence[torch.nn.Module], config: OptimizerConfig, world: World, overrides: Overrides | None = None
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Wraps and optimizes as Megatron does: Muon, repeated on every rank."""
    mcore, ddp = get_model_config(chunks[0]), DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(mcore, ddp, chunk, pg_collection=world.groups) for chunk in chunks]
    with exchange_objects_as_json():
        return wrapped, get_megatron_optimizer(
            config, wrapped, config_overrides=overrides, use_gloo_process_groups=False, pg_collection=world.groups
        )


def by_canzona(
    chunks: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    world: World,
    overrides: Overrides | None = None,
    *settings: str,
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    engine = Engine(config, *settings, groups=world.groups)
    wrapped = engine.wrap(chunks, DistributedDataParallelConfig(use_distributed_optimizer=True))
    return wrapped, engine.optimizer(wrapped, overrides)


def trainee_of(
    config: RunConfig,
    world: World,
    build: Callable[[list[torch.nn.Module]], tuple[list[DistributedDataParallel], MegatronOptimizer]],
) -> Trainee:
    chunks, optimizer = build(build_model(config.setup, world))
    mcore = get_model_config(chunks[0])
    mcore.no_sync_func, mcore.finalize_model_grads_func = chunks[0].no_sync, finalize_model_grads
    return Trainee(
        setup=config.setup,
        world=world,
        chunks=chunks,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.setup),
        timer=PhaseTimer(world.device),
    )


def train(trainee: Trainee, steps: int = 3) -> Trained:
    batches = batches_of(trainee, steps)
    results = [train_step(trainee, batches) for _ in range(steps)]
    return Trained(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        weights={name: param.detach().float().numpy().copy() for name, param in named_parameters(trainee.chunks)},
    )


def batches_of(trainee: Trainee, steps: int) -> Iterator[Batch]:
    layout: Layout = trainee.world.layout
    return BatchStream(samples_of(trainee.setup, steps * layout.global_batch_size), trainee.world)
