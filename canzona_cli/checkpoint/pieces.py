"""The division of a checkpoint: who writes what, and where the elements of a piece lie in the whole.

Every rank writes what it holds, and nothing travels: matrices that canzona hosts, pieces of what is spread over ranks
(AdamW's shards, tensor-parallel fragments of Megatron's own Muon). What several ranks hold, a whole or the same piece,
one of them writes. Ranks agree on that once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from canzona_cli.checkpoint.manifest import Piece


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's share of what is to be saved, in bytes."""

    wholes: Mapping[str, int]
    """Everything that the rank holds all of, by name."""
    pieces: Mapping[Piece, int]


@dataclass(frozen=True, kw_only=True)
class Writers:
    """The writer of each tensor or piece; the same on every rank."""

    wholes: Mapping[str, int]
    pieces: Mapping[Piece, int]


def share(holdings: Sequence[Holding], elements: Mapping[str, int]) -> Writers:
    """Give everything to one of its holders, of several to the one with least to write so far.

    Args:
        holdings: of every rank.
        elements: of every unit that comes in pieces.

    Raises:
        ValueError: the pieces of a unit do not make it up.
    """
    load = [0] * len(holdings)
    """Bytes that each rank writes."""
    wholes = _shared([holding.wholes for holding in holdings], load)
    pieces = _shared([holding.pieces for holding in holdings], load)
    made_up: dict[str, int] = defaultdict(int)
    for piece in pieces:
        made_up[piece.unit] += piece.elements
    for unit, count in made_up.items():
        if count != elements[unit]:
            raise ValueError(f"{unit} has {elements[unit]} elements, but its pieces do not add up to that")
    return Writers(wholes=wholes, pieces=pieces)


def _shared[T](held: Sequence[Mapping[T, int]], load: list[int]) -> dict[T, int]:
    """Writers of what ranks hold, added to `load`."""
    found: dict[T, tuple[int, list[int]]] = {}
    for rank, sizes in enumerate(held):
        for item, size in sizes.items():
            found.setdefault(item, (size, []))[1].append(rank)
    writers: dict[T, int] = {}
    # What has one holder first: the rest evens it out.
    for item, (size, holders) in sorted(found.items(), key=lambda entry: (len(entry[1][1]), str(entry[0]))):
        writers[item] = min(holders, key=lambda rank: (load[rank], rank))
        load[writers[item]] += size
    return writers


def paste(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    """Write a piece's elements (flat) to their place in the whole, (rows, columns)."""
    for region, part in _runs(whole, piece, data):
        region.copy_(part)


def cut(region: torch.Tensor, piece: Piece, out: torch.Tensor) -> None:
    """Read a piece's elements into `out` (flat).

    Args:
        region: the rectangle's rows that have elements of the piece, from the first such row on, all its columns.
    """
    for part_of_region, part in _runs(region, replace(trimmed(piece), row=0, col=0), out):
        part.copy_(part_of_region)


def trimmed(piece: Piece) -> Piece:
    """The same elements, of the rectangle's rows that have any of them."""
    above = piece.start // piece.cols
    return replace(
        piece,
        row=piece.row + above,
        rows=-(-piece.end // piece.cols) - above,
        start=piece.start - above * piece.cols,
        end=piece.end - above * piece.cols,
    )


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
