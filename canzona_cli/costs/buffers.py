"""Megatron's buffers before there is a plan: bytes of an element, size of a bucket, padding, shards."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout, RunConfig

BATCH_BYTES = 256 << 20
"""The most fp32 scratch of a batch of an owner's matrices, where tp = 1."""
FP32 = 4
"""Bytes of an element of masters, optimizer state and scratch."""
ALIGNMENT = 64
"""Elements a parameter's start is a multiple of (Megatron's `pad_param_start`)."""
_SHARD_ALIGNMENT = 128
"""Megatron pads bucket ends to multiples of the ranks and of this."""
_PADDING_FLOOR = 0.9
"""Megatron extends a bucket of equal shards until a dominant parameter fills at least this part of them."""


def element_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient buffer) bytes of a parameter."""
    width = 2 if config.train.precision == "bf16" else FP32
    return width, FP32 if config.train.grad_reduce_dtype == "fp32" else width


def default_bucket_elements(owners: int) -> int:
    """Size at which Megatron closes a bucket by default (`DistributedDataParallel`, 0.19)."""
    return max(40_000_000, 1_000_000 * owners)


def bucket_elements(config: RunConfig, layout: Layout) -> int | None:
    """Size at which Megatron closes a bucket of the first stage; None where all buffers are one bucket."""
    if not config.parallel.overlap_grad_reduce:
        return None
    return config.parallel.bucket_elements or default_bucket_elements(layout.owners)


def align(position: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Pads a bucket that ends at `position`: divisible by the ranks, and the next one starts aligned."""
    return align(position, math.lcm(shards, ALIGNMENT))


@dataclass(frozen=True, kw_only=True)
class PaddedBucket:
    """A bucket of `shards` equal shards that whole parameters were packed into."""

    shard_elements: int
    """Length of one shard, padding included."""
    shards: tuple[tuple[int, ...], ...]
    """Parameters of each shard in buffer order, as positions in the list of sizes."""

    @property
    def elements(self) -> int:
        return self.shard_elements * len(self.shards)


def lay_out(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[PaddedBucket]:
    """`LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` of megatron-core 0.19.

    Walks parameters of `sizes` elements (creation order) backwards, cuts a bucket at `bucket` elements (None: one
    bucket) or once the largest parameter no longer dominates, packs each bucket into `shards` by largest first onto
    the least loaded, and pads every shard to the fullest.
    """
    for chunk in _chunks(sizes, shards, bucket):
        yield _largest_first(sizes, chunk, shards)


def _chunks(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[list[int]]:
    """Cuts parameters into buckets, last created first."""
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
    heap = [(0, shard) for shard in range(shards)]
    held: list[list[int]] = [[] for _ in range(shards)]
    for parameter in sorted(chunk, key=lambda p: -sizes[p]):
        cursor, shard = heap[0]
        heapq.heapreplace(heap, (align(cursor) + sizes[parameter], shard))
        held[shard].append(parameter)
    fullest = max(cursor for cursor, _ in heap)
    return PaddedBucket(shard_elements=shard_elements(fullest, shards), shards=tuple(map(tuple, held)))


def shard_elements(fullest: int, shards: int) -> int:
    """Pads equal shards that hold `fullest` elements, so that their bucket ends on Megatron's alignment."""
    return align(fullest, math.lcm(ALIGNMENT, math.lcm(shards, _SHARD_ALIGNMENT) // shards))


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """(weight, gradient) bytes of an element that travels between TP ranks; C_max limits the larger."""
    return element_bytes(config)[0], 2 if config.engine.exchange_dtype == "bf16" else FP32
