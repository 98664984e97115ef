"""Weights read piece by piece, so that what is in memory does not grow with the largest of them."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

PIECE_BYTES: Final = 8 << 20
"""Of a piece in fp32."""


def row_ranges(shape: Sequence[int]) -> Iterator[range]:
    """The rows of each piece of a tensor, in order: `PIECE_BYTES` at most, or one row."""
    most = max(1, PIECE_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for first in range(0, shape[0], most):
        yield range(first, min(first + most, shape[0]))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor on the host as its bytes, C order."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
