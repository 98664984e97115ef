"""The gradient buffer once owners are known: the order inside every bucket, and who owns which range of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.geometry import Parameter, align, bucket_end, cut, owners, stage_parameters, stages
from canzona_cli.planner.types import Assignment, Bucket, PlanSettings, Range

_SHARD_ALIGNMENT = 128  # Megatron pads bucket ends to multiples of the ranks and of this


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
    - aligned: every owner's parameters in a shard of its own, all as long as the fullest;
    - strategy asc: natural order, whatever the layout.

    An owner without a parameter in a bucket has no range in it. How gradients travel is chosen by `reduction`.

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    found: list[Bucket] = []
    shards = owners(layout)
    padded = settings.layout == "aligned" and settings.strategy != "asc"
    for stage in stages(matrices):
        parameters = stage_parameters(matrices, stage, layout.tp)
        contents = cut(parameters, bucket_elements, stage=stage, shards=shards if padded else None)
        for index, bucket in enumerate(contents):
            owned = [_Owned.of(parameter, assignment) for parameter in bucket]
            if padded:
                found.append(_aligned(owned, stage, index, shards))
            else:
                order = _by_owner(owned) if settings.layout == "owner" and settings.strategy != "asc" else owned
                found.append(_packed(order, stage, index, shards))
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


def _aligned(owned: Sequence[_Owned], stage: int, index: int, shards: int) -> Bucket:
    held: Mapping[int, list[_Owned]] = {owner: [] for owner in range(shards)}
    lengths = [0] * shards
    for item in owned:
        held[item.first].append(item)
        lengths[item.first] = align(lengths[item.first]) + item.parameter.elements
    divisor = math.lcm(64, math.lcm(shards, _SHARD_ALIGNMENT) // shards)
    shard = align(max(lengths), divisor)
    ranges: list[Range] = []
    for owner in range(shards):
        position = owner * shard
        for item in held[owner]:
            position = align(position)
            _extend(ranges, position, position + item.parameter.elements, owner, item.parameter.matrices)
            position += item.parameter.elements
    return Bucket(
        index=index,
        stage=stage,
        parameters=tuple(item.parameter.name for owner in range(shards) for item in held[owner]),
        elements=shard * shards,
        padding=shard * shards - sum(item.parameter.elements for item in owned),
        ranges=tuple(ranges),
        reduction="even",
    )


def _extend(ranges: list[Range], start: int, end: int, owner: int, matrices: tuple[int, ...]) -> None:
    """Adds [start, end) to the last range where that has the same owner; what alignment skipped between joins it."""
    if ranges and ranges[-1].owner == owner and start in (ranges[-1].end, align(ranges[-1].end)):
        last = ranges.pop()
        start, matrices = last.start, last.matrices + matrices
    ranges.append(Range(start=start, end=end, owner=owner, matrices=matrices))
