"""Divides an owner's matrices into micro-groups. The matrices of a micro-group are sent together in one fused
all-to-all over the owner's TP group.

While group i is updated, group i + 1's gradients and group i - 1's new weights are communicated. Small groups
let hosts start computing sooner and take less memory; large groups pay the latency of an exchange less often.
The size of a group is the size of the matrices that its fullest host receives, at most C_max bytes. C_max
also bounds the bytes that a rank sends, because a rank sends 1 / tp of each matrix on tp hosts.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from canzona_cli.core.costs.sharing import SharedCost
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import alike_stages, pool_matrices
from canzona_cli.core.planner.paper import paper_groups
from canzona_cli.core.planner.pipeline import HostedPipeline, Job, make_jobs
from canzona_cli.core.planner.plan import Assignment, MicroGroup, PlanSettings, SameObject

_MIB = 1 << 20
LARGEST = 2
"""The limit on a group's matrices on one host, as a multiple of the largest matrix, if C_max is not set. Larger groups
take more memory and are not faster."""

Group = tuple[int, ...]
"""The matrices of one micro-group, as indices in the plan's list."""


def held_jobs(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment
) -> dict[tuple[int, int], list[Job]]:
    """Returns, by (stage, owner), a job for each matrix that belongs to a micro-group: its host and its
    update seconds. Experts with an `expert_rank` are in no micro-group and are left out."""
    held: dict[tuple[int, int], list[Job]] = {}
    for pool, members in pool_matrices(matrices).items():
        if pool.expert_rank is None:
            for job in make_jobs([matrix.index for matrix in members], matrices, costs, assignment):
                held.setdefault((pool.stage, assignment.cells[job.matrix.index].owner), []).append(job)
    return held


def expert_seconds(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment, pipeline: HostedPipeline
) -> Mapping[tuple[int, int], tuple[float, ...]]:
    """Returns, by (stage, owner), the seconds that each host takes to update its experts with an
    `expert_rank`, before its micro-groups. Owners without these experts are left out."""
    if all(pool.expert_rank is None for pool in pool_matrices(matrices)):
        return {}
    seconds: dict[tuple[int, int], tuple[float, ...]] = {}
    stages: dict[int, dict[int, list[float]]] = {}
    """The seconds of each owner's hosts, by stage."""
    for stage, (first, indices) in alike_stages(matrices, costs, assignment).items():
        if first == stage:
            stages[stage] = _expert_seconds(matrices, costs, assignment, pipeline, indices)
        seconds |= {(stage, owner): tuple(of_hosts) for owner, of_hosts in stages[first].items()}
    return seconds


def _expert_seconds(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    pipeline: HostedPipeline,
    indices: Sequence[int],
) -> dict[int, list[float]]:
    """Returns the `expert_seconds` of each owner of the stage with the matrices at `indices`."""
    cells, counted = assignment.cells, Counter[tuple[int, int, float, int]]()
    counted.update(
        [
            (cells[index].owner, cells[index].host, costs[index], matrices[index].elements)
            for index in indices
            if matrices[index].expert_rank is not None
        ]
    )
    seconds: dict[int, list[float]] = {}
    for (owner, host, cost, elements), count in sorted(counted.items()):
        of_hosts = seconds.setdefault(owner, [0.0] * pipeline.tp)
        # A host launches the updates of all its experts once.
        of_hosts[host] = (of_hosts[host] or pipeline.begin_s) + count * pipeline.each_alone(cost, elements)
    return seconds


