"""Megatron's rules for gradient buffers: where buckets end, how parameters are aligned, and how equal shards
are padded."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""The alignment of parameters, in elements: each starts at a multiple of this number (Megatron's
`pad_param_start`)."""
_SHARD_ALIGNMENT = 128
"""The alignment of layer-wise buckets, in elements: Megatron pads the end of a bucket to a common multiple of
this number and the number of ranks."""
_PADDING_FLOOR = 0.9
"""The factor in one of the two minimum sizes of a closed layer-wise bucket (see `lay_out`): this number times
the number of shards times the elements of the bucket's largest parameter."""


def align(position: int, to: int = ALIGNMENT) -> int:
    """Rounds `position` up to a multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Returns the padded end of a plan's bucket, a multiple of `ALIGNMENT` and of the number of shards."""
    return align(position, math.lcm(shards, ALIGNMENT))


@dataclass(frozen=True, kw_only=True)
class PaddedBucket:
    """A bucket of equal shards. Parameters are not divided between shards."""

    shard_elements: int
    """The elements of one shard, padding included."""
    shards: tuple[tuple[int, ...], ...]
    """The parameters of each shard in buffer order, as positions in the list of sizes."""

    @property
    def elements(self) -> int:
        return self.shard_elements * len(self.shards)


def lay_out(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[PaddedBucket]:
    """Yields the same buckets as `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` of
    megatron-core 0.19.

    Parameters are visited in reverse order of creation. A bucket is closed when it holds at least `bucket`
    elements and at least `_PADDING_FLOOR` * shards * its largest parameter, so that shards without a large
    parameter are not mostly padding. The parameters of a bucket go into the least loaded shard, largest
    first, and every shard is padded to the length of the fullest.

    Args:
        sizes: the elements of each parameter, in order of creation.
        bucket: the minimum number of elements in a closed bucket; None puts all parameters into one bucket.
    """
    for chunk in _chunks(sizes, shards, bucket):
        yield _largest_first(sizes, chunk, shards)


def _chunks(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[list[int]]:
    """Cuts parameters into buckets, last created first. A bucket closes when both conditions of `lay_out`
    hold."""
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
    contents: list[list[int]] = [[] for _ in range(shards)]
    for parameter in sorted(chunk, key=lambda p: -sizes[p]):
        cursor, shard = heap[0]
        heapq.heapreplace(heap, (align(cursor) + sizes[parameter], shard))
        contents[shard].append(parameter)
    fullest = max(cursor for cursor, _ in heap)
    return PaddedBucket(shard_elements=shard_elements(fullest, shards), shards=tuple(map(tuple, contents)))


def shard_elements(fullest: int, shards: int) -> int:
    """Returns the length of a bucket's equal shards in elements, padded so that the start of each shard and
    the end of the bucket are aligned.

    Args:
        fullest: the number of elements in the fullest shard.
    """
    return align(fullest, math.lcm(ALIGNMENT, math.lcm(shards, _SHARD_ALIGNMENT) // shards))
