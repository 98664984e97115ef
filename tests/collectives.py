"""The operations that use the network, and those that make the host wait for a value, by torch's names."""

from collections.abc import Mapping, Sequence
from types import FrameType

import torch
from torch.distributed import ProcessGroup

COLLECTIVES = tuple(
    name
    for name, method in vars(ProcessGroup).items()
    if "-> c10d::Work" in (method.__doc__ or "") and name not in ("_end_coalescing", "reconfigure")
)
"""Methods of `ProcessGroup` that put something on the network: what they return can be waited for."""
RENAMED = {
    "alltoall_base": "all_to_all_single",
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
}
"""Names in torch 2.11 of the methods that 2.15 calls."""
POINT_TO_POINT = ("send", "recv", "recv_anysource")
"""The operations among these that end only when another rank does something else."""
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero", "to")
"""Methods of `Tensor` for which the host waits until the device has come so far; of `to`, what `to_host` says."""
_ON_THE_HOST = ("megatron.core.tensor_parallel.random", "torch.optim.")


def on_the_host(frame: FrameType) -> bool:
    """Returns whether the tensor that this code reads lies on the host anyway: random states, and torch's counts of
    steps."""
    return str(frame.f_globals.get("__name__")).startswith(_ON_THE_HOST)


def device_in(args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """The kind of device that is among the arguments of a call."""
    for value in (*args, kwargs.get("device")):
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return value.partition(":")[0]
    return None


def to_host(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Returns whether `Tensor.to` waits when it is called on a tensor of a device."""
    return device_in(args, kwargs) == "cpu" and not kwargs.get("non_blocking")
