"""The update phase: the work of all ranks from clipped gradients to the last updated weight.

Hosted (canzona, paper, asc): an owner's TP group runs its micro-groups as a pipeline (`planner.pipeline`).

Duplicated (layerwise, sc): every TP rank updates the whole matrix, after an all-gather that it waits for.
Megatron's Muon does elementwise work on the fragment that the rank stores; canzona's sc, for other
optimizers, does all work on the whole matrix.

Both are written once, as calls of a `Pipeline`. `Alone` adds up the times of ranks that have a device each;
`Crowded` adds tasks to a timeline, for ranks that share a machine's cores with all other ranks. `UpdatePhase`
runs one of the two for all ranks of a strategy.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from canzona_cli.config.execution import AnyStrategy, Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import FP32, exchange_bytes, stage_weights
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import NormClip
from canzona_cli.costs.update import RULES, adamw_seconds, algorithm, implementation, memory_rate, step_factor
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.groups import expert_seconds
from canzona_cli.planner.pipeline import Activity, Clock, HostedPipeline, Job, Pipeline
from canzona_cli.planner.plan import Assignment, Bucket, MicroGroup
from canzona_cli.simulate.timeline import Ran, Timeline

Segment = tuple[Literal["compute", "exchange"], str, float, float]
"""(stream, phase, start, end), in seconds from `RankUpdate.begun_s`; negative for what happens before it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The matrices that a strategy updates, with their costs, owners and order."""

    strategy: AnyStrategy
    matrices: Sequence[Matrix] = ()
    costs: Sequence[float] = ()
    """The seconds to update each whole matrix on one rank."""
    assignment: Assignment | None = None
    """The owner and host of each matrix (layerwise has owners only); None for sc and adamw."""
    buckets: Sequence[Bucket] = ()
    """The buckets of the matrices' buffer; layerwise's have equal padded shards. Empty for sc and adamw."""
    groups: Sequence[MicroGroup] = ()
    """The micro-groups of canzona, paper and asc; empty for other strategies."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """The update phase of one rank."""

    matrix_update_s: float
    exchange_s: float
    """The exposed seconds: waits for exchanges, packing and unpacking, without `packed_s`."""
    exchange_total_s: float
    """All seconds of exchanges, overlapped ones and packing and unpacking included."""
    segments: tuple[Segment, ...]
    packed_s: float = 0.0
    """The seconds of packing before the gradient norm; part of `exchange_total_s` only."""
    begun_s: float = 0.0
    """The seconds from reduced gradients until norm, clipping and AdamW are done, before the matrix updates."""

    @property
    def seconds(self) -> float:
        return self.matrix_update_s + self.exchange_s


class UpdateModel:
    """The cost model of the updates and exchanges of a run's matrices."""

    def __init__(self, config: RunConfig, layout: Layout, matrices: Sequence[Matrix], costs: Sequence[float]) -> None:
        self._matrices, self._costs, self._tp = matrices, costs, layout.tp
        self.pipeline = HostedPipeline.of(config, layout)
        self._rate = memory_rate(config.cluster)
        self._whole = execution_of(config) is Execution.REDUNDANT
        self._fragment_bytes = RULES[algorithm(config).name].fragment_bytes + exchange_bytes(config)[0]

    def hosted(
        self,
        groups: Sequence[MicroGroup],
        assignment: Assignment,
        norm_s: float = 0.0,
        first: Sequence[float] = (),
    ) -> tuple[RankUpdate, ...]:
        """Returns the updates of an owner's micro-groups, by host.

        Args:
            norm_s: the seconds of norm, clipping and AdamW.
            first: see `HostedPipeline.run`.
        """
        alone = Alone(self._tp, norm_s)
        self.run_hosted(groups, assignment, alone, first)
        return alone.results()

    def duplicated(self, members: Sequence[int]) -> RankUpdate:
        """Returns the update of a TP rank that gathers and updates the matrices `members`, one after another."""
        alone = Alone(1)
        self.run_duplicated(members, alone)
        return alone.results()[0]

    def run_hosted[Moment](
        self,
        groups: Sequence[MicroGroup],
        assignment: Assignment,
        ranks: Pipeline[Moment],
        first: Sequence[float] = (),
    ) -> None:
        """Runs an owner's micro-groups on `ranks`."""

        def job(index: int) -> Job:
            host, share = assignment.cells[index].host, assignment.shares.get(index)
            return Job(matrix=self._matrices[index], host=host, seconds=self._costs[index], share=share)

        self.pipeline.run([[job(index) for index in group.matrices] for group in groups], ranks, first=first)

    def run_duplicated[Moment](self, members: Sequence[int], rank: Pipeline[Moment]) -> None:
        """Runs the updates of the matrices `members` on `rank`, which stands for all ranks of its TP group."""
        pipeline = self.pipeline
        for index in members:
            matrix = self._matrices[index]
            if matrix.expert_rank is not None:
                rank.work(0, "matrix_update", pipeline.updating * self._costs[index])
                continue
            if self._tp > 1 and not matrix.replicated:
                # Megatron gathers the fp32 update with its momentum; canzona's sc gathers the fp32 gradient.
                gather = pipeline.links.all_gather(4.0 * matrix.elements, pipeline.group)
                rank.wait(0, rank.exchange(gather.times(pipeline.exchanging)))
                if self._whole:
                    packed = matrix.fragment_elements(self._tp) * (pipeline.buffer + FP32)
                    rank.work(0, "exchange", (packed + 2 * FP32 * matrix.elements) * pipeline.byte_s)
            on_fragment = 0.0 if self._whole else matrix.elements * self._fragment_bytes / self._rate
            alone = max(0.0, self._costs[index] - (1 - 1 / self._tp) * on_fragment)
            rank.work(0, "matrix_update", pipeline.updating * alone)


