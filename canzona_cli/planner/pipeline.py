"""The time that a TP group takes for an owner's micro-groups and shared matrices,
in the order of `planner.order`.

Stages are told to a `Pipeline`: the planner's `Clock` adds them up, to compare groupings; the simulator draws
them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import FP32, element_bytes, exchange_bytes
from canzona_cli.costs.links import Group, Groups, Links, Transfer
from canzona_cli.costs.model import least_before_updates
from canzona_cli.costs.sharing import Share, shared_exchanges, shared_transfers
from canzona_cli.costs.update import algorithm, implementation, memory_rate, step_factor
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.exchange import Traffic, group_traffic, senders
from canzona_cli.planner.order import ahead, order, turns

Activity = Literal["matrix_update", "exchange"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix as its owner's pipeline sees it."""

    matrix: Matrix
    host: int
    seconds: float
    """The seconds of its update by one rank."""
    share: Share | None = None
    """The price where the TP group updates it together."""

    @property
    def busy(self) -> float:
        """The seconds of its host, besides what every rank does."""
        return self.seconds if self.share is None else 0.0

    @property
    def received(self) -> int:
        """The elements that its host receives and updates."""
        return self.matrix.elements if self.share is None else 0


class Pipeline[Moment](Protocol):
    """The work of a TP group's ranks in the update phase, in order;
    a moment is when an exchange has landed."""

    def work(self, host: int, phase: Activity, seconds: float) -> None: ...

    def wait(self, host: int, moment: Moment) -> None: ...

    def exchange(self, transfer: Transfer) -> Moment:
        """Starts once all ranks have come to it and the one before is done."""
        ...

    def norm(self) -> None:
        """Tells that all exchanges have started that may start before the gradient norm is known."""
        ...


class Clock:
    """The time at which each rank of a TP group is done, where every rank has a device of its own. Seconds
    since its gradients were reduced.

    Args:
        norm_s: the seconds of norm, clip and AdamW.
    """

    def __init__(self, tp: int, norm_s: float = 0.0) -> None:
        self.now = [0.0] * tp
        self.begun = 0.0
        """The time at which the updates begin."""
        self._free, self._norm_s = 0.0, norm_s

    def work(self, host: int, phase: Activity, seconds: float) -> None:
        self.now[host] += seconds

    def wait(self, host: int, moment: float) -> None:
        self.now[host] = max(self.now[host], moment)

    def exchange(self, transfer: Transfer) -> float:
        self._free = max(self._free, *self.now) + transfer.seconds
        return self._free

    def norm(self) -> None:
        self.begun = max(self.now) + self._norm_s
        self.now = [self.begun] * len(self.now)


