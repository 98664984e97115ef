"""Megatron's gradient buffer: how a stage's parameters are cut into buckets, and which owner has which range
of each.

Megatron walks parameters backwards through the model, because gradients become ready in this order, and
closes a bucket once it holds `bucket_elements` (`DistributedOptimizer._compute_per_buffer_param_layout`,
0.19). Each model chunk of an interleaved pipeline has its own buffer; the last chunk's buckets come first.
Once owners are known, `buckets` orders the parameters inside each bucket:

    parameters, last first   | fc2.1 | fc1.1      | qkv.1 | proj.1 | fc2.0 | fc1.0      | qkv.0 | proj.0 |
    cut into buckets         |       bucket 0             |           bucket 1          |  bucket 2      |
    inside bucket 0, layout
      contiguous             | fc2.1 | gate.1  up.1 | qkv.1 |     as Megatron lays them out
      owner                  | 0: qkv.1 gate.1 | 1: up.1 | 2: fc2.1 |     one range for each owner
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from canzona_cli.config.schema import Layout
from canzona_cli.costs.buffers import align, bucket_end, shard_elements
from canzona_cli.costs.sharing import Share
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.groups import Grouped, held_jobs
from canzona_cli.planner.plan import Assignment, Bucket, Cell, PlanSettings, Range


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of a parameter that must have one owner."""

    unit: int
    matrices: tuple[int, ...]
    """The indices of the part's matrices in the plan's list."""
    elements: int
    """The elements on one TP rank."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One Megatron parameter; fc1 has two parts, gate and up, unless they are one matrix; all others have one
    part."""

    name: str
    chunk: int
    """The number of the model chunk in its stage."""
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        """The elements on one TP rank."""
        return sum(part.elements for part in self.parts)

    @property
    def matrices(self) -> tuple[int, ...]:
        return tuple(index for part in self.parts for index in part.matrices)


def stages(matrices: Sequence[Matrix]) -> list[int]:
    """Lists the pipeline stages that have matrices, ascending."""
    return sorted({matrix.stage for matrix in matrices})


def stage_parameters(matrices: Sequence[Matrix], stage: int, tp: int) -> list[Parameter]:
    """Lists a stage's parameters in registration order, each with its parts."""
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
    """Counts the elements of a unit that one TP rank stores. Matrices of single heads are stored on one rank
    each, the same number on every rank."""
    heads = sum(matrix.elements for matrix in members if matrix.home is not None)
    return heads // tp + sum(matrix.fragment_elements(tp) for matrix in members if matrix.home is None)


def cut(parameters: Sequence[Parameter], bucket_elements: int | None, *, stage: int) -> list[list[Parameter]]:
    """Cuts a stage's parameters into buckets, the parameters registered last first.

    `bucket_elements` applies only to the first stage. In the other stages, as in Megatron, every model chunk
    is one bucket.
    """
    by_chunk = [list(of_chunk) for _, of_chunk in groupby(parameters, lambda parameter: parameter.chunk)]
    return [
        bucket for of_chunk in reversed(by_chunk) for bucket in _cut(of_chunk, bucket_elements if stage == 0 else None)
    ]


def stage_buckets(
    matrices: Sequence[Matrix], stage: int, tp: int, bucket_elements: int | None
) -> list[list[Parameter]]:
    """Lists the parameters of each bucket of a stage, see `cut`; do not change the lists, they are cached."""
    return _stage_buckets(_Same(matrices), stage, tp, bucket_elements)


class _Same(NamedTuple):
    """A list of matrices as the key of a cache. Only the same object is equal, because comparing thousands of
    matrices takes longer than what is cached."""

    matrices: Sequence[Matrix]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.matrices is other.matrices

    def __hash__(self) -> int:
        return id(self.matrices)


@lru_cache(maxsize=64)
def _stage_buckets(same: _Same, stage: int, tp: int, bucket_elements: int | None) -> list[list[Parameter]]:
    return cut(stage_parameters(same.matrices, stage, tp), bucket_elements, stage=stage)


def _cut(parameters: Sequence[Parameter], limit: int | None) -> list[list[Parameter]]:
    """Cuts a model chunk's parameters into buckets, each closed once it holds `limit` elements; None: one
    bucket."""
    closed: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled = align(filled) + parameter.elements
        if limit is not None and filled >= limit:
            closed.append(bucket)
            bucket, filled = [], 0
    return [*closed, bucket] if bucket else closed


