"""A bucket's uneven shares in native collectives of equal parts: who has what of it, and hands it to whom.

A reduce-scatter and an all-gather give every rank as much as any other; owners' shares are not alike:

    ranges of a bucket | 0: aaaaaa | 1: b | 2: cc |
    equal parts        | aaa | aaa | bcc |     Megatron's buffer as it lies: rank 1 still has to hand its part to 0, and
                                               rank 2 b to 1

An all-to-all after the reduce-scatter (before the all-gather) hands over what is not where it belongs. Its
messages lie in the order of ranks, so parts are cut into runs of ascending owners with an all-to-all each;
one is usual. Only owners' own shares are copied. Where every part is its owner's, nothing is handed over: it
is Megatron's own collective.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from canzona_cli.config.schema import Gathering, Layout, Reduction, RunConfig
from canzona_cli.costs.buffers import element_bytes
from canzona_cli.costs.links import Groups, Links, Transfer
from canzona_cli.costs.update import memory_rate
from canzona_cli.model.families import matrix_copies
from canzona_cli.planner.plan import Bucket, PlanSettings, Range


class Segment(NamedTuple):
    """Consecutive elements of a bucket on one rank's part, of one owner;
    alignment behind a range belongs to it."""

    owner: int
    start: int
    end: int


Run = tuple[Segment, ...]
"""A run of one rank's part: adjoining segments, each of a later owner than the one before."""


def shares(bucket: Bucket) -> dict[int, int]:
    """Elements of each owner that has any, alignment inside its ranges included."""
    elements: dict[int, int] = {}
    for part in bucket.ranges:
        elements[part.owner] = elements.get(part.owner, 0) + part.end - part.start
    return elements


