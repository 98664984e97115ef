"""The update phase of one TP group: its work from clipped gradients to the last updated weight.

Hosted updates (canzona, paper, asc): an owner's TP group runs its micro-groups as a pipeline
(`planner.pipeline`).

Updates without a plan (layerwise, sc): by default, every TP rank updates the whole matrix, after it has waited
for an all-gather. Megatron's Muon does elementwise work on the fragment that the rank stores; canzona's sc, for
other optimizers, does all work on the whole matrix. Megatron's Muon has two other modes (`costs.tp_modes`).

`UpdateModel` expresses all of these updates as calls of a `Pipeline`, which this module implements
twice: `SeparateDevices` adds up the times of ranks that each have a device, and `SharedCores` adds tasks to a
timeline for ranks that share a machine's cores with all other ranks. `update_phase` uses one of the two for
all ranks of a strategy.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.scratch import FP32
from canzona_cli.core.costs.timeline import TaskTimes, Timeline
from canzona_cli.core.costs.tp_modes import all_reduces, distributed_time, exchange_with_homes, homes, uncut_side
from canzona_cli.core.costs.update import RULES, UpdateTime, algorithm_of, memory_rate, summed
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.pipeline import Activity, Clock, HostedPipeline, Pipeline, make_jobs
from canzona_cli.core.planner.plan import Assignment, Bucket, MicroGroup
from canzona_cli.core.setup import Execution, Layout, Setup
from canzona_cli.core.setup.execution import AnyStrategy, tp_mode_of

Segment = tuple[Literal["compute", "exchange"], str, float, float]
"""The (stream, phase, start, end) of an activity. Times are in seconds from `RankUpdate.begun_s`, so packing
before the gradient norm has negative times."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The matrices that a strategy updates, with their costs, owners and order."""

    strategy: AnyStrategy
    matrices: Sequence[Matrix] = ()
    costs: Sequence[float] = ()
    """The seconds to update each whole matrix on one rank that updates nothing else."""
    times: Sequence[UpdateTime] = ()
    """The times of the kernels and of the host of which each of `costs` is the longer one; empty if the host
    takes no time."""
    assignment: Assignment | None = None
    """The owner and host of each matrix; for layerwise, only owners have a meaning. None for sc and adamw."""
    buckets: Sequence[Bucket] = ()
    """The buckets of the matrices' buffers; for layerwise, they have equal padded shards. Empty for sc and
    adamw."""
    groups: Sequence[MicroGroup] = ()
    """The micro-groups of canzona, paper and asc; empty for other strategies."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """The update phase of one rank."""

    matrix_update_s: float
    exchange_s: float
    """The exposed seconds: waits for exchanges, packing and unpacking, excluding `packed_s`."""
    exchange_total_s: float
    """The seconds of all exchanges, packing and unpacking, including those that overlap with updates."""
    segments: tuple[Segment, ...]
    packed_s: float = 0.0
    """The seconds of packing before the gradient norm. Only `exchange_total_s` includes them."""
    begun_s: float = 0.0
    """The seconds from reduced gradients to the beginning of the matrix updates, after norm, clipping and
    AdamW."""

    @property
    def seconds(self) -> float:
        return self.matrix_update_s + self.exchange_s


class UpdateModel:
    """The cost model of the updates and exchanges of a run's matrices."""

    def __init__(
        self,
        setup: Setup,
        layout: Layout,
        matrices: Sequence[Matrix],
        costs: Sequence[float],
        times: Sequence[UpdateTime] = (),
    ) -> None:
        self._matrices, self._costs, self._tp = matrices, costs, layout.tp
        self._algorithm, self._cluster, self._mode = algorithm_of(setup), setup.cluster, tp_mode_of(setup, layout.tp)
        self.unplanned_hosts = layout.tp if self._mode == "layer_sharded" else 1
        """The number of TP ranks whose updates differ if there is no plan."""
        self._times = times or [UpdateTime(cost) for cost in costs]
        self.pipeline = HostedPipeline.of(setup, layout)
        self._memory_rate = memory_rate(setup.cluster)
        self._updates_whole = setup.execution is Execution.REDUNDANT
        """True if every rank does all work on the whole matrix (canzona's sc)."""
        self._fragment_bytes = RULES[self._algorithm.name].fragment_bytes + setup.train.weight_bytes

    def hosted(
        self, groups: Sequence[MicroGroup], assignment: Assignment, norm_s: float = 0.0, experts_s: Sequence[float] = ()
    ) -> tuple[RankUpdate, ...]:
        """Returns the update phase of each host of an owner's TP group.

        Args:
            norm_s: the seconds of norm, clipping and AdamW.
            experts_s: see `HostedPipeline.run`.
        """
        devices = SeparateDevices(self._tp, norm_s)
        self.run_hosted(groups, assignment, devices, experts_s)
        return devices.results()

    def unplanned(self, members: Sequence[int], experts_s: Sequence[float] = ()) -> tuple[RankUpdate, ...]:
        """Returns the update phase of TP ranks that have no plan: of `unplanned_hosts` ranks, the others being like
        the first.

        Args:
            members: see `run_unplanned`.
            experts_s: see `run_unplanned`.
        """
        devices = SeparateDevices(self.unplanned_hosts)
        self.run_unplanned(members, devices, experts_s)
        return devices.results()

    def unplanned_seconds(self, index: int) -> float:
        """Returns the seconds for which a TP rank updates a matrix without a plan, or, in the mode layer_sharded,
        for which its home does, if the rank updates nothing else."""
        return self._costs_without_plan(index).alone_s

    def _costs_without_plan(self, index: int) -> UpdateTime:
        matrix = self._matrices[index]
        if self._mode == "distributed" and not matrix.replicated:
            parts = self._tp if matrix.expert_rank is None else 1
            return distributed_time(self._algorithm, matrix, parts, self._cluster)
        return self._times[index]

    def _unplanned_time(self, index: int) -> UpdateTime:
        """Returns the time of a matrix's update on each TP rank. In the mode duplicated, Megatron's Muon does the
        elementwise work of a matrix that TP divides on its fragment."""
        matrix = self._matrices[index]
        whole = self._updates_whole or matrix.replicated or matrix.expert_rank is not None
        if whole or self._mode == "distributed":
            return self._costs_without_plan(index)
        time = self._times[index]
        spared_s = (1 - 1 / self._tp) * self._elementwise_s(matrix)
        return time._replace(device_s=max(0.0, time.device_s - spared_s))

    def _without_fragments(self, matrix: Matrix) -> UpdateTime:
        """Returns the time of the part of a matrix's update that its home does."""
        time = self._times[matrix.index]
        return time._replace(device_s=max(0.0, time.device_s - self._elementwise_s(matrix)))

    def run_hosted[Moment](
        self,
        groups: Sequence[MicroGroup],
        assignment: Assignment,
        ranks: Pipeline[Moment],
        experts_s: Sequence[float] = (),
    ) -> None:
        """Runs an owner's micro-groups on `ranks`."""
        jobs = [make_jobs(group.matrices, self._matrices, self._costs, assignment) for group in groups]
        self.pipeline.run(jobs, ranks, experts_s)

    def run_unplanned[Moment](
        self, members: Sequence[int], ranks: Pipeline[Moment], experts_s: Sequence[float] = ()
    ) -> None:
        """Runs the updates of the matrices `members` on `ranks`, one after another. If `ranks` has one rank, it
        represents all ranks of its TP group.

        Args:
            experts_s: in the mode layer_sharded, the seconds for which each rank updates experts that no other rank
                of its TP group stores; empty if there are none. In other modes, `members` includes these experts.
        """
        if self._mode == "layer_sharded":
            self._run_at_homes(members, ranks, experts_s)
            return
        pipeline = self.pipeline
        times = [self._unplanned_time(index) for index in members]
        pace = pace_of(times)
        for index, time in zip(members, times, strict=True):
            matrix = self._matrices[index]
            if self._tp > 1 and matrix.expert_rank is None and not matrix.replicated:
                if self._mode == "distributed":
                    transfer = all_reduces(self._algorithm, uncut_side(matrix), pipeline.links, pipeline.group)
                else:
                    # Megatron gathers the fp32 update with its momentum; canzona's sc gathers the fp32 gradient.
                    transfer = pipeline.links.all_gather(4.0 * matrix.elements, pipeline.group)
                ranks.wait(0, ranks.exchange(transfer.scaled(pipeline.exchanging)))
                if self._updates_whole:
                    packed = matrix.fragment_elements(self._tp) * (pipeline.buffer + FP32)
                    ranks.work(0, "exchange", (packed + 2 * FP32 * matrix.elements) * pipeline.byte_s)
            ranks.work(0, "matrix_update", pipeline.updating * pace * time.alone_s)

    def _run_at_homes[Moment](
        self, members: Sequence[int], ranks: Pipeline[Moment], experts_s: Sequence[float]
    ) -> None:
        """Runs updates in the mode layer_sharded. Updates of experts overlap with the exchanges of other matrices,
        because Megatron runs both on separate streams."""
        pipeline, tp, updating = self.pipeline, self._tp, self.pipeline.updating
        matrices = [self._matrices[index] for index in members]
        everywhere = [m for m in matrices if m.replicated or m.expert_rank is not None]
        everywhere_s = self.in_sequence_s(matrix.index for matrix in everywhere)
        homes_of = homes([m for m in matrices if not m.replicated and m.expert_rank is None], tp)
        fragments_s = updating * sum(self._elementwise_s(matrix) / tp for at_home in homes_of for matrix in at_home)
        transfer = exchange_with_homes(homes_of, pipeline.links, pipeline.group).scaled(pipeline.exchanging)
        copied = 2 * FP32 * pipeline.byte_s
        fragments = sum(matrix.fragment_elements(tp) for at_home in homes_of for matrix in at_home)
        for host in range(tp):
            ranks.work(host, "matrix_update", fragments_s)
            ranks.work(host, "exchange", copied * fragments)
        arrived = ranks.exchange(transfer)
        overlapped_s = [min(everywhere_s + each_s, transfer.seconds) for each_s in experts_s or [0.0] * tp]
        for host, at_home in enumerate(homes_of):
            whole_s = summed(map(self._without_fragments, at_home)).alone_s
            elements = sum(matrix.elements for matrix in at_home)
            ranks.work(host, "matrix_update", overlapped_s[host])
            ranks.wait(host, arrived)
            ranks.work(host, "exchange", copied * elements)
            ranks.work(host, "matrix_update", updating * whole_s)
            ranks.work(host, "exchange", copied * elements)
        returned = ranks.exchange(transfer)
        for host in range(tp):
            rest_s = everywhere_s + (experts_s[host] if experts_s else 0.0) - overlapped_s[host]
            ranks.work(host, "matrix_update", rest_s)
            ranks.wait(host, returned)

    def in_sequence_s(self, members: Iterable[int]) -> float:
        """Returns the seconds in which a rank updates whole matrices one after another."""
        return self.pipeline.updating * summed(self._times[index] for index in members).alone_s

    def _elementwise_s(self, matrix: Matrix) -> float:
        """Returns the seconds of the part of an update that a rank can do on its fragment, for the whole matrix; 0
        if every rank stores the whole matrix."""
        return 0.0 if matrix.replicated else matrix.elements * self._fragment_bytes / self._memory_rate


