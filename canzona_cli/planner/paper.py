"""Strategy `paper`: the engine of the paper (arXiv 2602.06079), as far as its abstract and summaries describe
it.

Every bucket is cut between matrices, in Megatron's order, into one share for each owner. alpha = 0 balances
the elements of each bucket, alpha = 1 the total. An owner's matrices then join micro-groups in registration
order, each on the host with the fewest elements. A group is closed before the matrix that would take a host
above C_max. canzona's additions are not used: matrices are not shared, buckets are not reduced in rings
(unless `engine.reduction` is ring), and owners are not reordered. The cost model is used only to choose C_max
if the user sets none.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.pipeline import Job
from canzona_cli.planner.plan import PlanSettings


def as_published(requested: PlanSettings) -> PlanSettings:
    """Returns the settings with fixed values for those that the paper's engine does not have."""
    return replace(requested, strategy="paper", layout="contiguous", grouping="greedy", mode="hosted")


def even_start(weights: Sequence[float], owners: int) -> list[int]:
    """Divides pieces evenly by weight; returns the owner of each piece, which is the owner in whose share it
    starts."""
    total, starts = sum(weights), accumulate(weights[:-1], initial=0)
    return [min(owners - 1, int(start * owners // total)) for start in starts]


def balanced_cuts(buckets: Sequence[Sequence[float]], owners: int, alpha: float) -> list[list[int]]:
    """Cuts each bucket into consecutive shares, one for each owner; returns the owner of each piece of each
    bucket.

    alpha = 0 balances every bucket, alpha = 1 the total over buckets. If `even_start` for every bucket leaves
    less weight on the fullest owner, its result is returned instead.

    Args:
        buckets: the weights of each bucket's pieces, in natural order.
    """
    goal = sum(map(sum, buckets)) / owners
    loads = [0.0] * owners
    owners_of: list[list[int]] = [[] for _ in buckets]
    for index in sorted(range(len(buckets)), key=lambda b: (-sum(buckets[b]), b)):
        weights = buckets[index]
        total = sum(weights)
        lacking = [max(0.0, goal - load) for load in loads]
        missing = sum(lacking)
        shares = [
            total * ((1 - alpha) / owners + alpha * (lack / missing if missing > 0 else 1 / owners)) for lack in lacking
        ]
        boundaries = [0.0, *accumulate(weights)]
        cuts = [_nearest(boundaries, target) for target in accumulate(shares[:-1])]
        # The number of cuts at or before a piece is the number of its owner.
        owners_of[index] = [bisect_right(cuts, piece) for piece in range(len(weights))]
        for weight, owner in zip(weights, owners_of[index], strict=True):
            loads[owner] += weight
    even = [even_start(weights, owners) for weights in buckets]
    return owners_of if max(loads) <= _fullest(buckets, even, owners) else even


def _fullest(buckets: Sequence[Sequence[float]], owned: Sequence[Sequence[int]], owners: int) -> float:
    """Returns the weight of the fullest owner, summed over buckets."""
    loads = [0.0] * owners
    for weights, owners_of in zip(buckets, owned, strict=True):
        for weight, owner in zip(weights, owners_of, strict=True):
            loads[owner] += weight
    return max(loads)


def _nearest(boundaries: Sequence[float], target: float) -> int:
    """Returns the index of the boundary nearest to `target`; the lower index if two are equally near."""
    above = min(bisect_left(boundaries, target), len(boundaries) - 1)
    below = max(0, above - 1)
    return below if target - boundaries[below] <= boundaries[above] - target else above


def greedy_hosts(matrices: Sequence[Matrix], indices: Sequence[int], tp: int, capacity: int | None) -> list[int]:
    """Chooses hosts for an owner's matrices as `paper_groups` does, in the order of `indices`."""
    jobs = [Job(matrix=matrices[index], host=0, seconds=0.0) for index in indices]
    hosts = {job.matrix.index: job.host for group in paper_groups(jobs, tp, capacity) for job in group}
    return [hosts[index] for index in indices]


def paper_groups(jobs: Sequence[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """Makes the paper's micro-groups: jobs join the open group in order, as long as no host exceeds C_max.
    Returns the jobs of each group, with their new hosts.

    For every job, the whole open group is placed again, largest first, each job on the host with the fewest
    elements. If a host would then hold more than C_max (`capacity`, in elements), the last job is taken back
    and opens the next group.
    """
    groups: list[dict[int, int]] = []
    opened: list[tuple[int, int]] = []
    for job in jobs:
        # The open group is placed again each time, because a large job may displace smaller jobs added before
        # it.
        insort(opened, (-job.matrix.elements, job.matrix.index))
        hosts = _place_least_full(opened, tp, capacity) if groups else None
        if hosts is None:
            opened = [(-job.matrix.elements, job.matrix.index)]
            groups.append({job.matrix.index: 0})
        else:
            groups[-1] = hosts
    by_index = {job.matrix.index: job for job in jobs}
    return [[replace(by_index[index], host=host) for index, host in sorted(group.items())] for group in groups]


def _place_least_full(ranked: Sequence[tuple[int, int]], tp: int, capacity: int | None) -> dict[int, int] | None:
    """Places matrices largest first onto the host with the fewest elements; returns each matrix's host, or
    None if a host would exceed `capacity`.

    Args:
        ranked: (-elements, index) of each matrix, ascending.
    """
    heap = [(0, host) for host in range(tp)]
    hosts = {}
    for elements, index in ranked:
        held, host = heap[0]
        if capacity is not None and held - elements > capacity:
            return None
        heapq.heapreplace(heap, (held - elements, host))
        hosts[index] = host
    return hosts
