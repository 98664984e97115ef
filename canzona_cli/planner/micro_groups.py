"""Micro-groups: which of an owner's matrices travel together in one fused all-to-all over its TP group.

While group i is updated, group i + 1's gradients and group i - 1's new weights travel. Small groups start computing
sooner and hold less memory; large ones pay the latency of an exchange less often. A group's size is what one host
receives: the whole matrices it hosts, never more than C_max bytes. That bounds what a rank sends as well: tp hosts'
matrices, a fragment of 1 / tp of each.
"""

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.schema import Layout
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.exchange import group_traffic
from canzona_cli.planner.plan import Assignment, MicroGroup, PlanSettings

_MIB = 1 << 20

Group = tuple[int, ...]
"""Matrices of one micro-group, by index in the plan's list."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """What a fused all-to-all inside a TP group costs."""

    bytes_per_s: float = 450e9
    """One rank, one direction."""
    latency_s: float = 20e-6
    """One exchange, launch included."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix as its owner's pipeline sees it."""

    matrix: Matrix
    host: int
    seconds: float
    width: int
    """Bytes of an element in the exchange."""

    @property
    def index(self) -> int:
        return self.matrix.index

    @property
    def size(self) -> int:
        """Bytes of the whole matrix in the exchange."""
        return self.matrix.elements * self.width


def micro_groups(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    layout: Layout,
    settings: PlanSettings,
    bytes_per_element: int,
    link: ExchangeCost | None = None,
) -> tuple[MicroGroup, ...]:
    """Micro-groups of every owner in order of execution.

    - registration: in registration order, a group closed when the next matrix would overfill a host;
    - balanced: every host's next costliest matrices together, so that hosts are busy equally long in each group;
    - greedy: the paper's; its hosts are chosen by `greedy_hosts` (see `assign`);
    - auto: the order and the capacity up to C_max with the shortest `pipeline_seconds`.

    With tp = 1 nothing travels, and every owner has one group.

    Raises:
        ConfigError: C_max is smaller than the largest matrix.
    """
    check_capacity(matrices, layout, settings, bytes_per_element)
    link = link or ExchangeCost()
    held: dict[tuple[int, int], list[Job]] = {}
    for matrix, cell, cost in zip(matrices, assignment.cells, costs, strict=True):
        job = Job(matrix=matrix, host=cell.host, seconds=cost, width=bytes_per_element)
        held.setdefault((matrix.stage, cell.owner), []).append(job)
    known: dict[Hashable, list[tuple[int, ...]]] = {}
    found: list[MicroGroup] = []
    for (stage, owner), jobs in sorted(held.items()):
        # Most owners have the same costs on the same hosts; each such list is grouped once.
        key = tuple((job.host, job.seconds, job.size, job.matrix.home, job.matrix.replicated) for job in jobs)
        if key not in known:
            positions = {job.index: position for position, job in enumerate(jobs)}
            known[key] = [tuple(positions[i] for i in group) for group in _groups(jobs, layout.tp, settings, link)]
        found += [
            MicroGroup(stage=stage, owner=owner, index=number, matrices=tuple(jobs[p].index for p in group))
            for number, group in enumerate(known[key])
        ]
    return tuple(found)


def check_capacity(matrices: Sequence[Matrix], layout: Layout, settings: PlanSettings, bytes_per_element: int) -> None:
    """Raises ConfigError where no group could hold the largest matrix."""
    if settings.c_max_bytes is None or layout.tp == 1 or not matrices:
        return
    largest = max(matrices, key=lambda matrix: matrix.elements)
    need = largest.elements * bytes_per_element
    if settings.c_max_bytes < need:
        # Rounded up to what one can type, and a multiple of a power of two: it is the same number when it is read.
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


def greedy_hosts(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    indices: Sequence[int],
    tp: int,
    c_max_bytes: int | None,
    bytes_per_element: int,
) -> list[int]:
    """Hosts of an owner's matrices by the paper's rule, in the order of `indices`."""
    jobs = [Job(matrix=matrices[index], host=0, seconds=costs[index], width=bytes_per_element) for index in indices]
    placed = {job.index: job.host for group in _rolled_back(jobs, tp, c_max_bytes) for job in group}
    return [placed[index] for index in indices]


def pipeline_seconds(groups: Sequence[Sequence[Job]], tp: int, link: ExchangeCost) -> float:
    """Seconds from the first exchange to the last, for an owner's groups in this order.

    One communication stream carries in(1), in(2), out(1), in(3), out(2), ...; every host computes its groups in order.
    in(i) waits for the stream, compute(i) for in(i) and compute(i - 1) on that host, out(i) for the stream and for
    compute(i) on every host. An exchange lasts the latency and the bytes of its busiest rank.
    """
    stream = 0.0  # when the communication stream is free
    ready = [0.0] * tp  # when each host has updated all it has so far
    leaving: tuple[float, float] | None = None  # when the previous group is updated, and how long its weights travel
    for group in groups:
        inwards, outwards = _exchange_seconds(group, tp, link)
        arrived = stream = stream + inwards
        # out(i - 1) is queued behind in(i), so that computing never waits for weights to leave.
        if leaving is not None:
            stream = max(stream, leaving[0]) + leaving[1]
        for job in group:
            ready[job.host] = max(ready[job.host], arrived) + job.seconds
        leaving = max(ready), outwards
    return max(stream, leaving[0]) + leaving[1] if leaving is not None else 0.0


