"""Owners in natural order: every bucket stays as Megatron lays it out, cut at `owners - 1` places (the paper's layout).

Rule of the paper (arXiv 2602.06079) and of its published code: buckets in descending size; a rank's target in a bucket
is (1 - alpha) of an even share plus alpha of a share in proportion to what it still lacks of the even total; cuts go to
the nearest boundary.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def even_start(sizes: Sequence[int], owners: int) -> list[int]:
    """Owner of each piece of a bucket: the rank whose even share of the bucket the piece starts in (strategy asc)."""
    total, start = sum(sizes), 0
    found = []
    for size in sizes:
        found.append(min(owners - 1, start * owners // total))
        start += size
    return found


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
        found[index] = owned = _owners_of(cuts, len(weights))
        for weight, owner in zip(weights, owned, strict=True):
            loads[owner] += weight
    plain = [_by_start(weights, owners) for weights in buckets]
    return found if max(loads) <= _fullest(buckets, plain, owners) else plain


def _by_start(weights: Sequence[float], owners: int) -> list[int]:
    total = sum(weights)
    starts = [0.0, *accumulate(weights)][: len(weights)]
    return [min(owners - 1, int(start / total * owners)) if total > 0 else 0 for start in starts]


def _fullest(buckets: Sequence[Sequence[float]], owned: Sequence[Sequence[int]], owners: int) -> float:
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


def _owners_of(cuts: Sequence[int], pieces: int) -> list[int]:
    """cuts[r] is the piece at which rank r ends; they ascend."""
    found, owner = [], 0
    for piece in range(pieces):
        while owner < len(cuts) and cuts[owner] <= piece:
            owner += 1
        found.append(owner)
    return found
