"""The update phase: what every rank does between clipped gradients and its own updated matrices.

hosted (canzona, asc): an owner's TP group runs its micro-groups as a pipeline. Compute stream of each rank, with two
groups in flight: pack 0, pack 1, then per group: unpack its gradients, update its matrices, pack their new weights,
pack the gradients of the group after the next, unpack the weights of the group before. One communicator carries the
exchanges in the order gradients 0, gradients 1, weights 0, gradients 2, weights 1, ...; each starts once all ranks of
the group have packed for it and the one before is done.

duplicated (layerwise, sc): every TP rank updates the whole matrix, from an all-gather it waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.cost import algorithm, memory_rate
from canzona_cli.planner.links import Groups, Links
from canzona_cli.planner.memory import element_bytes, exchange_bytes
from canzona_cli.planner.types import Assignment, Matrix, MicroGroup

_FP32 = 4
Segment = tuple[Literal["compute", "exchange"], str, float, float]
"""Stream, phase, start, end; seconds from the beginning of the update."""

FRAGMENT_BYTES = {"adamw": 28, "muon": 64, "shampoo": 24, "soap": 24}
"""Memory traffic per element, beside writing the weight, of what a duplicated update does on its own fragment only:
decay, weight and, for Muon, momentum and scaling. The cost of a hosted update has it for the whole matrix."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """One rank's part of the update phase."""

    matrix_update_s: float
    exchange_s: float
    """Exposed: waiting for an exchange, packing and unpacking."""
    exchange_total_s: float
    """In flight, packing and unpacking included."""
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        return self.matrix_update_s + self.exchange_s

    @property
    def exchange_hidden_s(self) -> float:
        """In flight under updates; sums of floats in another order must not make it negative."""
        return max(0.0, self.exchange_total_s - self.exchange_s)


