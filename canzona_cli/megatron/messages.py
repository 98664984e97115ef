"""The messages between ranks besides tensors: records, as JSON in tensors.

torch's own way are pickles, and reading one does whatever it says. Between machines nothing is encrypted or signed
(`canzona_cli/launch/README.md` lists it all), so a rank would run what anybody sends in another one's place.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from canzona_cli.run.codec import parse, plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def gather[T: DataclassInstance](record: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers the record of every rank of the group, in rank order, on all of them. Collective.

    Args:
        group: None for the whole job.

    Raises:
        Damaged: what a rank sent is no such record.
    """
    return [parse(type(record), text) for text in _gather(json.dumps(plain(record), default=str).encode(), group)]


@contextmanager
def without_pickles() -> Iterator[None]:
    """Restricts `all_gather_object`, inside the block, to plain values, tuples and numbers among them: Megatron asks by
    it which groups of parameters other ranks have.

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