class Grouping:
    """The micro-groups of owners, and the seconds that they take. Results are cached, because many owners have the
    same costs on the same hosts.

    Args:
        costs: the seconds that one rank needs to update each matrix.
    """

    def __init__(
        self, matrices: Sequence[Matrix], costs: Sequence[float], settings: PlanSettings, pipeline: HostedPipeline
    ) -> None:
        self._matrices, self._costs, self._settings, self._pipeline = matrices, costs, settings, pipeline
        self._cache: dict[Hashable, tuple[float, list[tuple[int, ...]]]] = {}
        self._of_assignments: dict[Hashable, list[tuple[int, int, float, list[Group]]]] = {}

    def micro_groups(self, assignment: Assignment) -> tuple[MicroGroup, ...]:
        """Returns the micro-groups of every owner in order of execution.

        - strategy paper: see `paper.paper_groups`. `assign` has chosen the hosts in the same way;
        - otherwise every host's costliest matrix, so that hosts start computing soon; then groups of at most C_max
          or, if it is not set, `LARGEST` times the largest matrix.

        With tp = 1 nothing is exchanged, and every owner has one group.

        Raises:
            ConfigError: C_max is smaller than the largest matrix that is sent.
        """
        check_capacity(self._matrices, self._pipeline.tp, self._settings, self._pipeline.element_bytes)
        return tuple(
            MicroGroup(stage=stage, owner=owner, index=index, matrices=group)
            for stage, owner, _, groups in self._owners(assignment)
            for index, group in enumerate(groups)
        )

    def slowest_owner_seconds(self, assignment: Assignment) -> float:
        """Returns the update seconds of the slowest owner of all stages, as computed by `pipeline.Clock`."""
        return max(seconds for _, _, seconds, _ in self._owners(assignment))

    def _owners(self, assignment: Assignment) -> list[tuple[int, int, float, list[Group]]]:
        """Lists each stage and owner, with the owner's update seconds and its groups."""
        key = SameObject(assignment)
        if key not in self._of_assignments:
            jobs = held_jobs(self._matrices, self._costs, assignment)
            experts_s = expert_seconds(self._matrices, self._costs, assignment, self._pipeline)
            self._of_assignments[key] = [
                (stage, owner, *self.find(jobs.get((stage, owner), []), experts_s.get((stage, owner), ())))
                for stage, owner in sorted(jobs.keys() | experts_s.keys())
            ]
        return self._of_assignments[key]

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
            groups = _find_groups(jobs, self._settings, self._pipeline)
            seconds = self._pipeline.seconds(groups, experts_s)
            # Cached as positions in `jobs`, because owners with equal costs have different matrices.
            position_of = {job.matrix.index: position for position, job in enumerate(jobs)}
            positions = [tuple(position_of[job.matrix.index] for job in group) for group in groups]
            self._cache[key] = seconds, positions
        seconds, positions = self._cache[key]
        return seconds, [tuple(jobs[position].matrix.index for position in group) for group in positions]

    def faster_owners(self, hosted: Assignment, shared: Assignment) -> Assignment:
        """Returns an assignment in which every owner updates its matrices as in the faster of two assignments with
        the same owners."""
        cells, shared_costs = list(hosted.cells), dict[int, SharedCost]()
        of_hosted = held_jobs(self._matrices, self._costs, hosted)
        for key, jobs in held_jobs(self._matrices, self._costs, shared).items():
            if self.find(jobs)[0] < self.find(of_hosted[key])[0]:
                for job in jobs:
                    cells[job.matrix.index] = shared.cells[job.matrix.index]
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


def _find_groups(jobs: Sequence[Job], settings: PlanSettings, pipeline: HostedPipeline) -> list[list[Job]]:
    """Returns an owner's groups."""
    capacity, tp = settings.capacity(pipeline.element_bytes), pipeline.tp
    if tp == 1 or not jobs:
        return [list(jobs)] if jobs else []
    if settings.strategy == "paper":
        return paper_groups(jobs, tp, capacity)
    order = _rounds(jobs, tp)
    first = len({job.host for job in order})
    limit = capacity or LARGEST * max(job.received for job in jobs)
    return [group for group in (order[:first], *_cut(order[first:], tp, limit)) if group]


def _cut(jobs: Iterable[Job], tp: int, capacity: int) -> list[list[Job]]:
    """Cuts jobs into consecutive groups. A group is closed before the job that would take a host above
    `capacity`."""
    groups: list[list[Job]] = [[]]
    hosted = [0] * tp
    for job in jobs:
        if groups[-1] and hosted[job.host] + job.received > capacity:
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
