"""The ways to reduce and gather each bucket: collectives for each owner's range, or a ring of equal parts.

Owners' shares of a bucket differ in size, but a reduce-scatter or an all-gather gives every rank an equal
part:

    ranges of a bucket | 0: aaaaaa | 1: b | 2: cc |
    equal parts        | aaa | aaa | bcc |     the same buffer: rank 1 has to hand its part to owner 0, and rank 2
                                               b to owner 1

After the reduce-scatter (or before the all-gather), an all-to-all hands over the elements that a rank has but
does not own. The messages of an all-to-all are in the order of ranks, so each part is cut into runs of
ascending owners. The first all-to-all sends the first run of every part, the second all-to-all the second
run, and so on; usually there is only one. Each owner needs memory for a copy of its share. If every rank owns
its part, nothing is handed over, and the ring is Megatron's collective.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.core.costs.links import Group, Groups, Links, Transfer
from canzona_cli.core.costs.update import memory_rate
from canzona_cli.core.planner.plan import Bucket, Plan, PlanSettings, Range
from canzona_cli.core.setup import Device, Gathering, Layout, Reduction, Setup


class Segment(NamedTuple):
    """Consecutive elements of one rank's part of a bucket that have one owner. Padding after a range belongs
    to the range's owner. A segment that is only padding belongs to the part's rank."""

    owner: int
    start: int
    end: int


Run = tuple[Segment, ...]
"""Adjoining segments of one rank's part, in ascending order of owners."""


def owned_elements(bucket: Bucket) -> dict[int, int]:
    """Counts the elements of each owner with a range in the bucket, alignment inside ranges included."""
    elements: dict[int, int] = {}
    for part in bucket.ranges:
        elements[part.owner] = elements.get(part.owner, 0) + part.end - part.start
    return elements