def handovers(bucket: Bucket, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """All-to-alls of a ring, in order: of each rank, the run of its part that it hands over (is handed).

    Together they are the whole bucket, in which each rank's part is `bucket.elements / ranks`; none where
    every part is its owner's.
    """
    return _handovers(bucket.ranges, bucket.elements, ranks)


@lru_cache(maxsize=1024)
def _handovers(ranges: tuple[Range, ...], elements: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    parts = _parts(ranges, elements, ranks)
    if all(segment.owner == rank for rank, part in enumerate(parts) for segment in part):
        return ()
    runs = [_runs(part) for part in parts]
    return tuple(
        tuple(of_part[number] if number < len(of_part) else () for of_part in runs)
        for number in range(max(map(len, runs)))
    )


def handed(bucket: Bucket, ranks: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Counts, for each of `handovers`, the elements that every rank hands over of its part, and is handed of
    its share."""
    return _handed(bucket.ranges, bucket.elements, ranks)


@lru_cache(maxsize=1024)
def _handed(
    ranges: tuple[Range, ...], elements: int, ranks: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    segments = []
    for runs in _handovers(ranges, elements, ranks):
        there, owned = [0] * ranks, [0] * ranks
        for rank, run in enumerate(runs):
            for owner, start, end in run:
                if owner != rank:
                    there[rank] += end - start
                    owned[owner] += end - start
        segments.append((tuple(there), tuple(owned)))
    return tuple(segments)


def _parts(ranges: Sequence[Range], elements: int, ranks: int) -> list[list[Segment]]:
    """Segments of each rank's part, ascending."""
    part = elements // ranks
    parts: list[list[Segment]] = [[] for _ in range(ranks)]
    borders = [0, *(later.start for later in ranges[1:]), elements]
    for held, (start, end) in zip(ranges, pairwise(borders), strict=True):
        while start < end:
            rank = start // part
            stop = min(end, (rank + 1) * part)
            # A part that only pads the bucket stays where it is.
            parts[rank].append(Segment(held.owner if start < held.end else rank, start, stop))
            start = stop
    return parts


def _runs(part: Sequence[Segment]) -> list[Run]:
    runs: list[list[Segment]] = []
    for segment in part:
        if not runs or segment.owner < runs[-1][-1].owner:
            runs.append([segment])
        elif segment.owner == runs[-1][-1].owner:
            runs[-1][-1] = runs[-1][-1]._replace(end=segment.end)
        else:
            runs[-1].append(segment)
    return [tuple(run) for run in runs]


Native = Literal["reduce_scatter", "all_gather"]

GATHERED: Mapping[Reduction, Gathering] = MappingProxyType({"reduce": "broadcast", "ring": "ring"})
"""The way weights come back where a way was asked for; else it is chosen apart."""
GATHERED_AHEAD = 4
"""Buckets whose weights are on their way at the same time: what the first forward needs first starts with the
end of the updates, and whoever waits for one starts the one so many places behind it. With one, as Megatron
has it, the second bucket, mostly the first layer's largest matrices, starts with that forward only, and waits
for a link that was idle."""
WORTH = 0.95
"""A ring is chosen where it takes no more than this part of a collective per owner, because it needs memory
that those do not."""


def scratch_bytes(bucket: Bucket, way: Reduction | Gathering, owners: int, width: int) -> dict[int, int]:
    """Counts the bytes that ranks hold in addition to the buffer while a bucket travels, of `width` bytes an
    element: in a ring each its own share, in the order in which it is handed over."""
    if way != "ring" or owners == 1 or not handovers(bucket, owners):
        return {}
    return {owner: share * width for owner, share in shares(bucket).items()}


def collectives(bucket: Bucket, owners: int) -> tuple[int, int]:
    """Counts the collectives that a rank takes part in: to reduce the bucket's gradients,
    to gather its weights."""
    if owners == 1:
        return 0, 0
    each: Mapping[Reduction | Gathering, int] = {
        "reduce": len(bucket.ranges),
        "broadcast": len(bucket.ranges),
        "ring": 1 + len(handovers(bucket, owners)) if "ring" in (bucket.reduction, bucket.gathering) else 0,
    }
    return each[bucket.reduction], each[bucket.gathering]


def sent_elements(bucket: Bucket, way: Reduction | Gathering, owners: int) -> float:
    """Returns the elements that a rank sends of a bucket; in a ring, what ranks hand over in addition is an
    n-th, in the mean."""
    return bucket.elements * (1 if way == "ring" and owners > 1 else (owners - 1) / owners)


class ReductionModel:
    """Prices a run's buckets on its links, and chooses."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        groups = Groups.of(layout, config.cluster)
        self._links, self._group = Links(cluster=config.cluster), groups.holding(matrix_copies(config.model))
        self._width, self._grad = element_bytes(config)
        self._rate = memory_rate(config.cluster)
        self._launch_s = config.cluster.launch_us * 1e-6
        # gloo's second collective of a ring hides under nothing: it is launched when the first has been
        # waited for.
        self._rings = config.cluster.device == "cuda"

    def reduce(self, bucket: Bucket) -> Transfer:
        """Gradients to their owners."""
        if bucket.reduction == "ring":
            return self._ring(bucket, "reduce_scatter")
        return self._per_range(bucket, "reduce")

    def gather(self, bucket: Bucket) -> Transfer:
        """New weights from their owners."""
        if bucket.gathering == "ring":
            return self._ring(bucket, "all_gather")
        return self._per_range(bucket, "broadcast")

    def in_turn(self, buckets: Sequence[Bucket]) -> list[tuple[Transfer, Transfer]]:
        """Reductions and gatherings of a stage's buckets, the latter in the opposite order, one after another
        on a stream: of each chain only the part that overlaps the next one's counts as `fill_s`."""
        reduced = _overlapped([self.reduce(bucket) for bucket in buckets], buckets, self._group.size)
        gathered = _overlapped([self.gather(bucket) for bucket in buckets[::-1]], buckets[::-1], self._group.size)
        return list(zip(reduced, gathered[::-1], strict=True))

    def gather_evenly(self, elements: int) -> float:
        """Seconds that AdamW's parameters take, of which every rank has as many."""
        return self._native(elements, "all_gather").seconds

    def choose(self, buckets: Iterable[Bucket], settings: PlanSettings, *, scratch: bool) -> tuple[Bucket, ...]:
        """The buckets with how each is reduced and gathered.

        Those that were asked for; else a collective for each owner's range, or, in canzona's plans on GPUs, a
        ring where it is worth its memory.

        Args:
            scratch: there is memory for rings that nobody asked for.
        """
        way = settings.reduction or "reduce"
        plain = [replace(bucket, reduction=way, gathering=GATHERED[way]) for bucket in buckets]
        if settings.reduction or settings.strategy != "canzona" or not (scratch and self._rings):
            return tuple(plain)
        if self._group.size == 1:
            return tuple(plain)
        stages = groupby(plain, key=lambda bucket: bucket.stage)
        return tuple(bucket for _, held in stages for bucket in self._quickest(list(held)))

    def _quickest(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """A stage's buckets, each in the way with which all are done soonest."""
        reduced, gathered = zip(*self.in_turn(buckets), strict=True)
        reducing = _by_chain(reduced, self._ring_seconds(buckets, reduced, "reduce_scatter"))
        gathering = _by_chain(gathered[::-1], self._ring_seconds(buckets, gathered, "all_gather")[::-1])[::-1]
        for bucket, reduced_by_chain, gathered_by_chain in zip(buckets, reducing, gathering, strict=True):
            yield replace(
                bucket,
                reduction="reduce" if reduced_by_chain else "ring",
                gathering="broadcast" if gathered_by_chain else "ring",
            )

    def _ring_seconds(self, buckets: Sequence[Bucket], chains: Sequence[Transfer], kind: Native) -> list[float]:
        """Seconds of each bucket in a ring; infinite where it cannot be worth it, because looking up what a
        ring hands over takes long."""
        return [
            self._ring(bucket, kind).seconds
            if self._native(bucket.elements, kind).seconds <= WORTH * chain.seconds
            else math.inf
            for bucket, chain in zip(buckets, chains, strict=True)
        ]

    def _per_range(self, bucket: Bucket, kind: Literal["reduce", "broadcast"]) -> Transfer:
        """A reduction (broadcast) of each range; each adds the work of issuing it."""
        width = self._grad if kind == "reduce" else self._width
        whole = self._links.rooted(
            kind, [share * width for share in shares(bucket).values()], self._group, collectives=len(bucket.ranges)
        )
        issue = (len(bucket.ranges) - 1) * self._launch_s if self._group.size > 1 else 0.0
        return whole.delayed(issue)

    def _ring(self, bucket: Bucket, kind: Native) -> Transfer:
        """Equal parts of the bucket as it lies, and handing over what is not with its owner,
        who copies shares then."""
        ranks = self._group.size
        if ranks == 1:
            return Transfer()
        width = self._bytes(kind)
        whole = self._native(bucket.elements, kind)
        messages = handed(bucket, ranks)
        if not messages:
            return whole
        for runs in messages:
            there, owned = ([elements * width for elements in side] for side in runs)
            sent, received = (there, owned) if kind == "reduce_scatter" else (owned, there)
            whole = whole.then(self._links.all_to_all(sent, received, self._group)).delayed(self._launch_s)
        return whole.delayed(2 * max(shares(bucket).values()) * width / self._rate + self._launch_s)

    def _native(self, elements: int, kind: Native) -> Transfer:
        collective = self._links.reduce_scatter if kind == "reduce_scatter" else self._links.all_gather
        return collective(elements * self._bytes(kind), self._group)

    def _bytes(self, kind: Native) -> int:
        """Returns the bytes of an element on its way."""
        return self._grad if kind == "reduce_scatter" else self._width


def _overlapped(transfers: Sequence[Transfer], buckets: Sequence[Bucket], owners: int) -> list[Transfer]:
    """The transfers one after another, with what of each chain's filling overlaps the next one's.

    A chain that ends at (begins with) an owner starts on the rank behind it. Ranks are done with it in their
    order, and each may go on: the next chain starts as many hops later as its owner lies behind. Launches of
    several owners run on several channels, of which the one with the longest way counts.
    """
    overlaps = [
        replace(transfer, fill_s=max(0.0, 1 - _hops(one, other, owners) / (owners - 1)) * transfer.fill_s)
        if transfer.fill_s and following.fill_s
        else replace(transfer, fill_s=0.0)
        for (one, transfer), (other, following) in pairwise(zip(buckets, transfers, strict=True))
    ]
    return [*overlaps, *(replace(last, fill_s=0.0) for last in transfers[-1:])]


def _hops(bucket: Bucket, following: Bucket, owners: int) -> int:
    """Steps round the ring of owners from the first range of a bucket past all to the last of the following one."""
    roots = [part.owner for part in (*bucket.ranges, *following.ranges)]
    return sum((later - owner) % owners for owner, later in pairwise(roots))


def _by_chain(chains: Sequence[Transfer], rings_s: Sequence[float]) -> list[bool]:
    """Chooses for each of a stream's buckets between a chain (True) and a ring,
    so that the last one ends soonest.

    A chain overlaps a chain only. The last one is judged alone, because it may find the stream idle. A ring
    has to be `WORTH` its memory.
    """
    follows: list[tuple[bool, bool]] = []
    # Seconds to the end of the stream from a bucket that is a chain, and from one that is not.
    chain_s, ring_s = chains[-1].seconds, rings_s[-1] / WORTH
    chain_s, ring_s = (chain_s, math.inf) if chain_s <= ring_s else (math.inf, ring_s)
    for chain, seconds in zip(chains[-2::-1], rings_s[-2::-1], strict=True):
        overlapping, apart = chain.seconds - chain.fill_s + chain_s, chain.seconds + ring_s
        follows.append((overlapping <= apart, chain_s <= ring_s))
        chain_s, ring_s = min(overlapping, apart), seconds / WORTH + min(chain_s, ring_s)
    by_chain = [chain_s <= ring_s]
    for after_chain, after_ring in reversed(follows):
        by_chain.append(after_chain if by_chain[-1] else after_ring)
    return by_chain
