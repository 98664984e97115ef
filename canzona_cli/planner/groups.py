"""Micro-groups: which of an owner's matrices travel together in one fused all-to-all over its TP group.

While group i is updated, group i + 1's gradients and group i - 1's new weights travel. Small groups start
computing sooner and hold less memory; large ones pay the latency of an exchange less often. A group's size is
what one host receives: the whole matrices it hosts, never more than C_max bytes. That bounds what a rank
sends as well: tp hosts' matrices, a fragment of 1 / tp of each.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

from canzona_cli.costs.sharing import Share
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.paper import rolled_back
from canzona_cli.planner.pipeline import HostedPipeline, Job, Loads
from canzona_cli.planner.plan import Assignment, Cell, MicroGroup, PlanSettings

_MIB = 1 << 20
CLOSE = 0.002
"""Fewer exchanges are better where they take hardly longer: what they cost besides varies most."""

Group = tuple[int, ...]
"""Matrices of one micro-group, by index in the plan's list."""


def micro_groups(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    grouped: "Grouped",
) -> tuple[MicroGroup, ...]:
    """Micro-groups of every owner in order of execution.

    - greedy: the paper's, see `paper.rolled_back`; `assign` gives matrices its hosts;
    - auto: see `_searched`; the fewest groups of those that take no more than `CLOSE` above the shortest.

    With tp = 1 nothing travels, and every owner has one group.

    Raises:
        ConfigError: C_max is smaller than the largest matrix.
    """
    check_capacity(matrices, grouped.pipeline.tp, grouped.settings, grouped.bytes_per_element)
    groups: list[MicroGroup] = []
    for (stage, owner), jobs in sorted(held_jobs(matrices, costs, assignment).items()):
        groups += [
            MicroGroup(stage=stage, owner=owner, index=number, matrices=group)
            for number, group in enumerate(grouped.of(jobs)[1])
        ]
    return tuple(groups)


def held_jobs(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment
) -> dict[tuple[int, int], list[Job]]:
    """Groups matrices by stage and owner."""
    held: dict[tuple[int, int], list[Job]] = {}
    for matrix, cell, cost in zip(matrices, assignment.cells, costs, strict=True):
        job = Job(matrix=matrix, host=cell.host, seconds=cost, share=assignment.shares.get(matrix.index))
        held.setdefault((matrix.stage, cell.owner), []).append(job)
    return held


class Grouped:
    """Micro-groups of one owner after another; where several have the same costs on the same hosts, found once."""

    def __init__(self, settings: PlanSettings, bytes_per_element: int, pipeline: HostedPipeline) -> None:
        self.settings, self.bytes_per_element, self.pipeline = settings, bytes_per_element, pipeline
        self._known: dict[Hashable, tuple[float, list[tuple[int, ...]]]] = {}

    def of(self, jobs: Sequence[Job]) -> tuple[float, list[Group]]:
        """Returns the seconds they take by the planner's clock, and the groups."""
        key = tuple(
            (job.host, job.seconds, job.matrix.elements, job.matrix.home, job.matrix.replicated, job.share)
            for job in jobs
        )
        if key not in self._known:
            seconds, groups = _groups(jobs, self.settings, self.bytes_per_element, self.pipeline)
            positions = {job.matrix.index: position for position, job in enumerate(jobs)}
            self._known[key] = (
                seconds,
                [tuple(positions[job.matrix.index] for job in group) for group in groups],
            )
        seconds, places = self._known[key]
        return seconds, [tuple(jobs[place].matrix.index for place in group) for group in places]


def check_capacity(matrices: Sequence[Matrix], tp: int, settings: PlanSettings, bytes_per_element: int) -> None:
    """Raises ConfigError where no group could hold the largest matrix."""
    if settings.c_max_bytes is None or tp == 1 or not matrices:
        return
    largest = max(matrices, key=lambda matrix: matrix.elements)
    need = largest.elements * bytes_per_element
    if settings.c_max_bytes < need:
        # Rounded up to what one can type, and a multiple of a power of two: it is the same number when it is
        # read.
        least = math.ceil(need / _MIB * 64) / 64
        raise ConfigError(
            Problem(
                key="engine.c_max_mib",
                value=round(settings.c_max_bytes / _MIB, 2),
                reason=(
                    f"is too small for the largest matrix: {largest.name} ({largest.rows} x {largest.cols}) takes "
                    f"{least} MiB in an exchange at {bytes_per_element} bytes per element, and is never divided"
                ),
                fix=f"use engine.c_max_mib={least} or more, or null to let the planner choose",
            )
        )


