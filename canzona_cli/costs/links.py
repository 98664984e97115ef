"""The time that a transfer takes on a cluster profile:
latency plus bytes over the bandwidth of the busiest link.

Every GPU has two links: one to its peers inside a machine and one to other machines. A collective is given
the geometry of its group (`Group`) and comes to a `Transfer`: a latency that nothing shares and a time on one
link at its full rate, which stretches where transfers share the link (`simulate.timeline`).

Rings (Patarasuk and Yuan 2009): all-gather and reduce-scatter move (n-1)/n of the buffer through every rank.
Over several machines NCCL runs as many rings as the group has members on a machine, each leaving it through
another network port, so a group with k members a machine has k ports' bandwidth, at most the inner link's.

Chains: a reduction or broadcast passes through the same ring, but starts at one rank. A rank hands on a chunk
once it has it, so a chain of n ranks first has to be filled: n - 1 hops, each with its latency and the time
of a chunk.

Where the profile has measured the collective inside a machine (`ClusterConfig.collectives`), that counts
instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from canzona_cli.config.schema import ClusterConfig, Collective, Layout
from canzona_cli.model.family import Copies

Link = Literal["machine", "network"]

EFFICIENCY: dict[Link, float] = {"machine": 0.8, "network": 0.9}
"""Share of a link's nominal bandwidth that large NCCL collectives without in-network reduction reach: 360 of
NVLink 4's 450 GB/s, 45 of a 400 Gb/s port's 50."""


CHUNK = 512 << 10
"""Bytes that a rank of a chain hands on at a time through each of its channels: one of the eight steps into
which NCCL divides a channel's buffer of 4 MiB (NCCL_BUFFSIZE; NCCL_STEPS, REDUCE_CHUNKSTEPS,
BROADCAST_CHUNKSTEPS of its sources).
"""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective as seen by its busiest rank."""

    latency_s: float = 0.0
    link: Link = "machine"
    link_s: float = 0.0
    """Seconds on `link` when nothing else uses it."""
    fill_s: float = 0.0
    """The part of `latency_s` in which a chain of ranks fills: as long before its end its first ranks are
    done, and may go on with the next one."""
    cores: float = 0.0
    """Processor cores that moving it keeps busy, all ranks of the group together;
    0 where devices do it themselves."""

    @property
    def seconds(self) -> float:
        """Alone on its link."""
        return self.latency_s + self.link_s

    def times(self, factor: float) -> "Transfer":
        """Returns the transfer, taking `factor` times as long."""
        if factor == 1.0:
            return self
        latency_s, link_s, fill_s = (factor * seconds for seconds in (self.latency_s, self.link_s, self.fill_s))
        return replace(self, latency_s=latency_s, link_s=link_s, fill_s=fill_s)

    def delayed(self, seconds: float) -> "Transfer":
        """Returns the transfer with work on the ranks around it, which keeps no link busy."""
        return replace(self, latency_s=self.latency_s + seconds) if seconds else self

    def then(self, other: "Transfer") -> "Transfer":
        """One behind the other. On two links, the time on the less busy one counts as work around it."""
        longer = max(self, other, key=lambda one: one.link_s)
        shared = self.link == other.link or not self.link_s * other.link_s
        link_s = self.link_s + other.link_s if shared else longer.link_s
        seconds = self.seconds + other.seconds
        cores = (self.cores * self.seconds + other.cores * other.seconds) / seconds if seconds else 0.0
        return Transfer(latency_s=seconds - link_s, link=longer.link, link_s=link_s, cores=cores)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one communicator."""

    size: int
    per_machine: int
    """Members on each machine; the fewest where machines differ."""

    @property
    def machines(self) -> int:
        return -(-self.size // self.per_machine)

    @property
    def link(self) -> Link:
        """The link between machines where the group has one to cross."""
        return "machine" if self.machines == 1 else "network"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The communicators of a layout in Megatron's rank order: tp innermost, then cp, dp, pp."""

    tp: Group
    cp: Group
    data: Group
    """dp * cp: over which gradients are reduced."""
    stage_crosses: bool
    """True where neighbouring pipeline stages are on different machines."""
    world: Group

    @classmethod
    def of(cls, layout: Layout, cluster: ClusterConfig) -> "Groups":
        ranks, per_machine = layout.world_size, cluster.gpus_per_node
        shards = layout.owners
        return cls(
            tp=strided(1, layout.tp, ranks, per_machine),
            cp=strided(layout.tp, layout.cp, ranks, per_machine),
            data=strided(layout.tp, shards, ranks, per_machine),
            stage_crosses=strided(layout.tp * shards, layout.pp, ranks, per_machine).per_machine < layout.pp,
            world=strided(1, ranks, ranks, per_machine),
        )

    def holding(self, copies: Copies) -> Group:
        """The ranks that hold copies of one tensor and add up its gradients."""
        return self.data if copies == "data" else self.tp


