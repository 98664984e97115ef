"""Who sends which fragments of a micro-group to whom, and where they lie in the messages. Plain numbers, no tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.model.matrix import Matrix


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
    """By peer: where the flags of what this rank hosts lie, behind the fragments."""
    receive_flags: tuple[tuple[Matrix, int], ...] = ()
    """A matrix hosted elsewhere, and where its flag lies."""
    travels: bool
    """Whether anything moves between any two ranks: with nothing to move no rank takes part."""

    @property
    def sent(self) -> int:
        return sum(self.send_splits)

    @property
    def received(self) -> int:
        return sum(self.receive_splits)


Holders = Callable[[Matrix], range]
"""TP ranks with a fragment of a matrix."""


def to_hosts(
    matrices: Sequence[Matrix],
    hosts: Sequence[int],
    *,
    senders: Callable[[Matrix, int], range],
    elements: Callable[[Matrix], int],
    rank: int,
    tp: int,
) -> Route:
    """Fragments from all ranks to the hosts of their matrices.

    Args:
        hosts: by matrix.
        senders: which ranks' fragments make up a matrix with that host.
        elements: of one fragment.
    """
    moves = [
        _Move(matrix, source, host)
        for matrix, host in zip(matrices, hosts, strict=True)
        for source in senders(matrix, host)
        if source != host
    ]
    return _route(moves, elements, rank, tp)


def from_hosts(
    matrices: Sequence[Matrix],
    hosts: Sequence[int],
    *,
    holders: Holders,
    elements: Callable[[Matrix], int],
    rank: int,
    tp: int,
) -> Route:
    """Fragments from hosts back to all ranks that store one, and a flag for each matrix to every rank."""
    moves = [
        _Move(matrix, host, target)
        for matrix, host in zip(matrices, hosts, strict=True)
        for target in holders(matrix)
        if target != host
    ]
    hosted = {peer: [m for m, host in zip(matrices, hosts, strict=True) if host == peer] for peer in range(tp)}
    return _route(moves, elements, rank, tp, hosted if tp > 1 else {})


@dataclass(frozen=True)
class _Move:
    matrix: Matrix
    source: int
    target: int


def _route(
    moves: Sequence[_Move],
    elements: Callable[[Matrix], int],
    rank: int,
    tp: int,
    hosted: dict[int, list[Matrix]] | None = None,
) -> Route:
    hosted = hosted or {}
    sends, receives, send_splits, receive_splits = [], [], [], []
    send_flags: list[tuple[int, ...]] = []
    receive_flags: list[tuple[Matrix, int]] = []
    sent = received = 0
    for peer in range(tp):
        outgoing = list(_parcels([m for m in moves if (m.source, m.target) == (rank, peer)], peer, sent, elements))
        incoming = list(_parcels([m for m in moves if (m.source, m.target) == (peer, rank)], peer, received, elements))
        out_size, in_size = sum(p.elements for p in outgoing), sum(p.elements for p in incoming)
        own, theirs = (hosted.get(rank, []), hosted.get(peer, [])) if peer != rank else ([], [])
        send_flags.append(tuple(sent + out_size + n for n in range(len(own))))
        receive_flags += [(matrix, received + in_size + n) for n, matrix in enumerate(theirs)]
        sends += outgoing
        receives += incoming
        send_splits.append(out_size + len(own))
        receive_splits.append(in_size + len(theirs))
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


def _parcels(moves: Sequence[_Move], peer: int, start: int, elements: Callable[[Matrix], int]) -> Iterator[Parcel]:
    for move in moves:
        size = elements(move.matrix)
        yield Parcel(matrix=move.matrix, peer=peer, offset=start, elements=size)
        start += size
