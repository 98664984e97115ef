"""Simulates the update phase of a strategy on all ranks, from reduced gradients to the last updated
weight."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import NormClip
from canzona_cli.core.costs.scratch import FP32
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.costs.update import adamw_seconds, step_factor
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import LikeStage, alike_stages, pool_matrices
from canzona_cli.core.planner.groups import expert_seconds
from canzona_cli.core.planner.plan import Assignment, MicroGroup
from canzona_cli.core.setup import Execution, Layout, Setup
from canzona_cli.core.simulate.update import RankUpdate, SharedCores, UpdateModel, Workload, pace_of


@dataclass(frozen=True, kw_only=True)
class Team:
    """A group of ranks that update together: an owner's TP group or, for sc and adamw, all ranks of a
    stage."""

    stage: int
    owner: int
    hosts: int
    """The number of hosts, which are the ranks whose work differs: tp with a plan and in Muon's mode layer_sharded,
    otherwise 1."""
    host: int = 0
    """The TP rank of the first host. It is 0, except if there is one host and TP ranks with different experts are
    separate teams."""
    ranks: int
    """The number of ranks that one host represents, including ranks of other owners with the same work."""
    elements: int
    """The number of reduced gradient elements on each rank."""
    clipped: int
    """The number of gradient elements that are clipped in a separate pass. It excludes gradients sent to a
    host in fp32, which are scaled when the host assembles them."""
    groups: tuple[MicroGroup, ...] = ()
    """The micro-groups of strategies with hosts, in order; empty for other strategies."""
    members: tuple[int, ...] = ()
    """The indices of the matrices that the team updates without a plan, all ranks together or each rank for itself;
    empty for strategies with a plan."""
    experts_s: tuple[float, ...] = ()
    """The seconds that each host spends on its experts; empty if experts are not divided among ranks, or are among
    `members`."""


@dataclass(frozen=True, kw_only=True)
class CellUpdate:
    """The update of the ranks that one host of a team represents."""

    team: Team
    host: int
    adamw_s: float
    update: RankUpdate

    @property
    def seconds(self) -> float:
        """The seconds from clipped gradients to the last updated weight."""
        return self.adamw_s + self.update.seconds


def at_pace(workload: Workload, assignment: Assignment) -> Workload:
    """Scales the costs of each host's matrices, so that they add up to the seconds of the host's updates one
    after another (`pace_of`). Shared matrices keep their costs."""
    if not any(time.host_s for time in workload.times):
        return workload
    costs, stages = list(workload.costs), alike_stages(workload.matrices, workload.costs, assignment)
    for stage, (first, indices) in stages.items():
        if first != stage:
            for index, same_place in zip(indices, stages[first].indices, strict=True):
                costs[index] = costs[same_place]
            continue
        hosted: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            if index not in assignment.shared_costs:
                cell = assignment.cells[index]
                hosted.setdefault((cell.owner, cell.host), []).append(index)
        for members in hosted.values():
            pace = pace_of([workload.times[index] for index in members])
            for index in members:
                costs[index] *= pace
    return replace(workload, costs=costs)


class UpdatePhase:
    """The simulation of a strategy's ranks from reduced gradients to updated weights.

    Args:
        cores: the number of cores that all ranks share; None if each rank has a device.
    """

    def __init__(self, setup: Setup, layout: Layout, workload: Workload, *, cores: float | None) -> None:
        self._setup, self._layout, self._execution = setup, layout, setup.execution
        self._assignment = workload.assignment if self._execution is Execution.PLANNED else None
        """The assignment of a strategy with hosts; None for other strategies."""
        self._workload = workload if self._assignment is None else at_pace(workload, self._assignment)
        self._model = UpdateModel(setup, layout, workload.matrices, self._workload.costs, workload.times)
        self._cores, self._norm_clip = cores, NormClip(setup, layout)
        self._adamw_factor = step_factor(setup, "adamw_update")
        self._stages: Mapping[int, LikeStage] = {}
        """Which stages are alike, if matrices have owners."""
        if workload.assignment is not None:
            self._stages = alike_stages(workload.matrices, self._workload.costs, workload.assignment)
        self._owners: dict[int, list[Team]] = {}
        """The teams of the first of several alike stages, see `_teams_of_owners`."""

    def run(self, gathered: Sequence[Sequence[Transfer]] | None) -> tuple[list[CellUpdate], list[float]]:
        """Simulates the phase; returns all cells, and, by stage, the seconds of gathering that fit into the
        time of the matrix updates.

        Args:
            gathered: the gatherings of AdamW's parameters, by stage; None if they do not overlap with
                updates.
        """
        stages = range(self._layout.pp)
        teams = [team for stage in stages for team in self._teams(stage)]
        if self._cores is not None:
            return self._on_shared_cores(teams, gathered)
        cells = self._on_separate_devices(teams)
        return cells, [
            max(cell.update.matrix_update_s for cell in cells if cell.team.stage == stage) for stage in stages
        ]

    def _teams(self, stage: int) -> list[Team]:
        layout, weights = self._layout, stage_weights(self._setup, self._layout, stage)
        if self._execution.has_owners:
            adamw_elements, first = math.ceil(weights.others / layout.owners), self._stages[stage].first
            if first == stage:
                self._owners[stage] = list(self._teams_of_owners(stage))
            return [
                replace(
                    team,
                    stage=stage,
                    elements=team.elements + adamw_elements,
                    clipped=team.clipped + adamw_elements,
                )
                for team in self._owners[first]
            ]
        if self._execution.everywhere:
            elements = weights.matrices + weights.others
            members = tuple(
                sorted(
                    matrix.index
                    for pool, matrices in pool_matrices(self._workload.matrices).items()
                    if pool.stage == stage and pool.expert_rank in (None, 0)
                    for matrix in matrices
                )
            )
        else:
            elements = weights.share(layout, matrices=True)
            members = ()
        hosts = self._model.unplanned_hosts
        team = Team(stage=stage, owner=0, hosts=hosts, ranks=layout.cells // hosts, elements=elements, clipped=elements)
        return [replace(team, members=members)]

    def _teams_of_owners(self, stage: int) -> Iterator[Team]:
        """Yields the teams of a stage whose matrices have owners, without AdamW's parameters. If there is one host, and
        experts are divided among ranks, each of an owner's ranks is a team."""
        assert self._workload.assignment is not None
        tp, owners, cells = self._layout.tp, self._layout.owners, self._workload.assignment.cells
        owned: list[list[Matrix]] = [[] for _ in range(owners)]
        experts: list[list[list[Matrix]]] = [[[] for _ in range(tp)] for _ in range(owners)]
        for matrix in map(self._workload.matrices.__getitem__, sorted(self._stages[stage].indices)):
            cell = cells[matrix.index]
            (owned[cell.owner] if matrix.expert_rank is None else experts[cell.owner][cell.host]).append(matrix)
        groups: list[list[MicroGroup]] = [[] for _ in range(owners)]
        for group in sorted(self._workload.groups, key=lambda group: group.index):
            if group.stage == stage:
                groups[group.owner].append(group)
        for owner, matrices in enumerate(owned):
            expert_elements = max(sum(matrix.elements for matrix in of_host) for of_host in experts[owner])
            elements = expert_elements + sum(matrix.fragment_elements(tp) for matrix in matrices)
            scaled_elements = sum(matrix.fragment_elements(tp) for matrix in matrices if self._scaled_by_host(matrix))
            clipped = elements - scaled_elements
            team = Team(stage=stage, owner=owner, hosts=1, ranks=tp, elements=elements, clipped=clipped)
            if self._assignment is not None:
                experts_s = self._expert_seconds[stage, owner] if expert_elements else ()
                yield replace(team, hosts=tp, ranks=1, groups=tuple(groups[owner]), experts_s=experts_s)
                continue
            members = tuple(matrix.index for matrix in matrices)
            if self._model.unplanned_hosts > 1:
                own_s = tuple(self._updating_s(of_host) for of_host in experts[owner]) if expert_elements else ()
                yield replace(team, hosts=tp, ranks=1, members=members, experts_s=own_s)
                continue
            if not expert_elements:
                yield replace(team, members=members)
                continue
            for host, of_host in enumerate(experts[owner]):
                yield replace(team, host=host, ranks=1, members=(*members, *(matrix.index for matrix in of_host)))

    def _updating_s(self, experts: Sequence[Matrix]) -> float:
        """Returns the seconds that a rank without a plan spends on updating experts."""
        return self._model.in_sequence_s(matrix.index for matrix in experts)

    @cached_property
    def _expert_seconds(self) -> Mapping[tuple[int, int], tuple[float, ...]]:
        """The seconds that each host of a (stage, owner) spends on updating its experts."""
        assert self._assignment is not None
        return expert_seconds(self._workload.matrices, self._workload.costs, self._assignment, self._model.pipeline)

    def _scaled_by_host(self, matrix: Matrix) -> bool:
        """Returns True if the host scales the matrix's gradient when it assembles the matrix
        (`engine.hosted`)."""
        sent = self._assignment is not None and self._layout.tp > 1 and not matrix.replicated
        shared = self._assignment is not None and matrix.index in self._assignment.shared_costs
        return sent and not shared and self._setup.engine.gradient_bytes == FP32

    def _on_separate_devices(self, teams: Iterable[Team]) -> list[CellUpdate]:
        """Returns the cells of teams whose ranks have separate devices. Teams of a stage that have the same work are
        merged into the first of them, which then represents all of their ranks. Each kind of work is simulated once
        for all stages."""
        alike: dict[tuple[int, Hashable], list[Team]] = {}
        keys: dict[tuple[int, int], Hashable] = {}
        """The keys of groups and members, by object: the teams of alike stages have the same."""
        for team in teams:
            same = id(team.groups), id(team.members)
            if same not in keys:
                groups = tuple(tuple(map(self._work_key, group.matrices)) for group in team.groups)
                keys[same] = groups, tuple(map(self._work_key, team.members))
            key = team.elements, team.clipped, keys[same], team.experts_s, self._adamw_s(team.stage)
            alike.setdefault((team.stage, key), []).append(team)
        updates: dict[Hashable, tuple[RankUpdate, ...]] = {}
        cells: list[CellUpdate] = []
        for (_, work), equal in alike.items():
            if work not in updates:
                updates[work] = self._updates(equal[0])
            team, adamw_s = replace(equal[0], ranks=sum(team.ranks for team in equal)), self._adamw_s(equal[0].stage)
            cells += (
                CellUpdate(team=team, host=team.host + host, adamw_s=adamw_s, update=update)
                for host, update in enumerate(updates[work])
            )
        return cells

    def _work_key(self, index: int) -> Hashable:
        """Returns a key of all properties on which the time of a matrix's update and exchange depends."""
        matrix, cost = self._workload.matrices[index], self._workload.costs[index]
        host = shared_cost = None
        if self._assignment is not None:
            host = self._assignment.cells[index].host
            shared_cost = self._assignment.shared_costs.get(index)
        return cost, matrix.elements, matrix.shard_dim, matrix.home, host, shared_cost

    def _updates(self, team: Team) -> tuple[RankUpdate, ...]:
        """Simulates the hosts of a team, each on a separate device."""
        if self._assignment is None:
            return self._model.unplanned(team.members, team.experts_s)
        norm_s = self._norm_clip.seconds(team.elements, team.clipped) + self._adamw_s(team.stage)
        return self._model.hosted(team.groups, self._assignment, norm_s, team.experts_s)

    def _on_shared_cores(
        self, teams: Sequence[Team], gathered: Sequence[Sequence[Transfer]] | None
    ) -> tuple[list[CellUpdate], list[float]]:
        """Simulates the updates of all ranks, which share cores.

        Returns:
            All cells; and, for each stage, the seconds of gathering (as on idle cores) that are done before
            the stage's last update ends.
        """
        timeline = Timeline(self._cores)
        groups = [(team, *self._add_team(timeline, index, team)) for index, team in enumerate(teams)]
        gathers = []
        for stage, transfers in enumerate(gathered or ()):
            adamw_tasks = [task for team, _, adamw in groups for task in adamw if team.stage == stage]
            gathers.append(
                timeline.add(
                    "param_gather",
                    ("data", stage),
                    seconds=sum(transfer.seconds for transfer in transfers),
                    cores=self._layout.tp * max((transfer.cores for transfer in transfers), default=0.0),
                    after=adamw_tasks,
                )
            )
        times = timeline.run()
        cells = []
        for team, group, adamw in groups:
            for host, update in enumerate(group.results(times)):
                adamw_s = times[adamw[host]].end - times[adamw[host]].start
                cells.append(CellUpdate(team=team, host=team.host + host, adamw_s=adamw_s, update=update))
        overlapped_s = []
        for stage, task in enumerate(gathers):
            last_update_s = max(cell.update.begun_s + cell.update.seconds for cell in cells if cell.team.stage == stage)
            gather_s = times[task].end - times[task].start
            overlapped_share = min(1.0, max(0.0, last_update_s - times[task].start) / gather_s) if gather_s else 1.0
            overlapped_s.append(overlapped_share * (timeline.tasks[task].seconds + timeline.tasks[task].link_s))
        return cells, overlapped_s

    def _add_team(self, timeline: Timeline, index: int, team: Team) -> tuple[SharedCores, list[int]]:
        """Adds a team's updates to the timeline; returns its group of ranks, and the tasks of AdamW's
        update."""
        adamw_s = self._adamw_s(team.stage)
        begin = [timeline.add("other", (index, host)) for host in range(team.hosts)]
        if self._assignment is not None:
            norm_s = self._norm_clip.seconds(team.elements, team.clipped)
            group = SharedCores(timeline, index, team.hosts, begin, norm_s=norm_s, adamw_s=adamw_s)
            self._model.run_hosted(team.groups, self._assignment, group, team.experts_s)
            return group, group.begin
        # 1 if TP ranks have different experts, or different matrices.
        ranks_per_host = min(self._layout.tp, team.ranks) if team.hosts == 1 else 1
        copies = team.ranks // ranks_per_host
        group = SharedCores(timeline, index, team.hosts, begin, copies=copies, ranks_per_host=ranks_per_host)
        self._model.run_unplanned(team.members, group, team.experts_s)
        for host in range(team.hosts):
            group.end(host)
        return group, [
            timeline.add("adamw_update", (index, host), seconds=adamw_s, cores=float(team.ranks))
            for host in range(team.hosts)
        ]

    def _adamw_s(self, stage: int) -> float:
        """Returns the seconds of AdamW's update on one rank."""
        elements = stage_weights(self._setup, self._layout, stage).adamw(self._execution, self._layout)
        return self._adamw_factor * adamw_seconds(elements, self._setup.cluster)
