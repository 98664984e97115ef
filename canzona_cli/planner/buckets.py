"""Megatron's gradient buffer: how a stage's parameters are cut into buckets, and who owns which range of each.

Megatron walks parameters backwards through the model, because that is the order their gradients become ready in, and
closes a bucket once it holds `bucket_elements` (`DistributedOptimizer._compute_per_buffer_param_layout`, 0.19). Model
chunks of an interleaved pipeline have buffers of their own, of which the last one's comes first. Once
owners are known, `buckets` orders the parameters inside each bucket:

    parameters, last first   | fc2.1 | fc1.1      | qkv.1 | proj.1 | fc2.0 | fc1.0      | qkv.0 | proj.0 |
    cut into buckets         |       bucket 0             |           bucket 1          |  bucket 2      |
    inside bucket 0, layout
      contiguous             | fc2.1 | gate.1  up.1 | qkv.1 |     as Megatron lays them out
      owner                  | 0: qkv.1 gate.1 | 1: up.1 | 2: fc2.1 |     one range for each owner, no padding
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.parts import Assignment, Bucket, PlanSettings, Range

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


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of a parameter that must have one owner."""

    unit: int
    matrices: tuple[int, ...]
    """Indices in the plan's list."""
    elements: int
    """On one TP rank."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One Megatron parameter; fc1 has two parts, [gate_r; up_r], everything else one."""

    name: str
    chunk: int
    """Model chunk of its stage."""
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        """On one TP rank."""
        return sum(part.elements for part in self.parts)

    @property
    def matrices(self) -> tuple[int, ...]:
        return tuple(index for part in self.parts for index in part.matrices)


def stages(matrices: Sequence[Matrix]) -> list[int]:
    """Pipeline stages that have matrices, ascending."""
    return sorted({matrix.stage for matrix in matrices})


def stage_parameters(matrices: Sequence[Matrix], stage: int, tp: int) -> list[Parameter]:
    """A stage's parameters, in registration order."""
    grouped: dict[str, dict[int, list[Matrix]]] = {}
    for matrix in matrices:
        if matrix.stage == stage:
            grouped.setdefault(matrix.parameter, {}).setdefault(matrix.unit, []).append(matrix)
    return [
        Parameter(
            name=name,
            chunk=next(iter(units.values()))[0].chunk,
            parts=tuple(
                Part(
                    unit=unit,
                    matrices=tuple(matrix.index for matrix in members),
                    elements=_on_one_rank(members, tp),
                )
                for unit, members in units.items()
            ),
        )
        for name, units in grouped.items()
    ]


def _on_one_rank(members: Sequence[Matrix], tp: int) -> int:
    """Elements one TP rank stores of a unit; heads lie whole on one rank each, as many on every rank."""
    dealt = sum(matrix.elements for matrix in members if matrix.home is not None)
    return dealt // tp + sum(matrix.fragment_elements(tp) for matrix in members if matrix.home is None)


def cut(parameters: Sequence[Parameter], bucket_elements: int | None, *, stage: int) -> list[list[Parameter]]:
    """Parameters of each bucket, last registered first. Megatron makes one bucket of every stage but the first, or of
    each of its model chunks."""
    by_chunk = [list(own) for _, own in groupby(parameters, lambda parameter: parameter.chunk)]
    return [bucket for own in reversed(by_chunk) for bucket in _cut(own, bucket_elements if stage == 0 else None)]


def _cut(parameters: Sequence[Parameter], limit: int | None) -> list[list[Parameter]]:
    found: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled = align(filled) + parameter.elements
        if limit is not None and filled >= limit:
            found.append(bucket)
            bucket, filled = [], 0
    return [*found, bucket] if bucket else found


