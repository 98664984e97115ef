"""The time of a transfer on a cluster profile: latency plus bytes over the bandwidth of the busiest link.

Every GPU has two links: one to its peers in the same node and one to other nodes. A collective over a `Group`
of ranks becomes a `Transfer`, which has two parts: a latency, which nothing else delays, and a time on one
link, which grows if several transfers share the link (`costs.timeline`).

Rings (Patarasuk and Yuan 2009): all-gather and reduce-scatter move (n-1)/n of the buffer through every rank.
Over several nodes NCCL runs as many rings as the group has members on a node, each leaving the node through
another network port. A group with k members on each node therefore has the bandwidth of k ports, up to the
bandwidth of the intra-node link.

Chains: a reduction or broadcast passes through the same ring, but starts at one rank. A rank forwards a chunk
only after it has received the whole chunk, so a chain of n ranks first has to fill: n - 1 hops, each with its
latency and the time of a chunk.

If the profile has measurements of a collective within a node (`ClusterConfig.collectives`), they are used
instead of this model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from canzona_cli.core.setup import ClusterConfig, Collective, Layout

Link = Literal["machine", "network"]

EFFICIENCY: dict[Link, float] = {"machine": 0.8, "network": 0.9}
"""The share of a link's nominal bandwidth that large NCCL collectives reach without in-network reduction: 360
of NVLink 4's 450 GB/s, and 45 of the 50 GB/s of a 400 Gb/s port."""
CHUNK = 512 << 10
"""The number of bytes that each channel of a rank in a chain forwards at a time: one of the eight steps into
which NCCL divides a channel's buffer of 4 MiB (NCCL_BUFFSIZE; see NCCL_STEPS, REDUCE_CHUNKSTEPS and
BROADCAST_CHUNKSTEPS in its sources)."""
CHANNELS = 24
"""The number of channels that NCCL uses in a group on one node. It logs "24 coll channels" for eight H100, and 24 for
the links of eight A100 (NVIDIA/nccl issues 1259 and 652)."""
PORT_CHANNELS = 2
"""The number of channels per network port that NCCL uses in a group of several nodes: two for each port's ring. Logs of
two nodes with eight H100 each say "16 coll channels" (NVIDIA/nccl issue 1041)."""


class Transfer(NamedTuple):
    """The time of one or more collectives on their busiest rank."""

    latency_s: float = 0.0
    link: Link = "machine"
    link_s: float = 0.0
    """The seconds on `link` if nothing else uses it."""
    fill_s: float = 0.0
    """The part of `latency_s` during which a chain of ranks fills. The first ranks of the chain finish this
    much earlier than the last, and can then start the next chain."""
    cores: float = 0.0
    """The processor cores that the transfer keeps busy, summed over the group's ranks; 0 if devices move the
    data."""

    @property
    def seconds(self) -> float:
        """The seconds that the transfer takes if nothing else uses its link."""
        return self.latency_s + self.link_s

    def scaled(self, factor: float) -> "Transfer":
        """Returns a transfer that takes `factor` times as long."""
        if factor == 1.0:
            return self
        latency_s, link_s, fill_s = (factor * seconds for seconds in (self.latency_s, self.link_s, self.fill_s))
        return self._replace(latency_s=latency_s, link_s=link_s, fill_s=fill_s)

    def exposed(self, computing_s: float, units: float) -> "Transfer":
        """Returns the transfer reduced to the time that it adds to a computation of `computing_s` seconds
        that runs at the same time: the part that does not overlap, and the delay that the overlapping part
        causes.

        Args:
            units: the share of a GPU's compute units that the transfer occupies.
        """
        if not self.seconds:
            return self
        return self.scaled(1.0 - (1.0 - units) * min(1.0, computing_s / self.seconds))

    def delayed(self, seconds: float) -> "Transfer":
        """Returns the transfer, lengthened by `seconds` of work on its ranks that uses no link."""
        return self._replace(latency_s=self.latency_s + seconds) if seconds else self

    def without_fill(self) -> "Transfer":
        """Returns the transfer as one during which no next chain can start."""
        return self._replace(fill_s=0.0) if self.fill_s else self

    def with_cores(self, cores: float) -> "Transfer":
        """Returns the transfer as one that keeps `cores` processor cores busy."""
        return self._replace(cores=cores)

    def followed_by(self, other: "Transfer") -> "Transfer":
        """Returns one transfer that takes as long as this transfer and then `other`. If they use different
        links, the time on the less busy link counts as latency."""
        longer = self if self.link_s >= other.link_s else other
        shared = self.link == other.link or not self.link_s * other.link_s
        link_s = self.link_s + other.link_s if shared else longer.link_s
        seconds = self.seconds + other.seconds
        cores = 0.0
        if seconds and (self.cores or other.cores):
            cores = (self.cores * self.seconds + other.cores * other.seconds) / seconds
        return Transfer(latency_s=seconds - link_s, link=longer.link, link_s=link_s, cores=cores)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one communicator."""

    size: int
    per_machine: int
    """The number of members on each node; 1 if nodes do not have equal numbers (`strided_group`)."""

    @cached_property
    def machines(self) -> int:
        return -(-self.size // self.per_machine)

    @cached_property
    def link(self) -> Link:
        """The link that the group's collectives use: the network if the group spans several nodes, otherwise
        the link within a node."""
        return "machine" if self.machines == 1 else "network"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The communicators of a layout. Megatron numbers ranks with tp innermost, then cp, dp and pp. For
    experts, it divides the ranks of a stage a second time, with ep innermost."""

    tp: Group
    cp: Group
    data: Group
    """The group of dp * cp ranks over which gradients are reduced."""
    experts: Group
    """The group over which the gradients of experts are reduced: every ep-th rank of a stage, which all have
    the same experts; `data` if ep is 1."""
    dispatch: Group
    """The ep neighbouring ranks among which the experts of a layer are divided."""
    stage_crosses: bool
    """True if some neighbouring pipeline stages are on different nodes."""
    world: Group

    @classmethod
    def of(cls, layout: Layout, cluster: ClusterConfig) -> "Groups":
        return _groups(layout.tp, layout.cp, layout.dp, layout.pp, layout.ep, cluster.gpus_per_node)


