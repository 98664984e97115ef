"""The process groups and the device of a worker, and the exchange of records between workers."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from canzona_cli.core.megatron import cpu_backend
from canzona_cli.core.model.geometry import is_expert
from canzona_cli.core.planner.reduction import adamw_apart
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import Device, Layout, ModelConfig

Wrapped = Sequence[DistributedDataParallel]
"""The chunks of a rank's part of the model, wrapped with gradient buffers, in forward order."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks, groups and device of this worker in the job."""

    rank: int
    world_size: int
    device: torch.device
    layout: Layout
    groups: ProcessGroupCollection
    owners: ProcessGroup
    """The ranks of `groups.dp_cp`, in a separate group that only the buckets of matrices use
    (`planner.reduction.adamw_apart`); `groups.dp_cp` itself if no separate group is needed."""
    expert_owners: ProcessGroup
    """The ranks of `groups.expt_dp`, which have the same experts, in a separate group like `owners`. If
    experts are not divided among ranks, this is `owners`."""

    @property
    def dp_rank(self) -> int:
        return int(self.groups.dp.rank())

    @property
    def owner(self) -> int:
        """The rank in the group that reduces gradients (data and context parallel). Plans identify owners by
        this number."""
        return int(self.groups.dp_cp.rank())

    @property
    def expert_owner(self) -> int:
        """The rank in the group that reduces experts' gradients (`Mesh.expert_owner`)."""
        return int(self.groups.expt_dp.rank())

    @property
    def expert_rank(self) -> int:
        """The rank in the group over which the experts of a layer are divided (`Mesh.expert_rank`)."""
        return int(self.groups.ep.rank())

    @property
    def tp_rank(self) -> int:
        return int(self.groups.tp.rank())

    @property
    def pp_rank(self) -> int:
        return int(self.groups.pp.rank())

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def cut(self, parameter: str, model: ModelConfig) -> tuple[int, int]:
        """Returns the number of fragments into which tensor parallelism cuts a parameter, and the index of
        this rank's fragment: (1, 0) for an expert's weight if experts are divided among ranks."""
        if self.layout.ep > 1 and is_expert(parameter, model):
            return 1, 0
        return self.layout.tp, self.tp_rank


def initialize(
    layout: Layout,
    device: Device,
    *,
    seed: int,
    timeout_minutes: float = 10.0,
    alive: Callable[[], None] = lambda: None,
) -> World:
    """Joins the job: selects the device, starts the process group, makes Megatron's groups, and seeds its
    random states. Collective.

    Reads RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets.

    Args:
        timeout_minutes: The timeout of every collective.
        alive: Called repeatedly while groups are made, which takes a long time with many ranks.

    Raises:
        RuntimeError: The job does not have as many ranks as the layout needs.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise RuntimeError(f"torchrun started {world_size} ranks, but the layout needs {layout.world_size}")
    timeout = timedelta(minutes=timeout_minutes)
    if device == "cuda":
        rank_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(rank_device)
    else:
        cpu_backend.install()
        rank_device = torch.device("cpu")
    # With a device_id, every group would create its communicator at once, in a call that all ranks have to
    # join. Without it, a group creates its communicator at its first use.
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        timeout=timeout,
        rank=rank,
        world_size=world_size,
    )
    groups = make_groups(layout, timeout=timeout, alive=alive)
    model_parallel_cuda_manual_seed(seed)
    return world_of(groups, layout, rank_device, timeout=timeout)


def world_of(
    groups: ProcessGroupCollection, layout: Layout, device: torch.device, *, timeout: timedelta | None = None
) -> World:
    """Returns this rank's `World`, given Megatron's groups. Makes the separate groups of the buckets of
    matrices if they are needed. Collective.

    Args:
        timeout: The timeout of the separate groups' collectives; None for torch's default.
    """
    owners, expert_owners = groups.dp_cp, groups.expt_dp
    if adamw_apart(kind_of(device)):
        owners = duplicate_group(groups.dp_cp, timeout)
        expert_owners = owners if groups.expt_dp is groups.dp_cp else duplicate_group(groups.expt_dp, timeout)
    return World(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        device=device,
        layout=layout,
        groups=groups,
        owners=owners,
        expert_owners=expert_owners,
    )


def kind_of(device: torch.device) -> Device:
    """Returns the kind of the device, `cuda` or `cpu`, as configurations name it."""
    return "cuda" if device.type == "cuda" else "cpu"


def duplicate_group(group: ProcessGroup, timeout: timedelta | None) -> ProcessGroup:
    """Makes a second group of the same ranks, in the same order, with a separate communicator; returns
    `group` itself if it has one rank. Collective over the group."""
    if group.size() == 1:
        return group
    ranks = torch.distributed.get_process_group_ranks(group)
    duplicate = torch.distributed.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc="OWNERS")
    assert isinstance(duplicate, ProcessGroup)
    return duplicate


def shutdown() -> None:
    """Destroys Megatron's groups and the process group, if there is one."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


