"""Process groups and device of one worker."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where their types live
from torch.distributed import ProcessGroup

from canzona_cli.config.schema import Device, Layout
from canzona_cli.megatron import cpu_backend
from canzona_cli.run.codec import parse, plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this worker in the job."""

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
        """Rank among those that gradients are reduced over, data and context parallel together:
        a plan's owner."""
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
    turn: str = "",
) -> World:
    """Join the job: pick the device, start the process group, build Megatron's groups and random states.

    Reads RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them.

    Args:
        alive: called again and again while groups are made, which takes long where there are many.
        turn: a name for this meeting where processes meet one after another in one launch, whose store still
            has what those before have left.

    Raises:
        RuntimeError: the world has another size than the layout.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise RuntimeError(f"torchrun started {world_size} ranks, but the layout needs {layout.world_size}")
    timeout = timedelta(minutes=timeout_minutes)
    meeting = _Meeting(store=_store(turn), rank=rank, world_size=world_size) if turn else _Meeting()
    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        # With a device_id every group would get its communicator at once, in a call that the whole world has
        # to join. Without, each gets it when it is first used, if ever.
        torch.distributed.init_process_group("nccl", timeout=timeout, **meeting)
    else:
        cpu_backend.install()
        local = torch.device("cpu")
        torch.distributed.init_process_group("gloo", timeout=timeout, **meeting)
    groups = make_groups(layout, timeout=timeout, alive=alive)
    model_parallel_cuda_manual_seed(seed)
    return World(rank=rank, world_size=world_size, device=local, layout=layout, groups=groups)


class _Meeting(TypedDict, total=False):
    """The meeting place of ranks; nothing: as the launcher's environment says."""

    store: PrefixStore
    rank: int
    world_size: int


def _store(turn: str) -> PrefixStore:
    """Opens a part of the launcher's store that no meeting of another name has written to."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(host, port, is_master=False, wait_for_workers=False)
    return PrefixStore(turn, shared)


def shutdown() -> None:
    """Leave the job."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


Group = ProcessGroup | object
"""The value that torch gives for a group: to a rank outside of it, a number."""
AMONG_ALL: Final = frozenset(
    {
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    }
)
"""Purposes, in Megatron's words, of small numbers: the norm of the gradients, scales of fp8."""


def make_groups(layout: Layout, *, timeout: timedelta, alive: Callable[[], None]) -> ProcessGroupCollection:
    """Makes Megatron's process groups for this layout, each set of ranks joined once. Collective.

    Megatron makes a group for each of its purposes, also where it has one rank or the very ranks of another
    purpose:
    118 of them for 8 ranks, 8,091 for 1,024. Here purposes of the same ranks share a group, and all purposes
    of one rank alone share that rank's. Every rank names every group, in the same order; where the backend
    connects a group's ranks only when they first use it (NCCL without a device given in advance), that is all
    that the others cost.

    Args:
        timeout: the timeout of each group's collectives.
        alive: called at every group.
    """
    with _joined_once(timeout, alive):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            # Extra gloo groups serve Megatron's own (legacy) optimizer checkpoints, which canzona does not
            # write.
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


@contextmanager
def _joined_once(timeout: timedelta, alive: Callable[[], None]) -> Iterator[None]:
    """Makes Megatron take its groups from here, inside the block."""
    rank = torch.distributed.get_rank()
    # Buckets have no part in the world's own group: what all ranks tell each other would wait behind them.
    # For the same reason attention, which waits for keys and values, shares none with buckets where dp is 1.
    groups: dict[tuple[bool, tuple[int, ...]], Group] = {}
    alone = torch.distributed.new_group([rank], timeout=timeout, use_local_synchronization=True)

    def create_group(ranks: Sequence[int], *, group_desc: str, **options: object) -> Group:
        alive()
        if len(ranks) == 1:
            return alone
        if group_desc in AMONG_ALL and len(ranks) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        members = (group_desc == "CONTEXT_PARALLEL_GROUP", tuple(sorted(ranks)))
        if members not in groups:
            groups[members] = torch.distributed.new_group(list(ranks), timeout=timeout, group_desc=group_desc)
        return groups[members]

    original = parallel_state.create_group
    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original


def gather[T: DataclassInstance](record: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers the record of every rank of the group, in rank order, on all of them. Collective.

    Args:
        group: None for the whole job.

    Raises:
        Damaged: a rank sent something else.
    """
    return [parse(type(record), text) for text in _gather(json.dumps(plain(record), default=str).encode(), group)]


@contextmanager
def without_pickles() -> Iterator[None]:
    """Restricts `all_gather_object`, inside the block, to plain values, tuples and numbers among them:
    Megatron asks by it which groups of parameters other ranks have.

    Raises:
        TypeError: from such a call, with another kind of object.
    """
    real = dist.all_gather_object

    def plainly(object_list: list[object], obj: object, group: dist.ProcessGroup | None = None) -> None:
        object_list[:] = [_hashable(json.loads(text)) for text in _gather(json.dumps(obj).encode(), group)]

    dist.all_gather_object = plainly  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = real


def _gather(content: bytes, group: dist.ProcessGroup | None) -> Iterator[bytes]:
    """Gathers each rank's bytes."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)], device=device), group=group)
    longest = int(sizes.max())
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    everyone = torch.empty(ranks * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everyone, padded, group=group)
    for row, size in zip(everyone.cpu().view(ranks, longest), sizes.tolist(), strict=True):
        yield row[:size].numpy().tobytes()


def _hashable(value: object) -> object:
    """Tuples where JSON has lists."""
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
