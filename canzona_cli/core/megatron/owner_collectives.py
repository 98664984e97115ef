"""The collectives that reduce a bucket's gradients to owners and gather its weights from owners, by each method
that a plan may choose.

`planner.reduction` defines what each method communicates and in which order; the plan chooses the method.
NCCL runs the collectives of a communicator in the order in which they are launched, so a collective may use
the result of an earlier one without waiting for it. gloo runs collectives in threads, so a collective
that uses a result is launched only once that result is complete.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from canzona_cli.core.planner.plan import Bucket
from canzona_cli.core.planner.reduction import Run, handovers

Collective = Callable[[torch.Tensor, int, ProcessGroup], Work]
"""A function that starts a collective of a tensor, to or from the given rank of a group."""


class BucketMethod(ABC):
    """A method of reducing or gathering a bucket, used once in each step."""

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        self._bucket, self._group = bucket, group
        self.buffers: list[torch.Tensor] = []
        """The temporary memory that must not be freed before `finish`."""

    @abstractmethod
    def start(self, data: torch.Tensor) -> list[Work]:
        """Starts the collectives on the bucket's flat buffer and returns the handles to wait for."""

    def finish(self, data: torch.Tensor) -> None:
        """Completes the method after the handles have been waited for. Does nothing without a preceding
        `start`."""
        self.buffers = []


def reduction_method(bucket: Bucket, group: ProcessGroup) -> BucketMethod:
    """Returns the method that reduces a bucket's gradients. Afterwards, a rank's buffer is valid only in the
    ranges that the rank owns."""
    if bucket.reduction == "ring" and group.size() > 1:
        return _RingReduction(bucket, group)
    return _PerOwner(bucket, group, _reduce)


def gathering_method(bucket: Bucket, group: ProcessGroup) -> BucketMethod:
    """Returns the method that gathers a bucket's weights. Afterwards every rank has all ranges."""
    if bucket.gathering == "ring" and group.size() > 1:
        return _RingGathering(bucket, group)
    return _PerOwner(bucket, group, _broadcast)


def reduce_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a reduction of each tensor to its owner, as for a bucket, and returns the handles to wait
    for."""
    return _start_each(parts, group, _reduce)


def broadcast_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup) -> list[Work]:
    """Starts a broadcast of each tensor from its owner, as for a bucket, and returns the handles to wait
    for."""
    return _start_each(parts, group, _broadcast)


class _PerOwner(BucketMethod):
    """The method that starts one collective for each range. The backend determines the precision of partial
    sums."""

    def __init__(self, bucket: Bucket, group: ProcessGroup, collective: Collective) -> None:
        super().__init__(bucket, group)
        self._collective = collective

    def start(self, data: torch.Tensor) -> list[Work]:
        if self._group.size() == 1:
            return []
        parts = [(data[part.start : part.end], part.owner) for part in self._bucket.ranges]
        return _start_each(parts, self._group, self._collective)


class _Handover:
    """One rank's side of an all-to-all between equal parts and owners: it sends elements to their owners
    after a reduce-scatter, or from their owners before an all-gather. A rank's part is its equal part of the
    buffer; its share is the elements that it owns.

    Args:
        runs: for each rank, the segments of its part that are moved.
        rank: this rank.
    """

    def __init__(self, runs: Sequence[Run], rank: int) -> None:
        segments = runs[rank]
        self.part = slice(segments[0].start, segments[-1].end) if segments else slice(0, 0)
        """The elements of this rank's part that this all-to-all moves."""
        self.to_owners = [0] * len(runs)
        """The number of elements of `part` for each owner."""
        self.share: list[slice] = []
        """The elements of this rank's share that this all-to-all moves, in the order of the ranks whose parts
        contain them; adjoining ranges are merged."""
        self.from_ranks = [0] * len(runs)
        """The number of elements of `share` that each rank's part contains."""
        for segment in segments:
            self.to_owners[segment.owner] = segment.end - segment.start
        for peer, run in enumerate(runs):
            for segment in run:
                if segment.owner == rank:
                    self.from_ranks[peer] = segment.end - segment.start
                    start = segment.start
                    if self.share and self.share[-1].stop == start:
                        start = self.share.pop().start
                    self.share.append(slice(start, segment.end))


