"""The update phase: what every rank does between clipped gradients and its own updated matrices.

hosted (canzona, paper, asc): an owner's TP group runs its micro-groups as a pipeline (`planner.pipeline`).

duplicated (layerwise, sc): every TP rank updates the whole matrix, from an all-gather it waits for.
Megatron's Muon does what is elementwise on the fragment it stores; canzona's own sc, of other optimizers,
does all of it whole.

Both are written once, as instructions to a `Pipeline`: `Alone` works it out rank by rank, for ranks with a
device each; `Crowded` lays it on a timeline with all other ranks' updates, for ranks that share a machine's
cores.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.execution import AnyStrategy, Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import FP32, exchange_bytes
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.update import RULES, algorithm, memory_rate
from canzona_cli.model.matrix import Matrix
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
        """One owner's micro-groups, in order: its TP ranks' updates, by host.

        Args:
            norm_s: from packed gradients to the first update at least: norm, clip, AdamW.
        """
        alone = Alone(self._tp, norm_s)
        self.run_hosted(groups, assignment, alone)
        return alone.results()

    def duplicated(self, members: Sequence[int]) -> RankUpdate:
        """The matrices `members`, gathered and updated one after another,
        by every rank of a TP group alike."""
        alone = Alone(1)
        self.run_duplicated(members, alone)
        return alone.results()[0]

    def run_hosted[Moment](self, groups: Sequence[MicroGroup], assignment: Assignment, ranks: Pipeline[Moment]) -> None:
        """Has `ranks` work through an owner's micro-groups."""
        self.pipeline.run([[self._job(index, assignment) for index in group.matrices] for group in groups], ranks)

    def _job(self, index: int, assignment: Assignment) -> Job:
        return Job(
            matrix=self._matrices[index],
            host=assignment.cells[index].host,
            seconds=self._costs[index],
            share=assignment.shares.get(index),
        )

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
    """A TP group whose ranks have a device each: every rank's time follows from its own work and the exchanges."""

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