class Alone(Clock):
    """A TP group whose ranks have a device each."""

    def __init__(self, tp: int, norm_s: float = 0.0) -> None:
        super().__init__(tp, norm_s)
        self._segments: list[list[Segment]] = [[] for _ in range(tp)]
        self._transfers: list[Segment] = []

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        begin = self.now[host]
        super().work(host, phase, seconds)
        if seconds > 0:
            self._segments[host].append(("compute", phase, begin, self.now[host]))

    def exchange(self, transfer: Transfer) -> float:
        landed = super().exchange(transfer)
        if transfer.seconds > 0:
            self._transfers.append(("exchange", "exchange", landed - transfer.seconds, landed))
        return landed

    def results(self) -> tuple[RankUpdate, ...]:
        return tuple(
            _result(segments, self._transfers, self.begun, now)
            for segments, now in zip(self._segments, self.now, strict=True)
        )


class Crowded:
    """A TP group on a timeline whose tasks share cores; `results` are available once the timeline has run.

    Args:
        name: the name of the group, unique on the timeline.
        copies: the number of TP groups that do the same at the same time.
        alike: the number of ranks of each group that one host stands for: 1, or tp where all ranks do the
            same.
        after: the task, by host, after which the host starts.
        norm_s: the least seconds of norm and clipping.
        adamw_s: the seconds of AdamW's update, which follows norm and clipping.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: Hashable,
        hosts: int,
        after: Sequence[int],
        *,
        copies: int = 1,
        alike: int = 1,
        norm_s: float = 0.0,
        adamw_s: float = 0.0,
    ) -> None:
        self._timeline, self._name, self._copies, self._alike = timeline, name, copies, alike
        self.begin, self._norm_s, self._adamw_s = list(after), norm_s, adamw_s
        """The task, by host, after which the matrix updates begin: AdamW's, once `norm` has been called."""
        self._first, self._last = list(after), list(after)
        self._waits: list[list[int]] = [[number] for number in after]
        self._work: list[list[int]] = [[] for _ in range(hosts)]
        """The tasks of each host that pack or update."""
        self._transfers: list[int] = []

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        if seconds > 0:
            self._work[host].append(self._task(host, phase, seconds))

    def wait(self, host: int, moment: int) -> None:
        self._waits[host].append(moment)

    def exchange(self, transfer: Transfer) -> int:
        number = self._timeline.add(
            "exchange",
            (self._name, "exchange"),
            seconds=transfer.seconds,
            cores=transfer.cores * self._copies,
            after=[place for waits in self._waits for place in waits] + self._last,
        )
        if transfer.seconds > 0:
            self._transfers.append(number)
        return number

    def norm(self) -> None:
        packed = list(self._last)
        for host in range(len(packed)):
            self._waits[host] += packed
            self._task(host, "norm_clip", self._norm_s)
            self.begin[host] = self._task(host, "adamw_update", self._adamw_s)

    def end(self, host: int) -> int:
        """Adds a task after all work of a host; returns its number."""
        return self._task(host, "other", 0.0)

    def results(self, ran: Sequence[Ran]) -> tuple[RankUpdate, ...]:
        """Returns the update of each host, timed from the end of its task in `after`."""
        results = []
        for work, first, begin, last in zip(self._work, self._first, self.begin, self._last, strict=True):
            zero = ran[first].end
            tasks: list[Segment] = [
                ("compute", self._timeline.tasks[n].phase, ran[n].start - zero, ran[n].end - zero) for n in work
            ]
            moved: list[Segment] = [
                ("exchange", "exchange", ran[n].start - zero, ran[n].end - zero) for n in self._transfers
            ]
            results.append(_result(tasks, moved, ran[begin].end - zero, ran[last].end - zero))
        return tuple(results)

    def _task(self, host: int, phase: str, seconds: float) -> int:
        number = self._timeline.add(
            phase,
            (self._name, host),
            seconds=seconds,
            cores=float(self._copies * self._alike) if seconds > 0 else 0.0,
            after=self._waits[host],
        )
        self._waits[host], self._last[host] = [], number
        return number


