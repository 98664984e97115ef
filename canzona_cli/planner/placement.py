"""Which ranks hold the optimizer state of whole matrices, as far as memory is concerned.

The plan decides it for good; these two packings bound what the worst rank holds before there is a plan.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

# Megatron extends a bucket until a dominant parameter fills at least this share of its padded shards.
_PADDING_FLOOR = 0.9
# Elements that a parameter's start, and a bucket's end, are multiples of.
_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128

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


@dataclass(frozen=True, kw_only=True)
class PaddedBucket:
    """A bucket of `shards` equal shards that whole parameters were packed into."""

    shard_elements: int
    """Of one shard, padding included."""
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
    for chunk in chunks(sizes, shards, bucket):
        yield _packed(sizes, chunk, shards)


def chunks(sizes: Sequence[int], shards: int, bucket: int | None) -> Iterator[list[int]]:
    """Parameters of each bucket of equal shards, last created first; where `lay_out` cuts."""
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


def _packed(sizes: Sequence[int], chunk: Sequence[int], shards: int) -> PaddedBucket:
    heap = [(0, shard) for shard in range(shards)]
    held: list[list[int]] = [[] for _ in range(shards)]
    for parameter in sorted(chunk, key=lambda p: -sizes[p]):
        cursor, shard = heap[0]
        heapq.heapreplace(heap, (_multiple(cursor, _ALIGNMENT) + sizes[parameter], shard))
        held[shard].append(parameter)
    divisor = math.lcm(_ALIGNMENT, math.lcm(shards, _BUCKET_ALIGNMENT) // shards)
    fullest = max(cursor for cursor, _ in heap)
    return PaddedBucket(shard_elements=_multiple(fullest, divisor), shards=tuple(map(tuple, held)))


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


@lru_cache(maxsize=4096)
def layerwise(sizes: tuple[int, ...], layers: int, shards: int, bucket: int | None) -> Placement:
    """Load and padding of `lay_out` for `layers` times `sizes` (elements of one layer's parameters)."""
    loads = [0] * shards
    padded = 0
    everything = sizes * layers
    for laid_out in lay_out(everything, shards, bucket):
        padded += laid_out.elements
        for shard, held in enumerate(laid_out.shards):
            loads[shard] += sum(everything[parameter] for parameter in held)
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
