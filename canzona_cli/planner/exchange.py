"""What each TP rank sends and receives for one micro-group: the one account that everybody asks.

How a matrix travels depends on who stores it:

                                gradients, to the host           weights, back from the host
    cut (`shard_dim`)           every other rank's fragment      a fragment to every other rank
    replicated (neither)        nothing: the host has it         the whole to every other rank
    at home (`home`)            the whole, from its home         the whole, to its home
    shared, in every round      every other rank's contribution  an answer to every other rank

A contribution and an answer are a square of the short side, and behind it some numbers in fp32: bits, whatever type the
rest of the message has. A micro-group with
shared matrices has as many rounds of both all-to-alls as they need; only theirs travels after the first.

With hosted weights goes a flag for every matrix to every other rank: one element, not finite where the update was not.
A rank sends nothing to itself, and an all-to-all in which no fragment moves does not take place, flags or not.

The engine asks for a `Route`: where each fragment lies in one rank's messages. Planning, memory and simulation ask
for `group_traffic`: how large the messages of all ranks are, which is the size of their routes. Everything is counted
in elements. No torch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.buckets import FP32, element_bytes

CONTRIBUTED, ANSWERED = 3, 3
"""fp32 numbers of a contribution, and of an answer (`canzona_cli.optimizers.shared`)."""


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
    """Both all-to-alls of a micro-group in one round."""

    gradients: Traffic
    weights: Traffic

    @property
    def collectives(self) -> int:
        """All-to-alls in which something moves."""
        return sum(any(traffic.sent) for traffic in (self.gradients, self.weights))


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient) bytes of an element that travels between TP ranks; C_max limits the larger."""
    return element_bytes(config)[0], 2 if config.engine.exchange_dtype == "bf16" else FP32


def square_bytes(config: RunConfig) -> int:
    """Of an element of a square on its way to its host: that of the products, or of the messages if they have less."""
    return min(exchange_bytes(config))