def _result(segments: Sequence[Segment], transfers: Sequence[Segment], begun: float, end: float) -> RankUpdate:
    """Makes a rank's result from its segments.

    Args:
        segments: the rank's packing and updates.
        transfers: the exchanges of its TP group.
        begun: the time at which norm, clipping and AdamW are done.
        end: the time at which the rank is done.
    """
    updating = sum(stop - start for _, phase, start, stop in segments if phase == "matrix_update")
    packing = sum(stop - start for _, phase, start, stop in segments if phase == "exchange")
    packed = sum(stop - start for _, _, start, stop in segments if start < begun)
    in_flight = sum(stop - start for _, _, start, stop in transfers)
    exposed = end - begun - updating
    return RankUpdate(
        matrix_update_s=updating,
        exchange_s=exposed,
        exchange_total_s=max(in_flight + packing, exposed + packed),
        segments=tuple(
            (stream, phase, start - begun, stop - begun) for stream, phase, start, stop in (*segments, *transfers)
        ),
        packed_s=packed,
        begun_s=begun,
    )


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of a stage that update together: an owner's TP group; for sc and adamw all ranks of the
    stage."""

    stage: int
    owner: int
    hosts: int
    """The number of ranks whose work differs: tp with a plan, 1 otherwise."""
    host: int = 0
    """The first of them; not 0 only without a plan, where TP ranks differ by their experts."""
    ranks: int
    """The number of ranks that one host stands for, including those of later owners with the same work."""
    elements: int
    """The number of reduced gradient elements on each rank."""
    clipped: int
    """The number of these that are clipped in a separate pass. Gradients sent to a host in fp32 are scaled
    when the host assembles them."""
    groups: tuple[MicroGroup, ...] = ()
    """The micro-groups, in order, of strategies with hosts."""
    members: tuple[int, ...] = ()
    """The matrices that every rank updates, for strategies without hosts."""
    first: tuple[float, ...] = ()
    """The seconds for which each host updates its experts before anything else, if experts are divided among
    ranks."""


@dataclass(frozen=True, kw_only=True)
class CellUpdate:
    """The update of the ranks that one host of a team stands for."""

    team: Team
    host: int
    adamw_s: float
    update: RankUpdate

    @property
    def seconds(self) -> float:
        """The seconds from clipped gradients to the last updated weight."""
        return self.adamw_s + self.update.seconds


class UpdatePhase:
    """The work of a strategy's ranks from clipped gradients to updated weights.

    Args:
        cores: the number of cores that all ranks share; None where each rank has a device.
    """

    def __init__(self, config: RunConfig, layout: Layout, workload: Workload, *, cores: float | None) -> None:
        self._config, self._layout, self._execution = config, layout, execution_of(config)
        self._workload, self._model = workload, UpdateModel(config, layout, workload.matrices, workload.costs)
        self._hosts = workload.assignment if self._execution is Execution.PLANNED else None
        """The assignment of strategies that have hosts; None for others."""
        self._cores, self._norm_clip = cores, NormClip.of(config, layout)
        self._adamw_factor = step_factor(config.cluster, "adamw_update", implementation(config))

    def run(self, gathered: Sequence[Sequence[Transfer]] | None) -> tuple[list[CellUpdate], list[float]]:
        """Returns all cells, and by stage the seconds of gathering that fit into the time of the matrix
        updates.

        Args:
            gathered: the gatherings of AdamW's parameters, by stage; None where they do not overlap with
                updates.
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
        of_stage = [matrix for matrix in self._workload.matrices if matrix.stage == stage]
        if not self._execution.has_owners:
            everywhere, stored = self._execution.everywhere, weights.matrices + weights.others
            share = stored if everywhere else weights.share(self._layout, matrices=True)
            stored_here = (matrix.index for matrix in of_stage if matrix.expert_rank in (None, 0))
            members = tuple(stored_here) if everywhere else ()
            ranks = owners * tp
            return [Team(stage=stage, owner=0, hosts=1, ranks=ranks, elements=share, clipped=share, members=members)]
        return self._teams_of_owners(stage, of_stage, math.ceil(weights.others / owners))

    def _teams_of_owners(self, stage: int, of_stage: Sequence[Matrix], others: int) -> list[Team]:
        """Lists the teams of a stage whose matrices have owners; a team for each rank if experts are divided among
        ranks and there are no hosts.

        Args:
            others: the elements of each rank's share of AdamW's parameters.
        """
        assert self._workload.assignment is not None
        tp, owners, cells = self._layout.tp, self._layout.owners, self._workload.assignment.cells
        owned: list[list[int]] = [[] for _ in range(owners)]
        experts: list[list[list[int]]] = [[[] for _ in range(tp)] for _ in range(owners)]
        elements, clipped = [others] * owners, [others] * owners
        for matrix in of_stage:
            cell = cells[matrix.index]
            if matrix.expert_rank is not None:
                experts[cell.owner][cell.host].append(matrix.index)
                continue
            owned[cell.owner].append(matrix.index)
            elements[cell.owner] += matrix.fragment_elements(tp)
            if not self._scaled_on_its_way(matrix):
                clipped[cell.owner] += matrix.fragment_elements(tp)
        groups: list[list[MicroGroup]] = [[] for _ in range(owners)]
        for group in sorted(self._workload.groups, key=lambda group: group.index):
            if group.stage == stage:
                groups[group.owner].append(group)
        teams: list[Team] = []
        for owner, by_host in enumerate(experts):
            held = [sum(self._workload.matrices[index].elements for index in of_host) for of_host in by_host]
            team = Team(
                stage=stage,
                owner=owner,
                hosts=1 if self._hosts is None else tp,
                ranks=tp if self._hosts is None else 1,
                elements=elements[owner] + max(held),
                clipped=clipped[owner] + max(held),
                groups=tuple(groups[owner]),
                members=tuple(owned[owner]) if self._hosts is None else (),
            )
            if not any(held):
                teams.append(team)
            elif self._hosts is not None:
                teams.append(replace(team, first=self._experts_first[stage, owner]))
            else:
                teams += [
                    replace(team, host=host, ranks=1, members=(*team.members, *of_host))
                    for host, of_host in enumerate(by_host)
                ]
        return teams

    @cached_property
    def _experts_first(self) -> Mapping[tuple[int, int], tuple[float, ...]]:
        """The seconds for which the hosts of a (stage, owner) update their experts."""
        assert self._hosts is not None
        return expert_seconds(self._workload.matrices, self._workload.costs, self._hosts, self._model.pipeline)

    def _scaled_on_its_way(self, matrix: Matrix) -> bool:
        """Returns True if the host scales the matrix's gradient when it assembles the matrix
        (`engine.hosted`)."""
        sent = self._hosts is not None and self._layout.tp > 1 and not matrix.replicated
        shared = self._hosts is not None and matrix.index in self._hosts.shares
        return sent and not shared and exchange_bytes(self._config)[1] == FP32

    def _alike(self, teams: Iterable[Team]) -> list[Team]:
        """Merges teams of a stage with the same work into the first of them, which then stands for the ranks
        of all."""
        alike: dict[Hashable, list[Team]] = {}
        for team in teams:
            work = tuple(tuple(map(self._kind, group.matrices)) for group in team.groups)
            key = team.stage, team.elements, team.clipped, work, tuple(map(self._kind, team.members)), team.first
            alike.setdefault(key, []).append(team)
        return [replace(first, ranks=sum(team.ranks for team in (first, *others))) for first, *others in alike.values()]

    def _kind(self, index: int) -> Hashable:
        """Returns a key of everything that a matrix's update and exchange depend on."""
        matrix, cost = self._workload.matrices[index], self._workload.costs[index]
        host, share = None, None
        if self._hosts is not None:
            host, share = self._hosts.cells[index].host, self._hosts.shares.get(index)
        return cost, matrix.elements, matrix.shard_dim, matrix.home, host, share

    def _alone(self, team: Team) -> list[CellUpdate]:
        """Returns the cells of a team whose ranks have a device each."""
        adamw = self._adamw_s(team.stage)
        if self._hosts is not None:
            norm_s = self._norm_clip.seconds(team.elements, team.clipped) + adamw
            updates = self._model.hosted(team.groups, self._hosts, norm_s, team.first)
        else:
            updates = (self._model.duplicated(team.members),)
        return [
            CellUpdate(team=team, host=team.host + host, adamw_s=adamw, update=update)
            for host, update in enumerate(updates)
        ]

    def _crowded(
        self, teams: Sequence[Team], gathered: Sequence[Sequence[Transfer]] | None
    ) -> tuple[list[CellUpdate], list[float]]:
        """Runs the updates of all ranks on the cores that they share.

        Returns:
            As `run`; the seconds are at full rate, of the part of the gathering that is done before the last
            update.
        """
        timeline = Timeline(self._cores, self._config.cluster.crowding)
        adamw: list[list[int]] = []
        groups = []
        for number, team in enumerate(teams):
            seconds, begin = self._adamw_s(team.stage), [timeline.add("other", (number, h)) for h in range(team.hosts)]
            if self._hosts is not None:
                norm_s = self._norm_clip.seconds(team.elements, team.clipped)
                group = Crowded(timeline, number, team.hosts, begin, norm_s=norm_s, adamw_s=seconds)
                self._model.run_hosted(team.groups, self._hosts, group, team.first)
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
                adamw_s = ran[tasks[host]].end - ran[tasks[host]].start
                cells.append(CellUpdate(team=team, host=host, adamw_s=adamw_s, update=result))
        windows = []
        for stage, task in enumerate(gathers):
            last = max(cell.update.begun_s + cell.update.seconds for cell in cells if cell.team.stage == stage)
            length = ran[task].end - ran[task].start
            within = min(1.0, max(0.0, last - ran[task].start) / length) if length else 1.0
            windows.append(within * (timeline.tasks[task].seconds + timeline.tasks[task].link_s))
        return cells, windows

    def _adamw_s(self, stage: int) -> float:
        """Returns the seconds of AdamW's update on one rank."""
        weights = stage_weights(self._config, self._layout, stage)
        matrices = self._execution is Execution.ADAMW
        share = weights.others if self._execution.everywhere else weights.share(self._layout, matrices=matrices)
        return self._adamw_factor * adamw_seconds(share, self._config.cluster)
