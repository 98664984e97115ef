"""Megatron's rules for gradient buffers: where buckets end, how parameters are aligned and equal shards padded."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""The alignment of parameters, in elements: each starts at a multiple of this (Megatron's
`pad_param_start`)."""
_SHARD_ALIGNMENT = 128
"""The alignment of the end of a layer-wise bucket, in elements: Megatron pads it to a multiple of this and of
the number of ranks."""
_PADDING_FLOOR = 0.9
"""The factor of the least size of a closed layer-wise bucket: this times its number of shards times its
largest parameter."""


def align(position: int, to: int = ALIGNMENT) -> int:
    """Rounds `position` up to a multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Returns the padded end of a bucket, a multiple of the shards and of `ALIGNMENT`."""
    return align(position, math.lcm(shards, ALIGNMENT))


@dataclass(frozen=True, kw_only=True)
class PaddedBucket:
    """A bucket of equal shards, each of which holds undivided parameters."""

    shard_elements: int
    """The elements of one shard, padding included."""
    shards: tuple[tuple[int, ...], ...]
    """The parameters of each shard in buffer order, as positions in the list of sizes."""

    @property
    def elements(self) -> int:
        return self.shard_elements * len(self.shards)


def lay_out(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[PaddedBucket]:
    """Yields the buckets of `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`, megatron-core
    0.19.

    Parameters are walked in reverse order of creation. A bucket is closed once it holds at least `bucket`
    elements and also at least `_PADDING_FLOOR` * shards * its largest parameter, so that a large parameter
    does not leave the other shards mostly padding. The parameters of a bucket go into shards largest first,
    each into the least loaded, and every shard is padded to the length of the fullest.

    Args:
        sizes: the elements of each parameter, in order of creation.
        bucket: the least elements of a closed bucket; None: all parameters are one bucket.
    """
    for chunk in _chunks(sizes, shards, bucket):
        yield _largest_first(sizes, chunk, shards)


def _chunks(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[list[int]]:
    """Cuts parameters into buckets, the last created first; both conditions of `lay_out` close a bucket."""
    chunk: list[int] = []
    chunk_total = chunk_max = 0
    for parameter in reversed(range(len(sizes))):
        size = sizes[parameter]
        chunk.append(parameter)
        chunk_total, chunk_max = chunk_total + size, max(chunk_max, size)
        if bucket is not None and chunk_total >= max(bucket, int(shards * chunk_max * _PADDING_FLOOR)):
            yield chunk
            chunk, chunk_total, chunk_max = [], 0, 0
    if chunk:
        yield chunk


def _largest_first(sizes: Sequence[int], chunk: Sequence[int], shards: int) -> PaddedBucket:
    """Packs a bucket's parameters into equal shards, largest first."""
    heap = [(0, shard) for shard in range(shards)]
    held: list[list[int]] = [[] for _ in range(shards)]
    for parameter in sorted(chunk, key=lambda p: -sizes[p]):
        cursor, shard = heap[0]
        heapq.heapreplace(heap, (align(cursor) + sizes[parameter], shard))
        held[shard].append(parameter)
    fullest = max(cursor for cursor, _ in heap)
    return PaddedBucket(shard_elements=shard_elements(fullest, shards), shards=tuple(map(tuple, held)))


def shard_elements(fullest: int, shards: int) -> int:
    """Returns the length of equal shards of which the fullest holds `fullest` elements, padded so that shards
    start aligned and their bucket ends on Megatron's alignment."""
    return align(fullest, math.lcm(ALIGNMENT, math.lcm(shards, _SHARD_ALIGNMENT) // shards))
