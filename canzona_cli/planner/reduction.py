"""How a bucket's gradients get to their owners and its weights back: what every way takes, and which one is chosen."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Literal

from canzona_cli.config.execution import even_shards
from canzona_cli.config.schema import Gathering, Layout, Reduction, RunConfig
from canzona_cli.planner.buckets import ALIGNMENT, FP32, element_bytes
from canzona_cli.planner.cost import memory_rate
from canzona_cli.planner.links import Groups, Links, Transfer
from canzona_cli.planner.parts import Bucket, PlanSettings
from canzona_cli.planner.rings import handed, handovers, padded_part, shares

Native = Literal["reduce_scatter", "all_gather"]

GATHERED: Mapping[Reduction, Gathering] = MappingProxyType(
    {"reduce": "broadcast", "all_to_all": "broadcast", "padded": "padded", "ring": "ring", "even": "even"}
)
"""How weights come back where a way was asked for; else it is chosen apart."""
COPIED: tuple[Reduction, ...] = ("all_to_all", "padded")
"""Ways that hold more of a bucket than one's own share; no more than two buckets travel at the same time."""
GATHERED_AHEAD = 4
"""Buckets whose weights are on their way at the same time: what the first forward needs first starts with the end of
the updates, and whoever waits for one starts the one so many places behind it. With one, as Megatron has it, the second
bucket, mostly the first layer's largest matrices, starts with that forward only, and waits for a link that was idle."""
SIMILAR = 1.25
"""All-to-all is considered where no share is larger than this many even ones, and nobody has none."""
WORTH = 0.95
"""Another way is chosen where it takes no more than this part of a collective per owner: it needs memory that those do
not."""


def scratch_bytes(bucket: Bucket, owners: int, grad_bytes: int) -> dict[int, int]:
    """What ranks hold in addition to the buffer while a bucket's gradients travel.

    all_to_all: all ranks' copies of one's own share, its fp32 sum where that is not one of them, and what one sends,
    where it had to be packed first. padded: the padded copy. ring: one's own share.
    """
    found = shares(bucket)
    if owners == 1 or bucket.reduction in ("reduce", "even"):
        return {}
    if bucket.reduction == "padded":
        return dict.fromkeys(range(owners), owners * padded_part(bucket) * grad_bytes)
    if bucket.reduction == "ring":
        return {owner: share * grad_bytes for owner, share in found.items()}
    packed = 0 if in_order(bucket) else sum(found.values()) * grad_bytes
    total = 0 if grad_bytes == FP32 else FP32
    return {owner: (owners * grad_bytes + total) * found.get(owner, 0) + packed for owner in range(owners)}


def gathering_bytes(bucket: Bucket, owners: int, weight_bytes: int) -> dict[int, int]:
    """The same while its weights travel: the padded copy; one's own share, in the order in which it is handed over."""
    if owners > 1 and bucket.gathering == "padded":
        return dict.fromkeys(range(owners), owners * padded_part(bucket) * weight_bytes)
    if owners > 1 and bucket.gathering == "ring":
        return {owner: share * weight_bytes for owner, share in shares(bucket).items()}
    return {}


def in_order(bucket: Bucket) -> bool:
    """Whether shares follow each other in the order of owners: they can be sent as they lie."""
    return all(a.owner < b.owner and b.start - a.end < ALIGNMENT for a, b in pairwise(bucket.ranges))


def collectives(bucket: Bucket, owners: int) -> tuple[int, int]:
    """How many a rank takes part in: to reduce the bucket's gradients, to gather its weights."""
    if owners == 1:
        return 0, 0
    each: Mapping[Reduction | Gathering, int] = {
        "reduce": len(bucket.ranges),
        "broadcast": len(bucket.ranges),
        "all_to_all": 1,
        "padded": 1,
        "ring": 1 + len(handovers(bucket, owners)) if "ring" in (bucket.reduction, bucket.gathering) else 0,
        "even": 1,
    }
    return each[bucket.reduction], each[bucket.gathering]


