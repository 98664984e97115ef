"""Divides an owner's matrices into micro-groups. The matrices of a micro-group are sent together in one fused
all-to-all over the owner's TP group.

While group i is updated, group i + 1's gradients and group i - 1's new weights are communicated. Small groups
let hosts start computing sooner and take less memory; large groups pay the latency of an exchange less often.
The size of a group is the size of the matrices that its fullest host receives, at most C_max bytes. C_max
also bounds the bytes that a rank sends, because a rank sends 1 / tp of each matrix on tp hosts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

from canzona_cli.costs.sharing import SharedCosts
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.paper import largest_first, paper_groups
from canzona_cli.planner.pipeline import HostedPipeline, Job, Loads
from canzona_cli.planner.plan import Assignment, Cell, MicroGroup, PlanSettings

_MIB = 1 << 20
CLOSE = 0.002
"""The relative difference in time up to which a candidate with fewer groups is preferred to a faster
candidate. The overhead of exchanges is the least predictable part of the time."""

GAIN = 0.98
"""The threshold for sharing matrices in a stage: the largest ratio of its slowest owner's time with sharing
to the time without. Sharing must gain something, because it changes owners, and buckets may then take longer
to communicate."""

Group = tuple[int, ...]
"""The matrices of one micro-group, as indices in the plan's list."""


def held_jobs(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment
) -> dict[tuple[int, int], list[Job]]:
    """Returns, by (stage, owner), a job for each matrix that belongs to a micro-group: its host and its
    update seconds. Experts with an `expert_rank` are in no micro-group and are left out."""
    held: dict[tuple[int, int], list[Job]] = {}
    for matrix, cell, cost in zip(matrices, assignment.cells, costs, strict=True):
        if matrix.expert_rank is None:
            shared_cost = assignment.shared_costs.get(matrix.index)
            job = Job(matrix=matrix, host=cell.host, seconds=cost, shared_cost=shared_cost)
            held.setdefault((matrix.stage, cell.owner), []).append(job)
    return held


def expert_seconds(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment, pipeline: HostedPipeline
) -> Mapping[tuple[int, int], tuple[float, ...]]:
    """Returns, by (stage, owner), the seconds that each host takes to update its experts with an
    `expert_rank`, before its micro-groups. Owners without these experts are left out."""
    counted = Counter(
        (matrix.stage, cell.owner, cell.host, cost, matrix.elements)
        for matrix, cell, cost in zip(matrices, assignment.cells, costs, strict=True)
        if matrix.expert_rank is not None
    )
    seconds: dict[tuple[int, int], list[float]] = {}
    for (stage, owner, host, cost, elements), count in sorted(counted.items()):
        of_hosts = seconds.setdefault((stage, owner), [0.0] * pipeline.tp)
        # A host launches the updates of all its experts once.
        of_hosts[host] = (of_hosts[host] or pipeline.begin_s) + count * pipeline.each_alone(cost, elements)
    return {key: tuple(of_hosts) for key, of_hosts in seconds.items()}


