"""The update phase: all ranks' work from clipped gradients to the last updated weight.

hosted (canzona, paper, asc): an owner's TP group runs its micro-groups as a pipeline (`planner.pipeline`).

duplicated (layerwise, sc): every TP rank updates the whole matrix, from an all-gather it waits for.
Megatron's Muon does what is elementwise on the fragment it stores; canzona's own sc, of other optimizers,
does all of it whole.

Both are written once, as instructions to a `Pipeline`: `Alone` works it out rank by rank, for ranks with a
device each; `Crowded` lays it on a timeline with all other ranks' updates, for ranks that share a machine's
cores. `UpdatePhase` has either done by all ranks of a strategy.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from canzona_cli.config.execution import AnyStrategy, Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import FP32, exchange_bytes, stage_weights
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import NormClip
from canzona_cli.costs.update import RULES, adamw_seconds, algorithm, implementation, memory_rate, step_factor
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.pipeline import Activity, Clock, HostedPipeline, Job, Pipeline
from canzona_cli.planner.plan import Assignment, Bucket, MicroGroup
from canzona_cli.simulate.timeline import Ran, Timeline

Segment = tuple[Literal["compute", "exchange"], str, float, float]
"""Stream, phase, start, end; seconds from the beginning of the update, for what is ahead of it negative."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The matrices that a strategy updates: who, where and when."""

    strategy: AnyStrategy
    matrices: Sequence[Matrix] = ()
    costs: Sequence[float] = ()
    """Seconds to update each whole matrix on one rank."""
    assignment: Assignment | None = None
    """Owners and hosts; layerwise uses owners alone; None for sc and adamw, which have neither."""
    buckets: Sequence[Bucket] = ()
    """The buckets of the matrices' buffer; layerwise's have equal padded shards. Empty for sc and adamw."""
    groups: Sequence[MicroGroup] = ()
    """Micro-groups, for canzona, paper and asc."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """One rank's part of the update phase."""

    matrix_update_s: float
    exchange_s: float
    """Exposed: waiting for an exchange, packing and unpacking."""
    exchange_total_s: float
    """The seconds in flight, packing and unpacking included."""
    segments: tuple[Segment, ...]
    packed_s: float = 0.0
    """The seconds it packs before the norm: no part of `exchange_s`, but of the total."""
    begun_s: float = 0.0
    """The seconds from reduced gradients to the beginning."""

    @property
    def seconds(self) -> float:
        return self.matrix_update_s + self.exchange_s


class UpdateModel:
    """Prices updates and exchanges of a run's matrices."""

    def __init__(self, config: RunConfig, layout: Layout, matrices: Sequence[Matrix], costs: Sequence[float]) -> None:
        self._matrices, self._costs, self._tp = matrices, costs, layout.tp
        self.pipeline = HostedPipeline.of(config, layout)
        self._rate = memory_rate(config.cluster)
        self._whole = execution_of(config) is Execution.REDUNDANT
        self._fragment_bytes = RULES[algorithm(config).name].fragment_bytes + exchange_bytes(config)[0]

    def hosted(
        self, groups: Sequence[MicroGroup], assignment: Assignment, norm_s: float = 0.0
    ) -> tuple[RankUpdate, ...]:
        """Has an owner's TP ranks update its micro-groups in order, after `norm_s` of norm, clip and AdamW."""
        alone = Alone(self._tp, norm_s)
        self.run_hosted(groups, assignment, alone)
        return alone.results()

    def duplicated(self, members: Sequence[int]) -> RankUpdate:
        """Has every rank of a TP group gather and update the matrices `members`, one after another."""
        alone = Alone(1)
        self.run_duplicated(members, alone)
        return alone.results()[0]

    def run_hosted[Moment](self, groups: Sequence[MicroGroup], assignment: Assignment, ranks: Pipeline[Moment]) -> None:
        """Has `ranks` work through an owner's micro-groups."""

        def job(index: int) -> Job:
            host, share = assignment.cells[index].host, assignment.shares.get(index)
            return Job(matrix=self._matrices[index], host=host, seconds=self._costs[index], share=share)

        self.pipeline.run([[job(index) for index in group.matrices] for group in groups], ranks)

    def run_duplicated[Moment](self, members: Sequence[int], rank: Pipeline[Moment]) -> None:
        """Has `rank`, one of a TP group whose ranks do all the same, work through `members`."""
        how = self.pipeline
        for index in members:
            matrix = self._matrices[index]
            if self._tp > 1 and not matrix.replicated:
                # Megatron gathers the fp32 update, momentum included; canzona's own sc the fp32 gradient.
                gather = how.links.all_gather(4.0 * matrix.elements, how.group)
                rank.wait(0, rank.exchange(gather.times(how.exchanging)))
                if self._whole:
                    packed = matrix.fragment_elements(self._tp) * (how.buffer + FP32)
                    rank.work(0, "exchange", (packed + 2 * FP32 * matrix.elements) * how.byte_s)
            on_fragment = 0.0 if self._whole else matrix.elements * self._fragment_bytes / self._rate
            alone = max(0.0, self._costs[index] - (1 - 1 / self._tp) * on_fragment)
            rank.work(0, "matrix_update", how.updating * alone)