def align(position: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-position // to) * to


def bucket_end(position: int, shards: int) -> int:
    """Where a bucket that ends at `position` is padded to: divisible by the ranks, and the next one starts aligned."""
    return align(position, math.lcm(shards, ALIGNMENT))


def buckets(
    matrices: Sequence[Matrix],
    assignment: Assignment,
    layout: Layout,
    settings: PlanSettings,
    bucket_elements: int | None = None,
) -> tuple[Bucket, ...]:
    """All buckets of all stages, numbered from 0 in each stage in the order gradients become ready.

    - owner: parameters of one owner side by side, in uneven shards. A parameter whose gate and up have two owners
      lies across their border; the few that cannot give their owner another range. No padding but alignment;
    - contiguous: Megatron's own order;
    - strategies paper and asc: natural order, whatever the layout.

    An owner without a parameter in a bucket has no range in it. How gradients travel is chosen by `reduction`.

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    found: list[Bucket] = []
    for stage in stages(matrices):
        parameters = stage_parameters(matrices, stage, layout.tp)
        for index, bucket in enumerate(cut(parameters, bucket_elements, stage=stage)):
            owned = [_Owned.of(parameter, assignment) for parameter in bucket]
            order = _by_owner(owned) if settings.layout == "owner" and settings.strategy == "canzona" else owned
            found.append(_packed(order, stage, index, layout.owners))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Owned:
    """A parameter and the owners of its parts."""

    parameter: Parameter
    owners: tuple[int, ...]

    @staticmethod
    def of(parameter: Parameter, assignment: Assignment) -> "_Owned":
        return _Owned(
            parameter=parameter, owners=tuple(assignment.cells[part.matrices[0]].owner for part in parameter.parts)
        )

    @property
    def first(self) -> int:
        return self.owners[0]

    @property
    def last(self) -> int:
        return self.owners[-1]


def _by_owner(owned: Sequence[_Owned]) -> list[_Owned]:
    """Parameters so that owners have as few ranges as possible.

    A parameter across two owners is a link from the first to the last. Links that form chains (an owner is entered
    once and left once, without a ring) put the parameter on the border of two neighbours; owners then follow chain by
    chain. Any other link is put at an end of one of its owners where that is free, else behind everything.
    """
    after: dict[int, _Owned] = {}
    before: dict[int, _Owned] = {}
    chain: dict[int, int] = {}

    def head(owner: int) -> int:
        while chain.get(owner, owner) != owner:
            owner = chain[owner]
        return owner

    whole: dict[int, list[_Owned]] = {}
    loose: list[_Owned] = []
    for item in owned:
        whole.setdefault(item.first, []), whole.setdefault(item.last, [])
        if len(set(item.owners)) == 1:
            whole[item.first].append(item)
        elif item.first not in after and item.last not in before and head(item.first) != head(item.last):
            after[item.first] = before[item.last] = item
            chain[head(item.last)] = head(item.first)
        else:
            loose.append(item)
    tail: list[_Owned] = []
    behind: dict[int, list[_Owned]] = {}
    ahead: dict[int, list[_Owned]] = {}
    for item in loose:
        if item.first not in after and item.first not in behind:
            behind[item.first] = [item]
        elif item.last not in before and item.last not in ahead:
            ahead[item.last] = [item]
        else:
            tail.append(item)
    order: list[_Owned] = []
    for start in sorted(owner for owner in whole if owner not in before):
        owner: int | None = start
        while owner is not None:
            order += [*ahead.get(owner, []), *whole[owner], *behind.get(owner, [])]
            crossing = after.get(owner)
            owner = None
            if crossing is not None:
                order.append(crossing)
                owner = crossing.last
    return order + tail


def _packed(order: Sequence[_Owned], stage: int, index: int, shards: int) -> Bucket:
    ranges: list[Range] = []
    position = used = 0
    for item in order:
        position = align(position)
        for part, owner in zip(item.parameter.parts, item.owners, strict=True):
            _extend(ranges, position, position + part.elements, owner, part.matrices)
            position += part.elements
            used += part.elements
    end = bucket_end(position, shards)
    return Bucket(
        index=index,
        stage=stage,
        parameters=tuple(item.parameter.name for item in order),
        elements=end,
        padding=end - used,
        ranges=tuple(ranges),
    )


def even_bucket(held: Sequence[Sequence[Parameter]], stage: int, index: int) -> Bucket:
    """Lays out a bucket of Megatron's layer-wise optimizer: equal shards, one for each owner's whole parameters and all
    as long as the fullest. In a ring nothing has to be handed on."""
    lengths = [0] * len(held)
    for owner, parameters in enumerate(held):
        for parameter in parameters:
            lengths[owner] = align(lengths[owner]) + parameter.elements
    shard = _shard_elements(max(lengths), len(held))
    ranges: list[Range] = []
    used = 0
    for owner, parameters in enumerate(held):
        position = owner * shard
        for parameter in parameters:
            position = align(position)
            _extend(ranges, position, position + parameter.elements, owner, parameter.matrices)
            position += parameter.elements
            used += parameter.elements
    return Bucket(
        index=index,
        stage=stage,
        parameters=tuple(parameter.name for parameters in held for parameter in parameters),
        elements=shard * len(held),
        padding=shard * len(held) - used,
        ranges=tuple(ranges),
        reduction="ring",
        gathering="ring",
    )


def _extend(ranges: list[Range], start: int, end: int, owner: int, matrices: tuple[int, ...]) -> None:
    """Adds [start, end) to the last range where that has the same owner; what alignment skipped between joins it."""
    if ranges and ranges[-1].owner == owner and start in (ranges[-1].end, align(ranges[-1].end)):
        last = ranges.pop()
        start, matrices = last.start, last.matrices + matrices
    ranges.append(Range(start=start, end=end, owner=owner, matrices=matrices))


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
    return PaddedBucket(shard_elements=_shard_elements(fullest, shards), shards=tuple(map(tuple, held)))


def _shard_elements(fullest: int, shards: int) -> int:
    """Of equal shards that hold `fullest` elements: their bucket ends on Megatron's alignment."""
    return align(fullest, math.lcm(ALIGNMENT, math.lcm(shards, _SHARD_ALIGNMENT) // shards))
