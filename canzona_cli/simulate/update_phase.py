"""All ranks' updates, from clipped gradients to the last updated weight,
on devices of their own or on shared cores."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.activations import stage_weights
from canzona_cli.costs.buffers import FP32, exchange_bytes
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import NormClip
from canzona_cli.costs.update import adamw_seconds, implementation, step_factor
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.plan import MicroGroup
from canzona_cli.simulate.timeline import Timeline
from canzona_cli.simulate.update import Crowded, RankUpdate, UpdateModel, Workload


@dataclass(frozen=True, kw_only=True)
class Team:
    """Ranks of a stage that update together: an owner's TP group, or, for sc and adamw,
    all of the stage alike."""

    stage: int
    owner: int
    hosts: int
    """The number of its ranks that have work of their own; the others do the same as one of them."""
    ranks: int
    """The number of ranks one host stands for, those of later owners that do the same among them."""
    elements: int
    """Gradient elements each holds reduced."""
    clipped: int
    """Those of them that are clipped in a pass of their own:
    what travels to a host is scaled as it is put together."""
    groups: tuple[MicroGroup, ...] = ()
    """Hosted work, in order."""
    members: tuple[int, ...] = ()
    """Or matrices that every rank updates."""


@dataclass(frozen=True, kw_only=True)
class CellUpdate:
    """Ranks that behave alike in the update phase: one host of a team."""

    team: Team
    host: int
    adamw_s: float
    update: RankUpdate

    @property
    def seconds(self) -> float:
        """The seconds from clipped gradients to the last updated weight."""
        return self.adamw_s + self.update.seconds


class UpdatePhase:
    """The work of a strategy's ranks between clipped gradients and updated weights, by rank.

    Args:
        cores: that all ranks share; None where each has a device of its own.
    """

    def __init__(self, config: RunConfig, layout: Layout, workload: Workload, *, cores: float | None) -> None:
        self._config, self._layout, self._execution = config, layout, execution_of(config)
        self._workload, self._model = workload, UpdateModel(config, layout, workload.matrices, workload.costs)
        self._hosts = workload.assignment if self._execution is Execution.PLANNED else None
        """The pipeline of strategies that have hosts."""
        self._cores, self._norm_clip = cores, NormClip.of(config, layout)
        self._adamw_factor = step_factor(config.cluster, "adamw_update", implementation(config))

    def run(self, gathered: Sequence[Sequence[Transfer]] | None) -> tuple[list[CellUpdate], list[float]]:
        """All cells; and by stage, for how long the gathering of AdamW's parameters ran under the updates.

        Args:
            gathered: by stage, those gatherings; None where they do not run under the updates.
        """
        stages = range(self._layout.pp)
        teams = [team for stage in stages for team in self._teams(stage)]
        if self._cores is not None:
            return self._crowded(teams, gathered)
        cells = [cell for team in self._alike(teams) for cell in self._alone(team)]
        return cells, [
            max(cell.update.matrix_update_s for cell in cells if cell.team.stage == stage) for stage in stages
        ]

    def _teams(self, stage: int) -> list[Team]:
        tp, owners, weights = self._layout.tp, self._layout.owners, stage_weights(self._config, self._layout, stage)
        stored = weights.matrices + weights.others
        of_stage = [matrix for matrix in self._workload.matrices if matrix.stage == stage]
        if not self._execution.has_owners:
            sharded = not self._execution.everywhere
            return [
                Team(
                    stage=stage,
                    owner=0,
                    hosts=1,
                    ranks=owners * tp,
                    elements=math.ceil(stored / owners) if sharded else stored,
                    clipped=math.ceil(stored / owners) if sharded else stored,
                    members=() if sharded else tuple(matrix.index for matrix in of_stage),
                )
            ]
        assert self._workload.assignment is not None
        cells = self._workload.assignment.cells
        members: list[list[int]] = [[] for _ in range(owners)]
        held = [math.ceil(weights.others / owners)] * owners
        clipped = list(held)
        for matrix in of_stage:
            owner = cells[matrix.index].owner
            members[owner].append(matrix.index)
            held[owner] += matrix.fragment_elements(tp)
            if not self._scaled_on_its_way(matrix):
                clipped[owner] += matrix.fragment_elements(tp)
        if self._execution is Execution.LAYERWISE:
            return [
                Team(
                    stage=stage,
                    owner=o,
                    hosts=1,
                    ranks=tp,
                    elements=held[o],
                    clipped=clipped[o],
                    members=tuple(members[o]),
                )
                for o in range(owners)
            ]
        groups: list[list[MicroGroup]] = [[] for _ in range(owners)]
        for group in sorted(self._workload.groups, key=lambda group: group.index):
            if group.stage == stage:
                groups[group.owner].append(group)
        return [
            Team(
                stage=stage,
                owner=o,
                hosts=tp,
                ranks=1,
                elements=held[o],
                clipped=clipped[o],
                groups=tuple(groups[o]),
            )
            for o in range(owners)
        ]

    def _scaled_on_its_way(self, matrix: Matrix) -> bool:
        """True where the copies that put a whole gradient together multiply it (`engine.hosted`), in its own
        precision."""
        travels = self._hosts is not None and self._layout.tp > 1 and not matrix.replicated
        shared = self._hosts is not None and matrix.index in self._hosts.shares
        return travels and not shared and exchange_bytes(self._config)[1] == FP32

    def _alike(self, teams: Iterable[Team]) -> list[Team]:
        """The first of all teams of a stage that do the same, with the ranks of them all:
        of thousands few differ."""
        alike: dict[Hashable, list[Team]] = {}
        for team in teams:
            work = tuple(tuple(map(self._kind, group.matrices)) for group in team.groups)
            key = team.stage, team.elements, team.clipped, work, tuple(map(self._kind, team.members))
            alike.setdefault(key, []).append(team)
        return [replace(same[0], ranks=sum(team.ranks for team in same)) for same in alike.values()]

    def _kind(self, index: int) -> Hashable:
        """All that a matrix's update and its exchange depend on."""
        matrix, cost = self._workload.matrices[index], self._workload.costs[index]
        host, share = None, None
        if self._hosts is not None:
            host, share = self._hosts.cells[index].host, self._hosts.shares.get(index)
        return cost, matrix.elements, matrix.shard_dim, matrix.home, host, share

    def _alone(self, team: Team) -> list[CellUpdate]:
        """Every rank on a device of its own."""
        adamw = self._adamw_s(team.stage)
        if self._hosts is not None:
            norm_s = self._norm_clip.seconds(team.elements, team.clipped) + adamw
            updates = self._model.hosted(team.groups, self._hosts, norm_s)
        else:
            updates = (self._model.duplicated(team.members),)
        return [CellUpdate(team=team, host=host, adamw_s=adamw, update=update) for host, update in enumerate(updates)]

    def _crowded(
        self, teams: Sequence[Team], gathered: Sequence[Sequence[Transfer]] | None
    ) -> tuple[list[CellUpdate], list[float]]:
        """All ranks on the cores they share.

        Args:
            gathered: see `run`.

        Returns:
            All cells; and by stage, how long of its full rate that gathering ran before the last update was
            done.
        """
        timeline = Timeline(self._cores, self._config.cluster.crowding)
        adamw: list[list[int]] = []
        groups = []
        for number, team in enumerate(teams):
            seconds, begin = self._adamw_s(team.stage), [timeline.add("other", (number, h)) for h in range(team.hosts)]
            if self._hosts is not None:
                norm_s = self._norm_clip.seconds(team.elements, team.clipped)
                group = Crowded(timeline, number, team.hosts, begin, norm_s=norm_s, adamw_s=seconds)
                self._model.run_hosted(team.groups, self._hosts, group)
                adamw.append(group.begin)
            else:
                alike = self._layout.tp
                group = Crowded(timeline, number, 1, begin, copies=team.ranks // alike, alike=alike)
                self._model.run_duplicated(team.members, group)
                group.end(0)
                adamw.append([timeline.add("adamw_update", (number, 0), seconds=seconds, cores=float(team.ranks))])
            groups.append(group)
        gathers = []
        for stage, others in enumerate(gathered or ()):
            done = [task for team, tasks in zip(teams, adamw, strict=True) for task in tasks if team.stage == stage]
            gathers.append(
                timeline.add(
                    "param_gather",
                    ("data", stage),
                    seconds=sum(transfer.seconds for transfer in others),
                    cores=self._layout.tp * max((transfer.cores for transfer in others), default=0.0),
                    after=done,
                )
            )
        ran = timeline.run()
        cells = []
        for team, group, tasks in zip(teams, groups, adamw, strict=True):
            for host, result in enumerate(group.results(ran)):
                ran_here = ran[tasks[host]]
                cells.append(CellUpdate(team=team, host=host, adamw_s=ran_here.end - ran_here.start, update=result))
        windows = []
        for stage, task in enumerate(gathers):
            last = max(cell.update.begun_s + cell.update.seconds for cell in cells if cell.team.stage == stage)
            length = ran[task].end - ran[task].start
            within = min(1.0, max(0.0, last - ran[task].start) / length) if length else 1.0
            windows.append(within * (timeline.tasks[task].seconds + timeline.tasks[task].link_s))
        return cells, windows

    def _adamw_s(self, stage: int) -> float:
        """Returns the seconds of one rank's share of what AdamW updates."""
        weights = stage_weights(self._config, self._layout, stage)
        elements = weights.others + (weights.matrices if self._execution is Execution.ADAMW else 0)
        shares = 1 if self._execution.everywhere else self._layout.owners
        return self._adamw_factor * adamw_seconds(elements / shares, self._config.cluster)
