"""Symmetric matrices kept by half: rectangular full packed (Gustavson et al. 2010, doi:10.1145/1731022.1731028).

The upper half of the rows lies as it is in a square, to the right of the diagonal; to its left there is room for the
other triangle of the lower right quarter, transposed and a row further down. So both ways take a few whole copies.
"""

import torch

from .shampoo_facts import packed_elements

_STRIP = 64
"""Rows at least of a strip of a product on a CPU."""


def pack(square: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Packs the upper triangle of a contiguous symmetric matrix (side, side), which is overwritten, into `out`
    (packed_elements(side),), which is returned."""
    return out.copy_(_folded(square))


def unpack(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Unpacks what `pack` made into `out` (side, side), contiguous, which is returned."""
    side = len(out)
    half = (side + 1) // 2
    rest = side - half
    out.view(-1)[: len(packed)].copy_(packed)
    lower, corner, room = _lower(half, out.device), out[:half, :half], out[1 : rest + 1, :rest]
    torch.where(lower[:rest, :rest], room, room.mT, out=out[half:, half:])
    corner.copy_(torch.where(lower, corner.mT, corner))
    out[half:, :half].copy_(out[:half, half:].mT)
    return out


def average_gram(packed: torch.Tensor, x: torch.Tensor, weight: float, scratch: torch.Tensor) -> None:
    """packed += weight (X X^T - packed), of `x` (side, long).

    On a CPU by strips of rows, from the diagonal on, so that about half the products are made; a strip is too little
    for a GPU.

    Args:
        scratch: (side, side), contiguous, overwritten.
    """
    side = len(x)
    height = side if x.device.type != "cpu" else max(_STRIP, -(-side // 16))
    for top in range(0, side, height):
        end = min(side, top + height)
        torch.mm(x[top:end], x[top:].mT, out=scratch[top:end, top:])
    packed.lerp_(_folded(scratch), weight)


def _folded(square: torch.Tensor) -> torch.Tensor:
    """Folds a square's upper triangle into its packed form, in the square's memory."""
    side = len(square)
    half = (side + 1) // 2
    rest = side - half
    room = square[1 : rest + 1, :rest]
    torch.where(_lower(rest, square.device), square[half:, half:].mT, room, out=room)
    return square.view(-1)[: packed_elements(side)]


def _lower(side: int, device: torch.device) -> torch.Tensor:
    """Marks the elements that are on the diagonal or below it."""
    return torch.ones(side, side, dtype=torch.bool, device=device).tril_()
