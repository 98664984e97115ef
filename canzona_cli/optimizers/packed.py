"""Symmetric matrices kept by half: strips of rows, each from its diagonal block to the right, one behind the other."""

from collections.abc import Iterator

import torch

STRIPS = 16
"""Of a side that it divides 17/32 of the square is kept. More strips keep less, and make shorter products."""


def packed_elements(side: int) -> int:
    """Elements that are kept of a (side, side) matrix."""
    height = -(-side // STRIPS)
    return sum(min(height, side - top) * (side - top) for top in range(0, side, height))


def pack(square: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix (side, side) into `out` of `packed_elements(side)` elements, which is returned."""
    for top, end, strip in _strips(out, len(square)):
        strip.copy_(square[top:end, top:])
    return out


def unpack(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix of what `pack` made, into `out` (side, side), which is returned."""
    for top, end, strip in _strips(packed, len(out)):
        out[top:end, top:].copy_(strip)
        out[end:, top:end].copy_(strip[:, end - top :].mT)
    return out


def average_gram(packed: torch.Tensor, x: torch.Tensor, weight: float, scratch: torch.Tensor) -> None:
    """packed += weight (X X^T - packed), of `x` (side, long).

    On a CPU strip by strip, so that half the products are made (1024 x 2048 on one thread: 30 ms, and 47 whole); a
    strip is too little for a GPU.

    Args:
        scratch: (side, side), overwritten.
    """
    outer = None if x.device.type == "cpu" else torch.mm(x, x.mT, out=scratch)
    for top, end, strip in _strips(packed, len(x)):
        if outer is None:
            strip.addmm_(x[top:end], x[top:].mT, beta=1 - weight, alpha=weight)
        else:
            strip.lerp_(outer[top:end, top:], weight)


def _strips(packed: torch.Tensor, side: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First row, end of the rows, and the view (rows, side - first row) of each strip."""
    height, offset = -(-side // STRIPS), 0
    for top in range(0, side, height):
        end = min(side, top + height)
        size = (end - top) * (side - top)
        yield top, end, packed[offset : offset + size].view(end - top, side - top)
        offset += size