class UpdateModel:
    """Prices updates and exchanges of a run's matrices."""

    def __init__(self, config: RunConfig, layout: Layout, matrices: Sequence[Matrix], costs: Sequence[float]) -> None:
        self._matrices, self._costs, self._tp = matrices, costs, layout.tp
        self._links, self._group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).tp
        self._width, self._grad = exchange_bytes(config)
        self._buffer = element_bytes(config)[1]
        self._rate = memory_rate(config.cluster)
        self._fragment_bytes = FRAGMENT_BYTES[algorithm(config).name] + self._width

    def hosted(self, groups: Sequence[MicroGroup], assignment: Assignment) -> tuple[RankUpdate, ...]:
        """One owner's micro-groups, in order: its TP ranks' updates, by host."""
        if self._tp == 1:
            members = [index for group in groups for index in group.matrices]
            return (self._serial([self._costs[i] for i in members]),)
        ranks = [_Rank() for _ in range(self._tp)]
        loads = [self._load(group, assignment) for group in groups]
        channel = _Channel(ranks)
        gradients: list[float] = []
        for load in loads[:2]:
            gradients.append(self._send_gradients(load, ranks, channel))
        weights: list[float] = []
        for number, load in enumerate(loads):
            for host, rank in enumerate(ranks):
                rank.wait(gradients[number])
                rank.work("exchange", load.hosted[host] * (self._grad + _FP32) / self._rate)
                rank.work("matrix_update", load.seconds[host])
                rank.work("exchange", load.hosted[host] * 2 * self._width / self._rate)
            weights.append(channel.run(self._weights_s(load)))
            if number + 2 < len(loads):
                gradients.append(self._send_gradients(loads[number + 2], ranks, channel))
            if number:
                self._receive_weights(loads[number - 1], weights[number - 1], ranks)
        if loads:
            self._receive_weights(loads[-1], weights[-1], ranks)
        return tuple(rank.result(channel.segments) for rank in ranks)

    def duplicated(self, members: Sequence[int]) -> RankUpdate:
        """The matrices `members`, gathered and updated one after another, by every rank of a TP group alike."""
        rank = _Rank()
        channel = _Channel([rank])
        for index in members:
            matrix = self._matrices[index]
            if self._tp > 1 and matrix.shard_dim is not None:
                # Megatron gathers the fp32 update, momentum included.
                channel.run(self._links.all_gather(4.0 * matrix.elements, self._group).seconds)
                rank.wait(channel.free)
            on_fragment = matrix.elements * self._fragment_bytes / self._rate
            rank.work("matrix_update", max(0.0, self._costs[index] - (1 - 1 / self._tp) * on_fragment))
        return rank.result(channel.segments)

    def _serial(self, updates: Sequence[float]) -> RankUpdate:
        rank = _Rank()
        for seconds in updates:
            rank.work("matrix_update", seconds)
        return rank.result([])

    def _load(self, group: MicroGroup, assignment: Assignment) -> "_Load":
        load = _Load(self._tp)
        for index in group.matrices:
            matrix, host = self._matrices[index], assignment.cells[index].host
            load.hosted[host] += matrix.elements
            load.seconds[host] += self._costs[index]
            for rank in range(self._tp):
                stored = matrix.fragment_elements(self._tp) if matrix.home is None else matrix.elements
                if matrix.home not in (None, rank):
                    continue
                load.stored[rank] += stored
                if rank != host:
                    # A matrix that every rank holds whole has its gradient on its host already.
                    travels = 0 if matrix.shard_dim is None and matrix.home is None else stored
                    load.given[rank] += travels
                    load.taken[host] += travels
                    load.returned[rank] += stored
                    load.sent_back[host] += stored
        return load

    def _send_gradients(self, load: "_Load", ranks: Sequence["_Rank"], channel: "_Channel") -> float:
        for rank, stored in zip(ranks, load.stored, strict=True):
            rank.work("exchange", stored * (self._buffer + self._grad) / self._rate)
        given, taken = ([elements * self._grad for elements in side] for side in (load.given, load.taken))
        return channel.run(self._links.all_to_all(given, taken, self._group).seconds)

    def _weights_s(self, load: "_Load") -> float:
        given, taken = ([elements * self._width for elements in side] for side in (load.sent_back, load.returned))
        return self._links.all_to_all(given, taken, self._group).seconds

    def _receive_weights(self, load: "_Load", landed: float, ranks: Sequence["_Rank"]) -> None:
        for rank, stored in zip(ranks, load.stored, strict=True):
            rank.wait(landed)
            rank.work("exchange", stored * 2 * self._width / self._rate)


class _Load:
    """What one micro-group asks of each TP rank: elements, and seconds of update."""

    def __init__(self, tp: int) -> None:
        self.stored, self.hosted = [0] * tp, [0] * tp
        self.given, self.taken = [0] * tp, [0] * tp
        self.sent_back, self.returned = [0] * tp, [0] * tp
        self.seconds = [0.0] * tp


class _Rank:
    """One rank's compute stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.updating = self.packing = 0.0
        self._segments: list[Segment] = []

    def work(self, phase: Literal["matrix_update", "exchange"], seconds: float) -> None:
        if seconds <= 0:
            return
        self._segments.append(("compute", phase, self.now, self.now + seconds))
        self.now += seconds
        if phase == "matrix_update":
            self.updating += seconds
        else:
            self.packing += seconds

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def result(self, transfers: Sequence[Segment]) -> RankUpdate:
        in_flight = sum(end - start for _, _, start, end in transfers)
        return RankUpdate(
            matrix_update_s=self.updating,
            exchange_s=self.now - self.updating,
            exchange_total_s=max(in_flight + self.packing, self.now - self.updating),
            segments=(*self._segments, *transfers),
        )


class _Channel:
    """The TP group's communicator: one exchange at a time, once all ranks have come to it."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.free = 0.0
        self.segments: list[Segment] = []
        self._ranks = ranks

    def run(self, seconds: float) -> float:
        """Returns when it has landed."""
        start = max(self.free, *(rank.now for rank in self._ranks))
        self.free = start + seconds
        if seconds > 0:
            self.segments.append(("exchange", "exchange", start, self.free))
        return self.free
