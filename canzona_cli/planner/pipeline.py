"""An owner's micro-groups, updated by its TP group: who does what in which order, and what it takes.

Compute stream of each rank, with two groups in flight: pack 0, pack 1, then per group: unpack its gradients, update
its matrices, pack their new weights, pack the gradients of the group after the next, unpack the weights of the group
before.
One communicator carries the exchanges in the order gradients 0, gradients 1, weights 0, gradients 2, weights 1, ...;
each starts once all ranks of the group have packed for it and the one before is done.

The order is written once, as instructions to a `Pipeline`: the planner's `Clock` adds up what they take, to compare
groupings by; the simulator draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.buckets import FP32, element_bytes
from canzona_cli.planner.cost import implementation, memory_rate, step_factor
from canzona_cli.planner.exchange import Traffic, exchange_bytes, group_traffic
from canzona_cli.planner.links import Group, Groups, Links, Transfer


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix as its owner's pipeline sees it."""

    matrix: Matrix
    host: int
    seconds: float
    """Of its update."""


class Pipeline[Moment](Protocol):
    """What the ranks of a TP group do in the update phase, in order; a moment is when an exchange has landed."""

    def work(self, host: int, phase: Literal["matrix_update", "exchange"], seconds: float) -> None: ...

    def wait(self, host: int, moment: Moment) -> None: ...

    def exchange(self, transfer: Transfer) -> Moment:
        """Starts once all ranks have come to it and the one before is done."""
        ...


class Clock:
    """When each rank of a TP group is done, where every rank has a device of its own."""

    def __init__(self, tp: int) -> None:
        self.now = [0.0] * tp
        self._free = 0.0

    def work(self, host: int, phase: Literal["matrix_update", "exchange"], seconds: float) -> None:
        self.now[host] += seconds

    def wait(self, host: int, moment: float) -> None:
        self.now[host] = max(self.now[host], moment)

    def exchange(self, transfer: Transfer) -> float:
        self._free = max(self._free, *self.now) + transfer.seconds
        return self._free


@dataclass(frozen=True, kw_only=True)
class HostedPipeline:
    """What a TP group's steps take."""

    tp: int
    links: Links
    group: Group
    width: int = 2
    """Bytes of an element of a weight."""
    grad: int = FP32
    """Of a gradient on its way."""
    buffer: int = FP32
    """Of a gradient where it was reduced."""
    byte_s: float = 0.0
    """Seconds of memory traffic for each byte that is packed or unpacked."""
    launch_s: float = 0.0
    """Seconds to launch the copy of a fragment."""
    updating: float = 1.0
    exchanging: float = 1.0
    """Measured time of whole steps over that of their parts, of updates and of exchanges."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> "HostedPipeline":
        cluster, own = config.cluster, implementation(config)
        width, grad = exchange_bytes(config)
        exchanging = step_factor(cluster, "exchange", own)
        return cls(
            tp=layout.tp,
            links=Links(cluster=cluster),
            group=Groups.of(layout, cluster).tp,
            width=width,
            grad=grad,
            buffer=element_bytes(config)[1],
            byte_s=exchanging / memory_rate(cluster),
            launch_s=exchanging * cluster.launch_us * 1e-6,
            updating=step_factor(cluster, "matrix_update", own),
            exchanging=exchanging,
        )

    @property
    def packing_s(self) -> float:
        """Seconds of packing and unpacking per element of a matrix, all ranks together, without launches."""
        return (self._sent + self._received + 2 * self._written) * self.byte_s

    @property
    def _sent(self) -> int:
        """Bytes of memory traffic per element of a gradient in front of its exchange."""
        return self.buffer + self.grad

    @property
    def _received(self) -> int:
        """And behind it."""
        return self.grad + FP32

    @property
    def _written(self) -> int:
        """Of a weight, in front of its exchange and behind it."""
        return 2 * self.width

    def seconds(self, groups: Sequence[Sequence[Job]]) -> float:
        """From the first step to the last, for an owner's groups in this order."""
        clock = Clock(self.tp)
        self.run(groups, clock)
        return max(clock.now)

    def run[Moment](self, groups: Sequence[Sequence[Job]], ranks: Pipeline[Moment]) -> None:
        """Has `ranks` work through an owner's micro-groups."""
        if self.tp == 1:
            for group in groups:
                for job in group:
                    ranks.work(0, "matrix_update", self.updating * job.seconds)
            return
        loads = [_Load(self.tp, group) for group in groups]
        gradients = [self._send_gradients(load, ranks) for load in loads[:2]]
        weights: list[Moment] = []
        for number, load in enumerate(loads):
            for host, (elements, matrices) in enumerate(zip(load.hosted, load.matrices, strict=True)):
                ranks.wait(host, gradients[number])
                ranks.work(host, "exchange", self._copies(elements * self._received, self.tp * matrices))
                ranks.work(host, "matrix_update", self.updating * load.seconds[host])
                # Other ranks' fragments, and its own: rounded, then taken where they are finite.
                ranks.work(host, "exchange", self._copies(elements * self._written, (self.tp + 1) * matrices))
            weights.append(ranks.exchange(self._travel(load.weights, self.width)))
            if number + 2 < len(loads):
                gradients.append(self._send_gradients(loads[number + 2], ranks))
            if number:
                self._receive_weights(loads[number - 1], weights[number - 1], ranks)
        if loads:
            self._receive_weights(loads[-1], weights[-1], ranks)

    def _copies(self, size: int, launches: int) -> float:
        return size * self.byte_s + launches * self.launch_s

    def _send_gradients[Moment](self, load: "_Load", ranks: Pipeline[Moment]) -> Moment:
        for host, stored in enumerate(load.stored):
            ranks.work(host, "exchange", self._copies(stored * self._sent, load.fragments[host] - load.matrices[host]))
        return ranks.exchange(self._travel(load.gradients, self.grad))

    def _receive_weights[Moment](self, load: "_Load", landed: Moment, ranks: Pipeline[Moment]) -> None:
        for host, stored in enumerate(load.stored):
            ranks.wait(host, landed)
            arriving = load.fragments[host] - load.matrices[host]
            ranks.work(host, "exchange", self._copies(stored * self._written, arriving))

    def _travel(self, traffic: Traffic, width: int) -> Transfer:
        """`width`: bytes of an element."""
        sent, received = ([elements * width for elements in side] for side in (traffic.sent, traffic.received))
        return self.links.all_to_all(sent, received, self.group).times(self.exchanging)


class _Load:
    """What one micro-group asks of each TP rank: elements, matrices, and seconds of update."""

    def __init__(self, tp: int, group: Sequence[Job]) -> None:
        self.stored, self.fragments = [0] * tp, [0] * tp
        self.hosted, self.matrices, self.seconds = [0] * tp, [0] * tp, [0.0] * tp
        moved = group_traffic([job.matrix for job in group], [job.host for job in group], tp)
        self.gradients, self.weights = moved.gradients, moved.weights
        for job in group:
            matrix, host = job.matrix, job.host
            self.hosted[host] += matrix.elements
            self.matrices[host] += 1
            self.seconds[host] += job.seconds
            for rank in {host, *matrix.holders(tp)}:
                self.fragments[rank] += 1
            for rank in matrix.holders(tp):
                self.stored[rank] += matrix.held_elements(tp)


def planning(config: RunConfig) -> RunConfig:
    """The run without what changes predicted times, but no plan: the cores its ranks share, what whole steps took."""
    return replace(config, cluster=replace(config.cluster, cores=None, step_factors={}))