class GroupSearch:
    """The search for the micro-groups of owners. Results are cached, because many owners have the same costs
    on the same hosts.

    Args:
        costs: the seconds that one rank needs to update each matrix.
    """

    def __init__(
        self, matrices: Sequence[Matrix], costs: Sequence[float], settings: PlanSettings, pipeline: HostedPipeline
    ) -> None:
        self._matrices, self._costs, self._settings, self._pipeline = matrices, costs, settings, pipeline
        self._cache: dict[Hashable, tuple[float, list[tuple[int, ...]]]] = {}

    def micro_groups(self, assignment: Assignment) -> tuple[MicroGroup, ...]:
        """Returns the micro-groups of every owner in order of execution.

        - grouping greedy: the paper's groups, see `paper.paper_groups`. `assign` has chosen the hosts in the
          same way, unless a memory cap or sharing led to others;
        - grouping auto: the candidate with the fewest groups among the `_candidates` whose time is within
          `CLOSE` of the fastest.

        With tp = 1 nothing is exchanged, and every owner has one group.

        Raises:
            ConfigError: C_max is smaller than the largest matrix that is sent.
        """
        check_capacity(self._matrices, self._pipeline.tp, self._settings, self._pipeline.element_bytes)
        return tuple(
            MicroGroup(stage=stage, owner=owner, index=index, matrices=group)
            for stage, owner, _, groups in self._find_all(assignment)
            for index, group in enumerate(groups)
        )

    def slowest_owner_seconds(self, assignment: Assignment) -> dict[int, float]:
        """Returns the update seconds of each stage's slowest owner, as computed by `pipeline.Clock`."""
        slowest: dict[int, float] = defaultdict(float)
        for stage, _, seconds, _ in self._find_all(assignment):
            slowest[stage] = max(slowest[stage], seconds)
        return slowest

    def _find_all(self, assignment: Assignment) -> Iterator[tuple[int, int, float, list[Group]]]:
        """Yields each stage and owner, with the owner's update seconds and its groups."""
        jobs = held_jobs(self._matrices, self._costs, assignment)
        experts_s = expert_seconds(self._matrices, self._costs, assignment, self._pipeline)
        for stage, owner in sorted(jobs.keys() | experts_s.keys()):
            seconds, groups = self.find(jobs.get((stage, owner), []), experts_s.get((stage, owner), ()))
            yield stage, owner, seconds, groups

    def find(self, jobs: Sequence[Job], experts_s: Sequence[float] = ()) -> tuple[float, list[Group]]:
        """Returns an owner's update seconds, as computed by `pipeline.Clock`, and its groups.

        Args:
            experts_s: the seconds of each host's updates before the groups, see `expert_seconds`.
        """
        key = (
            tuple(experts_s),
            tuple(
                (job.host, job.seconds, job.matrix.elements, job.matrix.home, job.matrix.replicated, job.shared_cost)
                for job in jobs
            ),
        )
        if key not in self._cache:
            seconds, groups = _find_groups(jobs, self._settings, self._pipeline, experts_s)
            # Cached as positions in `jobs`, because owners with equal costs have different matrices.
            position_of = {job.matrix.index: position for position, job in enumerate(jobs)}
            positions = [tuple(position_of[job.matrix.index] for job in group) for group in groups]
            self._cache[key] = seconds, positions
        seconds, positions = self._cache[key]
        return seconds, [tuple(jobs[position].matrix.index for position in group) for group in positions]

    def choose_shared(
        self, hosted: Assignment, balanced: Assignment, possible: SharedCosts, memory_cap: int | None
    ) -> Assignment:
        """Chooses the matrices that each stage shares. Each owner in `balanced` shares as many as make it
        fastest. A stage whose slowest owner gains too little (`GAIN`) keeps its cells in `hosted` and shares
        nothing.

        Args:
            hosted: an assignment that shares nothing.
            balanced: an assignment that was balanced with sharing. Stages that share matrices have its owners.
            possible: the costs of the matrices that may be shared, by index.
            memory_cap: the elements of matrices that a cell may keep; None for no limit.
        """
        tp, matrices, costs = self._pipeline.tp, self._matrices, self._costs
        packer = HostPacker(costs, tp, possible)
        longest_s: dict[int, float] = {}
        for (stage, _), jobs in held_jobs(matrices, costs, hosted).items():
            longest_s[stage] = max(longest_s.get(stage, 0.0), GAIN * self.find(jobs)[0])
        owners_of_stage: dict[int, list[tuple[int, list[Job]]]] = {}
        too_slow: set[int] = set()
        for (stage, owner), jobs in held_jobs(matrices, costs, balanced).items():
            if stage in too_slow:
                continue
            alternatives = [
                alternative
                for alternative in _alternatives(jobs, packer, possible)
                if memory_cap is None or _fullest(alternative, tp) <= memory_cap
            ]
            # The first of equally fast alternatives.
            seconds, _, best = min(
                (self.find(alternative)[0], place, alternative)
                for place, alternative in enumerate(alternatives or [jobs])
            )
            owners_of_stage.setdefault(stage, []).append((owner, best))
            if seconds > longest_s[stage]:
                too_slow.add(stage)
        cells, shared_costs = list(hosted.cells), {}
        for stage, of_stage in owners_of_stage.items():
            if stage in too_slow:
                continue
            for owner, jobs in of_stage:
                for job in jobs:
                    cells[job.matrix.index] = Cell(owner=owner, host=job.host)
                    if job.shared_cost is not None:
                        shared_costs[job.matrix.index] = job.shared_cost
        return Assignment(cells=tuple(cells), shared_costs=MappingProxyType(dict(sorted(shared_costs.items()))))