@lru_cache(maxsize=1024)
def _groups(tp: int, cp: int, dp: int, pp: int, ep: int, per_machine: int) -> Groups:
    """Computes `Groups.of` for a layout with these sizes."""
    owners, ranks = cp * dp, tp * cp * dp * pp
    data = strided_group(tp, owners, ranks, per_machine)
    return Groups(
        tp=strided_group(1, tp, ranks, per_machine),
        cp=strided_group(tp, cp, ranks, per_machine),
        data=data,
        experts=data if ep == 1 else strided_group(ep, tp * owners // ep, ranks, per_machine),
        dispatch=strided_group(1, ep, ranks, per_machine),
        stage_crosses=strided_group(tp * owners, pp, ranks, per_machine).per_machine < pp,
        world=strided_group(1, ranks, ranks, per_machine),
    )


def strided_group(stride: int, size: int, ranks: int, per_machine: int) -> Group:
    """Returns a group of `size` ranks, every `stride`-th of the job's `ranks` ranks. If nodes do not have
    equal numbers of its members, every member is assumed to be on a separate node."""
    if ranks <= per_machine or per_machine % (stride * size) == 0:
        members_per_machine = size
    elif per_machine % stride == 0 and stride * size % per_machine == 0:
        members_per_machine = per_machine // stride
    else:
        members_per_machine = 1
    return Group(size=size, per_machine=members_per_machine)


GLOO_THREADS = 2
"""The number of a group's collectives that gloo runs at the same time (default of torch's
ProcessGroupGloo)."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a cluster profile, and the time of collectives on them. Sizes are the bytes of a rank's
    buffer before sharding."""

    cluster: ClusterConfig

    def bandwidth(self, link: Link) -> float:
        """Returns the bytes per second of one GPU's link in one direction."""
        cluster = self.cluster
        nominal = cluster.intra_node_gb_per_s if link == "machine" else cluster.inter_node_gb_per_s
        return EFFICIENCY[link] * nominal * 1e9

    def latency(self, link: Link) -> float:
        """Returns the seconds of one hop."""
        cluster = self.cluster
        return 1e-6 * (cluster.intra_node_latency_us if link == "machine" else cluster.inter_node_latency_us)

    def ring(self, group: Group) -> tuple[Link, float]:
        """Returns the link that limits a ring over `group`, and the bytes per second through each rank."""
        machine_rate = self.bandwidth("machine")
        if group.machines == 1:
            return "machine", machine_rate
        network_rate = group.per_machine * self.bandwidth("network")
        if network_rate <= machine_rate or group.per_machine == 1:
            return "network", network_rate
        return "machine", machine_rate

    def all_gather(self, size: float, group: Group) -> Transfer:
        """Returns the transfer of an all-gather of `size` bytes in equal shards."""
        return self._measured("all_gather", size, group) or self.ring_pass(size * (group.size - 1) / group.size, group)

    def reduce_scatter(self, size: float, group: Group) -> Transfer:
        """Returns the transfer of a reduce-scatter of `size` bytes in equal shards, which moves as many bytes
        as an all-gather."""
        measured = self._measured("reduce_scatter", size, group)
        return measured or self.ring_pass(size * (group.size - 1) / group.size, group)

    def all_reduce(self, size: float, group: Group) -> Transfer:
        """Returns the transfer of an all-reduce of `size` bytes: a reduce-scatter and an all-gather in a
        ring, but with the latency of a tree if that is lower."""
        measured = self._measured("all_reduce", size, group)
        if measured is not None:
            return measured
        ring = self.ring_pass(2 * size * (group.size - 1) / group.size, group)
        tree = 2 * math.ceil(math.log2(group.size)) * self.latency(group.link)
        return Transfer(latency_s=min(2 * ring.latency_s, tree), link=ring.link, link_s=ring.link_s)

    def rooted_collectives(
        self, kind: Literal["reduce", "broadcast"], sizes: Sequence[float], group: Group, *, collectives: int
    ) -> Transfer:
        """Returns the transfer of reductions to several owners, or broadcasts from several owners, that start
        together.

        Each owner's share passes through a chain of ranks that ends at the owner (or, in a broadcast, starts
        at the owner). A rank therefore sends every share except its own, and the rank with the smallest share
        sends the most. On GPUs, all shares use the same link one after another. Their latencies overlap if
        the collectives are issued as one NCCL group, and add up otherwise.

        Args:
            sizes: the bytes of each owner's share.
            collectives: the number of collectives.
        """
        on_gpu = self.cluster.device == "cuda"
        chains = collectives if on_gpu and not self.cluster.grouped_collectives else 1
        together = self._measured(kind, sum(sizes), group) if on_gpu else None
        if together is not None:
            # The profile's measurement is for a bucket with one range for each rank, issued as in training.
            latencies = 1.0 if self.cluster.grouped_collectives else collectives / group.size
            return together._replace(latency_s=latencies * together.latency_s)
        transfers = [self._measured(kind, size, group) for size in sizes]
        measured = [transfer for transfer in transfers if transfer is not None]
        if not measured:
            smallest = min(sizes) if len(sizes) == group.size else 0.0
            return self.chains(sum(sizes) - smallest, group, chains)
        at_once = min(GLOO_THREADS, len(measured))
        seconds = sum(transfer.seconds for transfer in measured) / at_once
        return Transfer(link_s=seconds, cores=at_once * max(transfer.cores for transfer in measured))

    def chains(self, size: float, group: Group, launches: int = 1) -> Transfer:
        """Returns the transfer of reductions or broadcasts that move `size` bytes through every rank. They
        run in `launches` equal launches, one after another.

        NCCL distributes the chains of one launch over its channels, so they fill at the same time.
        """
        ring = self.ring_pass(size, group)
        if self.cluster.device == "cpu":
            return ring._replace(latency_s=launches * ring.latency_s)
        fill_s = ring.latency_s + (group.size - 1) * self._chunk(size / launches, group)
        return ring._replace(latency_s=launches * fill_s, fill_s=fill_s)

    def _chunk(self, size: float, group: Group) -> float:
        """Returns the seconds that the channels of a chain take to forward one chunk each, together at most
        `size` bytes."""
        channels = CHANNELS if group.machines == 1 else PORT_CHANNELS * group.per_machine
        return min(CHUNK * channels, size) / self.ring(group)[1]

    def ring_pass(self, size: float, group: Group) -> Transfer:
        """Returns the transfer of `size` bytes through every rank of a ring, in a pipelined pass."""
        if group.size == 1 or size == 0:
            return Transfer()
        link, rate = self.ring(group)
        network_hops = group.machines if group.machines > 1 else 0
        round_s = (group.size - network_hops) * self.latency("machine") + network_hops * self.latency("network")
        return Transfer(latency_s=round_s * (group.size - 1) / group.size, link=link, link_s=size / rate)

    def all_to_all(self, sent: Sequence[float], received: Sequence[float], group: Group) -> Transfer:
        """Returns the transfer of an all-to-all, which takes as long as its busiest sender or receiver
        (incast).

        The share of a rank's traffic that goes over the network is the share of its peers on other nodes.

        Args:
            sent: the bytes that each rank sends in total.
            received: the bytes that each rank receives in total.
        """
        busiest_bytes = max(*sent, *received, 0.0)
        if group.size == 1 or busiest_bytes == 0:
            return Transfer()
        measured = self._measured_exchange(sent, busiest_bytes, group)
        if measured is not None:
            return measured
        remote = (group.size - group.per_machine) / (group.size - 1)
        times: dict[Link, float] = {
            "machine": busiest_bytes * (1 - remote) / self.bandwidth("machine"),
            "network": busiest_bytes * remote / self.bandwidth("network"),
        }
        link: Link = "machine" if times["machine"] >= times["network"] else "network"
        return Transfer(latency_s=self.latency(group.link), link=link, link_s=times[link])

    def point_to_point(self, size: float, *, crosses: bool) -> Transfer:
        """Returns a transfer of `size` bytes from one GPU to another, on different nodes if `crosses`."""
        measured = None if crosses else self._measured("send", size, Group(size=2, per_machine=2))
        if measured is not None:
            return measured
        link: Link = "network" if crosses else "machine"
        return Transfer(latency_s=self.latency(link), link=link, link_s=size / self.bandwidth(link))

    def _measured_exchange(self, sent: Sequence[float], busiest_bytes: float, group: Group) -> Transfer | None:
        """Interpolates the profile's measured all-to-alls, in which every rank sends the same number of
        bytes; None without measurements.

        If the group has more ranks than there are cores, the cores always have bytes to move, so the time
        follows from the mean bytes per rank. Otherwise the busiest rank determines the time, and the cores of
        the other ranks are idle for part of it.
        """
        mean_bytes = sum(sent) / group.size
        cores = self.cluster.cores
        if cores is not None and group.size > cores:
            return self._measured("all_to_all", mean_bytes, group)
        measured = self._measured("all_to_all", busiest_bytes, group)
        return measured and measured._replace(cores=measured.cores * mean_bytes / busiest_bytes)

    def _measured(self, kind: Collective, size: float, group: Group) -> Transfer | None:
        """Interpolates the profile's measurements of a collective within a node; None without measurements,
        and for groups of one rank or on several nodes.

        Times are constant up to the first row and linear in bytes between two rows. Beyond the last row they
        are extrapolated from the last two.
        """
        if group.machines > 1 or group.size == 1 or not self.cluster.collectives:
            return None
        rows = _rows(self.cluster.collectives, kind, group.size)
        if not rows:
            return None
        if size == 0:
            return Transfer()
        least_bytes, least_s, least_cores = rows[0]
        if size <= least_bytes or len(rows) == 1:
            return Transfer(latency_s=least_s, cores=least_cores)
        above = next((index for index, row in enumerate(rows) if row[0] >= size), len(rows) - 1)
        (low, low_s, low_cores), (high, high_s, high_cores) = rows[above - 1], rows[above]
        fraction = (size - low) / (high - low)
        seconds = max(least_s, low_s + fraction * (high_s - low_s))
        return Transfer(
            latency_s=least_s,
            link_s=seconds - least_s,
            cores=low_cores + min(1.0, fraction) * (high_cores - low_cores),
        )


@lru_cache(maxsize=1024)
def _rows(
    table: tuple[tuple[str, int, float, float, float], ...], kind: Collective, ranks: int
) -> tuple[tuple[float, float, float], ...]:
    """Lists the measured (bytes, seconds, cores) of a collective, ascending: for the smallest measured group
    with at least `ranks` ranks or, if there is none, for the largest measured group."""
    sizes = sorted({row[1] for row in table if row[0] == kind})
    if not sizes:
        return ()
    nearest = next((size for size in sizes if size >= ranks), sizes[-1])
    return tuple(sorted((row[2], row[3], row[4]) for row in table if row[:2] == (kind, nearest)))