Group = ProcessGroup | object
"""The value that torch returns for a new group: the group, or a placeholder on ranks that are not members."""
WORLD_GROUPS: Final = frozenset(
    {
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    }
)
"""The names of Megatron's groups whose ranks only exchange a few numbers, such as the gradient norm and fp8
scales. If such a group contains all ranks, the world's group replaces it."""


def make_groups(layout: Layout, *, timeout: timedelta, alive: Callable[[], None]) -> ProcessGroupCollection:
    """Makes Megatron's process groups for this layout, only one for each set of ranks. Collective.

    Megatron makes a group for each purpose, even if the group has a single rank or the same ranks as another
    group: 118 groups for 8 ranks, 8,091 for 1,024. Here, purposes with the same ranks share a group, and all
    groups of a single rank are the same. Every rank registers every group in the same order. If the backend
    connects ranks only at a group's first use, as NCCL does if it is not given a device in advance, groups
    that a rank does not use need no further time or memory.

    Args:
        timeout: the timeout of each group's collectives.
        alive: called for every group.
    """
    with _share_groups(layout, timeout, alive):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            # Additional gloo groups are only used by Megatron's legacy optimizer checkpoints, which canzona
            # does not write.
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


_TOKEN_GROUPS: Final = frozenset({"EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"})
"""The names of Megatron's groups whose ranks send tokens to each other's experts."""


@contextmanager
def _share_groups(layout: Layout, timeout: timedelta, alive: Callable[[], None]) -> Iterator[None]:
    """Replaces Megatron's `create_group` inside the block by a function that makes only one group for each
    set of ranks, with the exceptions that the comments explain."""
    rank = torch.distributed.get_rank()
    # Buckets do not use the world's group, because messages among all ranks would queue after the buckets.
    # For the same reason, attention, which waits for keys and values, does not share a group with buckets if
    # dp is 1, nor do experts, which wait for tokens.
    separate = {"CONTEXT_PARALLEL_GROUP"} | (_TOKEN_GROUPS if layout.ep > 1 else set())
    groups: dict[tuple[bool, tuple[int, ...]], Group] = {}
    single = torch.distributed.new_group([rank], timeout=timeout, use_local_synchronization=True)

    def create_group(ranks: Sequence[int], *, group_desc: str, **options: object) -> Group:
        alive()
        if len(ranks) == 1:
            return single
        if group_desc in WORLD_GROUPS and len(ranks) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        key = (group_desc in separate, tuple(sorted(ranks)))
        if key not in groups:
            groups[key] = torch.distributed.new_group(list(ranks), timeout=timeout, group_desc=group_desc)
        return groups[key]

    original = parallel_state.create_group
    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original


def gather[T](value: T, kind: type[T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the values of all ranks of the group, in rank order. Collective.

    Args:
        value: plain data, which may contain dataclass instances; sent as JSON.
        kind: the type of the value.
        group: None for all ranks of the job.

    Raises:
        Damaged: A rank sent data that is not of this type.
    """
    content = json.dumps(value, default=_plain_value).encode()
    return [parse(kind, text) for text in _gather(content, group)]


def _plain_value(value: object) -> object:
    """Converts a value that JSON cannot represent: a dataclass instance to a dict, anything else to text."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


@contextmanager
def exchange_objects_as_json() -> Iterator[None]:
    """Makes torch's `all_gather_object` send JSON instead of pickles inside the block. Megatron uses this
    function to exchange the parameter groups of all ranks, which consist of plain values and tuples.

    Raises:
        TypeError: from `all_gather_object`, if the object cannot be sent as JSON.
    """
    original = dist.all_gather_object

    def all_gather_json(object_list: list[object], obj: object, group: dist.ProcessGroup | None = None) -> None:
        object_list[:] = [_hashable(json.loads(text)) for text in _gather(json.dumps(obj).encode(), group)]

    dist.all_gather_object = all_gather_json  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = original


def _gather(content: bytes, group: dist.ProcessGroup | None) -> Iterator[bytes]:
    """Yields the `content` of each rank of the group, in rank order. Collective."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)], device=device), group=group)
    longest = int(sizes.max())
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = torch.empty(ranks * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, padded, group=group)
    for row, size in zip(gathered.cpu().view(ranks, longest), sizes.tolist(), strict=True):
        yield row[:size].numpy().tobytes()


def _hashable(value: object) -> object:
    """Converts lists back to tuples, recursively, because JSON turns tuples into lists."""
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