def _exchange_seconds(group: Sequence[Job], tp: int, link: ExchangeCost) -> tuple[float, float]:
    """Seconds of the gradients' exchange and of the weights', both at the wider element of the two.

    Without the weights' flags: a few bytes should not decide between groupings that take equally long.
    """
    if tp == 1:
        return 0.0, 0.0
    moved = group_traffic([job.matrix for job in group], [job.host for job in group], tp, flags=False)
    width = group[0].width
    return (
        link.latency_s + moved.gradients.busiest * width / link.bytes_per_s,
        link.latency_s + moved.weights.busiest * width / link.bytes_per_s,
    )


def _groups(jobs: Sequence[Job], tp: int, settings: PlanSettings, link: ExchangeCost) -> list[Group]:
    capacity = settings.c_max_bytes
    if tp == 1:
        return [tuple(job.index for job in jobs)]
    if settings.grouping == "greedy":
        groups = _rolled_back(jobs, tp, capacity)
        # A memory cap may have moved hosts away from the greedy choice; groups are then cut for the hosts there are.
        kept = {job.index: job.host for group in groups for job in group} == {job.index: job.host for job in jobs}
        chosen = groups if kept else _cut(jobs, tp, capacity)
    elif settings.grouping == "registration":
        chosen = _cut(jobs, tp, capacity)
    elif settings.grouping == "balanced":
        chosen = _cut(_rounds(jobs, tp, descending=True), tp, capacity)
    else:
        chosen = min(_searched(jobs, tp, capacity), key=lambda groups: pipeline_seconds(groups, tp, link))
    return [tuple(job.index for job in group) for group in chosen]


def _searched(jobs: Sequence[Job], tp: int, c_max_bytes: int | None) -> Iterator[list[list[Job]]]:
    """Candidates of `auto`: four orders, each at capacities from the largest matrix doubling up to C_max."""
    largest = max(job.size for job in jobs)
    hosted = [0] * tp
    for job in jobs:
        hosted[job.host] += job.size
    most = min(c_max_bytes or max(hosted), max(hosted))
    # Doubling: the time is flat around its minimum, and a plan has to be made within a second.
    capacities = [largest]
    while capacities[-1] < most:
        capacities.append(min(2 * capacities[-1], most))
    orders = (
        list(jobs),
        _rounds(jobs, tp, descending=True),
        _rounds(jobs, tp, descending=False),
        # Little to wait for at both ends: something small to start with, something small to finish on.
        _arched(_rounds(jobs, tp, descending=False)),
    )
    for capacity in capacities:
        for order in orders:
            yield _cut(order, tp, capacity)


def _cut(jobs: Iterable[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """Consecutive jobs, a group closed when the next would take a host above `capacity`."""
    groups: list[list[Job]] = [[]]
    hosted = [0] * tp
    for job in jobs:
        if capacity is not None and groups[-1] and hosted[job.host] + job.size > capacity:
            groups.append([])
            hosted = [0] * tp
        groups[-1].append(job)
        hosted[job.host] += job.size
    return groups


def _rounds(jobs: Sequence[Job], tp: int, *, descending: bool) -> list[Job]:
    """Every host's first job by cost, then every host's second, and so on."""
    sign = -1 if descending else 1
    queues = [
        sorted((j for j in jobs if j.host == host), key=lambda j: (sign * j.seconds, j.index)) for host in range(tp)
    ]
    longest = max(map(len, queues))
    if not descending:
        # Hosts with fewer jobs start in a later round, so that all hosts take part in the last one.
        return [queue[turn - longest] for turn in range(longest) for queue in queues if turn >= longest - len(queue)]
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _arched(ascending: Sequence[Job]) -> list[Job]:
    """Up the even positions and down the odd ones."""
    return [*ascending[::2], *reversed(ascending[1::2])]


def _rolled_back(jobs: Sequence[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """The paper's groups: jobs in registration order join the open group as long as it can be balanced within C_max.

    Each time, the group's jobs go costliest first onto the least busy host (a heap). When a host would hold more than
    C_max, the job that caused it is rolled back and opens the next group. Returns jobs with their new hosts.
    """
    done: list[list[Job]] = []
    members: list[Job] = []
    placed: list[Job] = []
    for job in jobs:
        # The whole open group is placed anew each time: a late costly job may displace earlier, cheaper ones.
        trial = _least_busy([*members, job], tp, capacity)
        if trial is None:
            done.append(placed)
            members, trial = [], _least_busy([job], tp, None)
        members.append(job)
        placed = trial or []
    return [*done, placed] if placed else done


def _least_busy(jobs: Sequence[Job], tp: int, capacity: int | None) -> list[Job] | None:
    heap = [(0.0, host) for host in range(tp)]
    hosted = [0] * tp
    placed = []
    for job in sorted(jobs, key=lambda j: (-j.seconds, j.index)):
        busy, host = heap[0]
        hosted[host] += job.size
        if capacity is not None and hosted[host] > capacity:
            return None
        heapq.heapreplace(heap, (busy + job.seconds, host))
        placed.append(replace(job, host=host))
    return sorted(placed, key=lambda j: j.index)