def sent_elements(bucket: Bucket, way: Reduction | Gathering, owners: int) -> float:
    """What a rank sends of a bucket; in a ring, what ranks hand over in addition is an n-th, in the mean."""
    if way == "ring" and owners > 1:
        return bucket.elements
    whole = padded_part(bucket) * owners if way == "padded" else bucket.elements
    return whole * (owners - 1) / owners


class ReductionModel:
    """Prices a run's buckets on its links, and chooses."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._links, self._group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).data
        self._width, self._grad = element_bytes(config)
        self._rate = memory_rate(config.cluster)
        self._launch_s = config.cluster.launch_us * 1e-6
        self._native_ways = _native_ways(config)

    def reduce(self, bucket: Bucket) -> Transfer:
        """Gradients to their owners."""
        match bucket.reduction:
            case "even":
                return self._native(bucket.elements, "reduce_scatter")
            case "all_to_all":
                return self._all_to_all(bucket)
            case "padded":
                return self._padded(bucket, "reduce_scatter")
            case "ring":
                return self._ring(bucket, "reduce_scatter")
            case "reduce":
                return self._per_range(bucket, "reduce")

    def gather(self, bucket: Bucket) -> Transfer:
        """New weights from their owners."""
        match bucket.gathering:
            case "even":
                return self._native(bucket.elements, "all_gather")
            case "padded":
                return self._padded(bucket, "all_gather")
            case "ring":
                return self._ring(bucket, "all_gather")
            case "broadcast":
                return self._per_range(bucket, "broadcast")

    def in_turn(self, buckets: Sequence[Bucket]) -> list[tuple[Transfer, Transfer]]:
        """Reductions and gatherings of a stage's buckets, the latter in the opposite order, one after another on a
        stream: of each chain only the part that overlaps the next one's counts as `fill_s`."""
        reduced = _overlapped([self.reduce(bucket) for bucket in buckets], buckets, self._group.size)
        gathered = _overlapped([self.gather(bucket) for bucket in buckets[::-1]], buckets[::-1], self._group.size)
        return list(zip(reduced, gathered[::-1], strict=True))

    def gather_evenly(self, elements: int) -> float:
        """Seconds that AdamW's parameters take, of which every rank has as many."""
        return self._native(elements, "all_gather").seconds

    def choose(self, buckets: Iterable[Bucket], settings: PlanSettings, *, scratch: bool) -> tuple[Bucket, ...]:
        """The buckets with how each is reduced and gathered.

        What was asked for; else even collectives for equal shards, a collective for each owner's range, or, in
        canzona's plans, what is fastest of the other ways where it is worth its memory: native collectives, padded or
        in a ring, and for gradients an all-to-all where shares are alike, each in one range.

        Args:
            settings: even collectives are asked for only where shards are equal (`config.checks`).
            scratch: whether there is memory for a way that nobody asked for.
        """
        asked = settings.reduction or ("even" if even_shards(settings.layout, settings.strategy) else None)
        way = asked or "reduce"
        plain = [replace(bucket, reduction=way, gathering=GATHERED[way]) for bucket in buckets]
        if asked or settings.strategy != "canzona" or not scratch or self._group.size == 1:
            return tuple(plain)
        stages = groupby(plain, key=lambda bucket: bucket.stage)
        return tuple(bucket for _, held in stages for bucket in self._quickest(list(held)))

    def _quickest(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """A stage's buckets, each in the way with which all are done soonest."""
        moves = self.in_turn(buckets)
        reduced = [self._other_reduction(bucket, way.seconds) for bucket, (way, _) in zip(buckets, moves, strict=True)]
        gathered = [self._other_gathering(bucket, way.seconds) for bucket, (_, way) in zip(buckets, moves, strict=True)]
        reducing = _by_chain([way for way, _ in moves], [seconds for seconds, _ in reduced])
        gathering = _by_chain([way for _, way in moves[::-1]], [seconds for seconds, _ in gathered[::-1]])[::-1]
        for number, bucket in enumerate(buckets):
            yield replace(
                bucket,
                reduction=bucket.reduction if reducing[number] else reduced[number][1].reduction,
                gathering=bucket.gathering if gathering[number] else gathered[number][1].gathering,
            )

    def _other_reduction(self, plain: Bucket, plain_s: float) -> tuple[float, Bucket]:
        """The fastest way but a chain, and its seconds."""
        ways: list[Reduction] = [*self._promising(plain, "reduce_scatter", plain_s)]
        if self._alike(plain):
            ways.append("all_to_all")
        return _fastest(plain, [replace(plain, reduction=way) for way in ways], self.reduce)

    def _other_gathering(self, plain: Bucket, plain_s: float) -> tuple[float, Bucket]:
        ways = self._promising(plain, "all_gather", plain_s)
        return _fastest(plain, [replace(plain, gathering=way) for way in ways], self.gather)

    def _promising(self, bucket: Bucket, kind: Native, plain_s: float) -> list[Literal["padded", "ring"]]:
        """Native ways without those that cannot be worth it: what a ring hands over is looked up only if it matters."""
        ring_s = self._native(bucket.elements, kind).seconds
        return [way for way in self._native_ways if way != "ring" or ring_s <= WORTH * plain_s]

    def _alike(self, bucket: Bucket) -> bool:
        found = shares(bucket)
        if self._group.size == 1 or not len(found) == len(bucket.ranges) == self._group.size:
            return False
        return max(found.values()) * self._group.size <= SIMILAR * sum(found.values())

    def _per_range(self, bucket: Bucket, kind: Literal["reduce", "broadcast"]) -> Transfer:
        """A reduction (broadcast) of each range; each adds the work of issuing it."""
        width = self._grad if kind == "reduce" else self._width
        whole = self._links.rooted(
            kind, [share * width for share in shares(bucket).values()], self._group, collectives=len(bucket.ranges)
        )
        issue = (len(bucket.ranges) - 1) * self._launch_s if self._group.size > 1 else 0.0
        return whole.delayed(issue)

    def _all_to_all(self, bucket: Bucket) -> Transfer:
        """Every rank's copy of an owner's share to the owner, which adds them up in fp32.

        What does not lie in the order of owners is packed first. Copies are added one after another, and the sum is
        written to the buffer.
        """
        ranks = self._group.size
        if ranks == 1:
            return Transfer()
        found = shares(bucket)
        total = sum(found.values())
        own = [found.get(owner, 0) for owner in range(ranks)]
        moved = self._links.all_to_all(
            [(total - share) * self._grad for share in own],
            [(ranks - 1) * share * self._grad for share in own],
            self._group,
        )
        widened = 0 if self._grad == FP32 else self._grad + FP32
        per_element = (ranks - 1) * (2 * FP32 + self._grad) + FP32 + self._grad + widened
        packed = 0 if in_order(bucket) else 2 * total * self._grad
        return moved.delayed((max(own) * per_element + packed) / self._rate + ranks * self._launch_s)

    def _padded(self, bucket: Bucket, kind: Native) -> Transfer:
        """Equal parts, each as long as the longest share. Everything is copied once, to or from it; owners' shares
        another time.
        """
        if self._group.size == 1:
            return Transfer()
        found = shares(bucket)
        copied = 2 * (sum(found.values()) + max(found.values())) * self._bytes(kind)
        return self._native(padded_part(bucket) * self._group.size, kind).delayed(
            copied / self._rate + 2 * self._launch_s
        )

    def _ring(self, bucket: Bucket, kind: Native) -> Transfer:
        """Equal parts of the bucket as it lies, and handing over what is not with its owner. Owners copy shares."""
        ranks = self._group.size
        if ranks == 1:
            return Transfer()
        width = self._bytes(kind)
        whole = self._native(bucket.elements, kind)
        for runs in handed(bucket, ranks):
            there, owned = ([elements * width for elements in side] for side in runs)
            sent, received = (there, owned) if kind == "reduce_scatter" else (owned, there)
            whole = whole.then(self._links.all_to_all(sent, received, self._group)).delayed(self._launch_s)
        return whole.delayed(2 * max(shares(bucket).values()) * width / self._rate + self._launch_s)

    def _native(self, elements: int, kind: Native) -> Transfer:
        collective = self._links.reduce_scatter if kind == "reduce_scatter" else self._links.all_gather
        return collective(elements * self._bytes(kind), self._group)

    def _bytes(self, kind: Native) -> int:
        """Of an element on its way."""
        return self._grad if kind == "reduce_scatter" else self._width


def _overlapped(transfers: Sequence[Transfer], buckets: Sequence[Bucket], owners: int) -> list[Transfer]:
    """The transfers one after another, with what of each chain's filling overlaps the next one's.

    A chain that ends at (begins with) an owner starts on the rank behind it. Ranks are done with it in their order,
    and each may go on: the next chain starts as many hops later as its owner lies behind. Launches of several owners
    run on several channels, of which the one with the longest way counts.
    """
    found = [
        replace(transfer, fill_s=max(0.0, 1 - _hops(one, other, owners) / (owners - 1)) * transfer.fill_s)
        if transfer.fill_s and following.fill_s
        else replace(transfer, fill_s=0.0)
        for (one, transfer), (other, following) in pairwise(zip(buckets, transfers, strict=True))
    ]
    return [*found, *(replace(last, fill_s=0.0) for last in transfers[-1:])]


def _hops(bucket: Bucket, following: Bucket, owners: int) -> int:
    """Steps round the ring of owners from the first range of a bucket past all to the last of the following one."""
    roots = [part.owner for part in (*bucket.ranges, *following.ranges)]
    return sum((later - owner) % owners for owner, later in pairwise(roots))


def _fastest(plain: Bucket, others: Iterable[Bucket], priced: Callable[[Bucket], Transfer]) -> tuple[float, Bucket]:
    """Seconds of the one of `others` that takes least, and that one; never, and `plain`, where there is none."""
    return min(((priced(one).seconds, one) for one in others), key=itemgetter(0), default=(math.inf, plain))


def _by_chain(chains: Sequence[Transfer], others_s: Sequence[float]) -> list[bool]:
    """Tells of each of a stream's buckets whether it should travel along a chain, so that the last one ends soonest.

    A chain overlaps a chain only. The last one is judged alone, because it may find the stream idle. Another way has to
    be `WORTH` its memory.
    """
    follows: list[tuple[bool, bool]] = []
    # Seconds to the end of the stream from a bucket that is a chain, and from one that is not.
    chain_s, other_s = chains[-1].seconds, others_s[-1] / WORTH
    chain_s, other_s = (chain_s, math.inf) if chain_s <= other_s else (math.inf, other_s)
    for chain, seconds in zip(chains[-2::-1], others_s[-2::-1], strict=True):
        overlapping, apart = chain.seconds - chain.fill_s + chain_s, chain.seconds + other_s
        follows.append((overlapping <= apart, chain_s <= other_s))
        chain_s, other_s = min(overlapping, apart), seconds / WORTH + min(chain_s, other_s)
    by_chain = [chain_s <= other_s]
    for after_chain, after_other in reversed(follows):
        by_chain.append(after_chain if by_chain[-1] else after_other)
    return by_chain


def _native_ways(config: RunConfig) -> tuple[Literal["padded", "ring"], ...]:
    """Those that are chosen by price. gloo's has to be measured, and there a ring's second collective hides under
    nothing: it is launched when the first has been waited for.
    """
    if config.cluster.device == "cuda":
        return ("padded", "ring")
    return ("padded",) if config.cluster.collectives else ()