class Alone(Clock):
    """A TP group whose ranks have a device each."""

    def __init__(self, tp: int, norm_s: float = 0.0) -> None:
        super().__init__(tp, norm_s)
        self._own: list[list[Segment]] = [[] for _ in range(tp)]
        self._transfers: list[Segment] = []

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        begin = self.now[host]
        super().work(host, phase, seconds)
        if seconds > 0:
            self._own[host].append(("compute", phase, begin, self.now[host]))

    def exchange(self, transfer: Transfer) -> float:
        landed = super().exchange(transfer)
        if transfer.seconds > 0:
            self._transfers.append(("exchange", "exchange", landed - transfer.seconds, landed))
        return landed

    def results(self) -> tuple[RankUpdate, ...]:
        return tuple(
            _result(team, self._transfers, self.begun, now) for team, now in zip(self._own, self.now, strict=True)
        )


class Crowded:
    """A TP group on a timeline whose tasks share cores; ask for `results` once that has run.

    Args:
        name: the name of the group, unlike any other's on the timeline.
        copies: the number of TP groups that do the very same at the same time.
        alike: the number of ranks of each group that one host here stands for: 1, or tp where all do the
            same.
        after: by host, the task it begins behind.
        norm_s: the least seconds of norm and clip.
        adamw_s: the seconds of AdamW's update after them.
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
        """The task, by host, that the update begins behind."""
        self._first, self._last = list(after), list(after)
        self._waits: list[list[int]] = [[number] for number in after]
        self._own: list[list[int]] = [[] for _ in range(hosts)]
        self._transfers: list[int] = []

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        if seconds > 0:
            self._own[host].append(self._task(host, phase, seconds))

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
        """A task behind everything a host was given so far."""
        return self._task(host, "other", 0.0)

    def results(self, ran: Sequence[Ran]) -> tuple[RankUpdate, ...]:
        """Returns results by host, from the end of what it began behind."""
        results = []
        for team, first, begin, last in zip(self._own, self._first, self.begin, self._last, strict=True):
            zero = ran[first].end
            tasks: list[Segment] = [
                ("compute", self._timeline.tasks[n].phase, ran[n].start - zero, ran[n].end - zero) for n in team
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
    """`begun`: when norm, clip and AdamW are done, in the time of all others."""
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
    """The ranks of a stage that update together: an owner's TP group; for sc and adamw all of the stage."""

    stage: int
    owner: int
    hosts: int
    """The number of its ranks that have work of their own; the others do the same as one of them."""
    ranks: int
    """The number of ranks one host stands for, those of later owners that do the same among them."""
    elements: int
    """Gradient elements each holds reduced."""
    clipped: int
    """Those clipped in a pass of their own: what travels to a host is scaled as it is put together."""
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
        """Returns all cells; and by stage, how long AdamW's parameters were gathered under the updates.

        Args:
            gathered: those gatherings by stage; None where they do not run under the updates.
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
            share = stored if everywhere else math.ceil(stored / owners)
            members = tuple(matrix.index for matrix in of_stage) if everywhere else ()
            ranks = owners * tp
            return [Team(stage=stage, owner=0, hosts=1, ranks=ranks, elements=share, clipped=share, members=members)]
        assert self._workload.assignment is not None
        cells = self._workload.assignment.cells
        owned: list[list[int]] = [[] for _ in range(owners)]
        elements = [math.ceil(weights.others / owners)] * owners
        clipped = list(elements)
        for matrix in of_stage:
            owner = cells[matrix.index].owner
            owned[owner].append(matrix.index)
            elements[owner] += matrix.fragment_elements(tp)
            if not self._scaled_on_its_way(matrix):
                clipped[owner] += matrix.fragment_elements(tp)
        groups: list[list[MicroGroup]] = [[] for _ in range(owners)]
        for group in sorted(self._workload.groups, key=lambda group: group.index):
            if group.stage == stage:
                groups[group.owner].append(group)
        return [
            Team(
                stage=stage,
                owner=owner,
                hosts=1 if self._hosts is None else tp,
                ranks=tp if self._hosts is None else 1,
                elements=elements[owner],
                clipped=clipped[owner],
                groups=tuple(groups[owner]),
                members=tuple(owned[owner]) if self._hosts is None else (),
            )
            for owner in range(owners)
        ]

    def _scaled_on_its_way(self, matrix: Matrix) -> bool:
        """True where the copies that put a whole gradient together scale it in its own precision (`engine.hosted`)."""
        travels = self._hosts is not None and self._layout.tp > 1 and not matrix.replicated
        shared = self._hosts is not None and matrix.index in self._hosts.shares
        return travels and not shared and exchange_bytes(self._config)[1] == FP32

    def _alike(self, teams: Iterable[Team]) -> list[Team]:
        """Keeps the first of a stage's teams that do the same, for the ranks of them all: few differ."""
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
        """Has all ranks update on the cores they share.

        Returns:
            As `run`; gatherings count as long as they take at their full rate, until the last update is done.
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
        """Returns the seconds of one rank's share of what AdamW updates."""
        weights = stage_weights(self._config, self._layout, stage)
        elements = weights.others + (weights.matrices if self._execution is Execution.ADAMW else 0)
        shares = 1 if self._execution.everywhere else self._layout.owners
        return self._adamw_factor * adamw_seconds(elements / shares, self._config.cluster)
