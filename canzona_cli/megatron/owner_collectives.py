"""The collectives that reduce a bucket's gradients to owners and gather its weights from owners, with one
class for each method that a plan may choose.

`planner.reduction` defines what each method communicates and in which order; the plan chooses the method.
NCCL runs the collectives of a communicator in the order of their launches, so a collective may use the result
of an earlier one that has not been waited for. gloo runs them in threads, so there the second collective is
launched after waiting for the first.
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
"""A function that starts a collective of a tensor, to or from the given rank of a group."""


class BucketMethod(Protocol):
    """A method of reducing or gathering a bucket, used once in each step."""

    held: list[torch.Tensor]
    """The temporary memory that is needed until `finish`."""

    def start(self, data: torch.Tensor) -> list[Work]:
        """Starts the collectives on the bucket's flat buffer and returns the handles to wait for."""

    def finish(self, data: torch.Tensor) -> None:
        """Does the remaining work after the handles have been waited for. May be called without `start`."""


def reduction_method(bucket: Bucket, group: ProcessGroup) -> BucketMethod:
    """Returns the method that reduces a bucket's gradients. When it has finished, a rank's buffer is valid
    only in the ranges that the rank owns."""
    if bucket.reduction == "ring" and group.size() > 1:
        return _RingReduction(bucket, group)
    return _PerOwner(_ranges(bucket), group, _reduce)


def gathering_method(bucket: Bucket, group: ProcessGroup) -> BucketMethod:
    """Returns the method that gathers a bucket's weights. Afterwards every rank has all ranges."""
    if bucket.gathering == "ring" and group.size() > 1:
        return _RingGathering(bucket, group)
    return _PerOwner(_ranges(bucket), group, _broadcast)


def reduce_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a reduction of each tensor to its owner, as for a bucket, and returns the handles to wait
    for."""
    return _start_each(parts, group, _reduce)


def broadcast_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a broadcast of each tensor from its owner, as for a bucket, and returns the handles to wait
    for."""
    return _start_each(parts, group, _broadcast)


class _PerOwner:
    """The method with one collective for each range. The backend determines the precision of partial sums."""

    def __init__(self, ranges: Sequence[tuple[slice, int]], group: ProcessGroup, collective: Collective) -> None:
        self.held: list[torch.Tensor] = []
        self._ranges, self._group, self._collective = ranges, group, collective

    def start(self, data: torch.Tensor) -> list[Work]:
        if self._group.size() == 1:
            return []
        return _start_each([(data[part], owner) for part, owner in self._ranges], self._group, self._collective)

    def finish(self, data: torch.Tensor) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _Handover:
    """One rank's view of an all-to-all between the owners and the ranks that have the owners' elements after
    a reduce-scatter (or before an all-gather). A rank's part is its equal part of the buffer; its share is
    what it owns."""

    part: slice
    """The elements of this rank's part that this all-to-all moves."""
    to_owners: list[int]
    """The number of elements of `part` for each owner."""
    share: list[slice]
    """The elements of this rank's share that this all-to-all moves, in the order of the ranks that have them;
    adjoining ranges are merged."""
    from_ranks: list[int]
    """The number of elements of `share` from each rank."""

    @classmethod
    def of(cls, runs: Sequence[Run], rank: int) -> "_Handover":
        """Returns the handover as `rank` sees it.

        Args:
            runs: for each rank, the segments of its part that are moved.
        """
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
    """The base of the methods that use ring collectives on equal parts of the buffer, with `handovers`
    between the ranks that have parts and the owners."""

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        self.held: list[torch.Tensor] = []
        self._group = group
        self._handovers = [_Handover.of(runs, group.rank()) for runs in handovers(bucket, group.size())]
        part = bucket.elements // group.size()
        self._part = slice(group.rank() * part, (group.rank() + 1) * part)


class _RingReduction(_Ring):
    """An in-place reduce-scatter, after which the sums that other ranks own are sent to their owners. The
    backend determines how sums are rounded."""

    _second: Callable[[], list[Work]] | None = None

    def start(self, data: torch.Tensor) -> list[Work]:
        part = data[self._part]
        self.held = [data.new_empty(sum(handover.from_ranks)) for handover in self._handovers]
        work = torch.distributed.reduce_scatter_tensor(part, data, group=self._group, async_op=True)
        assert work is not None
        if _runs_in_order(self._group, data.device):
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
    """An exchange that collects this rank's part of the buffer from its owners, followed by an in-place
    all-gather."""

    @torch.no_grad()
    def start(self, data: torch.Tensor) -> list[Work]:
        works = []
        for handover in self._handovers:
            # A copy, because the all-to-all writes into the rank's part, which may overlap with its share.
            share = torch.cat([data[piece] for piece in handover.share]) if handover.share else data.new_empty(0)
            self.held.append(share)
            works.append(_all_to_all(data[handover.part], share, handover.to_owners, handover.from_ranks, self._group))
            if not _runs_in_order(self._group, data.device):
                works.pop().wait()
        gathered = torch.distributed.all_gather_into_tensor(data, data[self._part], group=self._group, async_op=True)
        assert gathered is not None
        return [*works, gathered]

    def finish(self, data: torch.Tensor) -> None:
        self.held = []


def _spread(packed: torch.Tensor, data: torch.Tensor, pieces: Sequence[slice]) -> None:
    """Copies consecutive pieces of `packed` to their positions in `data`."""
    position = 0
    for piece in pieces:
        size = piece.stop - piece.start
        data[piece].copy_(packed[position : position + size])
        position += size


def _ranges(bucket: Bucket) -> list[tuple[slice, int]]:
    return [(slice(part.start, part.end), part.owner) for part in bucket.ranges]


def _start_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup, collective: Collective) -> list[Work]:
    """Starts a collective for each tensor and owner. NCCL gets them as one batch; whether this becomes one
    launch depends on torch's backend (`owner_bucket_group.contradiction`)."""
    device = parts[0][0].device
    if not _runs_in_order(group, device):
        return [collective(data, owner, group) for data, owner in parts]
    with _coalescing_manager(group, device=device, async_ops=True) as launched:
        for data, owner in parts:
            collective(data, owner, group)
    return launched.works


def _runs_in_order(group: ProcessGroup, device: torch.device) -> bool:
    """Returns True if a communicator's collectives run in the order of their launches. That is NCCL, the only
    backend that can coalesce collectives."""
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
