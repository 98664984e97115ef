"""How a bucket's gradients get to their owners and its weights back: what every way takes, and which one is chosen."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from canzona_cli.config.execution import even_shards
from canzona_cli.config.schema import Layout, Reduction, RunConfig
from canzona_cli.planner.buckets import ALIGNMENT, FP32, element_bytes
from canzona_cli.planner.cost import memory_rate
from canzona_cli.planner.links import Groups, Links, Transfer
from canzona_cli.planner.plan import Bucket, PlanSettings

SIMILAR = 1.25
"""All-to-all is considered where no share is larger than this many even ones, and nobody has none."""
WORTH = 0.95
"""And chosen where it takes no more than this part of the per-owner reductions: it needs memory that they do not."""


def shares(bucket: Bucket) -> dict[int, int]:
    """Elements of each owner that has any, alignment inside its ranges included."""
    found: dict[int, int] = {}
    for part in bucket.ranges:
        found[part.owner] = found.get(part.owner, 0) + part.end - part.start
    return found


def scratch_bytes(bucket: Bucket, owners: int, grad_bytes: int) -> dict[int, int]:
    """What ranks hold in addition to the buffer while a bucket is reduced all-to-all.

    All ranks' copies of one's own share, its fp32 sum where that is not one of them, and what one sends, where it had
    to be packed first.
    """
    if bucket.reduction != "all_to_all" or owners == 1:
        return {}
    found = shares(bucket)
    packed = 0 if in_order(bucket) else sum(found.values()) * grad_bytes
    total = 0 if grad_bytes == FP32 else FP32
    return {owner: (owners * grad_bytes + total) * found.get(owner, 0) + packed for owner in range(owners)}


def in_order(bucket: Bucket) -> bool:
    """Whether shares follow each other in the order of owners: they can be sent as they lie."""
    return all(a.owner < b.owner and b.start - a.end < ALIGNMENT for a, b in pairwise(bucket.ranges))


def collectives(bucket: Bucket, owners: int) -> tuple[int, int]:
    """How many a rank takes part in: to reduce the bucket's gradients, to gather its weights."""
    if owners == 1:
        return 0, 0
    if bucket.reduction == "even":
        return 1, 1
    return 1 if bucket.reduction == "all_to_all" else len(bucket.ranges), len(bucket.ranges)


class ReductionModel:
    """Prices a run's buckets on its links, and chooses."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._links, self._group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).data
        self._width, self._grad = element_bytes(config)
        self._rate = memory_rate(config.cluster)
        self._launch_s = config.cluster.launch_us * 1e-6

    def reduce(self, bucket: Bucket) -> Transfer:
        """Gradients to their owners."""
        if bucket.reduction == "even":
            return self._links.reduce_scatter(bucket.elements * self._grad, self._group)
        if bucket.reduction == "all_to_all":
            return self._all_to_all(bucket)
        return self._per_range(bucket, "reduce")

    def gather(self, bucket: Bucket) -> Transfer:
        """New weights from their owners: Megatron's all-gather of equal shards, else a broadcast of each range."""
        if bucket.reduction == "even":
            return self._links.all_gather(bucket.elements * self._width, self._group)
        return self._per_range(bucket, "broadcast")

    def choose(self, buckets: Iterable[Bucket], settings: PlanSettings, *, scratch: bool) -> tuple[Bucket, ...]:
        """The buckets with how each is reduced.

        What was asked for; else even collectives for equal shards, a reduction for each owner's range, or, in canzona's
        plans, an all-to-all where shares are alike, each in one range, and it is worth its memory.

        Args:
            settings: even collectives are asked for only where shards are equal (`config.checks`).
            scratch: whether there is memory for an all-to-all that nobody asked for.
        """
        return tuple(replace(one, reduction=self._choice(one, settings, scratch)) for one in buckets)

    def _choice(self, bucket: Bucket, settings: PlanSettings, scratch: bool) -> Reduction:
        if settings.reduction is not None:
            return settings.reduction
        if even_shards(settings.layout, settings.strategy):
            return "even"
        if settings.strategy == "asc" or not scratch or not self._alike(bucket):
            return "reduce"
        worth = self._all_to_all(bucket).seconds <= WORTH * self._per_range(bucket, "reduce").seconds
        return "all_to_all" if worth else "reduce"

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
        return replace(whole, latency_s=whole.latency_s + issue)

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
        local = (max(own) * per_element + packed) / self._rate + ranks * self._launch_s
        return replace(moved, latency_s=moved.latency_s + local)