def _groups(
    jobs: Sequence[Job], settings: PlanSettings, bytes_per_element: int, pipeline: HostedPipeline
) -> tuple[float, list[list[Job]]]:
    """Returns the groups and the seconds they take."""
    capacity, tp = settings.capacity(bytes_per_element), pipeline.tp
    if settings.grouping == "auto" and tp > 1:
        return _quickest(_searched(jobs, tp, capacity), pipeline)
    chosen = [list(jobs)]
    if tp > 1:
        chosen = rolled_back(jobs, tp, capacity)
        # A memory cap may have moved hosts away from the greedy choice; groups are then cut for the hosts
        # there are.
        hosts = {job.matrix.index: job.host for group in chosen for job in group}
        if hosts != {job.matrix.index: job.host for job in jobs}:
            chosen = _cut(jobs, tp, capacity)
    return pipeline.seconds(chosen), chosen


def _quickest(candidates: Iterable[list[list[Job]]], pipeline: HostedPipeline) -> tuple[float, list[list[Job]]]:
    # Several ways to cut come to the same groups, and most have some in common.
    ways = {tuple(tuple(job.matrix.index for job in group) for group in groups): groups for groups in candidates}
    known: Loads = {}
    timed = [(pipeline.seconds(groups, known), groups) for groups in ways.values()]
    least = min(seconds for seconds, _ in timed)
    return min(
        (one for one in timed if one[0] <= (1 + CLOSE) * least),
        key=lambda one: (len(one[1]), one[0]),
    )


def _searched(jobs: Sequence[Job], tp: int, capacity: int | None) -> Iterator[list[list[Job]]]:
    """Candidates of `auto`: three orders, each at capacities from the largest matrix doubling up to C_max.

    And the same with groups of their own for what nothing hides: every host's first matrix, and the last one
    of every host, or of those hosts alone that are busy longer than the mean.
    """
    largest = max(job.received for job in jobs)
    hosted = [0] * tp
    for job in jobs:
        hosted[job.host] += job.received
    most = min(capacity or max(hosted), max(hosted))
    # Doubling: the time is flat around its minimum, and a plan has to be made within a second.
    capacities = [largest]
    while capacities[-1] < most:
        capacities.append(min(2 * capacities[-1], most))
    busy = [sum(job.busy for job in jobs if job.host == host) for host in range(tp)]
    late = {host for host in range(tp) if busy[host] * tp > sum(busy)}
    rising = _rounds(jobs, tp, descending=False)
    orders = (
        _rounds(jobs, tp, descending=True),
        rising,
        # Little to wait for at both ends: something small to start with, something small to finish on.
        _arched(rising, tp),
    )
    for order in orders:
        divided = [_ends(order, ending) for ending in (set(range(tp)), late)]
        for size in capacities:
            yield _cut(order, tp, size)
            for first, middle, last in divided:
                yield [group for group in (first, *_cut(middle, tp, size), last) if group]


def _ends(order: Sequence[Job], late: Set[int]) -> tuple[list[Job], list[Job], list[Job]]:
    """Every host's first job, what lies between, and the last job of the hosts in `late` that have another."""
    first: dict[int, Job] = {}
    last: dict[int, Job] = {}
    for job in order:
        first.setdefault(job.host, job)
        last[job.host] = job
    begin = list(first.values())
    end = [job for host, job in last.items() if host in late and first[host] is not job]
    taken = {job.matrix.index for job in (*begin, *end)}
    return begin, [job for job in order if job.matrix.index not in taken], end


def _cut(jobs: Iterable[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """Consecutive jobs, a group closed when the next would take a host above `capacity`."""
    groups: list[list[Job]] = [[]]
    hosted = [0] * tp
    for job in jobs:
        if capacity is not None and groups[-1] and hosted[job.host] + job.received > capacity:
            groups.append([])
            hosted = [0] * tp
        groups[-1].append(job)
        hosted[job.host] += job.received
    return groups


def _rounds(jobs: Sequence[Job], tp: int, *, descending: bool) -> list[Job]:
    """Every host's first job by cost, then every host's second, and so on."""
    sign = -1 if descending else 1
    queues = [
        sorted((j for j in jobs if j.host == host), key=lambda j: (sign * j.busy, j.matrix.index)) for host in range(tp)
    ]
    longest = max(map(len, queues))
    if not descending:
        # Hosts with fewer jobs start in a later round, so that all hosts take part in the last one.
        return [queue[turn - longest] for turn in range(longest) for queue in queues if turn >= longest - len(queue)]
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _arched(ascending: Sequence[Job], tp: int) -> list[Job]:
    """Every host's jobs up its even positions and down the odd ones, in rounds."""
    queues = [[job for job in ascending if job.host == host] for host in range(tp)]
    arches = [[*queue[::2], *reversed(queue[1::2])] for queue in queues]
    return [arch[turn] for turn in range(max(map(len, arches))) for arch in arches if turn < len(arch)]


GAIN = 0.98
"""A stage shares matrices where its slowest owner then takes at most this share of its time without: buckets
that other owners make may travel for longer."""


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
        balanced: the assignments whose owners may each share matrices, or not.
        possible: the ways in which matrices may be shared, by index.
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
    for stage, of_stage in rows.items():
        if stage in late:
            continue
        for owner, jobs in of_stage:
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
