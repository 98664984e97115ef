"""The time that a TP group takes to update an owner's micro-groups and shared matrices in the order of
`planner.order`.

`HostedPipeline.run` passes the work to a `Pipeline`: the planner's `Clock` adds up the time of the work, and
the simulator adds the work to a timeline.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from canzona_cli.core.costs.links import Group, Groups, Links, Transfer
from canzona_cli.core.costs.model import least_before_updates
from canzona_cli.core.costs.scratch import FP32
from canzona_cli.core.costs.sharing import SharedCost, shared_exchanges, shared_transfers
from canzona_cli.core.costs.update import algorithm_of, memory_rate, step_factor
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.exchange import Traffic, group_traffic, senders
from canzona_cli.core.planner.order import entries_before_norm, order, shared_order
from canzona_cli.core.planner.plan import Assignment
from canzona_cli.core.setup import Layout, Setup

Activity = Literal["matrix_update", "exchange"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The update of one matrix, on a host or shared by the TP group."""

    matrix: Matrix
    host: int
    seconds: float
    """The seconds that one rank would need to update the whole matrix, even if the matrix is shared."""
    shared_cost: SharedCost | None = None
    """The costs of the shared update; None if the matrix is hosted."""

    @property
    def busy(self) -> float:
        """The seconds of the host's update; 0 if the matrix is shared."""
        return self.seconds if self.shared_cost is None else 0.0

    @property
    def received(self) -> int:
        """The elements of the whole matrix that the host assembles; 0 if the matrix is shared."""
        return self.matrix.elements if self.shared_cost is None else 0


def make_jobs(
    indices: Iterable[int], matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment
) -> list[Job]:
    """Returns a job for each of the matrices at `indices`.

    Args:
        costs: the seconds that one rank needs to update each matrix.
    """
    cells, shared_costs = assignment.cells, assignment.shared_costs
    return [
        Job(matrix=matrices[index], host=cells[index].host, seconds=costs[index], shared_cost=shared_costs.get(index))
        for index in indices
    ]


class Pipeline[Moment](Protocol):
    """The interface of objects that receive the work of a TP group's ranks in the update phase, in order. A
    `Moment` is the end of an exchange."""

    def work(self, host: int, phase: Activity, seconds: float) -> None: ...

    def wait(self, host: int, moment: Moment) -> None: ...

    def exchange(self, transfer: Transfer) -> Moment:
        """Adds an exchange, which starts once all ranks have reached it and the previous exchange is done."""
        ...

    def norm(self) -> None:
        """Marks the point at which all exchanges that may start before the gradient norm is known have
        started."""
        ...


