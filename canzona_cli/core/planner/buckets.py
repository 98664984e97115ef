"""Megatron's gradient buffer: how a stage's parameters are cut into buckets, and which range of a bucket each
owner has.

Megatron goes through the parameters from the last to the first, because gradients become ready in this order,
and closes a bucket once it holds `bucket_elements` (`DistributedOptimizer._compute_per_buffer_param_layout`,
0.19). Each model chunk of an interleaved pipeline has a separate buffer; the last model chunk's buckets come
first. Once owners are known, `buckets` orders the parameters inside each bucket:

    parameters, last first   | fc2.1 | fc1.1      | qkv.1 | proj.1 | fc2.0 | fc1.0      | qkv.0 | proj.0 |
    cut into buckets         |       bucket 0             |           bucket 1          |  bucket 2      |
    inside bucket 0, layout
      contiguous             | fc2.1 | gate.1  up.1 | qkv.1 |     as Megatron lays them out
      owner                  | 0: qkv.1 gate.1 | 1: up.1 | 2: fc2.1 |     one range for each owner

Experts that expert parallelism divides among ranks have separate buffers, because their gradients are reduced
over other ranks. Expert-parallel ranks have different experts in buckets of the same sizes. Buckets of
experts end where every owner can have equally many matrices of each size, so that equal parts need no
padding.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, starmap
from operator import attrgetter
from typing import NamedTuple

from canzona_cli.core.costs.padding import align, bucket_end, shard_elements
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.plan import Assignment, Bucket, Cell, PlanSettings, Range, SameObject
from canzona_cli.core.setup import Mesh


class Part(NamedTuple):
    """Consecutive elements of a parameter that must have one owner."""

    unit: int
    matrices: tuple[int, ...]
    """The indices of the part's matrices in the plan's list."""
    elements: int
    """The elements on one TP rank."""


class Parameter(NamedTuple):
    """A parameter of Megatron. In the known model families, fc1 has two parts, gate and up, unless they are
    one matrix; all other parameters have one part."""

    name: str
    chunk: int
    """The index of the model chunk within its stage."""
    parts: tuple[Part, ...]
    elements: int
    """The elements on one TP rank."""

    @property
    def matrices(self) -> tuple[int, ...]:
        return tuple(index for part in self.parts for index in part.matrices)


def stage_parameters(matrices: Sequence[Matrix], stage: int, tp: int) -> list[Parameter]:
    """Lists a stage's parameters in registration order, each with its parts."""
    grouped: dict[str, dict[int, list[Matrix]]] = {}
    for matrix in matrices:
        if matrix.stage == stage:
            grouped.setdefault(matrix.parameter, {}).setdefault(matrix.unit, []).append(matrix)
    parameters: list[Parameter] = []
    for name, units in grouped.items():
        parts = tuple(
            Part(unit, tuple([matrix.index for matrix in members]), _elements_on_rank(members, tp))
            for unit, members in units.items()
        )
        chunk = next(iter(units.values()))[0].chunk
        parameters.append(Parameter(name, chunk, parts, sum([part.elements for part in parts])))
    return parameters


def _elements_on_rank(members: Sequence[Matrix], tp: int) -> int:
    """Counts the elements of a unit that one TP rank stores. A matrix of a single head is stored whole on
    one rank, and all ranks store equally many of them."""
    heads = fragments = 0
    for matrix in members:
        if matrix.home is None:
            fragments += matrix.fragment_elements(tp)
        else:
            heads += matrix.elements
    return heads // tp + fragments


class Pool(NamedTuple):
    """The matrices of a pipeline stage whose gradients are reduced over the same ranks."""

    stage: int
    expert_rank: int | None = None
    """The matrices' `Matrix.expert_rank`."""

    def cell(self, owner: int, mesh: Mesh) -> Cell:
        """Returns the cell of an owner: for experts, the cell that stores them; otherwise the first cell of
        its row."""
        if self.expert_rank is None:
            return Cell(owner=owner, host=0)
        return Cell.at(mesh.expert_cells(self.expert_rank)[owner], mesh)


