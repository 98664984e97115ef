"""Everything a training step needs, in one value."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """Everything a step needs."""

    config: RunConfig
    world: World
    chunks: Sequence[DistributedDataParallel]
    """This rank's part of the model, in forward order: one, but with an interleaved pipeline (`parallel.vpp`)."""
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    timer: PhaseTimer