class Clock:
    """A `Pipeline` that computes when each rank of a TP group is done, in seconds since the owner's gradients
    were reduced. Every rank has a separate device.

    Args:
        norm_s: the seconds of norm, clip and AdamW.
    """

    def __init__(self, tp: int, norm_s: float = 0.0) -> None:
        self.now = [0.0] * tp
        self.begun = 0.0
        """The time at which norm, clip and AdamW are done and updates may start."""
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
    """The costs of the packing, exchanges and updates of a TP group."""

    tp: int
    links: Links
    group: Group
    width: int = 2
    """The bytes of a weight element."""
    grad: int = FP32
    """The bytes of a gradient element in an exchange."""
    buffer: int = FP32
    """The bytes of a gradient element in the buffer in which gradients are reduced."""
    store: int = 0
    """The bytes of memory traffic to unpack and store a weight element after its exchange."""
    host_store: int = 0
    """The bytes of memory traffic to store a weight element that its host keeps, excluding the rounded copy,
    which is part of the update."""
    byte_s: float = 0.0
    """The seconds of memory traffic for each byte that is packed or unpacked."""
    launch_s: float = 0.0
    """The seconds to launch the copy of a fragment."""
    replay_s: float = 0.0
    """The seconds to launch a micro-group's updates as one graph; 0 if each operation is launched
    separately."""
    steps: int = 0
    """The number of Newton-Schulz steps."""
    updating: float = 1.0
    """The measured factor by which updates take longer in whole training steps than in isolation; 1 without a
    measurement."""
    exchanging: float = 1.0
    """The measured factor by which exchanges take longer in whole training steps than in isolation; 1 without
    a measurement."""
    norm_s: float = 0.0
    """The least seconds of norm, clip and AdamW, with which the first exchanges overlap."""

    @classmethod
    def of(cls, setup: Setup, layout: Layout) -> "HostedPipeline":
        cluster, width = setup.cluster, setup.train.weight_bytes
        exchanging = step_factor(setup, "exchange")
        # A GPU reads the new and the old weight and writes one of them, so that it need not wait for the
        # finite flags.
        select = 3 * width if cluster.device == "cuda" else 0
        return cls(
            tp=layout.tp,
            links=Links(cluster=cluster),
            group=Groups.of(layout, cluster).tp,
            width=width,
            grad=setup.engine.gradient_bytes,
            buffer=setup.train.gradient_bytes,
            store=select or 2 * width,
            host_store=0 if cluster.measured_updates else select,  # measured updates include it
            byte_s=exchanging / memory_rate(cluster),
            launch_s=exchanging * cluster.launch_us * 1e-6,
            replay_s=cluster.launch_us * 1e-6 if algorithm_of(setup).graph else 0.0,
            steps=algorithm_of(setup).ns_steps,
            updating=step_factor(setup, "matrix_update"),
            exchanging=exchanging,
            norm_s=least_before_updates(setup, layout),
        )

    @property
    def element_bytes(self) -> int:
        """The bytes of an element in the larger of a micro-group's two messages, which C_max limits."""
        return max(self.width, self.grad)

    @property
    def packing_s(self) -> float:
        """The least seconds of packing and unpacking per element of a matrix, summed over ranks, without
        launches."""
        exchanged = (self.tp - 1) / self.tp
        return (exchanged * (self._pack_bytes + self.store) + self._unpack_bytes) * self.byte_s

    @property
    def _pack_bytes(self) -> int:
        """The bytes of memory traffic to pack a gradient element before its exchange."""
        return self.buffer + self.grad

    @property
    def _unpack_bytes(self) -> int:
        """The bytes of memory traffic to unpack a gradient element after its exchange."""
        return self.grad + FP32

    def seconds(self, groups: Sequence[Sequence[Job]], experts_s: Sequence[float] = ()) -> float:
        """Returns the seconds that an owner's groups take in the given order, excluding norm, clip and AdamW.

        Args:
            experts_s: see `run`.
        """
        clock = Clock(self.tp, self.norm_s)
        self.run(groups, clock, experts_s)
        return max(clock.now) - self.norm_s

    @property
    def begin_s(self) -> float:
        """The seconds to launch a host's updates of matrices that no other rank of its TP group stores."""
        return self.updating * self.replay_s

    def alone(self, jobs: Sequence[Job]) -> float:
        """Returns the seconds that a host takes to update matrices that no other rank of its TP group
        stores."""
        if not jobs:
            return 0.0
        return self.begin_s + sum(self.each_alone(job.seconds, job.matrix.elements) for job in jobs)

    def each_alone(self, seconds: float, elements: int) -> float:
        """Returns the seconds that a host takes to update a matrix that no other rank of its TP group stores,
        excluding the launch.

        Args:
            seconds: the seconds of the update.
            elements: the elements of the matrix.
        """
        return self.updating * seconds + self.host_store * elements * self.byte_s

    def run[Moment](
        self, groups: Sequence[Sequence[Job]], ranks: Pipeline[Moment], experts_s: Sequence[float] = ()
    ) -> None:
        """Passes the work of an owner's micro-groups, and then of its shared matrices, to `ranks` in order.

        Args:
            experts_s: the seconds for which each host updates its experts, before all other updates.
        """
        if self.tp == 1 or not groups:
            _begin(ranks, experts_s)
            for group in groups:
                ranks.work(0, "matrix_update", self.begin_s)
                for job in group:
                    ranks.work(0, "matrix_update", self.each_alone(job.seconds, job.matrix.elements))
            return
        loads = [self.new_load([job for job in group if job.shared_cost is None]) for group in groups]
        exchanged: dict[int, Moment] = {}
        for position, (group_index, stage) in enumerate(order(len(loads))):
            if position == entries_before_norm(len(loads)):
                _begin(ranks, experts_s)
            load = loads[group_index]
            for host, activities in enumerate(load.work[stage]):
                if stage:
                    ranks.wait(host, exchanged[group_index])
                for phase, seconds in activities:
                    ranks.work(host, phase, seconds)
            if stage < len(load.exchanges):
                exchanged[group_index] = ranks.exchange(load.exchanges[stage])
        self._run_shared([job for group in groups for job in group if job.shared_cost is not None], ranks)

    def _run_shared[Moment](self, jobs: Sequence[Job], ranks: Pipeline[Moment]) -> None:
        """Passes the work and exchanges of shared matrices to `ranks`, in the order of
        `planner.order.shared_order`."""
        parts = [job.shared_cost.fragment for job in jobs if job.shared_cost is not None]
        sides = {min(job.matrix.shape) for job in jobs}
        transfers = {side: shared_transfers(side, self.steps, self.width, self.links, self.group) for side in sides}
        following = shared_exchanges(self.steps)
        # The ends of the exchanges that the part of a matrix waits for, by (matrix, part).
        awaited = defaultdict[tuple[int, int], list[Moment]](list)
        for index, part in shared_order([len(of_matrix) for of_matrix in parts]):
            for host in range(self.tp):
                for moment in awaited[index, part]:
                    ranks.wait(host, moment)
                ranks.work(host, "matrix_update", self.updating * parts[index][part])
            if part < len(following) and following[part].exchanges:
                transfer = transfers[min(jobs[index].matrix.shape)][part]
                needed_by = part + 1 + following[part].overlapped_parts
                awaited[index, needed_by].append(ranks.exchange(transfer.scaled(self.exchanging)))

    def new_load(self, group: Sequence[Job]) -> "Load":
        """Computes the load of a micro-group of hosted matrices."""
        tp = self.tp
        # By rank: the elements of gradients sent to other hosts, of weights received from other hosts, and of
        # weights for which the rank is the host.
        gradients_sent, weights_received, weights_hosted = [0] * tp, [0] * tp, [0] * tp
        # By rank: the number of matrices that it hosts, their elements and update seconds, and the number of
        # matrices that it hosts or stores.
        matrices, elements, seconds, fragments = [0] * tp, [0] * tp, [0.0] * tp, [0] * tp
        for job in group:
            matrix, host, fragment_elements = job.matrix, job.host, job.matrix.held_elements(tp)
            elements[host] += matrix.elements
            matrices[host] += 1
            seconds[host] += job.seconds
            for rank in {host, *matrix.holders(tp)}:
                fragments[rank] += 1
            for rank in matrix.holders(tp):
                if rank == host:
                    weights_hosted[rank] += fragment_elements
                else:
                    weights_received[rank] += fragment_elements
            for rank in senders(matrix, host, tp):
                if rank != host:
                    gradients_sent[rank] += fragment_elements

        def stages(rank: int) -> Iterator[tuple[tuple[Activity, float], ...]]:
            """Yields the (activity, seconds) of a rank in each of the three stages."""
            exchanged = fragments[rank] - matrices[rank]
            replay_s = self.replay_s if matrices[rank] else 0.0
            yield (("exchange", self._copies(gradients_sent[rank] * self._pack_bytes, exchanged)),)
            yield (
                ("exchange", self._copies(elements[rank] * self._unpack_bytes, tp * matrices[rank])),
                ("matrix_update", self.updating * (replay_s + seconds[rank])),
                # Packs the fragments of other ranks, and rounds and stores the host's finite fragments.
                ("exchange", self._copies(weights_hosted[rank] * self.host_store, (tp + 1) * matrices[rank])),
            )
            yield (("exchange", self._copies(weights_received[rank] * self.store, exchanged)),)

        moved = group_traffic([job.matrix for job in group], [job.host for job in group], tp)
        return Load(
            work=tuple(
                tuple(tuple(part for part in parts if part[1] > 0) for parts in of_hosts)
                for of_hosts in zip(*map(stages, range(tp)), strict=True)
            ),
            exchanges=(self._exchange(moved.gradients, self.grad), self._exchange(moved.weights, self.width)),
        )

    def _copies(self, size: int, launches: int) -> float:
        """Returns the seconds of copies that move `size` bytes in `launches` kernels."""
        return size * self.byte_s + launches * self.launch_s

    def _exchange(self, traffic: Traffic, width: int) -> Transfer:
        """Returns the all-to-all that moves `traffic`, with `width` bytes per element."""
        sent, received = ([elements * width for elements in side] for side in (traffic.sent, traffic.received))
        return self.links.all_to_all(sent, received, self.group).scaled(self.exchanging)


def _begin[Moment](ranks: Pipeline[Moment], experts_s: Sequence[float]) -> None:
    """Passes the gradient norm, and then the updates of experts, which precede all other updates, to
    `ranks`."""
    ranks.norm()
    for host, seconds in enumerate(experts_s):
        ranks.work(host, "matrix_update", seconds)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work and exchanges of one micro-group."""

    work: tuple[tuple[tuple[tuple[Activity, float], ...], ...], ...]
    """The (activity, seconds) of each host in each stage, in order: `work[stage][host]`."""
    exchanges: tuple[Transfer, ...]
    """The exchange after each stage except the last."""


def planning_config(setup: Setup) -> Setup:
    """Returns the run without two profile values that change predicted times but must not change plans: the
    number of cores that ranks share, and the factors measured in whole steps."""
    return replace(setup, cluster=replace(setup.cluster, cores=None, step_factors={}))
