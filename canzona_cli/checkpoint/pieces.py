"""Puts units together that ranks hold pieces of: who writes which, and who sends what to whom.

What a rank holds whole it writes itself, and nothing travels: matrices that canzona hosts, and what sc has everywhere.
The rest (AdamW's shards, tensor-parallel fragments of Megatron's own Muon) goes to its holders: each tensor to one of
them, of an embedding the master to another than its moments. Ranks agree once on who writes what; a save then only
moves data.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

BATCH_BYTES = 64 << 20
"""What one rank has in flight at a time, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, end), row by row, of a rectangle of a unit."""

    unit: str
    row: int
    col: int
    rows: int
    cols: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank has to save, without the data."""

    wholes: Mapping[str, int]
    """Bytes of everything that the rank holds all of, by name."""
    pieces: tuple[Piece, ...]
    fields: Mapping[str, tuple[str, ...]]
    """By unit of a piece: what there is of each element (master, exp_avg, ...), the same on all its holders."""


@dataclass(frozen=True, kw_only=True)
class PieceTransfer:
    """One piece of a tensor on its way to the rank that writes that; sender and writer may be one rank."""

    piece: Piece
    field: str
    sender: int
    writer: int


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Who writes what; the same on every rank."""

    writers: Mapping[str, int]
    """By whole's name, and, of what comes in pieces, by unit and field: `unit/field`."""
    transfers: tuple[PieceTransfer, ...]
    fields: Mapping[str, tuple[str, ...]]


def route(holdings: Sequence[Holding], elements: Mapping[str, int]) -> Routing:
    """Give everything to one of its holders: the one with most of it, and of equals the one with least to write so far.

    Args:
        holdings: of every rank.
        elements: of every unit that comes in pieces.

    Raises:
        ValueError: the pieces of a unit do not make it up.
    """
    load = [0] * len(holdings)
    """Bytes that each rank writes."""
    writers = _share_wholes(holdings, load)
    fields = {unit: names for holding in holdings for unit, names in holding.fields.items()}
    transfers: list[PieceTransfer] = []
    for unit, pieces in _holders(holdings).items():
        if sum(piece.elements for piece in pieces) != elements[unit]:
            raise ValueError(f"{unit} has {elements[unit]} elements, but its pieces do not add up to that")
        held: Counter[int] = Counter()
        for piece, ranks in pieces.items():
            for rank in ranks:
                held[rank] += piece.elements
        for field in fields[unit]:
            writer = writers[f"{unit}/{field}"] = min(held, key=lambda rank: (-held[rank], load[rank], rank))
            load[writer] += 4 * elements[unit]
            for piece, ranks in pieces.items():
                sender = writer if writer in ranks else ranks[0]
                transfers.append(PieceTransfer(piece=piece, field=field, sender=sender, writer=writer))
    return Routing(writers=writers, transfers=tuple(transfers), fields=fields)


def _share_wholes(holdings: Sequence[Holding], load: list[int]) -> dict[str, int]:
    """Writers of what ranks hold whole, added to `load`."""
    wholes: dict[str, tuple[int, list[int]]] = {}
    for rank, holding in enumerate(holdings):
        for name, size in holding.wholes.items():
            wholes.setdefault(name, (size, []))[1].append(rank)
    writers: dict[str, int] = {}
    # What has one holder first: the rest evens it out.
    for name, (size, holders) in sorted(wholes.items(), key=lambda item: (len(item[1][1]), item[0])):
        writers[name] = min(holders, key=lambda rank: (load[rank], rank))
        load[writers[name]] += size
    return writers


