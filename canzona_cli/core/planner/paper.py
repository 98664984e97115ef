"""Strategy `paper`: who updates what, and when, in the paper (arXiv 2602.06079) and in its authors' code
(github.com/liangyuwang/Megatron-Canzona).

Every bucket is cut between matrices, in Megatron's order, into one share for each owner. alpha = 0 balances
the elements of each bucket, alpha = 1 the total. An owner's matrices then join micro-groups, the largest
first, each on the host with the fewest elements. A matrix that would take its host above C_max opens the next
group. The cost model is used only to choose the size of buckets, their collectives and C_max, like those of
every plan, unless the user sets them. Matrices are not shared, and owners are not reordered. The
manual lists how the authors' code differs from this strategy.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.pipeline import Job
from canzona_cli.core.planner.plan import PlanSettings


def as_published(requested: PlanSettings) -> PlanSettings:
    """Returns the settings with fixed values for those that the paper's engine does not have."""
    return replace(requested, strategy="paper", mode="hosted")


def even_start(weights: Sequence[float], owners: int) -> list[int]:
    """Divides pieces evenly by weight; returns the owner of each piece, which is the owner in whose share it
    starts."""
    total, starts = sum(weights), accumulate(weights[:-1], initial=0)
    return [min(owners - 1, int(start * owners // total)) for start in starts]


def balanced_cuts(buckets: Sequence[Sequence[float]], owners: int, alpha: float) -> list[list[int]]:
    """Cuts each bucket into consecutive shares, one for each owner; returns the owner of each piece of each
    bucket.

    alpha = 0 balances every bucket, alpha = 1 the total over buckets. Unless this leaves less weight on the
    fullest owner than `even_start` for every bucket, the result of `even_start` is returned instead.

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
    return owners_of if max(loads) < _fullest(buckets, even, owners) else even


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


def largest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sorts jobs by elements, the paper's cost, and then by index, both descending."""
    return sorted(jobs, key=lambda job: (job.matrix.elements, job.matrix.index), reverse=True)


def paper_groups(jobs: Sequence[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """Makes the micro-groups of the authors' mode `global`; returns the jobs of each group, with their new
    hosts.

    Jobs join the open group largest first, each on the host with the fewest elements in this group. A job
    that would take its host above C_max (`capacity`, in elements) opens the next group instead. The authors'
    code places the whole group anew for every job, which has the same result, because no job is larger than
    the jobs before it.
    """
    groups: list[list[Job]] = []
    held: list[tuple[int, int]] = []
    for job in largest_first(jobs):
        elements = job.matrix.elements
        if not groups or (capacity is not None and held[0][0] + elements > capacity):
            groups.append([])
            held = [(0, host) for host in range(tp)]
        least, host = held[0]
        heapq.heapreplace(held, (least + elements, host))
        groups[-1].append(replace(job, host=host))
    return groups