def handovers(bucket: Bucket, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """Lists the all-to-alls of a ring in order. Each is given as the run that it hands over from each rank's
    part: to owners after a reduce-scatter, or from owners before an all-gather.

    A rank's part has `bucket.elements / ranks` elements, and together the runs cover the bucket. The list is
    empty if every rank owns its part.
    """
    return _handovers(_without_matrices(bucket), bucket.elements, ranks)


def _without_matrices(bucket: Bucket) -> tuple[Range, ...]:
    """Returns a bucket's ranges without their matrices. Many buckets have equal ranges, which makes the
    result a good key for a cache."""
    return tuple(Range(part.start, part.end, part.owner, ()) for part in bucket.ranges)


@lru_cache(maxsize=1024)
def _handovers(ranges: tuple[Range, ...], elements: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    parts = _parts(ranges, elements, ranks)
    if all(segment.owner == rank for rank, part in enumerate(parts) for segment in part):
        return ()
    runs = [_runs(part) for part in parts]
    return tuple(
        tuple(of_part[index] if index < len(of_part) else () for of_part in runs)
        for index in range(max(map(len, runs)))
    )


def handover_sizes(bucket: Bucket, ranks: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Returns (sent, received) for each all-to-all of `handovers` after a reduce-scatter: by rank, the number
    of elements that it sends from its part, and the number that it receives as their owner."""
    return _handover_sizes(_without_matrices(bucket), bucket.elements, ranks)


@lru_cache(maxsize=1024)
def _handover_sizes(
    ranges: tuple[Range, ...], elements: int, ranks: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    counts = []
    for runs in _handovers(ranges, elements, ranks):
        sent, received = [0] * ranks, [0] * ranks
        for rank, run in enumerate(runs):
            for owner, start, end in run:
                if owner != rank:
                    sent[rank] += end - start
                    received[owner] += end - start
        counts.append((tuple(sent), tuple(received)))
    return tuple(counts)


def _parts(ranges: Sequence[Range], elements: int, ranks: int) -> list[list[Segment]]:
    """Cuts a bucket into equal parts; returns the segments of each rank's part, ascending."""
    part_elements = elements // ranks
    parts: list[list[Segment]] = [[] for _ in range(ranks)]
    borders = [0, *(later.start for later in ranges[1:]), elements]
    for owned, (start, end) in zip(ranges, pairwise(borders), strict=True):
        while start < end:
            rank = start // part_elements
            stop = min(end, (rank + 1) * part_elements)
            # A segment of padding alone stays on the rank whose part it is in.
            parts[rank].append(Segment(owned.owner if start < owned.end else rank, start, stop))
            start = stop
    return parts


def _runs(part: Sequence[Segment]) -> list[Run]:
    """Cuts a part into runs of ascending owners; adjoining segments of one owner are merged."""
    runs: list[list[Segment]] = []
    for segment in part:
        if not runs or segment.owner < runs[-1][-1].owner:
            runs.append([segment])
        elif segment.owner == runs[-1][-1].owner:
            runs[-1][-1] = runs[-1][-1]._replace(end=segment.end)
        else:
            runs[-1].append(segment)
    return [tuple(run) for run in runs]


def adamw_apart(device: Device) -> bool:
    """Returns True if, under a plan, AdamW's buckets and the matrices' buckets have separate communicators.

    On GPUs, collectives of AdamW's few parameters and of the matrices then do not wait for each other: they
    are in flight at the same time, share the links, and hide each other's latency. gloo runs the collectives
    of one group at the same time anyway.
    """
    return device == "cuda"


Native = Literal["reduce_scatter", "all_gather"]

GATHERED: Mapping[Reduction, Gathering] = MappingProxyType({"reduce": "broadcast", "ring": "ring"})
"""The way in which weights are gathered, by the value of `engine.reduction`. If it is not set, reduction and
gathering are chosen separately."""
GATHERED_AHEAD = 4
"""The number n of buckets that are gathered at the same time. When the updates end, the gathering of the
first n buckets that the forward pass needs starts. Whenever the forward pass has waited for a bucket, the
gathering of the n-th bucket after it starts. With n = 1, as in Megatron, the gathering of the second bucket,
which usually has the first layer's largest matrices, would start only with the forward pass, after the link
has been idle."""
WORTH = 0.95
"""The threshold for choosing a ring: the largest ratio of its time to the time of a collective for each
owner's range. A ring must be clearly faster, because only rings need additional memory."""


def scratch_bytes(bucket: Bucket, way: Reduction | Gathering, owners: int, width: int) -> dict[int, int]:
    """Counts, by owner, the bytes that are needed in addition to the buffer while a bucket is communicated: a
    copy of the owner's share if a ring hands elements over, otherwise none.

    Args:
        width: the bytes of an element.
    """
    if way != "ring" or owners == 1 or not handovers(bucket, owners):
        return {}
    return {owner: elements * width for owner, elements in owned_elements(bucket).items()}


def ring_scratch(plan: Plan, stage: int, grad: int, width: int) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Counts, by cell, the bytes of scratch for the reduction of gradients and for the gathering of weights.

    All buckets may need their scratch for gradients at the same time. Of the scratch for weights, only the
    largest `GATHERED_AHEAD` + 1 buckets count: those that are being gathered, and one whose weights are being
    copied to their buffer.

    Args:
        grad: the bytes of an element of a gradient.
        width: the bytes of an element of a weight.
    """
    mesh = plan.subject.layout

    def scratch_of_cells(bucket: Bucket, way: Reduction | Gathering, element_bytes: int) -> Mapping[int, int]:
        """Returns the bytes of scratch that each cell needs for a bucket."""
        scratch = scratch_bytes(bucket, way, mesh.reducers(bucket.expert_rank), element_bytes)
        if bucket.expert_rank is not None:
            cells = mesh.expert_cells(bucket.expert_rank)
            return {cells[owner]: size for owner, size in scratch.items()}
        return {owner * mesh.tp + host: size for owner, size in scratch.items() for host in range(mesh.tp)}

    reduced, gathered = Counter[int](), defaultdict[int, list[int]](list)
    for bucket in plan.buckets:
        if bucket.stage == stage:
            reduced.update(scratch_of_cells(bucket, bucket.reduction, grad))
            for cell, size in scratch_of_cells(bucket, bucket.gathering, width).items():
                gathered[cell].append(size)
    return reduced, {cell: sum(sorted(sizes)[-GATHERED_AHEAD - 1 :]) for cell, sizes in gathered.items()}


def collectives(bucket: Bucket, owners: int) -> tuple[int, int]:
    """Counts the collectives that reduce the bucket's gradients, and the collectives that gather its
    weights."""
    if owners == 1:
        return 0, 0
    counts: Mapping[Reduction | Gathering, int] = {
        "reduce": len(bucket.ranges),
        "broadcast": len(bucket.ranges),
        "ring": 1 + len(handovers(bucket, owners)) if "ring" in (bucket.reduction, bucket.gathering) else 0,
    }
    return counts[bucket.reduction], counts[bucket.gathering]


def sent_elements(bucket: Bucket, way: Reduction | Gathering, owners: int) -> float:
    """Returns the elements that a rank sends for a bucket, on average: (n - 1) / n of the bucket, and another
    1 / n if a ring hands elements over."""
    return bucket.elements * (1 if way == "ring" and handovers(bucket, owners) else (owners - 1) / owners)


def uniform_buckets(buckets: Iterable[Bucket], settings: PlanSettings) -> tuple[Bucket, ...]:
    """Returns the buckets, all reduced and gathered in the same way: as `engine.reduction` says or, if it is
    not set, with a collective for each owner's range."""
    way = settings.reduction or "reduce"
    return tuple(with_ways(bucket, way, GATHERED[way]) for bucket in buckets)


def with_ways(bucket: Bucket, reduction: Reduction, gathering: Gathering) -> Bucket:
    """Returns a bucket that is reduced and gathered in these ways; the same object if it already is."""
    if bucket.reduction == reduction and bucket.gathering == gathering:
        return bucket
    return replace(bucket, reduction=reduction, gathering=gathering)


class ReductionModel:
    """The cost model of a run's reductions and gatherings, and the choice of the way for each bucket."""

    def __init__(self, setup: Setup, layout: Layout) -> None:
        groups = Groups.of(layout, setup.cluster)
        self._links, self._group = Links(cluster=setup.cluster), groups.data
        self._experts = groups.experts
        self._weight_bytes, self._gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
        self._memory_rate = memory_rate(setup.cluster)
        self._launch_s = setup.cluster.launch_us * 1e-6
        self._estimates: dict[tuple[int, int, Native, bool], Transfer] = {}
        self._ring_transfers: dict[tuple[Native, bool, int, tuple[Range, ...]], Transfer] = {}
        # With gloo the all-to-all of a ring overlaps with nothing, because it is launched only after a wait
        # for the reduce-scatter.
        self.rings = setup.cluster.device == "cuda" and max(self._group.size, self._experts.size) > 1
        """True if the planner may choose rings when `engine.reduction` is not set."""

    def reduce(self, bucket: Bucket) -> Transfer:
        """Returns the transfer that reduces a bucket's gradients to their owners."""
        if bucket.reduction == "ring":
            return self._ring(bucket, "reduce_scatter")
        return self._per_range(bucket, "reduce")

    def gather(self, bucket: Bucket) -> Transfer:
        """Returns the transfer that gathers a bucket's new weights from their owners."""
        if bucket.gathering == "ring":
            return self._ring(bucket, "all_gather")
        return self._per_range(bucket, "broadcast")

    def in_sequence(self, buckets: Sequence[Bucket]) -> list[tuple[Transfer, Transfer]]:
        """Returns the reduction and the gathering of each bucket. Reductions run on a stream in the order of
        buckets, gatherings in the opposite order. The `fill_s` of a transfer is only the time that it
        overlaps with the next chain.

        Args:
            buckets: a stage's buckets with the same `Bucket.expert_rank`.
        """
        if not buckets:
            return []
        ranks = self._group_of(buckets[0]).size
        reduced = _overlap([self.reduce(bucket) for bucket in buckets], buckets, ranks)
        gathered = _overlap([self.gather(bucket) for bucket in buckets[::-1]], buckets[::-1], ranks)
        return list(zip(reduced, gathered[::-1], strict=True))

    def _group_of(self, bucket: Bucket) -> Group:
        """Returns the ranks over which a bucket is reduced."""
        return self._group if bucket.expert_rank is None else self._experts

    def choose(self, buckets: Iterable[Bucket], settings: PlanSettings) -> tuple[Bucket, ...]:
        """Chooses how each bucket is reduced and gathered. On GPUs, if `engine.reduction` is not set, a bucket
        uses a ring if a ring is faster by enough (`WORTH`). All other buckets are as in `uniform_buckets`."""
        uniform = uniform_buckets(buckets, settings)
        if settings.reduction or not self.rings:
            return uniform
        streams = groupby(uniform, key=lambda bucket: (bucket.stage, bucket.expert_rank))
        return tuple(bucket for _, of_stream in streams for bucket in self._choose_ways(list(of_stream)))

    def choices(self, buckets: Sequence[Bucket], settings: PlanSettings) -> Iterator[tuple[Bucket, ...]]:
        """Yields alternative ways to reduce and gather the buckets. The first is that of `choose`, which has
        the least total time. If the planner may choose, the two uniform ways follow, unless they are
        equal to the first: rings for all buckets, and collectives for each range of all buckets.

        The alternative with the least total time does not always have the least exposed time: a ring occupies
        its stream until it ends, but a chain of ranks overlaps with the next chain.
        """
        chosen = self.choose(buckets, settings)
        yield chosen
        if settings.reduction or not self.rings:
            return
        rings = tuple(with_ways(bucket, "ring", "ring") for bucket in chosen)
        yield from (way for way in (rings, uniform_buckets(buckets, settings)) if way != chosen)

    def estimate(self, elements: int, largest: int, kind: Native, *, experts: bool) -> Transfer:
        """Estimates the reduction or gathering of a bucket whose owners are not known yet.

        Args:
            elements: the elements of the bucket.
            largest: the elements of the largest part of the bucket that must have one owner.
            experts: True for a bucket of experts with an `expert_rank`.
        """
        key = elements, largest, kind, experts
        if key not in self._estimates:  # many buckets have equal sizes
            self._estimates[key] = self._estimate(elements, largest, kind, experts=experts)
        return self._estimates[key]

    def _estimate(self, elements: int, largest: int, kind: Native, *, experts: bool) -> Transfer:
        group = self._experts if experts else self._group
        owner_bytes = max(largest, elements // group.size) * self._bytes(kind)
        chain = self._links.chains(elements * self._bytes(kind), group)
        ring = self._native(elements, kind, group)
        if not experts:
            # Experts have equal sizes, so owners can have equal shares, and nothing is handed over.
            handover = self._links.all_to_all([owner_bytes], [owner_bytes], group)
            handover = handover.delayed(2 * owner_bytes / self._memory_rate)
            ring = ring.followed_by(handover)
        return ring if ring.seconds <= WORTH * chain.seconds else chain.without_fill()

    def _choose_ways(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """Yields a stage's buckets with the ways of reducing and gathering that let the last reduction, and
        the last gathering, end earliest."""
        reduced, gathered = zip(*self.in_sequence(buckets), strict=True)
        reducing = _choose_chains(reduced, self._ring_seconds(buckets, reduced, "reduce_scatter"))
        gathering = _choose_chains(gathered[::-1], self._ring_seconds(buckets, gathered, "all_gather")[::-1])[::-1]
        for bucket, reduced_by_chain, gathered_by_chain in zip(buckets, reducing, gathering, strict=True):
            yield with_ways(
                bucket, "reduce" if reduced_by_chain else "ring", "broadcast" if gathered_by_chain else "ring"
            )

    def _ring_seconds(self, buckets: Sequence[Bucket], chains: Sequence[Transfer], kind: Native) -> list[float]:
        """Returns the seconds of each bucket in a ring. If a ring could not be faster by enough even if it
        handed nothing over, this is infinity, without the slow computation of handovers."""
        return [
            self._ring(bucket, kind).seconds
            if self._native(bucket.elements, kind, self._group_of(bucket)).seconds <= WORTH * chain.seconds
            else math.inf
            for bucket, chain in zip(buckets, chains, strict=True)
        ]

    def _per_range(self, bucket: Bucket, kind: Literal["reduce", "broadcast"]) -> Transfer:
        """Returns the transfer of a bucket with a reduction or a broadcast for each range. Each range after
        the first adds a launch."""
        width = self._gradient_bytes if kind == "reduce" else self._weight_bytes
        group = self._group_of(bucket)
        sizes = [elements * width for elements in owned_elements(bucket).values()]
        transfer = self._links.rooted_collectives(kind, sizes, group, collectives=len(bucket.ranges))
        launches_s = (len(bucket.ranges) - 1) * self._launch_s if group.size > 1 else 0.0
        return transfer.delayed(launches_s)

    def _ring(self, bucket: Bucket, kind: Native) -> Transfer:
        """Returns the transfer of a bucket in a ring: a reduce-scatter or an all-gather of equal parts. If
        ranks do not own their parts, all-to-alls between parts and owners' shares and the copy of the largest
        share are added. Results are cached, because the choices of many plans have the same buckets."""
        key = kind, bucket.expert_rank is None, bucket.elements, _without_matrices(bucket)
        if key not in self._ring_transfers:
            self._ring_transfers[key] = self._compute_ring(bucket, kind)
        return self._ring_transfers[key]

    def _compute_ring(self, bucket: Bucket, kind: Native) -> Transfer:
        group = self._group_of(bucket)
        ranks = group.size
        if ranks == 1:
            return Transfer()
        width = self._bytes(kind)
        transfer = self._native(bucket.elements, kind, group)
        messages = handover_sizes(bucket, ranks)
        if not messages:
            return transfer
        for runs in messages:
            from_parts, to_shares = ([elements * width for elements in side] for side in runs)
            sent, received = (from_parts, to_shares) if kind == "reduce_scatter" else (to_shares, from_parts)
            transfer = transfer.followed_by(self._links.all_to_all(sent, received, group)).delayed(self._launch_s)
        return transfer.delayed(2 * max(owned_elements(bucket).values()) * width / self._memory_rate + self._launch_s)

    def _native(self, elements: int, kind: Native, group: Group) -> Transfer:
        collective = self._links.reduce_scatter if kind == "reduce_scatter" else self._links.all_gather
        return collective(elements * self._bytes(kind), group)

    def _bytes(self, kind: Native) -> int:
        """Returns the bytes of a communicated element: a gradient or a weight."""
        return self._gradient_bytes if kind == "reduce_scatter" else self._weight_bytes


def _overlap(transfers: Sequence[Transfer], buckets: Sequence[Bucket], owners: int) -> list[Transfer]:
    """Returns the transfers of a stream with `fill_s` reduced to the time that overlaps with the next
    transfer. Only two consecutive chains overlap; for all other transfers, `fill_s` is 0.

    The chain of a reduction ends at the owner, so it starts on the next rank; the chain of a broadcast starts
    at the owner. Ranks finish a chain in ring order, and each can then start the next chain. The next chain
    therefore starts after as many hops as there are from this owner to the next owner in the ring. If a
    launch has several owners, their chains run on several channels, and the channel with the most hops
    determines the time.
    """
    overlaps = [
        transfer._replace(
            fill_s=max(0.0, 1 - _count_hops(bucket, next_bucket, owners) / (owners - 1)) * transfer.fill_s
        )
        if transfer.fill_s and next_transfer.fill_s
        else transfer.without_fill()
        for (bucket, transfer), (next_bucket, next_transfer) in pairwise(zip(buckets, transfers, strict=True))
    ]
    return [*overlaps, *(last.without_fill() for last in transfers[-1:])]


def _count_hops(bucket: Bucket, following: Bucket, owners: int) -> int:
    """Counts the steps around the ring of owners from the owner of a bucket's first range, through the owners
    of all ranges in order, to the owner of the following bucket's last range."""
    roots = [part.owner for part in (*bucket.ranges, *following.ranges)]
    return sum((later - owner) % owners for owner, later in pairwise(roots))


def _choose_chains(chains: Sequence[Transfer], rings_s: Sequence[float]) -> list[bool]:
    """Chooses for each bucket of a stream between a chain (True) and a ring (False), so that the stream ends
    as early as possible.

    A chain overlaps only with a following chain. The last bucket is judged alone, because the stream may be
    idle before it. A ring's time is divided by `WORTH`, to make up for its memory.

    Args:
        chains: each bucket's transfer as a chain, in the order of the stream.
        rings_s: each bucket's seconds as a ring.
    """
    # For each bucket, from the end: True if the next is a chain, if this one is a chain and if it is a ring.
    follows: list[tuple[bool, bool]] = []
    # The seconds from a bucket to the end of the stream, if the bucket is a chain, and if it is a ring.
    chain_s, ring_s = chains[-1].seconds, rings_s[-1] / WORTH
    chain_s, ring_s = (chain_s, math.inf) if chain_s <= ring_s else (math.inf, ring_s)
    for chain, seconds in zip(chains[-2::-1], rings_s[-2::-1], strict=True):
        before_chain_s = chain.seconds - chain.fill_s + chain_s
        before_ring_s = chain.seconds + ring_s
        follows.append((before_chain_s <= before_ring_s, chain_s <= ring_s))
        ring_s = seconds / WORTH + min(chain_s, ring_s)
        chain_s = min(before_chain_s, before_ring_s)
    by_chain = [chain_s <= ring_s]
    for after_chain, after_ring in reversed(follows):
        by_chain.append(after_chain if by_chain[-1] else after_ring)
    return by_chain