def check_capacity(matrices: Sequence[Matrix], tp: int, settings: PlanSettings, bytes_per_element: int) -> None:
    """Raises ConfigError if C_max is smaller than the largest matrix that is sent between TP ranks."""
    if settings.c_max_bytes is None or tp == 1 or not matrices:
        return
    exchanged = (matrix for matrix in matrices if matrix.expert_rank is None)
    largest = max(exchanged, key=lambda matrix: matrix.elements)
    needed_bytes = largest.elements * bytes_per_element
    if settings.c_max_bytes < needed_bytes:
        # Rounded up to a multiple of 1/64, which has few digits and is read back exactly.
        least_mib = math.ceil(needed_bytes / _MIB * 64) / 64
        raise ConfigError(
            Problem(
                key="engine.c_max_mib",
                value=round(settings.c_max_bytes / _MIB, 2),
                reason=(
                    f"is too small for the largest matrix: {largest.name} ({largest.rows} x {largest.cols}) takes "
                    f"{least_mib} MiB in an exchange at {bytes_per_element} bytes per element, and is never divided"
                ),
                fix=f"use engine.c_max_mib={least_mib} or more, or null to let the planner choose",
            )
        )


def _find_groups(
    jobs: Sequence[Job], settings: PlanSettings, pipeline: HostedPipeline, experts_s: Sequence[float]
) -> tuple[float, list[list[Job]]]:
    """Finds an owner's groups; returns the seconds that they take, and the groups."""
    capacity, tp = settings.capacity(pipeline.element_bytes), pipeline.tp
    if settings.grouping == "auto" and tp > 1 and jobs:
        return _fewest_of_the_fastest(_candidates(jobs, tp, capacity), pipeline, experts_s)
    chosen = [list(jobs)] if jobs else []
    if tp > 1:
        chosen = paper_groups(jobs, tp, capacity)
        # If a memory cap or sharing led to hosts other than the greedy choice, the groups are cut for these.
        hosts = {job.matrix.index: job.host for group in chosen for job in group}
        if hosts != {job.matrix.index: job.host for job in jobs}:
            chosen = _cut(largest_first(jobs), tp, capacity)
    return pipeline.seconds(chosen, experts_s=experts_s), chosen


def _fewest_of_the_fastest(
    candidates: Iterable[list[list[Job]]], pipeline: HostedPipeline, experts_s: Sequence[float]
) -> tuple[float, list[list[Job]]]:
    """Times all candidates. Returns the seconds and groups of the candidate with the fewest groups among
    those within `CLOSE` of the fastest."""
    # Candidates are often equal, and most have groups in common, so loads are cached.
    distinct = {tuple(tuple(job.matrix.index for job in group) for group in groups): groups for groups in candidates}
    loads: Loads = {}
    timed = [(pipeline.seconds(groups, loads, experts_s), groups) for groups in distinct.values()]
    least = min(seconds for seconds, _ in timed)
    fast = [(seconds, groups) for seconds, groups in timed if seconds <= (1 + CLOSE) * least]
    return min(fast, key=lambda candidate: (len(candidate[1]), candidate[0]))