def pace_of(times: Sequence[UpdateTime]) -> float:
    """Returns the seconds of a rank's updates relative to the sum of the seconds that each takes alone. It is
    less than 1 if the launches of some matrices are hidden while others are updated."""
    alone_s = math.fsum(map(max, times))  # `alone_s` of each, computed faster
    return summed(times).alone_s / alone_s if alone_s else 1.0


class SeparateDevices(Clock):
    """A TP group whose ranks have separate devices."""

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


class SharedCores:
    """A TP group on a timeline whose tasks share cores. `results` can be called once the timeline has run.

    Args:
        name: the name of the group, unique on the timeline.
        copies: the number of TP groups that do the same work at the same time.
        ranks_per_host: the number of ranks of each group that one host represents: 1, or tp if all ranks do
            the same work.
        after: the task after which each host starts, by host.
        norm_s: the seconds of norm and clipping, if no other task slows them down.
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
        ranks_per_host: int = 1,
        norm_s: float = 0.0,
        adamw_s: float = 0.0,
    ) -> None:
        self._timeline, self._name, self._copies, self._ranks_per_host = timeline, name, copies, ranks_per_host
        self._norm_s, self._adamw_s = norm_s, adamw_s
        self.begin = list(after)
        """The task of each host after which matrix updates begin: its task in `after`, or, once `norm` has
        been called, AdamW's update."""
        self._first_tasks, self._last_tasks = list(after), list(after)
        self._waits: list[list[int]] = [[task] for task in after]
        self._work: list[list[int]] = [[] for _ in range(hosts)]
        """The tasks of each host in which it packs or updates matrices."""
        self._transfers: list[int] = []

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        if seconds > 0:
            self._work[host].append(self._task(host, phase, seconds))

    def wait(self, host: int, moment: int) -> None:
        self._waits[host].append(moment)

    def exchange(self, transfer: Transfer) -> int:
        index = self._timeline.add(
            "exchange",
            (self._name, "exchange"),
            seconds=transfer.seconds,
            cores=transfer.cores * self._copies,
            after=[task for waits in self._waits for task in waits] + self._last_tasks,
        )
        if transfer.seconds > 0:
            self._transfers.append(index)
        return index

    def norm(self) -> None:
        packing = list(self._last_tasks)
        for host in range(len(packing)):
            self._waits[host] += packing
            self._task(host, "norm_clip", self._norm_s)
            self.begin[host] = self._task(host, "adamw_update", self._adamw_s)

    def end(self, host: int) -> int:
        """Adds a task after all work of a host; returns the task's index."""
        return self._task(host, "other", 0.0)

    def results(self, times: Sequence[TaskTimes]) -> tuple[RankUpdate, ...]:
        """Returns the update phase of each host, timed from the end of its task in `after`."""
        results = []
        for tasks, first, begin, last in zip(self._work, self._first_tasks, self.begin, self._last_tasks, strict=True):
            zero_s = times[first].end
            segments: list[Segment] = [
                ("compute", self._timeline.tasks[n].phase, times[n].start - zero_s, times[n].end - zero_s)
                for n in tasks
            ]
            transfers: list[Segment] = [
                ("exchange", "exchange", times[n].start - zero_s, times[n].end - zero_s) for n in self._transfers
            ]
            results.append(_result(segments, transfers, times[begin].end - zero_s, times[last].end - zero_s))
        return tuple(results)

    def _task(self, host: int, phase: str, seconds: float) -> int:
        index = self._timeline.add(
            phase,
            (self._name, host),
            seconds=seconds,
            cores=float(self._copies * self._ranks_per_host) if seconds > 0 else 0.0,
            after=self._waits[host],
        )
        self._waits[host], self._last_tasks[host] = [], index
        return index


def _result(segments: Sequence[Segment], transfers: Sequence[Segment], begun_s: float, end_s: float) -> RankUpdate:
    """Adds up a rank's update phase from its segments.

    Args:
        segments: the rank's packing and updates.
        transfers: the exchanges of its TP group.
        begun_s: the time at which norm, clipping and AdamW are done.
        end_s: the time at which the rank is done.
    """
    updating_s = sum(stop - start for _, phase, start, stop in segments if phase == "matrix_update")
    packing_s = sum(stop - start for _, phase, start, stop in segments if phase == "exchange")
    packed_s = sum(stop - start for _, _, start, stop in segments if start < begun_s)
    in_flight_s = sum(stop - start for _, _, start, stop in transfers)
    exposed_s = end_s - begun_s - updating_s
    return RankUpdate(
        matrix_update_s=updating_s,
        exchange_s=exposed_s,
        exchange_total_s=max(in_flight_s + packing_s, exposed_s + packed_s),
        segments=tuple(
            (stream, phase, start - begun_s, stop - begun_s) for stream, phase, start, stop in (*segments, *transfers)
        ),
        packed_s=packed_s,
        begun_s=begun_s,
    )
