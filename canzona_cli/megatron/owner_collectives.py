"""The ways of a bucket's gradients to owners and of its weights back:
a class for each way that a plan may choose.

What the ways move, and in which order, is `planner.reduction`; which one is chosen, the plan's. NCCL runs a
communicator's collectives in the order of their launches, so one may use what another leaves. gloo runs them
in threads: there the second one is launched once the first has been waited for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from canzona_cli.planner.plan import Bucket
from canzona_cli.planner.reduction import Run, handovers

Collective = Callable[[torch.Tensor, int, ProcessGroup], Work]
"""A collective of a tensor, to or from one rank of a group."""


class Way(Protocol):
    """One bucket's gradients or weights on their way, once a step."""

    held: list[torch.Tensor]
    """Memory that is needed until `finish`."""

    def start(self, data: torch.Tensor) -> list[Work]:
        """Launch on the bucket's flat buffer; what to wait for."""

    def finish(self, data: torch.Tensor) -> None:
        """Does the rest, once that has been waited for; also where nothing had been started."""


def reducing(bucket: Bucket, group: ProcessGroup) -> Way:
    """Reduces a bucket's gradients; afterwards only an owner's ranges of the buffer hold anything."""
    if bucket.reduction == "ring" and group.size() > 1:
        return _RingReduction(bucket, group)
    return _PerOwner(_ranges(bucket), group, _reduce)


def gathering(bucket: Bucket, group: ProcessGroup) -> Way:
    """Gathers a bucket; afterwards every rank holds all its ranges."""
    if bucket.gathering == "ring" and group.size() > 1:
        return _RingGathering(bucket, group)
    return _PerOwner(_ranges(bucket), group, _broadcast)


def reduce_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a reduction of each tensor to its owner, as a bucket's are; what to wait for."""
    return _each(parts, group, _reduce)


def broadcast_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a broadcast of each tensor from its owner, as a bucket's are; what to wait for."""
    return _each(parts, group, _broadcast)


class _PerOwner:
    """One collective for each range. What parts of a sum are added up in is the backend's."""

    def __init__(self, ranges: Sequence[tuple[slice, int]], group: ProcessGroup, collective: Collective) -> None:
        self.held: list[torch.Tensor] = []
        self._ranges, self._group, self._collective = ranges, group, collective

    def start(self, data: torch.Tensor) -> list[Work]:
        if self._group.size() == 1:
            return []
        return _each([(data[part], owner) for part, owner in self._ranges], self._group, self._collective)

    def finish(self, data: torch.Tensor) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _Handover:
    """One all-to-all between the owners of shares and those who have parts of them, as one rank sees it."""

    part: slice
    """The pieces of this rank's part that are another's, or its own."""
    to_owners: list[int]
    """Elements of it by owner."""
    share: list[slice]
    """The pieces of this rank's share that ranks have, in their order; what adjoins is one slice."""
    from_ranks: list[int]
    """Elements of it by rank."""

    @classmethod
    def of(cls, runs: Sequence[Run], rank: int) -> "_Handover":
        mine = runs[rank]
        to_owners, from_ranks = [0] * len(runs), [0] * len(runs)
        share: list[slice] = []
        for segment in mine:
            to_owners[segment.owner] = segment.end - segment.start
        for other, run in enumerate(runs):
            for segment in run:
                if segment.owner == rank:
                    from_ranks[other] = segment.end - segment.start
                    start = share.pop().start if share and share[-1].stop == segment.start else segment.start
                    share.append(slice(start, segment.end))
        part = slice(mine[0].start, mine[-1].end) if mine else slice(0, 0)
        return cls(part=part, to_owners=to_owners, share=share, from_ranks=from_ranks)


class _Ring:
    """Equal parts of the buffer as it lies; `handovers` between those who have parts and those who own them."""

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        self.held: list[torch.Tensor] = []
        self._group = group
        self._handovers = [_Handover.of(runs, group.rank()) for runs in handovers(bucket, group.size())]
        part = bucket.elements // group.size()
        self._part = slice(group.rank() * part, (group.rank() + 1) * part)