def buckets(
    matrices: Sequence[Matrix],
    assignment: Assignment,
    layout: Layout,
    settings: PlanSettings,
    bucket_elements: int | None = None,
) -> tuple[Bucket, ...]:
    """Makes the buckets of all stages, numbered from 0 in each stage in the order in which gradients become
    ready.

    - layout owner: the parameters of an owner are adjacent, in uneven shards. A parameter whose gate and up
        have
      two owners is placed on the border between them; the few that cannot be give their owner another range;
    - layout contiguous: Megatron's order;
    - strategies paper and asc: Megatron's order, whatever the layout.

    The only padding is alignment. An owner without a parameter in a bucket has no range in it.
    `ReductionModel.choose` then chooses how each bucket is reduced and gathered.

    Args:
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
    """
    made: list[Bucket] = []
    cells = assignment.cells
    for stage in stages(matrices):
        for index, bucket in enumerate(stage_buckets(matrices, stage, layout.tp, bucket_elements)):
            owned = [_Owned(item, tuple(cells[part.matrices[0]].owner for part in item.parts)) for item in bucket]
            order = _by_owner(owned) if settings.layout == "owner" and settings.strategy == "canzona" else owned
            made.append(_packed(order, stage, index, layout.owners))
    return tuple(made)


class _Owned(NamedTuple):
    """A parameter and the owner of each of its parts."""

    parameter: Parameter
    owners: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.owners[0]

    @property
    def last(self) -> int:
        return self.owners[-1]


def _by_owner(owned: Sequence[_Owned]) -> list[_Owned]:
    """Orders a bucket's parameters so that owners have few ranges.

    A parameter with two owners links the first to the last. Links are joined into chains, without cycles, in
    which every owner has at most one link in and one out; a linking parameter is then placed on the border
    between its owners, and owners follow chain by chain. Any other parameter with two owners is placed after
    its first owner or before its last owner if the border there is free, otherwise at the end of the bucket.
    """
    after: dict[int, _Owned] = {}
    before: dict[int, _Owned] = {}
    chain: dict[int, int] = {}

    def head(owner: int) -> int:
        """Returns the owner at the start of this owner's chain."""
        while chain.get(owner, owner) != owner:
            owner = chain[owner]
        return owner

    single: dict[int, list[_Owned]] = {}  # by owner, the parameters that have no other owner
    loose: list[_Owned] = []
    for item in owned:
        single.setdefault(item.first, []), single.setdefault(item.last, [])
        if len(set(item.owners)) == 1:
            single[item.first].append(item)
        elif item.first not in after and item.last not in before and head(item.first) != head(item.last):
            after[item.first] = before[item.last] = item
            chain[head(item.last)] = head(item.first)
        else:
            loose.append(item)
    tail: list[_Owned] = []
    at_end: dict[int, list[_Owned]] = {}
    at_start: dict[int, list[_Owned]] = {}
    for item in loose:
        if item.first not in after and item.first not in at_end:
            at_end[item.first] = [item]
        elif item.last not in before and item.last not in at_start:
            at_start[item.last] = [item]
        else:
            tail.append(item)
    order: list[_Owned] = []
    for start in sorted(owner for owner in single if owner not in before):
        owner: int | None = start
        while owner is not None:
            order += [*at_start.get(owner, []), *single[owner], *at_end.get(owner, [])]
            crossing = after.get(owner)
            owner = None
            if crossing is not None:
                order.append(crossing)
                owner = crossing.last
    return order + tail


def _packed(order: Sequence[_Owned], stage: int, index: int, shards: int) -> Bucket:
    """Makes the bucket whose parameters are placed one after another in this order."""
    starts, end = _side_by_side([item.parameter for item in order])
    return _filled(zip(starts, order, strict=True), bucket_end(end, shards), stage, index)


def _side_by_side(parameters: Iterable[Parameter]) -> tuple[list[int], int]:
    """Places parameters one after another, each aligned; returns their starts and the end of the last."""
    starts: list[int] = []
    end = 0
    for parameter in parameters:
        starts.append(align(end))
        end = starts[-1] + parameter.elements
    return starts, end


