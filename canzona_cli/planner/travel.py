"""Of assignments whose updates take as long, the one whose gradients and weights travel best.

An owner's range of a bucket is a collective of its own, with its latency; where a bucket travels in one, even shares
are better. Most of it is hidden, but not the last bucket of a stage: it is reduced behind the last backward, and
gathered in front of the next forward.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from canzona_cli.config.schema import Layout
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.buckets import Part, cut, stage_parameters, stages
from canzona_cli.planner.micro_groups import Grouped, held_jobs
from canzona_cli.planner.parts import Assignment, Bucket, Cell, Share
from canzona_cli.planner.reduction import ReductionModel

Seat = tuple[tuple[Cell, Share | None], ...]
"""Of a unit: the cell of each of its matrices, and how they are shared."""


def few_owners(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment,
    layout: Layout,
    bucket_elements: int | None,
) -> Assignment:
    """Units of one kind changed round, so that buckets have few owners: the last one of a stage first.

    Every cell keeps as many of each kind, so that its updates take as long as before.
    """
    cells, shares = list(assignment.cells), dict(assignment.shares)
    for stage in stages(matrices):
        parameters = stage_parameters(matrices, stage, layout.tp)
        buckets = [
            [part for parameter in bucket for part in parameter.parts]
            for bucket in cut(parameters, bucket_elements, stage=stage)
        ]

        def kind(part: Part) -> Hashable:
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
            wanted: dict[Hashable, list[Part]] = defaultdict(list)
            for part in bucket:
                wanted[kind(part)].append(part)
            while wanted:
                owner = _most_useful(wanted, free)
                for each in [each for each in wanted if owner in free[each]]:
                    seats = free[each][owner]
                    while wanted[each] and seats:
                        for index, (cell, share) in zip(wanted[each].pop().matrices, seats.pop(), strict=True):
                            cells[index] = cell
                            if share is not None:
                                shares[index] = share
                    if not seats:
                        del free[each][owner]
                    if not wanted[each]:
                        del wanted[each]
    return Assignment(cells=tuple(cells), shares=MappingProxyType(dict(sorted(shares.items()))))


def in_order_of_reductions(
    matrices: Sequence[Matrix], assignment: Assignment, layout: Layout, bucket_elements: int | None
) -> Assignment:
    """Numbers the owners of every stage in the order in which its buckets are reduced to them.

    The chain of ranks of one reduction then overlaps the next one's. Of the owners that a bucket adds, the one that is
    needed longest gets the highest number, because it comes first in a bucket that follows. Gatherings go the other
    way and overlap less, but nothing hides the last reductions, which wait for the end of the backward pass.
    """
    number: dict[tuple[int, int], int] = {}
    for stage in stages(matrices):
        owners = [
            [assignment.cells[part.matrices[0]].owner for parameter in bucket for part in parameter.parts]
            for bucket in cut(stage_parameters(matrices, stage, layout.tp), bucket_elements, stage=stage)
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
    wanted: Mapping[Hashable, Sequence[Part]], free: Mapping[Hashable, Mapping[int, Sequence[Seat]]]
) -> int:
    """The owner that can take most elements of what a bucket still wants, of equal ones the first."""
    takes: dict[int, int] = defaultdict(int)
    for kind, parts in wanted.items():
        for owner, seats in free[kind].items():
            takes[owner] += min(len(parts), len(seats)) * parts[0].elements
    return min(takes, key=lambda owner: (-takes[owner], owner))


def slowest(
    matrices: Sequence[Matrix], costs: Sequence[float], assignment: Assignment, grouped: Grouped
) -> dict[int, float]:
    """By stage: seconds of the owner that is done last, by the planner's clock."""
    found: dict[int, float] = defaultdict(float)
    for (stage, _), jobs in held_jobs(matrices, costs, assignment).items():
        found[stage] = max(found[stage], grouped.of(jobs)[0])
    return found


def travel(buckets: Iterable[Bucket], model: ReductionModel) -> tuple[dict[int, float], float]:
    """Seconds of each stage's last bucket, there and back, and of all buckets."""
    last, whole = dict[int, float](), 0.0
    for stage, held in groupby(buckets, key=lambda bucket: bucket.stage):
        for reduced, gathered in model.in_turn(list(held)):
            last[stage] = reduced.seconds + gathered.seconds
            whole += last[stage] - reduced.fill_s - gathered.fill_s
    return last, whole
