"""The messages that each TP rank sends and receives for one micro-group. The engine sends them; the planner,
the memory estimate and the simulation need their sizes.

The parts of a matrix that are sent depend on the ranks that store it:

                                gradients, to the host           weights, back from the host
    cut (`shard_dim`)           every other rank's fragment      a fragment to every other rank
    replicated (neither)        nothing: the host has it         the whole matrix to every other rank
    at home (`home`)            the whole matrix, from its home  the whole matrix, to its home

A shared matrix is not sent; `sharing.shared_exchanges` has its collectives.

Together with the weights, every host sends a flag for each of its matrices to every other rank: one element,
which is not finite if the update was not finite. A rank sends nothing to itself. An all-to-all in which no
fragment moves is skipped, and its flags are not sent.

The engine uses a `Route`, which has the place of each fragment in one rank's messages. Planning, memory and
simulation use `group_traffic`, which has the sizes of all ranks' messages and agrees with their routes. All
sizes are in elements. This module does not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canzona_cli.core.model.matrices import Matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The elements that each TP rank sends and receives in one all-to-all."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def busiest(self) -> int:
        """The largest number of elements that a rank sends or receives."""
        return max(*self.sent, *self.received)

    def reversed(self) -> "Traffic":
        return Traffic(sent=self.received, received=self.sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTraffic:
    """The traffic of a micro-group's two all-to-alls."""

    gradients: Traffic
    weights: Traffic

    @property
    def collectives(self) -> int:
        """The number of all-to-alls with at least one element."""
        return sum(any(traffic.sent) for traffic in (self.gradients, self.weights))


def group_traffic(matrices: Sequence[Matrix], hosts: Sequence[int], tp: int) -> GroupTraffic:
    """Counts the elements that a micro-group of `matrices` moves.

    Args:
        hosts: the host (TP rank) of each matrix.
    """
    # By host: the elements of gradients that every other rank sends to it, the elements of weights that it sends
    # to every other rank, and its flags.
    gradients, weights, flags = [0] * tp, [0] * tp, [0] * tp
    homes: list[tuple[int, int, int]] = []
    for matrix, host in zip(matrices, hosts, strict=True):
        flags[host] += 1
        elements = matrix.held_elements(tp)
        if matrix.home is None:
            weights[host] += elements
            if not matrix.replicated:
                gradients[host] += elements
        elif matrix.home != host:
            homes.append((host, matrix.home, elements))
    if homes or any(weights):
        weights = [elements + flag for elements, flag in zip(weights, flags, strict=True)]
    return GroupTraffic(gradients=_from_hosts(gradients, homes).reversed(), weights=_from_hosts(weights, homes))