def _candidates(jobs: Sequence[Job], tp: int, capacity: int | None) -> Iterator[list[list[Job]]]:
    """Yields the candidates of grouping auto. Jobs are in the order of `_rounds` and are cut into groups at
    capacities that double from the largest matrix to C_max, or to the matrices of the fullest host if these
    are smaller. No other order gained even 0.01% of an iteration.

    Each candidate is also yielded with a separate first and last group, because nothing overlaps with their
    exchanges. The first group has every host's first matrix; the last group has the last matrix of every
    host, or only of hosts that are busier than the mean.
    """
    largest = max(job.received for job in jobs)
    hosted = [0] * tp
    for job in jobs:
        hosted[job.host] += job.received
    highest = min(capacity or max(hosted), max(hosted))
    # Doubling suffices, because the time is flat around its minimum, and a plan must be made within a second.
    capacities = [largest]
    while capacities[-1] < highest:
        capacities.append(min(2 * capacities[-1], highest))
    busy_s = [sum(job.busy for job in jobs if job.host == host) for host in range(tp)]
    busier_hosts = {host for host in range(tp) if busy_s[host] * tp > sum(busy_s)}
    order = _rounds(jobs, tp)
    divisions = [_ends(order, ending) for ending in (set(range(tp)), busier_hosts)]
    for size in capacities:
        yield _cut(order, tp, size)
        for first, middle, last in divisions:
            yield [group for group in (first, *_cut(middle, tp, size), last) if group]


def _ends(order: Sequence[Job], ending_hosts: Set[int]) -> tuple[list[Job], list[Job], list[Job]]:
    """Splits jobs into three lists: every host's first job, the jobs between, and the last job of each host
    in `ending_hosts` with more than one job."""
    first_of_host: dict[int, Job] = {}
    last_of_host: dict[int, Job] = {}
    for job in order:
        first_of_host.setdefault(job.host, job)
        last_of_host[job.host] = job
    beginning = list(first_of_host.values())
    ending = [job for host, job in last_of_host.items() if host in ending_hosts and first_of_host[host] is not job]
    outer = {job.matrix.index for job in (*beginning, *ending)}
    return beginning, [job for job in order if job.matrix.index not in outer], ending


def _cut(jobs: Iterable[Job], tp: int, capacity: int | None) -> list[list[Job]]:
    """Cuts jobs into consecutive groups. A group is closed before the job that would take a host above
    `capacity`."""
    groups: list[list[Job]] = [[]]
    hosted = [0] * tp
    for job in jobs:
        if capacity is not None and groups[-1] and hosted[job.host] + job.received > capacity:
            groups.append([])
            hosted = [0] * tp
        groups[-1].append(job)
        hosted[job.host] += job.received
    return groups


def _rounds(jobs: Sequence[Job], tp: int) -> list[Job]:
    """Orders jobs so that every host's costliest job comes first, then every host's second, and so on."""
    queues = [
        sorted((j for j in jobs if j.host == host), key=lambda j: (-j.busy, j.matrix.index)) for host in range(tp)
    ]
    return [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]


def _alternatives(jobs: Sequence[Job], packer: HostPacker, possible: SharedCosts) -> Iterator[list[Job]]:
    """Yields an owner's jobs on the hosts of each row of the packer, the row that shares nothing first."""
    rows = packer.rows([job.matrix.index for job in jobs])
    sharing = [row for row in rows if any(row.shared)]
    for row in [*(row for row in rows if not any(row.shared)), *sharing]:
        yield [
            replace(job, host=host, shared_cost=possible[job.matrix.index] if shared else None)
            for job, host, shared in zip(jobs, row.hosts, row.shared, strict=True)
        ]


def _fullest(jobs: Sequence[Job], tp: int) -> int:
    """Counts the elements that the fullest host holds, including its fragments of shared matrices."""
    elements = [0] * tp
    shared = 0
    for job in jobs:
        if job.shared_cost is None:
            elements[job.host] += job.matrix.elements
        else:
            shared += job.matrix.elements // tp
    return shared + max(elements)
