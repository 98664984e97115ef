"""Which matrices an owner's TP group updates together: chosen with their owners and hosts, by what a step takes.

Whole matrices leave ranks idle where an owner has few, and make all wait for the largest. Shared ones keep every rank
busy, but with more work, and more exchanges. So the plan without them is made first, and beside it one whose owners are
balanced with as many shared as make the busiest cell least busy. There each owner has what its TP group is done with
first, by the planner's clock: that, nothing shared, or all. Every pipeline stage then has the one of both whose slowest
owner is done first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.micro_groups import Grouped, held_jobs
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.parts import Assignment, Cell, Share
from canzona_cli.planner.pipeline import Job

GAIN = 0.98
"""A stage shares matrices where its slowest owner then takes at most this share of its time without: buckets that other
owners make may travel for longer."""


def best_of(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    hosted: Assignment,
    balanced: Assignment,
    possible: Mapping[int, Share],
    tp: int,
    grouped: Grouped,
    memory_cap: int | None,
) -> Assignment:
    """Owner, host and mode of every matrix.

    Args:
        hosted: with nothing shared.
        balanced: of whose owners each may share, or not.
        possible: of what may be shared, by index.
        memory_cap: elements of matrices that a cell may keep.
    """
    packer = HostPacker(costs, tp, possible)
    limits: dict[int, float] = {}
    for (stage, _), jobs in held_jobs(matrices, costs, hosted).items():
        limits[stage] = max(limits.get(stage, 0.0), GAIN * grouped.of(jobs)[0])
    rows: dict[int, list[tuple[int, list[Job]]]] = {}
    late: set[int] = set()
    for (stage, owner), jobs in held_jobs(matrices, costs, balanced).items():
        if stage in late:
            continue
        ways = [way for way in _ways(jobs, packer, possible) if memory_cap is None or _fullest(way, tp) <= memory_cap]
        # Of equally long ones the first.
        seconds, _, best = min((grouped.of(way)[0], place, way) for place, way in enumerate(ways or [jobs]))
        rows.setdefault(stage, []).append((owner, best))
        if seconds > limits[stage]:
            late.add(stage)
    cells, shares = list(hosted.cells), {}
    for stage, own in rows.items():
        if stage in late:
            continue
        for owner, jobs in own:
            for job in jobs:
                cells[job.matrix.index] = Cell(owner=owner, host=job.host)
                if job.share is not None:
                    shares[job.matrix.index] = job.share
    return Assignment(cells=tuple(cells), shares=MappingProxyType(dict(sorted(shares.items()))))


def _ways(jobs: Sequence[Job], packer: HostPacker, possible: Mapping[int, Share]) -> Iterator[list[Job]]:
    """Yields nothing shared, then what is lowest, then all."""
    for row in sorted(packer.rows([job.matrix.index for job in jobs]), key=lambda row: sum(row.shared) > 0):
        yield [
            replace(job, host=host, share=possible[job.matrix.index] if shared else None)
            for job, host, shared in zip(jobs, row.hosts, row.shared, strict=True)
        ]


def _fullest(jobs: Sequence[Job], tp: int) -> int:
    held, each = [0] * tp, 0
    for job in jobs:
        if job.share is None:
            held[job.host] += job.matrix.elements
        else:
            each += job.matrix.elements // tp
    return each + max(held)