def strided(stride: int, size: int, ranks: int, per_machine: int) -> Group:
    """A group of every `stride`-th rank. Where it does not tile machines evenly, as if no two shared one."""
    if ranks <= per_machine or per_machine % (stride * size) == 0:
        together = size
    elif per_machine % stride == 0 and stride * size % per_machine == 0:
        together = per_machine // stride
    else:
        together = 1
    return Group(size=size, per_machine=together)


GLOO_THREADS = 2
"""Collectives of one group that gloo runs at the same time (the default of torch's ProcessGroupGloo)."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """A cluster profile's links, and what collectives take on them. Bytes are per rank, before sharding."""

    cluster: ClusterConfig

    def bandwidth(self, link: Link) -> float:
        """Bytes per second one GPU gets, one direction."""
        cluster = self.cluster
        nominal = cluster.intra_node_gb_per_s if link == "machine" else cluster.inter_node_gb_per_s
        return EFFICIENCY[link] * nominal * 1e9

    def latency(self, link: Link) -> float:
        """Seconds of one hop."""
        cluster = self.cluster
        return 1e-6 * (cluster.intra_node_latency_us if link == "machine" else cluster.inter_node_latency_us)

    def ring(self, group: Group) -> tuple[Link, float]:
        """The link that limits a ring over `group`, and bytes per second through each of its ranks."""
        inner = self.bandwidth("machine")
        if group.machines == 1:
            return "machine", inner
        outer = group.per_machine * self.bandwidth("network")
        return ("network", outer) if outer <= inner or group.per_machine == 1 else ("machine", inner)

    def all_gather(self, size: float, group: Group) -> Transfer:
        """`size` bytes gathered in equal shards."""
        return self._measured("all_gather", size, group) or self.through(size * (group.size - 1) / group.size, group)

    def reduce_scatter(self, size: float, group: Group) -> Transfer:
        """`size` bytes added up in equal shards: an all-gather backwards."""
        measured = self._measured("reduce_scatter", size, group)
        return measured or self.through(size * (group.size - 1) / group.size, group)

    def all_reduce(self, size: float, group: Group) -> Transfer:
        """A reduce-scatter and an all-gather. Small ones go up and down a tree."""
        measured = self._measured("all_reduce", size, group)
        if measured is not None:
            return measured
        ring = self.through(2 * size * (group.size - 1) / group.size, group)
        tree = 2 * math.ceil(math.log2(group.size)) * self.latency(group.link)
        return Transfer(latency_s=min(2 * ring.latency_s, tree), link=ring.link, link_s=ring.link_s)

    def rooted(
        self, kind: Literal["reduce", "broadcast"], sizes: Sequence[float], group: Group, *, collectives: int
    ) -> Transfer:
        """Reductions to (broadcasts from) one rank after another,
        each of its number of bytes, started together.

        Each owner's share runs down a chain that ends at it, so a rank sends every share but its own, whoever
        owns most; whoever owns least sends most. Nobody is flooded. On GPUs the link carries one byte after
        another and only latencies overlap, in a group: without one, each of the `collectives` has its own.
        """
        on_gpu = self.cluster.device == "cuda"
        chains = collectives if on_gpu and not self.cluster.grouped_collectives else 1
        together = self._measured(kind, sum(sizes), group) if on_gpu else None
        if together is not None:
            # Measured as a bucket's are issued, with one range for each rank.
            alone = 1.0 if self.cluster.grouped_collectives else collectives / group.size
            return replace(together, latency_s=alone * together.latency_s)
        each = [self._measured(kind, size, group) for size in sizes]
        measured = [one for one in each if one is not None]
        if not measured:
            least = min(sizes) if len(sizes) == group.size else 0.0
            return self.chains(sum(sizes) - least, group, chains)
        at_once = min(GLOO_THREADS, len(measured))
        seconds = sum(one.seconds for one in measured) / at_once
        return Transfer(link_s=seconds, cores=at_once * max(one.cores for one in measured))

    def chains(self, size: float, group: Group, launches: int = 1) -> Transfer:
        """Reductions or broadcasts that move `size` bytes through every rank, in `launches` alike,
        one after another.

        In one launch NCCL deals them over its channels, where they fill at the same time.
        """
        ring = self.through(size, group)
        if self.cluster.device == "cpu":
            return replace(ring, latency_s=launches * ring.latency_s)
        fill_s = ring.latency_s + (group.size - 1) * self._chunk(size / launches, group)
        return replace(ring, latency_s=launches * fill_s, fill_s=fill_s)

    def _chunk(self, size: float, group: Group) -> float:
        """Seconds in which every channel of a chain hands on a chunk of `size` bytes, or all there is."""
        cluster = self.cluster
        channels = cluster.intra_node_channels
        if group.machines > 1:
            channels = cluster.inter_node_channels * group.per_machine
        return min(CHUNK * channels, size) / self.ring(group)[1]

    def through(self, size: float, group: Group) -> Transfer:
        """A ring that moves `size` bytes through every rank, pipelined, past every member once."""
        if group.size == 1 or size == 0:
            return Transfer()
        link, rate = self.ring(group)
        outer = group.machines if group.machines > 1 else 0
        hops = (group.size - outer) * self.latency("machine") + outer * self.latency("network")
        return Transfer(latency_s=hops * (group.size - 1) / group.size, link=link, link_s=size / rate)

    def all_to_all(self, sent: Sequence[float], received: Sequence[float], group: Group) -> Transfer:
        """Each rank's bytes to and from all others at once: the busiest sender or receiver decides (incast).

        Of a rank's traffic, the share of its peers on other machines goes through its network port.
        """
        busiest = max(*sent, *received, 0.0)
        if group.size == 1 or busiest == 0:
            return Transfer()
        measured = self._measured_exchange(sent, busiest, group)
        if measured is not None:
            return measured
        remote = (group.size - group.per_machine) / (group.size - 1)
        times: dict[Link, float] = {
            "machine": busiest * (1 - remote) / self.bandwidth("machine"),
            "network": busiest * remote / self.bandwidth("network"),
        }
        link: Link = "machine" if times["machine"] >= times["network"] else "network"
        return Transfer(latency_s=self.latency(group.link), link=link, link_s=times[link])

    def point_to_point(self, size: float, *, crosses: bool) -> Transfer:
        """`size` bytes from one GPU to another."""
        measured = None if crosses else self._measured("send", size, Group(size=2, per_machine=2))
        if measured is not None:
            return measured
        link: Link = "network" if crosses else "machine"
        return Transfer(latency_s=self.latency(link), link=link, link_s=size / self.bandwidth(link))

    def _measured_exchange(self, sent: Sequence[float], busiest: float, group: Group) -> Transfer | None:
        """Measured with as much from every rank. Where cores are few, they move all bytes one after another:
        the mean counts; else the busiest rank does, and the others leave their cores to somebody else.
        """
        mean = sum(sent) / group.size
        cores = self.cluster.cores
        if cores is not None and group.size > cores:
            return self._measured("all_to_all", mean, group)
        measured = self._measured("all_to_all", busiest, group)
        return measured and replace(measured, cores=measured.cores * mean / busiest)

    def _measured(self, kind: Collective, size: float, group: Group) -> Transfer | None:
        """Interpolates the profile's table: linear in bytes between two rows, and beyond the last as between
        the last two."""
        if group.machines > 1 or group.size == 1 or not self.cluster.collectives:
            return None
        rows = _rows(self.cluster.collectives, kind, group.size)
        if not rows:
            return None
        if size == 0:
            return Transfer()
        first = rows[0]
        if size <= first[0] or len(rows) == 1:
            return Transfer(latency_s=first[1], cores=first[2])
        above = next((number for number, row in enumerate(rows) if row[0] >= size), len(rows) - 1)
        (low, low_s, low_cores), (high, high_s, high_cores) = rows[above - 1], rows[above]
        place = (size - low) / (high - low)
        seconds = max(first[1], low_s + place * (high_s - low_s))
        return Transfer(
            latency_s=first[1],
            link_s=seconds - first[1],
            cores=low_cores + min(1.0, place) * (high_cores - low_cores),
        )


@lru_cache(maxsize=1024)
def _rows(
    table: tuple[tuple[str, int, float, float, float], ...], kind: Collective, ranks: int
) -> tuple[tuple[float, float, float], ...]:
    """(bytes, seconds, cores), ascending, of the group size that comes nearest:
    not below it where there is one."""
    sizes = sorted({row[1] for row in table if row[0] == kind})
    if not sizes:
        return ()
    nearest = next((size for size in sizes if size >= ranks), sizes[-1])
    return tuple(sorted((row[2], row[3], row[4]) for row in table if row[:2] == (kind, nearest)))
