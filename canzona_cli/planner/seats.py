"""Exchanges units between owners to shorten the communication of buckets; the time of updates stays the same.

Units of the same kind have the same cost and the same number of elements, so owners may exchange them freely.
Collectives for each owner's range are fastest if few owners have a range in the bucket; rings are fastest if
owners have equal shares.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from canzona_cli.config.schema import Mesh
from canzona_cli.costs.sharing import SharedCost
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.buckets import Parameter, Part, owner_of, pool_buckets, pools
from canzona_cli.planner.plan import Assignment, Cell

Seat = tuple[tuple[Cell, SharedCost | None], ...]
"""The place of a unit: the cell of each of its matrices, and the matrix's costs if it is shared."""


def concentrate_owners(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    layout: Mesh,
    bucket_elements: int | None,
) -> Assignment:
    """Exchanges units of the same kind between cells so that buckets have few owners. The last bucket of a
    pool is the first to choose its owners.

    Every cell keeps its number of units of each kind, so its updates take as long as before.
    """
    cells, shared_costs = list(assignment.cells), dict(assignment.shared_costs)

    kinds: dict[Hashable, int] = {}
    kind_of: dict[tuple[int, ...], int] = {}
    """The number of each part's kind, by the part's matrices. Parts of the same kind can be exchanged."""

    def kind(part: Part) -> int:
        """Returns the number of the part's kind."""
        if part.matrices not in kind_of:
            members = [matrices[index] for index in part.matrices]
            key = tuple(
                (costs[m.index], m.rows, m.cols, m.shard_dim, m.home, m.index in assignment.shared_costs)
                for m in members
            )
            kind_of[part.matrices] = kinds.setdefault(key, len(kinds))
        return kind_of[part.matrices]

    for pool in pools(matrices):
        buckets = [
            [part for parameter in bucket for part in parameter.parts]
            for bucket in pool_buckets(matrices, pool, layout, bucket_elements)
        ]
        free: dict[Hashable, dict[int, list[Seat]]] = defaultdict(dict)
        for part in (part for bucket in buckets for part in bucket):
            seat = tuple((assignment.cells[index], assignment.shared_costs.get(index)) for index in part.matrices)
            free[kind(part)].setdefault(owner_of(part, matrices, assignment, layout), []).append(seat)
        for bucket in reversed(buckets):
            for part, seat in _seat_parts(bucket, kind, free):
                for index, (cell, shared_cost) in zip(part.matrices, seat, strict=True):
                    cells[index] = cell
                    if shared_cost is not None:
                        shared_costs[index] = shared_cost
    return Assignment(cells=tuple(cells), shared_costs=MappingProxyType(dict(sorted(shared_costs.items()))))


def _seat_parts(
    bucket: Sequence[Part], kind_of: Callable[[Part], Hashable], free: Mapping[Hashable, dict[int, list[Seat]]]
) -> Iterator[tuple[Part, Seat]]:
    """Assigns a seat to each part of a bucket so that few owners get parts; yields (part, seat).

    Args:
        free: the free seats, by kind and owner. Assigned seats are removed.
    """
    parts_by_kind: dict[Hashable, list[Part]] = defaultdict(list)
    for part in bucket:
        parts_by_kind[kind_of(part)].append(part)
    while parts_by_kind:
        owner = _most_useful(parts_by_kind, free)
        for kind in [kind for kind in parts_by_kind if owner in free[kind]]:
            parts, seats = parts_by_kind[kind], free[kind][owner]
            while parts and seats:
                yield parts.pop(), seats.pop()
            if not seats:
                del free[kind][owner]
            if not parts:
                del parts_by_kind[kind]