def _from_hosts(to_each: Sequence[int], homes: Iterable[tuple[int, int, int]]) -> Traffic:
    """Returns the traffic if each host sends `to_each[host]` elements to every other rank and, for each
    (host, home, elements) in `homes`, further elements from `host` to `home`.

    The function computes sums instead of single messages, because plans have thousands of groups.
    """
    total = sum(to_each)
    peers = len(to_each) - 1
    sent = [peers * elements for elements in to_each]
    received = [total - elements for elements in to_each]
    for host, home, elements in homes:
        sent[host] += elements
        received[home] += elements
    return Traffic(sent=tuple(sent), received=tuple(received))


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One fragment in a message."""

    matrix: Matrix
    peer: int
    """The TP rank to which, or from which, the fragment is sent."""
    offset: int
    """The fragment's start in the buffer, in elements."""
    elements: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """One rank's part in one all-to-all. Its buffers hold the messages of all peers in rank order."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    send_splits: tuple[int, ...]
    """The elements sent to each peer, flags included."""
    receive_splits: tuple[int, ...]
    """The elements received from each peer, flags included."""
    send_flags: tuple[tuple[int, ...], ...] = ()
    """The offsets, in the send buffer, of the flags of this rank's hosted matrices in the message to each
    peer. Flags follow the fragments."""
    receive_flags: tuple[tuple[Matrix, int], ...] = ()
    """The matrices that other ranks host, each with the offset of its flag in the received buffer."""
    travels: bool
    """True if a fragment moves between any two ranks. If False, the all-to-all is skipped on all ranks."""

    @property
    def sent(self) -> int:
        return sum(self.send_splits)

    @property
    def received(self) -> int:
        return sum(self.receive_splits)


def senders(matrix: Matrix, host: int, tp: int) -> range:
    """Returns the TP ranks whose gradients make up the gradient of the whole matrix; only the host if every
    rank stores the whole matrix."""
    return range(host, host + 1) if matrix.replicated else matrix.holders(tp)


def to_hosts(matrices: Sequence[Matrix], hosts: Sequence[int], *, rank: int, tp: int) -> Route:
    """Routes gradient fragments from all ranks to the hosts of their matrices.

    Args:
        hosts: the host (TP rank) of each matrix.
    """
    moves = [
        _Move(matrix, source, host)
        for matrix, host in zip(matrices, hosts, strict=True)
        for source in senders(matrix, host, tp)
        if source != host
    ]
    return _route(moves, [[] for _ in range(tp)], rank)


def from_hosts(matrices: Sequence[Matrix], hosts: Sequence[int], *, rank: int, tp: int) -> Route:
    """Routes weight fragments from hosts to all ranks that store them, and a flag for each matrix to every
    other rank.

    Args:
        hosts: the host (TP rank) of each matrix.
    """
    moves = [
        _Move(matrix, host, target)
        for matrix, host in zip(matrices, hosts, strict=True)
        for target in matrix.holders(tp)
        if target != host
    ]
    flagged = [
        [matrix for matrix, host in zip(matrices, hosts, strict=True) if host == peer and moves] for peer in range(tp)
    ]
    return _route(moves, flagged, rank)


@dataclass(frozen=True)
class _Move:
    """The transfer of a matrix, or of a rank's fragment of it, between two TP ranks."""

    matrix: Matrix
    source: int
    target: int


def _route(moves: Sequence[_Move], flagged: Sequence[Sequence[Matrix]], rank: int) -> Route:
    """Lays out the messages of `rank`.

    Args:
        moves: the fragments that move between any two ranks.
        flagged: by host, the matrices whose flags the host sends to every other rank.
    """
    tp = len(flagged)
    sends: list[Parcel] = []
    receives: list[Parcel] = []
    send_splits, receive_splits = [], []
    send_flags: list[tuple[int, ...]] = []
    receive_flags: list[tuple[Matrix, int]] = []
    sent = received = 0
    for peer in range(tp):
        outgoing = [move.matrix for move in moves if (move.source, move.target) == (rank, peer)]
        incoming = [move.matrix for move in moves if (move.source, move.target) == (peer, rank)]
        out_end = _append(outgoing, peer, tp, sent, sends)
        in_end = _append(incoming, peer, tp, received, receives)
        mine, theirs = (flagged[rank], flagged[peer]) if peer != rank else ([], [])
        send_flags.append(tuple(out_end + n for n in range(len(mine))))
        receive_flags += [(matrix, in_end + n) for n, matrix in enumerate(theirs)]
        send_splits.append(out_end - sent + len(mine))
        receive_splits.append(in_end - received + len(theirs))
        sent, received = sent + send_splits[-1], received + receive_splits[-1]
    return Route(
        sends=tuple(sends),
        receives=tuple(receives),
        send_splits=tuple(send_splits),
        receive_splits=tuple(receive_splits),
        send_flags=tuple(send_flags),
        receive_flags=tuple(receive_flags),
        travels=bool(moves),
    )


def _append(matrices: Sequence[Matrix], peer: int, tp: int, start: int, parcels: list[Parcel]) -> int:
    """Appends the parcels of a message that begins at offset `start`; returns the offset at which its
    fragments end."""
    for matrix in matrices:
        parcels.append(Parcel(matrix=matrix, peer=peer, offset=start, elements=matrix.held_elements(tp)))
        start += parcels[-1].elements
    return start