def pools(matrices: Sequence[Matrix]) -> list[Pool]:
    """Lists the pools of all stages, ascending. In each stage, the pool of the matrices that all ranks store
    comes first."""
    return list(pool_matrices(matrices))


def pool_matrices(matrices: Sequence[Matrix]) -> Mapping[Pool, Sequence[Matrix]]:
    """Returns the matrices of each pool, in order, by the pools of `pools`."""
    return _pooled(SameObject(matrices))


def alike_pools(matrices: Sequence[Matrix]) -> Mapping[Pool, Pool]:
    """Returns, for each pool, the first pool with the same matrices in the same order, except for their names and
    numbers. Most stages are alike, and so are the experts of all expert-parallel ranks. The first stage is like no
    other, because only its buffers are cut into buckets."""
    return _alike(SameObject(matrices))


_Matrices = SameObject[Sequence[Matrix]]


class LikeStage(NamedTuple):
    """A pipeline stage, and the first stage with the same work."""

    first: int
    indices: Sequence[int]
    """The matrices of the stage, pool by pool. Matrices at the same place in both stages are alike."""


def alike_stages(matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment) -> Mapping[int, LikeStage]:
    """Returns, for each stage, the first stage with alike matrices that have the same costs and the same cells."""
    cells, shared = assignment.cells, assignment.shared_costs
    stages: dict[int, LikeStage] = {}
    for alike in _stages_with_alike_pools(SameObject(matrices)):
        first: dict[Hashable, int] = {}
        for stage, indices in alike.items():
            key: Hashable = None
            if len(alike) > 1:
                # `assign` gives alike stages the same objects as cells.
                of_matrices = tuple([id(cells[index]) for index in indices]), tuple(map(costs.__getitem__, indices))
                key = of_matrices, tuple(map(shared.get, indices)) if shared else None
            stages[stage] = LikeStage(first.setdefault(key, stage), indices)
    return stages


@lru_cache(maxsize=8)
def _stages_with_alike_pools(key: _Matrices) -> Sequence[Mapping[int, Sequence[int]]]:
    """Returns groups of stages with alike matrices: the matrices of each stage, pool by pool, by stage."""
    members, alike = pool_matrices(key.value), alike_pools(key.value)
    groups: dict[Hashable, dict[int, Sequence[int]]] = {}
    for stage, of_stage in groupby(members, key=lambda pool: pool.stage):
        pools = list(of_stage)
        group = groups.setdefault(tuple(map(alike.__getitem__, pools)), {})
        group[stage] = [matrix.index for pool in pools for matrix in members[pool]]
    return list(groups.values())


def typical_pools(matrices: Sequence[Matrix]) -> list[Pool]:
    """Lists the first of several pools that are alike."""
    return list(dict.fromkeys(alike_pools(matrices).values()))


def cut(
    parameters: Sequence[Parameter], bucket_elements: int | None, *, stage: int, even: int = 1
) -> list[list[Parameter]]:
    """Cuts a stage's parameters into buckets, starting with the parameter that was registered last.

    `bucket_elements` applies only to the first stage. In the other stages, as in Megatron, every model chunk
    is one bucket.

    Args:
        even: a bucket ends only when its number of parts of each size is a multiple of `even`, or when it is
            twice as large as `bucket_elements`.
    """
    by_chunk = [list(of_chunk) for _, of_chunk in groupby(parameters, lambda parameter: parameter.chunk)]
    limit = bucket_elements if stage == 0 else None
    return [bucket for of_chunk in reversed(by_chunk) for bucket in _cut(of_chunk, limit, even)]


def pool_parameters(matrices: Sequence[Matrix], pool: Pool, tp: int) -> list[Parameter]:
    """Lists the parameters of a pool in registration order. The list is cached; do not change it."""
    return _pool_parameters(SameObject(matrices), pool, tp)