@dataclass(frozen=True, kw_only=True)
class HostedPipeline:
    """The prices of a TP group's steps."""

    tp: int
    links: Links
    group: Group
    width: int = 2
    """Bytes of an element of a weight."""
    grad: int = FP32
    """Bytes of an element of a gradient on its way."""
    buffer: int = FP32
    """Bytes of an element of a gradient where it was reduced."""
    taken: int = 0
    """Bytes of memory traffic per element of a weight behind its exchange."""
    own: int = 0
    """Bytes per element where its host stores it, besides its rounded copy, which is a part of the update."""
    byte_s: float = 0.0
    """Seconds of memory traffic for each byte that is packed or unpacked."""
    launch_s: float = 0.0
    """Seconds to launch the copy of a fragment."""
    replay_s: float = 0.0
    """Seconds to launch a micro-group's updates as one graph; 0 where each operation has its own launch."""
    steps: int = 0
    """The steps of Newton-Schulz."""
    updating: float = 1.0
    exchanging: float = 1.0
    """Measured time of whole steps over that of their parts, of updates and of exchanges."""
    norm_s: float = 0.0
    """Seconds of norm, clip and AdamW, at least; they hide the first exchanges."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> "HostedPipeline":
        cluster, implemented = config.cluster, implementation(config)
        width, grad = exchange_bytes(config)
        exchanging = step_factor(cluster, "exchange", implemented)
        # A GPU does not wait to know whether a weight is finite: it reads the old one too, and writes one of
        # them.
        chosen = 3 * width if cluster.device == "cuda" else 0
        return cls(
            tp=layout.tp,
            links=Links(cluster=cluster),
            group=Groups.of(layout, cluster).tp,
            width=width,
            grad=grad,
            buffer=element_bytes(config)[1],
            taken=chosen or 2 * width,
            own=0 if cluster.measured_updates else chosen,  # measured updates have it
            byte_s=exchanging / memory_rate(cluster),
            launch_s=exchanging * cluster.launch_us * 1e-6,
            replay_s=cluster.launch_us * 1e-6 if algorithm(config).graph else 0.0,
            steps=algorithm(config).ns_steps,
            updating=step_factor(cluster, "matrix_update", implemented),
            exchanging=exchanging,
            norm_s=least_before_updates(config, layout),
        )

    @property
    def packing_s(self) -> float:
        """Seconds of packing and unpacking per element of a matrix, all ranks together and at least, without
        launches."""
        travels = (self.tp - 1) / self.tp
        return (travels * (self._sent + self.taken) + self._received) * self.byte_s

    @property
    def _sent(self) -> int:
        """Bytes of memory traffic per element of a gradient in front of its exchange."""
        return self.buffer + self.grad

    @property
    def _received(self) -> int:
        """Bytes of memory traffic per element of a gradient after its exchange."""
        return self.grad + FP32

    def seconds(self, groups: Sequence[Sequence[Job]], known: "Loads | None" = None) -> float:
        """Times an owner's groups in this order, from the first step to the last,
        without norm, clip and AdamW.

        Args:
            known: the results of groups of the very same jobs so far; new ones are added.
        """
        clock = Clock(self.tp, self.norm_s)
        self.run(groups, clock, known)
        return max(clock.now) - self.norm_s

    def run[Moment](
        self, groups: Sequence[Sequence[Job]], ranks: Pipeline[Moment], known: "Loads | None" = None
    ) -> None:
        """Has `ranks` work through an owner's micro-groups."""
        if self.tp == 1:
            ranks.norm()
            for group in groups:
                ranks.work(0, "matrix_update", self.updating * self.replay_s)
                for job in group:
                    own_s = self.own * job.matrix.elements * self.byte_s
                    ranks.work(0, "matrix_update", self.updating * job.seconds + own_s)
            return
        loads = [
            self._load([job for job in group if not job.share], {} if known is None else known) for group in groups
        ]
        landed: dict[int, Moment] = {}
        for place, (number, stage) in enumerate(order(len(loads))):
            if place == ahead(len(loads)):
                ranks.norm()
            load = loads[number]
            for host, parts in enumerate(load.work[stage]):
                if stage:
                    ranks.wait(host, landed[number])
                for phase, seconds in parts:
                    ranks.work(host, phase, seconds)
            if stage < len(load.exchanges):
                landed[number] = ranks.exchange(load.exchanges[stage])
        self._run_shared([job for group in groups for job in group if job.share], ranks)

    def _run_shared[Moment](self, jobs: Sequence[Job], ranks: Pipeline[Moment]) -> None:
        parts = [job.share.fragment for job in jobs if job.share is not None]
        sides = {min(job.matrix.shape) for job in jobs}
        moved = {side: shared_transfers(side, self.steps, self.width, self.links, self.group) for side in sides}
        behind, landed = shared_exchanges(self.steps), defaultdict[tuple[int, int], list[Moment]](list)
        for place, part in turns([len(of_matrix) for of_matrix in parts]):
            for host in range(self.tp):
                for moment in landed[place, part]:
                    ranks.wait(host, moment)
                ranks.work(host, "matrix_update", self.updating * parts[place][part])
            if part < len(behind) and behind[part].exchanges:
                transfer = moved[min(jobs[place].matrix.shape)][part]
                before = part + 1 + behind[part].under
                landed[place, before].append(ranks.exchange(transfer.times(self.exchanging)))

    def _load(self, group: Sequence[Job], known: "Loads") -> "Load":
        key = tuple(job.matrix.index for job in group)
        if key not in known:
            known[key] = self._priced(group)
        return known[key]

    def _priced(self, group: Sequence[Job]) -> "Load":
        tp = self.tp
        # Elements whose gradients go to others, whose weights come from others, and of a rank's own fragments.
        sent, stored, own = [0] * tp, [0] * tp, [0] * tp
        fragments, hosted, matrices, seconds = [0] * tp, [0] * tp, [0] * tp, [0.0] * tp
        for job in group:
            matrix, host, held = job.matrix, job.host, job.matrix.held_elements(tp)
            hosted[host] += matrix.elements
            matrices[host] += 1
            seconds[host] += job.seconds
            for rank in {host, *matrix.holders(tp)}:
                fragments[rank] += 1
            for rank in matrix.holders(tp):
                (own if rank == host else stored)[rank] += held
            for rank in senders(matrix, host, tp):
                sent[rank] += held if rank != host else 0

        def stages(host: int) -> Iterator[tuple[tuple[Activity, float], ...]]:
            others, replay_s = fragments[host] - matrices[host], self.replay_s if matrices[host] else 0.0
            yield (("exchange", self._copies(sent[host] * self._sent, others)),)
            yield (
                ("exchange", self._copies(hosted[host] * self._received, tp * matrices[host])),
                ("matrix_update", self.updating * (replay_s + seconds[host])),
                # Other ranks' fragments, and its own: rounded, then taken where they are finite.
                ("exchange", self._copies(own[host] * self.own, (tp + 1) * matrices[host])),
            )
            yield (("exchange", self._copies(stored[host] * self.taken, others)),)

        moved = group_traffic([job.matrix for job in group], [job.host for job in group], tp)
        return Load(
            work=tuple(
                tuple(tuple(part for part in parts if part[1] > 0) for parts in of_hosts)
                for of_hosts in zip(*map(stages, range(tp)), strict=True)
            ),
            exchanges=(self._travel(moved.gradients, self.grad), self._travel(moved.weights, self.width)),
        )

    def _copies(self, size: int, launches: int) -> float:
        return size * self.byte_s + launches * self.launch_s

    def _travel(self, traffic: Traffic, width: int) -> Transfer:
        """`width`: bytes of an element."""
        sent, received = ([elements * width for elements in side] for side in (traffic.sent, traffic.received))
        return self.links.all_to_all(sent, received, self.group).times(self.exchanging)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work and exchanges of one micro-group."""

    work: tuple[tuple[tuple[tuple[Activity, float], ...], ...], ...]
    """The seconds of each thing a host does, in order, by stage and host."""
    exchanges: tuple[Transfer, ...]
    """The exchange after each stage but the last."""


Loads = dict[tuple[int, ...], Load]
"""Known loads by the group's matrices, for jobs that have the same hosts and shares every time."""


def planning(config: RunConfig) -> RunConfig:
    """The run without what changes predicted times, but no plan: the cores its ranks share,
    what whole steps took."""
    return replace(config, cluster=replace(config.cluster, cores=None, step_factors={}))