def _filled(placed: Iterable[tuple[int, _Owned]], elements: int, stage: int, index: int) -> Bucket:
    """Makes a bucket of `elements` elements.

    Args:
        placed: each parameter with its start in the bucket, ascending.
    """
    ranges: list[Range] = []
    names: list[str] = []
    used = 0
    for start, item in placed:
        names.append(item.parameter.name)
        for part, owner in zip(item.parameter.parts, item.owners, strict=True):
            _extend(ranges, start, start + part.elements, owner, part.matrices)
            start += part.elements
            used += part.elements
    parameters, padding = tuple(names), elements - used
    return Bucket(
        index=index, stage=stage, parameters=parameters, elements=elements, padding=padding, ranges=tuple(ranges)
    )


def even_bucket(held: Sequence[Sequence[Parameter]], stage: int, index: int) -> Bucket:
    """Makes a bucket of Megatron's layer-wise optimizer: a shard for each owner's parameters, padded to the
    length of the fullest. It is reduced and gathered in a ring, in which nothing has to be handed over."""
    positions = [_side_by_side(parameters) for parameters in held]
    shard = shard_elements(max(end for _, end in positions), len(held))
    placed = (
        (owner * shard + start, _Owned(parameter, (owner,) * len(parameter.parts)))
        for owner, (parameters, (starts, _)) in enumerate(zip(held, positions, strict=True))
        for parameter, start in zip(parameters, starts, strict=True)
    )
    return replace(_filled(placed, shard * len(held), stage, index), reduction="ring", gathering="ring")


def _extend(ranges: list[Range], start: int, end: int, owner: int, matrices: tuple[int, ...]) -> None:
    """Appends the range [start, end), or extends the last range if it has the same owner and ends at `start`
    up to alignment."""
    if ranges and ranges[-1].owner == owner and start in (ranges[-1].end, align(ranges[-1].end)):
        last = ranges.pop()
        start, matrices = last.start, last.matrices + matrices
    ranges.append(Range(start=start, end=end, owner=owner, matrices=matrices))


Seat = tuple[tuple[Cell, Share | None], ...]
"""A unit's place: the cell of each of its matrices, and its share if it is shared."""


def few_owners(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    layout: Layout,
    bucket_elements: int | None,
) -> Assignment:
    """Exchanges units of one kind between cells so that buckets have few owners, a stage's last bucket first.

    Every cell keeps its number of units of each kind, so its updates take as long as before.
    """
    cells, shares = list(assignment.cells), dict(assignment.shares)
    for stage in stages(matrices):
        buckets = [
            [part for parameter in bucket for part in parameter.parts]
            for bucket in stage_buckets(matrices, stage, layout.tp, bucket_elements)
        ]

        def kind(part: Part) -> Hashable:
            """Returns a key that parts have in common if they can be exchanged."""
            return tuple(
                (costs[index], matrix.shape, matrix.shard_dim, matrix.home, index in assignment.shares)
                for index in part.matrices
                for matrix in (matrices[index],)
            )

        free: dict[Hashable, dict[int, list[Seat]]] = defaultdict(dict)
        for part in (part for bucket in buckets for part in bucket):
            seat = tuple((assignment.cells[index], assignment.shares.get(index)) for index in part.matrices)
            free[kind(part)].setdefault(seat[0][0].owner, []).append(seat)
        for bucket in reversed(buckets):
            parts_by_kind: dict[Hashable, list[Part]] = defaultdict(list)
            for part in bucket:
                parts_by_kind[kind(part)].append(part)
            while parts_by_kind:
                owner = _most_useful(parts_by_kind, free)
                for part_kind in [part_kind for part_kind in parts_by_kind if owner in free[part_kind]]:
                    parts, seats = parts_by_kind[part_kind], free[part_kind][owner]
                    while parts and seats:
                        for index, (cell, share) in zip(parts.pop().matrices, seats.pop(), strict=True):
                            cells[index] = cell
                            if share is not None:
                                shares[index] = share
                    if not seats:
                        del free[part_kind][owner]
                    if not parts:
                        del parts_by_kind[part_kind]
    return Assignment(cells=tuple(cells), shares=MappingProxyType(dict(sorted(shares.items()))))


