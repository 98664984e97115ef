"""Process groups and device of one worker."""

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from canzona_cli.config.schema import Device, Layout
from canzona_cli.megatron import cpu_backend
from canzona_cli.megatron.groups import make_groups


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this worker stands in the job."""

    rank: int
    world_size: int
    device: torch.device
    layout: Layout
    groups: ProcessGroupCollection

    @property
    def dp_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def owner(self) -> int:
        """Rank among those that gradients are reduced over, data and context parallel together: a plan's owner."""
        return int(self.groups.dp_cp.rank())

    @property
    def tp_rank(self) -> int:
        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def pp_rank(self) -> int:
        return int(parallel_state.get_pipeline_model_parallel_rank())

    @property
    def is_first_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_first_stage())

    @property
    def is_last_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage())

    def describe(self) -> str:
        return f"rank {self.rank} (dp {self.dp_rank}, tp {self.tp_rank}, pp {self.pp_rank})"


def initialize(
    layout: Layout,
    device: Device,
    *,
    seed: int,
    timeout_minutes: float = 10.0,
    alive: Callable[[], None] = lambda: None,
) -> World:
    """Join the job: pick the device, start the process group, build Megatron's groups and random states.

    Reads RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them.

    Args:
        alive: called again and again while groups are made, which takes long where there are many.

    Raises:
        RuntimeError: the world has another size than the layout.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise RuntimeError(f"torchrun started {world_size} ranks, but the layout needs {layout.world_size}")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        # With a device_id every group would get its communicator at once, in a call that the whole world has to join.
        # Without, each gets it when it is first used, if ever.
        torch.distributed.init_process_group("nccl", timeout=timeout)
    else:
        cpu_backend.install()
        local = torch.device("cpu")
        torch.distributed.init_process_group("gloo", timeout=timeout)
    groups = make_groups(layout, timeout=timeout, alive=alive)
    model_parallel_cuda_manual_seed(seed)
    return World(rank=rank, world_size=world_size, device=local, layout=layout, groups=groups)


def shutdown() -> None:
    """Leave the job."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
