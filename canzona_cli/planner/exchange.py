"""The messages that each TP rank sends and receives for one micro-group: the one account that everybody asks.

How a matrix travels depends on who stores it:

                                gradients, to the host           weights, back from the host
    cut (`shard_dim`)           every other rank's fragment      a fragment to every other rank
    replicated (neither)        nothing: the host has it         the whole to every other rank
    at home (`home`)            the whole, from its home         the whole, to its home

A shared matrix does not travel; `sharing.shared_exchanges` has its collectives.

With hosted weights goes a flag for every matrix to every other rank: one element, not finite where the update
was not. A rank sends nothing to itself, and an all-to-all in which no fragment moves does not take place,
flags or not.

The engine asks for a `Route`: where each fragment lies in one rank's messages. Planning, memory and
simulation ask for `group_traffic`: how large the messages of all ranks are, which is the size of their
routes. Everything is counted in elements. No torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canzona_cli.model.matrices import Matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One all-to-all: elements by TP rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def busiest(self) -> int:
        """The most that any rank sends or receives."""
        return max(*self.sent, *self.received)

    def reversed(self) -> "Traffic":
        return Traffic(sent=self.received, received=self.sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTraffic:
    """Both all-to-alls of a micro-group."""

    gradients: Traffic
    weights: Traffic

    @property
    def collectives(self) -> int:
        """All-to-alls in which something moves."""
        return sum(any(traffic.sent) for traffic in (self.gradients, self.weights))


def group_traffic(matrices: Sequence[Matrix], hosts: Sequence[int], tp: int) -> GroupTraffic:
    """Counts what a micro-group of `matrices` moves.

    Args:
        hosts: theirs, TP ranks.
    """
    out, back, flags = [0] * tp, [0] * tp, [0] * tp
    homes: list[tuple[int, int, int]] = []
    for matrix, host in zip(matrices, hosts, strict=True):
        flags[host] += 1
        elements = matrix.held_elements(tp)
        if matrix.home is None:
            back[host] += elements
            out[host] += 0 if matrix.replicated else elements
        elif matrix.home != host:
            homes.append((host, matrix.home, elements))
    if homes or any(back):
        back = [elements + flag for elements, flag in zip(back, flags, strict=True)]
    return GroupTraffic(gradients=_from_hosts(out, homes).reversed(), weights=_from_hosts(back, homes))


def _from_hosts(to_each: Sequence[int], homes: Iterable[tuple[int, int, int]]) -> Traffic:
    """Traffic of hosts that send `to_each[host]` elements to every other rank, and some to one:
    (host, home, elements).

    Sums instead of one message after another: `auto` weighs hundreds of candidate groups.
    """
    total, others = sum(to_each), len(to_each) - 1
    sent, received = [others * mine for mine in to_each], [total - mine for mine in to_each]
    for host, home, elements in homes:
        sent[host] += elements
        received[home] += elements
    return Traffic(sent=tuple(sent), received=tuple(received))


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One fragment in a message."""

    matrix: Matrix
    peer: int
    """TP rank it goes to or comes from."""
    offset: int
    """Elements into the buffer."""
    elements: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """One rank's part in one all-to-all. Buffers hold the messages of its peers in rank order."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    send_splits: tuple[int, ...]
    """Elements by peer."""
    receive_splits: tuple[int, ...]
    send_flags: tuple[tuple[int, ...], ...] = ()
    """The place, by peer, where the flags of what this rank hosts lie, behind the fragments."""
    receive_flags: tuple[tuple[Matrix, int], ...] = ()
    """A matrix hosted elsewhere, and where its flag lies."""
    travels: bool
    """True where anything moves between any two ranks: with nothing to move no rank takes part."""

    @property
    def sent(self) -> int:
        return sum(self.send_splits)

    @property
    def received(self) -> int:
        return sum(self.receive_splits)


def senders(matrix: Matrix, host: int, tp: int) -> range:
    """TP ranks whose gradients make up the whole: where every rank has all of it, the host's own do."""
    return range(host, host + 1) if matrix.replicated else matrix.holders(tp)


def to_hosts(matrices: Sequence[Matrix], hosts: Sequence[int], *, rank: int, tp: int) -> Route:
    """Fragments from all ranks to the hosts of their matrices.

    Args:
        hosts: by matrix.
    """
    moves = [
        _Move(matrix, source, host)
        for matrix, host in zip(matrices, hosts, strict=True)
        for source in senders(matrix, host, tp)
        if source != host
    ]
    return _route(moves, [[] for _ in range(tp)], rank)


def from_hosts(matrices: Sequence[Matrix], hosts: Sequence[int], *, rank: int, tp: int) -> Route:
    """Fragments from hosts back to all ranks that store one, and a flag for each matrix to every rank.

    Args:
        hosts: by matrix.
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
    matrix: Matrix
    source: int
    target: int


def _route(moves: Sequence[_Move], flagged: Sequence[Sequence[Matrix]], rank: int) -> Route:
    """`flagged`: by host, the matrices whose flags it sends to every other rank."""
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
        out_end, in_end = _lay(outgoing, peer, tp, sent, sends), _lay(incoming, peer, tp, received, receives)
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


def _lay(matrices: Sequence[Matrix], peer: int, tp: int, start: int, parcels: list[Parcel]) -> int:
    """Appends one message's parcels, from `start` on, and returns where it ends."""
    for matrix in matrices:
        parcels.append(Parcel(matrix=matrix, peer=peer, offset=start, elements=matrix.held_elements(tp)))
        start += parcels[-1].elements
    return start