def pool_buckets(
    matrices: Sequence[Matrix], pool: Pool, mesh: Mesh, bucket_elements: int | None
) -> list[list[Parameter]]:
    """Lists the parameters of each bucket of a pool, see `cut`. The lists are cached; do not change them."""
    even = 1 if pool.expert_rank is None else mesh.expert_owners
    return _pool_buckets(SameObject(matrices), pool, mesh.tp, bucket_elements, even)


@lru_cache(maxsize=8)
def _pooled(key: _Matrices) -> Mapping[Pool, Sequence[Matrix]]:
    """Returns the matrices of each pool."""
    pooled: dict[tuple[int, int | None], list[Matrix]] = {}
    for matrix in key.value:
        pooled.setdefault((matrix.stage, matrix.expert_rank), []).append(matrix)

    def place(pool: Pool) -> tuple[int, int]:
        return pool.stage, -1 if pool.expert_rank is None else pool.expert_rank

    return {pool: pooled[pool] for pool in sorted(starmap(Pool, pooled), key=place)}


@lru_cache(maxsize=8)
def _alike(key: _Matrices) -> Mapping[Pool, Pool]:
    first: dict[Hashable, Pool] = {}
    return {pool: first.setdefault(_structure(pool, members), pool) for pool, members in _pooled(key).items()}


def _structure(pool: Pool, members: Sequence[Matrix]) -> Hashable:
    """Returns everything on which the buckets of a pool and the updates of its matrices depend."""
    fields = tuple(map(_FIELDS, members))
    units, parameters = _in_order(map(_UNIT, members)), _in_order(map(_PARAMETER, members))
    return pool.stage == 0, pool.expert_rank is None, fields, units, parameters


_FIELDS, _UNIT = attrgetter("kind", "rows", "cols", "shard_dim", "home", "chunk"), attrgetter("unit")
_PARAMETER = attrgetter("parameter")


