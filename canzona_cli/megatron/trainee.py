"""Everything a forward pass needs, and everything a training step does, each in one value."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer


@dataclass(frozen=True, kw_only=True)
class Model:
    """Everything a forward pass needs."""

    config: RunConfig
    world: World
    chunks: Sequence[torch.nn.Module]
    """This rank's part of the model, in forward order: one, but with an interleaved pipeline (`parallel.vpp`)."""
    timer: PhaseTimer


@dataclass(frozen=True, kw_only=True)
class Trainee(Model):
    """Everything a step needs."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
