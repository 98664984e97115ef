"""Which ranks hold the optimizer state of whole matrices, as far as memory is concerned.

The plan decides it for good; these two packings bound what the worst rank holds before there is a plan.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

# Megatron extends a bucket until a dominant parameter fills at least this share of its padded shards.
_PADDING_FLOOR = 0.9

Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The load of the worst rank."""

    worst: int
    """Elements of the matrices on the rank that holds most."""
    worst_shapes: Mapping[Shape, int]
    """How many matrices of each (rows, columns) that rank holds; empty where shapes do not matter."""
    padded: int
    """Elements of the buffer that stores all matrices, padding included; 0 when it is not padded."""


@lru_cache(maxsize=4096)
def layerwise(sizes: tuple[int, ...], layers: int, shards: int, bucket: int | None) -> Placement:
    """`LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` of megatron-core 0.19, counted, not laid out.

    Walks `layers` times `sizes` (elements of one layer's parameters, creation order) backwards, cuts a bucket at
    `bucket` elements (None: one bucket) or once the largest parameter no longer dominates, packs each bucket
    into `shards` by largest first onto the least loaded, and pads every shard to the fullest.
    """
    loads = [0] * shards
    padded = chunk_total = chunk_max = 0
    chunk: list[int] = []

    def close() -> None:
        nonlocal padded, chunk_total, chunk_max
        heap = [(0, shard) for shard in range(shards)]
        for size in sorted(chunk, reverse=True):
            load, shard = heap[0]
            heapq.heapreplace(heap, (load + size, shard))
        fullest = max(load for load, _ in heap)
        for load, shard in heap:
            loads[shard] += load
        padded += shards * fullest
        chunk_total = chunk_max = 0
        chunk.clear()

    for _ in range(layers):
        for size in reversed(sizes):
            chunk.append(size)
            chunk_total, chunk_max = chunk_total + size, max(chunk_max, size)
            if bucket is not None and chunk_total >= max(bucket, int(shards * chunk_max * _PADDING_FLOOR)):
                close()
    if chunk:
        close()
    return Placement(worst=max(loads), worst_shapes=MappingProxyType({}), padded=padded)


@lru_cache(maxsize=4096)
def balance(shapes: tuple[Shape, ...], layers: int, cells: int, *, in_order: bool) -> Placement:
    """`layers` times `shapes` over `cells`: largest first onto the least loaded, or cut in natural order.

    In natural order a cell is closed once it has reached the mean, so the worst holds up to a matrix more.
    """
    everything = [shape for _ in range(layers) for shape in shapes]
    held: list[dict[Shape, int]] = [{} for _ in range(cells)]
    loads = [0] * cells
    if in_order:
        mean = sum(math.prod(shape) for shape in everything) / cells
        done = 0
        for shape in everything:
            cell = min(cells - 1, int(done / mean))
            _add(held[cell], shape)
            loads[cell] += math.prod(shape)
            done += math.prod(shape)
    else:
        heap = [(0, cell) for cell in range(cells)]
        for shape in sorted(everything, key=lambda s: (-math.prod(s), s)):
            load, cell = heap[0]
            heapq.heapreplace(heap, (load + math.prod(shape), cell))
            _add(held[cell], shape)
        for load, cell in heap:
            loads[cell] = load
    worst = max(range(cells), key=loads.__getitem__)
    return Placement(worst=loads[worst], worst_shapes=MappingProxyType(held[worst]), padded=0)


def _add(counts: dict[Shape, int], shape: Shape) -> None:
    counts[shape] = counts.get(shape, 0) + 1