class _RingReduction(_Ring):
    """A reduce-scatter in place, and what of its sums are others';
    sums are rounded as the backend rounds them."""

    _second: Callable[[], list[Work]] | None = None

    def start(self, data: torch.Tensor) -> list[Work]:
        part = data[self._part]
        self.held = [data.new_empty(sum(handover.from_ranks)) for handover in self._handovers]
        work = torch.distributed.reduce_scatter_tensor(part, data, group=self._group, async_op=True)
        assert work is not None
        if _queues(self._group, data.device):
            return [work, *self._hand_over(data)]
        self._second = lambda: self._hand_over(data)
        return [work]

    def _hand_over(self, data: torch.Tensor) -> list[Work]:
        return [
            _all_to_all(received, data[handover.part], handover.from_ranks, handover.to_owners, self._group)
            for received, handover in zip(self.held, self._handovers, strict=True)
        ]

    @torch.no_grad()
    def finish(self, data: torch.Tensor) -> None:
        if self._second is not None:
            for work in self._second():
                work.wait()
            self._second = None
        for received, handover in zip(self.held, self._handovers, strict=False):
            _spread(received, data, handover.share)
        self.held = []


class _RingGathering(_Ring):
    """The gathering of what others own of a rank's part, and an all-gather in place."""

    @torch.no_grad()
    def start(self, data: torch.Tensor) -> list[Work]:
        works = []
        for handover in self._handovers:
            # A copy, for the rank's part may be of its own share.
            share = torch.cat([data[piece] for piece in handover.share]) if handover.share else data.new_empty(0)
            self.held.append(share)
            works.append(_all_to_all(data[handover.part], share, handover.to_owners, handover.from_ranks, self._group))
            if not _queues(self._group, data.device):
                works.pop().wait()
        gathered = torch.distributed.all_gather_into_tensor(data, data[self._part], group=self._group, async_op=True)
        assert gathered is not None
        return [*works, gathered]

    def finish(self, data: torch.Tensor) -> None:
        self.held = []


def _spread(packed: torch.Tensor, data: torch.Tensor, pieces: Sequence[slice]) -> None:
    """Puts pieces that lie one after another where they belong."""
    position = 0
    for piece in pieces:
        size = piece.stop - piece.start
        data[piece].copy_(packed[position : position + size])
        position += size


def _ranges(bucket: Bucket) -> list[tuple[slice, int]]:
    return [(slice(part.start, part.end), part.owner) for part in bucket.ranges]


def _each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup, collective: Collective) -> list[Work]:
    """Handed over together where the backend can, as NCCL: whether they are one launch is its own affair
    (`owner_bucket_group.contradiction`)."""
    device = parts[0][0].device
    if not _queues(group, device):
        return [collective(data, owner, group) for data, owner in parts]
    with _coalescing_manager(group, device=device, async_ops=True) as launched:
        for data, owner in parts:
            collective(data, owner, group)
    return launched.works


def _queues(group: ProcessGroup, device: torch.device) -> bool:
    """Tells whether a communicator's collectives run in the order of their launches: NCCL, the one that can
    coalesce them."""
    return group._get_backend(device).supports_coalescing


def _all_to_all(
    received: torch.Tensor, sent: torch.Tensor, from_ranks: list[int], to_ranks: list[int], group: ProcessGroup
) -> Work:
    work = torch.distributed.all_to_all_single(received, sent, from_ranks, to_ranks, group=group, async_op=True)
    assert work is not None
    return work


def _reduce(data: torch.Tensor, owner: int, group: ProcessGroup) -> Work:
    work = torch.distributed.reduce(data, group=group, group_dst=owner, async_op=True)
    assert work is not None
    return work


def _broadcast(data: torch.Tensor, owner: int, group: ProcessGroup) -> Work:
    work = torch.distributed.broadcast(data, group=group, group_src=owner, async_op=True)
    assert work is not None
    return work