class _Ring(BucketMethod):
    """The base class of the methods that use ring collectives on equal parts of the buffer, and `handovers`
    between these parts and the owners."""

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        super().__init__(bucket, group)
        self._handovers = [_Handover(runs, group.rank()) for runs in handovers(bucket, group.size())]
        length = bucket.elements // group.size()
        self._part = slice(group.rank() * length, (group.rank() + 1) * length)


class _RingReduction(_Ring):
    """The method that reduces by an in-place reduce-scatter, after which ranks send the sums that they do not
    own to their owners. The backend determines how sums are rounded."""

    _start_handover: Callable[[], list[Work]] | None = None
    """A function that starts the all-to-alls, for backends on which they have to wait for the
    reduce-scatter."""

    def start(self, data: torch.Tensor) -> list[Work]:
        part = data[self._part]
        self.buffers = [data.new_empty(sum(handover.from_ranks)) for handover in self._handovers]
        work = torch.distributed.reduce_scatter_tensor(part, data, group=self._group, async_op=True)
        assert work is not None
        if _runs_in_order(self._group, data.device):
            return [work, *self._hand_over(data)]
        self._start_handover = lambda: self._hand_over(data)
        return [work]

    def _hand_over(self, data: torch.Tensor) -> list[Work]:
        return [
            _all_to_all(received, data[handover.part], handover.from_ranks, handover.to_owners, self._group)
            for received, handover in zip(self.buffers, self._handovers, strict=True)
        ]

    @torch.no_grad()
    def finish(self, data: torch.Tensor) -> None:
        if self._start_handover is not None:
            for work in self._start_handover():
                work.wait()
            self._start_handover = None
        for received, handover in zip(self.buffers, self._handovers, strict=False):
            _unpack(received, data, handover.share)
        super().finish(data)


class _RingGathering(_Ring):
    """The method that gathers in two steps: owners send each rank the elements of its equal part, and an
    in-place all-gather completes the buffer."""

    @torch.no_grad()
    def start(self, data: torch.Tensor) -> list[Work]:
        works = []
        for handover in self._handovers:
            # A copy, because the all-to-all writes into the rank's part, which may overlap with its share.
            share = torch.cat([data[piece] for piece in handover.share]) if handover.share else data.new_empty(0)
            self.buffers.append(share)
            works.append(_all_to_all(data[handover.part], share, handover.to_owners, handover.from_ranks, self._group))
            if not _runs_in_order(self._group, data.device):
                works.pop().wait()
        gathered = torch.distributed.all_gather_into_tensor(data, data[self._part], group=self._group, async_op=True)
        assert gathered is not None
        return [*works, gathered]


def _unpack(packed: torch.Tensor, data: torch.Tensor, pieces: Sequence[slice]) -> None:
    """Copies the elements of `packed` to the ranges `pieces` of `data`, in order."""
    position = 0
    for piece in pieces:
        size = piece.stop - piece.start
        data[piece].copy_(packed[position : position + size])
        position += size


def _start_each(parts: Sequence[tuple[torch.Tensor, int]], group: ProcessGroup, collective: Collective) -> list[Work]:
    """Starts a collective for each tensor and owner. NCCL gets them as one batch, which is one launch or
    several depending on torch's backend (`owner_bucket_group.find_contradiction`)."""
    device = parts[0][0].device
    if not _runs_in_order(group, device):
        return [collective(data, owner, group) for data, owner in parts]
    with _coalescing_manager(group, device=device, async_ops=True) as launched:
        for data, owner in parts:
            collective(data, owner, group)
    return launched.works


def _runs_in_order(group: ProcessGroup, device: torch.device) -> bool:
    """Returns True if a communicator's collectives run in the order in which they are launched. This is true
    of NCCL, which is recognised as the only backend that can coalesce collectives."""
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
