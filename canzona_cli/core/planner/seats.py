"""Exchanges units between owners to shorten the communication of buckets; the time of updates stays the same.

Units of the same kind have the same cost and the same number of elements, so owners may exchange them freely.
Collectives for each owner's range are fastest if few owners have a range in the bucket; rings are fastest if
owners have equal shares.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import Parameter, Part, pool_buckets, pools
from canzona_cli.core.planner.plan import Assignment
from canzona_cli.core.setup import Mesh


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