def _holders(holdings: Sequence[Holding]) -> dict[str, dict[Piece, list[int]]]:
    """By unit: its pieces, and the ranks that have each, in their order."""
    found: dict[str, dict[Piece, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, holding in enumerate(holdings):
        for piece in holding.pieces:
            found[piece.unit][piece].append(rank)
    return found


def collect(
    routing: Routing,
    rank: int,
    device: torch.device,
    local: Mapping[tuple[Piece, str], torch.Tensor],
    targets: Mapping[tuple[str, str], torch.Tensor],
) -> None:
    """Move every piece to its writer. Collective; between every two ranks one message a batch.

    Args:
        local: by piece and field, this rank's elements, fp32, flat.
        targets: by unit and field, the whole this rank writes, fp32, (rows, columns), on any device.
    """
    for batch in _batches(routing):
        out: dict[int, list[torch.Tensor]] = defaultdict(list)
        arriving: dict[int, list[tuple[Piece, str]]] = defaultdict(list)
        for transfer in batch:
            key = (transfer.piece, transfer.field)
            if transfer.sender == transfer.writer == rank:
                paste(targets[transfer.piece.unit, transfer.field], transfer.piece, local[key])
            elif transfer.sender == rank:
                out[transfer.writer].append(local[key].reshape(-1))
            elif transfer.writer == rank:
                arriving[transfer.sender].append(key)
        received = {
            peer: torch.empty(sum(piece.elements for piece, _ in keys), dtype=torch.float32, device=device)
            for peer, keys in arriving.items()
        }
        operations = [
            *(torch.distributed.P2POp(torch.distributed.isend, torch.cat(parts), peer) for peer, parts in out.items()),
            *(torch.distributed.P2POp(torch.distributed.irecv, data, peer) for peer, data in received.items()),
        ]
        if operations:
            for work in torch.distributed.batch_isend_irecv(operations):
                work.wait()
        for peer, keys in arriving.items():
            parts = torch.split(received[peer], [piece.elements for piece, _ in keys])
            for (piece, field), part in zip(keys, parts, strict=True):
                paste(targets[piece.unit, field], piece, part)


def paste(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    """Write a piece's elements (flat) to their place in the whole, (rows, columns).

    From a GPU to pinned memory the copy goes on behind this: whoever reads the whole waits for the device first.
    """
    for region, part in _runs(whole, piece, data):
        region.copy_(part, non_blocking=True)


def cut(region: torch.Tensor, piece: Piece, out: torch.Tensor) -> None:
    """Read a piece's elements into `out` (flat).

    Args:
        region: the rectangle's rows that have elements of the piece, from the first such row on, all its columns.
    """
    shifted = piece.start // piece.cols
    rows = -(-piece.end // piece.cols) - shifted
    local = Piece(
        unit=piece.unit,
        row=0,
        col=0,
        rows=rows,
        cols=piece.cols,
        start=piece.start - shifted * piece.cols,
        end=piece.end - shifted * piece.cols,
    )
    for part_of_region, part in _runs(region, local, out):
        part.copy_(part_of_region)


def _runs(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A flat piece as at most three rectangles (end of a row, whole rows, beginning of a row), each with its data."""
    rectangle = whole[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols]
    cols, position = piece.cols, 0
    flat = data.reshape(-1)
    at = piece.start
    while at < piece.end:
        row, col = divmod(at, cols)
        if col == 0 and piece.end - at >= cols:
            rows = (piece.end - at) // cols
            size = rows * cols
            yield rectangle[row : row + rows], flat[position : position + size].view(rows, cols)
        else:
            size = min(cols - col, piece.end - at)
            yield rectangle[row, col : col + size], flat[position : position + size]
        at, position = at + size, position + size


def _batches(routing: Routing) -> Iterator[list[PieceTransfer]]:
    """Transfers in their order, cut where some rank would send or receive more than `BATCH_BYTES`."""
    batch: list[PieceTransfer] = []
    incoming, outgoing = Counter[int](), Counter[int]()
    for transfer in routing.transfers:
        size = 4 * transfer.piece.elements
        if batch and max(incoming[transfer.writer], outgoing[transfer.sender]) + size > BATCH_BYTES:
            yield batch
            batch, incoming, outgoing = [], Counter(), Counter()
        incoming[transfer.writer] += size
        outgoing[transfer.sender] += size
        batch.append(transfer)
    if batch:
        yield batch