def message_elements(matrix: Matrix, numbers: int, square: int, width: int) -> int:
    """Of a shared matrix's contribution or answer: the bytes of a square, up to a multiple of 4, and its numbers.

    Args:
        numbers: `CONTRIBUTED` or `ANSWERED`.
        square: bytes of an element of the square.
        width: and of the message.
    """
    return (-(-square * min(matrix.shape) ** 2 // FP32) + numbers) * FP32 // width


def contribution_elements(matrix: Matrix, widths: tuple[int, int]) -> int:
    """Of a shared matrix's contribution; `widths` are `exchange_bytes`."""
    return message_elements(matrix, CONTRIBUTED, min(widths), widths[1])


def answer_elements(matrix: Matrix, widths: tuple[int, int]) -> int:
    """Of the answer to them."""
    return message_elements(matrix, ANSWERED, widths[0], widths[0])


def group_traffic(
    matrices: Sequence[Matrix],
    hosts: Sequence[int],
    tp: int,
    *,
    shared: Collection[int] = (),
    widths: tuple[int, int] = (FP32, FP32),
    number: int = 0,
) -> GroupTraffic:
    """What a micro-group of `matrices` moves in one round.

    Args:
        hosts: theirs, TP ranks.
        shared: indices of those that the TP group updates together.
        widths: `exchange_bytes`; it matters to shared ones alone.
        number: of the round, from 0.
    """
    out, back, flags = [0] * tp, [0] * tp, [0] * tp
    homes: list[tuple[int, int, int]] = []
    for matrix, host in zip(matrices, hosts, strict=True):
        if matrix.index in shared:
            out[host] += contribution_elements(matrix, widths)
            back[host] += answer_elements(matrix, widths)
            continue
        if number:
            continue
        flags[host] += 1
        elements = matrix.held_elements(tp)
        if matrix.home is None:
            back[host] += elements
            out[host] += 0 if matrix.replicated else elements
        elif matrix.home != host:
            homes.append((host, matrix.home, elements))
    if homes or any(back):
        back = [elements + own for elements, own in zip(back, flags, strict=True)]
    return GroupTraffic(gradients=_from_hosts(out, homes).reversed(), weights=_from_hosts(back, homes))


def _from_hosts(to_each: Sequence[int], homes: Iterable[tuple[int, int, int]]) -> Traffic:
    """Traffic of hosts that send `to_each[host]` elements to every other rank, and some to one: (host, home, elements).

    Sums instead of one message after another: `auto` weighs hundreds of candidate groups.
    """
    total, others = sum(to_each), len(to_each) - 1
    sent, received = [others * own for own in to_each], [total - own for own in to_each]
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
    square_sends: tuple[Parcel, ...]
    """Of shared matrices: contributions or answers, a square with its numbers behind it. All before are hosted ones."""
    square_receives: tuple[Parcel, ...]
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


def senders(matrix: Matrix, host: int, tp: int) -> range:
    """TP ranks whose gradients make up the whole: where every rank has all of it, the host's own do."""
    return range(host, host + 1) if matrix.replicated else matrix.holders(tp)


def to_hosts(
    matrices: Sequence[Matrix],
    hosts: Sequence[int],
    *,
    rank: int,
    tp: int,
    shared: Collection[int] = (),
    widths: tuple[int, int] = (FP32, FP32),
    number: int = 0,
) -> Route:
    """Fragments from all ranks to the hosts of their matrices, and contributions to shared ones.

    Args:
        hosts: by matrix.
        shared: indices of those that the TP group updates together.
        widths: `exchange_bytes`; it matters to shared ones alone.
        number: of the round; after the first, number 0, only shared matrices' contributions travel.
    """
    moves = [
        _Move(matrix, source, host, size, squared)
        for matrix, host, squared in _travelling(matrices, hosts, shared, number)
        for size in (contribution_elements(matrix, widths) if squared else matrix.held_elements(tp),)
        for source in (range(tp) if squared else senders(matrix, host, tp))
        if source != host
    ]
    return _route(moves, [[] for _ in range(tp)], rank)


def from_hosts(
    matrices: Sequence[Matrix],
    hosts: Sequence[int],
    *,
    rank: int,
    tp: int,
    shared: Collection[int] = (),
    widths: tuple[int, int] = (FP32, FP32),
    number: int = 0,
) -> Route:
    """Fragments from hosts back to all ranks that store one, and a flag for each matrix to every rank; and answers of
    shared ones, without a flag. Arguments as of `to_hosts`."""
    present = _travelling(matrices, hosts, shared, number)
    moves = [
        _Move(matrix, host, target, size, squared)
        for matrix, host, squared in present
        for size in (answer_elements(matrix, widths) if squared else matrix.held_elements(tp),)
        for target in (range(tp) if squared else matrix.holders(tp))
        if target != host
    ]
    flagged = [
        [matrix for matrix, host, squared in present if host == peer and moves and not squared] for peer in range(tp)
    ]
    return _route(moves, flagged, rank)


def _travelling(
    matrices: Sequence[Matrix], hosts: Sequence[int], shared: Collection[int], number: int
) -> list[tuple[Matrix, int, bool]]:
    """Each matrix of the round with its host, and whether it is shared."""
    found = [(matrix, host, matrix.index in shared) for matrix, host in zip(matrices, hosts, strict=True)]
    return [one for one in found if one[2] or not number]


@dataclass(frozen=True)
class _Move:
    matrix: Matrix
    source: int
    target: int
    elements: int
    squared: bool
    """A contribution or an answer, not a fragment."""


def _route(moves: Sequence[_Move], flagged: Sequence[Sequence[Matrix]], rank: int) -> Route:
    """`flagged`: by host, the matrices whose flags it sends to every other rank."""
    tp = len(flagged)
    # Of fragments, of squares.
    sends: tuple[list[Parcel], list[Parcel]] = ([], [])
    receives: tuple[list[Parcel], list[Parcel]] = ([], [])
    send_splits, receive_splits = [], []
    send_flags: list[tuple[int, ...]] = []
    receive_flags: list[tuple[Matrix, int]] = []
    sent = received = 0
    for peer in range(tp):
        outgoing = [move for move in moves if (move.source, move.target) == (rank, peer)]
        incoming = [move for move in moves if (move.source, move.target) == (peer, rank)]
        out_end, in_end = _lay(outgoing, peer, sent, sends), _lay(incoming, peer, received, receives)
        own, theirs = (flagged[rank], flagged[peer]) if peer != rank else ([], [])
        send_flags.append(tuple(out_end + n for n in range(len(own))))
        receive_flags += [(matrix, in_end + n) for n, matrix in enumerate(theirs)]
        send_splits.append(out_end - sent + len(own))
        receive_splits.append(in_end - received + len(theirs))
        sent, received = sent + send_splits[-1], received + receive_splits[-1]
    return Route(
        sends=tuple(sends[0]),
        receives=tuple(receives[0]),
        square_sends=tuple(sends[1]),
        square_receives=tuple(receives[1]),
        send_splits=tuple(send_splits),
        receive_splits=tuple(receive_splits),
        send_flags=tuple(send_flags),
        receive_flags=tuple(receive_flags),
        travels=bool(moves),
    )


def _lay(moves: Sequence[_Move], peer: int, start: int, found: tuple[list[Parcel], list[Parcel]]) -> int:
    """One message's parcels into `found`, from `start` on; where it ends."""
    for move in moves:
        found[move.squared].append(Parcel(matrix=move.matrix, peer=peer, offset=start, elements=move.elements))
        start += move.elements
    return start