def _in_order(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Numbers values in the order in which they occur; returns the number of each."""
    values = list(values)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(map(numbers.__getitem__, values))


@lru_cache(maxsize=512)
def _pool_parameters(key: _Matrices, pool: Pool, tp: int) -> list[Parameter]:
    return stage_parameters(_pooled(key)[pool], pool.stage, tp)


@lru_cache(maxsize=512)
def _pool_buckets(key: _Matrices, pool: Pool, tp: int, bucket_elements: int | None, even: int) -> list[list[Parameter]]:
    return cut(_pool_parameters(key, pool, tp), bucket_elements, stage=pool.stage, even=even)


def _cut(parameters: Sequence[Parameter], limit: int | None, even: int) -> list[list[Parameter]]:
    """Cuts a model chunk's parameters into buckets. A bucket is closed once it holds `limit` elements and can
    be divided evenly (see `cut`); a `limit` of None gives one bucket."""
    closed: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled, uneven = 0, Counter[int]()
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled = align(filled) + parameter.elements
        for part in parameter.parts if even > 1 else ():
            uneven[part.elements] = (uneven[part.elements] + 1) % even
        if limit is None or filled < limit:
            continue
        if filled >= 2 * limit or not any(uneven.values()):
            closed.append(bucket)
            bucket, filled, uneven = [], 0, Counter()
    return [*closed, bucket] if bucket else closed


def buckets(
    matrices: Sequence[Matrix],
    assignment: Assignment,
    layout: Mesh,
    settings: PlanSettings,
    bucket_elements: int | None = None,
    chosen_pools: Sequence[Pool] | None = None,
) -> tuple[Bucket, ...]:
    """Returns the buckets of all stages, numbered from 0 in each stage. The buckets of a pool are in the
    order in which gradients become ready.

    - strategy canzona: the parameters of an owner are adjacent, in uneven shards. A parameter whose gate and
      up have two owners is placed on the border between their ranges. If that is impossible, which is rare, an
      owner gets a second range;
    - strategies paper and asc: Megatron's order.

    The only padding is alignment. An owner without a parameter in a bucket has no range in it.
    `ReductionModel.choices` then has the ways in which each bucket may be reduced and gathered.

    Args:
        bucket_elements: the size at which Megatron closes a bucket of the first stage; None for one bucket
            per model chunk.
        chosen_pools: the pools whose buckets are returned; None for all.
    """
    made: list[Bucket] = []
    bucket_counts = Counter[int]()
    members, alike = pool_matrices(matrices), alike_pools(matrices)
    filled: dict[Hashable, tuple[Pool, list[Bucket]]] = {}
    """The first of several alike pools with the same owners, and its buckets, by what is alike."""
    for pool in members if chosen_pools is None else chosen_pools:
        owners = tuple([assignment.cells[m.index].reducing_rank(m, layout) for m in members[pool]])
        key, first_index = (alike[pool], owners), bucket_counts[pool.stage]
        if key in filled:
            first_pool, of_pool = filled[key]
            of_pool = list(copy_buckets(of_pool, members[first_pool], members[pool], pool, first_index))
        else:
            cut_pool = pool_buckets(matrices, pool, layout, bucket_elements)
            owner_of = dict(zip([matrix.index for matrix in members[pool]], owners, strict=True))
            of_pool = [
                _lay_out(bucket, owner_of, pool, layout, settings, index)
                for index, bucket in enumerate(cut_pool, first_index)
            ]
            filled[key] = pool, of_pool
        made += of_pool
        bucket_counts[pool.stage] += len(of_pool)
    return tuple(made)


def copy_buckets(
    buckets: Iterable[Bucket], source: Sequence[Matrix], target: Sequence[Matrix], pool: Pool, first_index: int
) -> Iterator[Bucket]:
    """Yields the buckets of `pool`, whose matrices are `target`, like `buckets` of an alike pool, whose matrices are
    `source`; numbered from `first_index`."""
    same_place = {old.index: new for old, new in zip(source, target, strict=True)}
    for index, bucket in enumerate(buckets, first_index):
        of_ranges = [[same_place[place] for place in part.matrices] for part in bucket.ranges]
        yield replace(
            bucket,
            index=index,
            stage=pool.stage,
            expert_rank=pool.expert_rank,
            parameters=tuple(dict.fromkeys([matrix.parameter for of_range in of_ranges for matrix in of_range])),
            ranges=tuple(
                part._replace(matrices=tuple([matrix.index for matrix in of_range]))
                for part, of_range in zip(bucket.ranges, of_ranges, strict=True)
            ),
        )


def _lay_out(
    bucket: Sequence[Parameter], owner_of: Mapping[int, int], pool: Pool, mesh: Mesh, settings: PlanSettings, index: int
) -> Bucket:
    """Returns the `index`-th bucket of its stage, which has these parameters.

    Args:
        owner_of: the owner of each matrix, by index, numbered as in the ranges of buckets.
    """
    owned = [_Owned(item, tuple([owner_of[part.matrices[0]] for part in item.parts])) for item in bucket]
    order = _order_by_owner(owned) if settings.strategy == "canzona" else owned
    starts, end = _place_consecutively([item.parameter for item in order])
    return _fill_bucket(zip(starts, order, strict=True), bucket_end(end, mesh.reducers(pool.expert_rank)), pool, index)


class _Owned(NamedTuple):
    """A parameter and the owner of each of its parts."""

    parameter: Parameter
    owners: tuple[int, ...]

    @property
    def first_owner(self) -> int:
        return self.owners[0]

    @property
    def last_owner(self) -> int:
        return self.owners[-1]


def _order_by_owner(owned: Sequence[_Owned]) -> list[_Owned]:
    """Orders a bucket's parameters so that owners have few ranges.

    A parameter with two owners links the first to the last. Links are joined into chains without cycles, in
    which every owner has at most one incoming and one outgoing link. Owners follow chain by chain, and a
    linking parameter is placed on the border between its owners. Any other parameter with two owners is
    placed after its first owner or before its last owner if the border there is free, otherwise at the end of
    the bucket.
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
        first, last = item.first_owner, item.last_owner
        single.setdefault(first, [])
        single.setdefault(last, [])
        if len(set(item.owners)) == 1:
            single[first].append(item)
        elif first not in after and last not in before and head(first) != head(last):
            after[first] = before[last] = item
            chain[head(last)] = head(first)
        else:
            loose.append(item)
    tail: list[_Owned] = []
    at_end: dict[int, list[_Owned]] = {}
    at_start: dict[int, list[_Owned]] = {}
    for item in loose:
        if item.first_owner not in after and item.first_owner not in at_end:
            at_end[item.first_owner] = [item]
        elif item.last_owner not in before and item.last_owner not in at_start:
            at_start[item.last_owner] = [item]
        else:
            tail.append(item)
    order: list[_Owned] = []
    for start in sorted(owner for owner in single if owner not in before):
        owner: int | None = start
        while owner is not None:
            order += [*at_start.get(owner, []), *single[owner], *at_end.get(owner, [])]
            link = after.get(owner)
            owner = None
            if link is not None:
                order.append(link)
                owner = link.last_owner
    return order + tail


def _place_consecutively(parameters: Iterable[Parameter]) -> tuple[list[int], int]:
    """Places parameters one after another, each at an aligned start; returns the starts and the end of the
    last parameter."""
    starts: list[int] = []
    end = 0
    for parameter in parameters:
        starts.append(align(end))
        end = starts[-1] + parameter.elements
    return starts, end


def _fill_bucket(placed: Iterable[tuple[int, _Owned]], elements: int, pool: Pool, index: int) -> Bucket:
    """Returns a bucket of `elements` elements.

    Args:
        placed: each parameter with its start in the bucket, ascending.
    """
    ranges: list[tuple[int, int, int, list[int]]] = []
    names: list[str] = []
    used = 0
    for start, item in placed:
        names.append(item.parameter.name)
        for part, owner in zip(item.parameter.parts, item.owners, strict=True):
            _extend(ranges, start, start + part.elements, owner, part.matrices)
            start += part.elements
            used += part.elements
    return Bucket(
        index=index,
        stage=pool.stage,
        expert_rank=pool.expert_rank,
        parameters=tuple(names),
        elements=elements,
        padding=elements - used,
        ranges=tuple(Range(start, end, owner, tuple(matrices)) for start, end, owner, matrices in ranges),
    )


def even_bucket(by_owner: Sequence[Sequence[Parameter]], pool: Pool) -> Bucket:
    """Returns a bucket of Megatron's layer-wise optimizer, which is not numbered yet, with one shard for each owner.
    Shards are padded to the length of the fullest, so the ring that reduces or gathers the bucket needs no second
    transfer.

    Args:
        by_owner: the parameters of each owner.
    """
    positions = [_place_consecutively(parameters) for parameters in by_owner]
    shard = shard_elements(max(end for _, end in positions), len(by_owner))
    placed = (
        (owner * shard + start, _Owned(parameter, (owner,) * len(parameter.parts)))
        for owner, (parameters, (starts, _)) in enumerate(zip(by_owner, positions, strict=True))
        for parameter, start in zip(parameters, starts, strict=True)
    )
    return replace(_fill_bucket(placed, shard * len(by_owner), pool, 0), reduction="ring", gathering="ring")


def _extend(
    ranges: list[tuple[int, int, int, list[int]]], start: int, end: int, owner: int, matrices: tuple[int, ...]
) -> None:
    """Appends the range [start, end), or extends the last range if it has the same owner and ends at `start`
    up to alignment.

    Args:
        ranges: (start, end, owner, matrices) of each range.
    """
    if ranges:
        last_start, last_end, last_owner, last_matrices = ranges[-1]
        if last_owner == owner and start in (last_end, align(last_end)):
            ranges[-1] = last_start, end, owner, last_matrices
            last_matrices.extend(matrices)
            return
    ranges.append((start, end, owner, [*matrices]))
