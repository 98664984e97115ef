"""Owners in natural order, for layout contiguous and strategy asc: buckets are cut between pieces as they lie."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


def even_start(weights: Sequence[float], owners: int) -> list[int]:
    """Owner of each piece: the rank whose even share of all of them the piece starts in."""
    total, starts = sum(weights), accumulate(weights[:-1], initial=0)
    return [min(owners - 1, int(start * owners // total)) for start in starts]


def balanced_cuts(buckets: Sequence[Sequence[float]], owners: int, alpha: float) -> list[list[int]]:
    """Owner of each piece of each bucket; `buckets[b]` are the weights of its pieces in natural order.

    alpha = 0 evens out every bucket, alpha = 1 the total over buckets. Where the result's fullest rank is fuller than
    that of `even_start` applied to the weights, that slicing is kept for all buckets.
    """
    goal = sum(map(sum, buckets)) / owners
    loads = [0.0] * owners
    found: list[list[int]] = [[] for _ in buckets]
    for index in sorted(range(len(buckets)), key=lambda b: (-sum(buckets[b]), b)):
        weights = buckets[index]
        total = sum(weights)
        lacking = [max(0.0, goal - load) for load in loads]
        wanted = sum(lacking)
        shares = [
            total * ((1 - alpha) / owners + alpha * (lack / wanted if wanted > 0 else 1 / owners)) for lack in lacking
        ]
        boundaries = [0.0, *accumulate(weights)]
        cuts = [_nearest(boundaries, target) for target in accumulate(shares[:-1])]
        # A rank ends where the next one's first piece is; the cuts ascend.
        found[index] = [bisect_right(cuts, piece) for piece in range(len(weights))]
        for weight, owner in zip(weights, found[index], strict=True):
            loads[owner] += weight
    plain = [even_start(weights, owners) for weights in buckets]
    return found if max(loads) <= _most(buckets, plain, owners) else plain


def _most(buckets: Sequence[Sequence[float]], owned: Sequence[Sequence[int]], owners: int) -> float:
    loads = [0.0] * owners
    for weights, found in zip(buckets, owned, strict=True):
        for weight, owner in zip(weights, found, strict=True):
            loads[owner] += weight
    return max(loads)


def _nearest(boundaries: Sequence[float], target: float) -> int:
    """Index of the boundary nearest to `target`; the lower of two equally near."""
    above = min(bisect_left(boundaries, target), len(boundaries) - 1)
    below = max(0, above - 1)
    return below if target - boundaries[below] <= boundaries[above] - target else above