def renumber_owners(
    matrices: Sequence[Matrix], assignment: Assignment, layout: Mesh, bucket_elements: int | None
) -> Assignment:
    """Renumbers the owners of every stage in the order in which buckets are reduced to them.

    The chain of ranks of one reduction then overlaps with the next chain. If several owners occur in a bucket
    for the first time, the owner with the latest last bucket gets the highest number, because it comes first
    in a following bucket. Gatherings run in the opposite order and overlap less. Reductions matter more,
    because the last reductions wait for the end of the backward pass and overlap with nothing else.

    If experts are divided among ranks, owners keep their numbers: the number of a rank decides which experts
    it stores, and these experts were balanced together with the matrices of this owner.
    """
    if layout.ep > 1:
        return assignment
    new_number: dict[tuple[int, int], int] = {}
    for pool in pools(matrices):
        bucket_owners = [
            [assignment.cells[part.matrices[0]].owner for parameter in bucket for part in parameter.parts]
            for bucket in pool_buckets(matrices, pool, layout, bucket_elements)
        ]
        last_bucket = {owner: index for index, owners in enumerate(bucket_owners) for owner in owners}
        ordered = dict.fromkeys(
            owner for owners in bucket_owners for owner in sorted(owners, key=last_bucket.__getitem__)
        )
        new_number.update({(pool.stage, owner): number for number, owner in enumerate(ordered)})
    cells = tuple(
        replace(cell, owner=new_number[matrix.stage, cell.owner])
        for matrix, cell in zip(matrices, assignment.cells, strict=True)
    )
    return replace(assignment, cells=cells)


def _most_useful(
    parts_by_kind: Mapping[Hashable, Sequence[Part]], free: Mapping[Hashable, Mapping[int, Sequence[Seat]]]
) -> int:
    """Returns the owner that can take the most elements of a bucket's unassigned parts; if several can, the
    owner with the lowest number.

    Args:
        parts_by_kind: the unassigned parts.
        free: the free seats, by kind and owner.
    """
    taken_elements: dict[int, int] = defaultdict(int)
    for kind, parts in parts_by_kind.items():
        for owner, seats in free[kind].items():
            taken_elements[owner] += min(len(parts), len(seats)) * parts[0].elements
    return min(taken_elements, key=lambda owner: (-taken_elements[owner], owner))


def spread_bytes(
    buckets: Sequence[Sequence[Parameter]], owners: Mapping[int, int], kinds: Mapping[int, Hashable]
) -> dict[int, int]:
    """Exchanges units of the same kind between owners so that each bucket's bytes are spread evenly over
    owners.

    Every owner keeps its number of units of each kind. Bucket by bucket, the units of a kind are given to the
    owners with the fewest bytes of the bucket so far. In a tie, the owner with the most unassigned units of
    this kind comes first. Inside a bucket, gate and up of a layer get the same or neighbouring owners, so
    that few parameters have two owners.

    Args:
        owners: the owner of each unit before the exchange.
        kinds: the kind of each unit.
    """
    unassigned: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for unit, owner in sorted(owners.items()):
        unassigned[kinds[unit]][owner] += 1
    new_owner: dict[int, int] = {}
    for bucket in buckets:
        held: Counter[int] = Counter()
        parts_of_kind: dict[Hashable, list[Part]] = defaultdict(list)
        # Parameters of several parts first: their parts are then next to each other in the list.
        for parameter in sorted(bucket, key=lambda parameter: -len(parameter.parts)):
            for part in parameter.parts:
                parts_of_kind[kinds[part.unit]].append(part)
        for kind, parts in sorted(parts_of_kind.items(), key=lambda item: -item[1][0].elements):
            left = unassigned[kind]
            chosen: list[int] = []
            while len(chosen) < len(parts):
                ranked = sorted(left, key=lambda owner: (held[owner], -left[owner], owner))
                for owner in ranked[: len(parts) - len(chosen)]:
                    chosen.append(owner)
                    held[owner] += parts[0].elements
                    left[owner] -= 1
                    if not left[owner]:
                        del left[owner]
            for part, owner in zip(parts, sorted(chosen), strict=True):
                new_owner[part.unit] = owner
    return new_owner