def in_order_of_reductions(
    matrices: Sequence[Matrix], assignment: Assignment, layout: Layout, bucket_elements: int | None
) -> Assignment:
    """Renumbers the owners of every stage in the order in which buckets are reduced to them.

    The chain of ranks of one reduction then overlaps with the next chain. Of the owners that first occur in
    one bucket, the owner that occurs in the latest bucket gets the highest number, because it comes first in
    a bucket that follows. Gatherings run in the opposite order and overlap less. Reductions matter more,
    because the last reductions wait for the end of the backward pass and overlap with nothing else.
    """
    number: dict[tuple[int, int], int] = {}
    for stage in stages(matrices):
        owners = [
            [assignment.cells[part.matrices[0]].owner for parameter in bucket for part in parameter.parts]
            for bucket in stage_buckets(matrices, stage, layout.tp, bucket_elements)
        ]
        last = {owner: place for place, held in enumerate(owners) for owner in held}
        first = dict.fromkeys(owner for held in owners for owner in sorted(held, key=last.__getitem__))
        number.update({(stage, owner): place for place, owner in enumerate(first)})
    cells = tuple(
        replace(cell, owner=number[matrix.stage, cell.owner])
        for matrix, cell in zip(matrices, assignment.cells, strict=True)
    )
    return replace(assignment, cells=cells)


def _most_useful(
    parts_by_kind: Mapping[Hashable, Sequence[Part]], free: Mapping[Hashable, Mapping[int, Sequence[Seat]]]
) -> int:
    """Returns the owner that can take most elements of a bucket's unassigned parts, the first of equal ones.

    Args:
        parts_by_kind: the parts that have no seat yet.
        free: by kind and owner, the seats that are not taken.
    """
    takes: dict[int, int] = defaultdict(int)
    for kind, parts in parts_by_kind.items():
        for owner, seats in free[kind].items():
            takes[owner] += min(len(parts), len(seats)) * parts[0].elements
    return min(takes, key=lambda owner: (-takes[owner], owner))


def slowest(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment, grouped: Grouped
) -> dict[int, float]:
    """Returns, by stage, the update seconds of the owner that is done last, as the planner's `Clock` adds
    them up."""
    seconds: dict[int, float] = defaultdict(float)
    for (stage, _), jobs in held_jobs(matrices, costs, assignment).items():
        seconds[stage] = max(seconds[stage], grouped.of(jobs)[0])
    return seconds


def spread(
    buckets: Sequence[Sequence[Parameter]], owner_of: Mapping[int, int], alike: Mapping[int, Hashable]
) -> dict[int, int]:
    """Exchanges units of the same kind between owners so that each bucket's bytes are spread evenly over
    owners.

    Every owner keeps its number of units of each kind. Bucket by bucket, the units of a kind go to the owners
    with the fewest bytes of the bucket so far, and of equal ones to the owner with most units of this kind
    left. Inside a bucket gate and up of a layer get the same or neighbouring owners, so that few parameters
    have two owners.

    Args:
        owner_of: the owner of each unit so far.
        alike: the kind of each unit.
    """
    left: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for unit, owner in sorted(owner_of.items()):
        left[alike[unit]][owner] += 1
    new_owner: dict[int, int] = {}
    for bucket in buckets:
        held: Counter[int] = Counter()
        kinds: dict[Hashable, list[Part]] = defaultdict(list)
        # Parameters of several parts first: their parts are then next to each other in the list.
        for parameter in sorted(bucket, key=lambda parameter: -len(parameter.parts)):
            for part in parameter.parts:
                kinds[alike[part.unit]].append(part)
        for kind, parts in sorted(kinds.items(), key=lambda item: -item[1][0].elements):
            free = left[kind]
            chosen: list[int] = []
            while len(chosen) < len(parts):
                ranked = sorted(free, key=lambda owner: (held[owner], -free[owner], owner))
                for owner in ranked[: len(parts) - len(chosen)]:
                    chosen.append(owner)
                    held[owner] += parts[0].elements
                    free[owner] -= 1
                    if not free[owner]:
                        del free[owner]
            for part, owner in zip(parts, sorted(chosen), strict=True):
                new_owner[part.unit] = owner
    return new_owner
