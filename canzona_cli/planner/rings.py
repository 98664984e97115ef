"""A bucket's uneven shares in native collectives of equal parts: who has what of it, and hands it to whom.

A reduce-scatter and an all-gather give every rank as much as any other; owners' shares are not alike:

    ranges of a bucket | 0: aaaaaa | 1: b | 2: cc |
    equal parts        | aaa | aaa | bcc |     Megatron's buffer as it lies: rank 1 still has to hand its part to 0, and
                                               rank 2 b to 1

An all-to-all after the reduce-scatter (before the all-gather) hands over what is not where it belongs. Its messages lie
in the order of ranks, so parts are cut into runs of ascending owners with an all-to-all each; one is usual. Only
owners' own shares are copied. Where every part is its owner's, nothing is handed over: it
is Megatron's own collective.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from canzona_cli.planner.parts import Bucket, Range


class Segment(NamedTuple):
    """Consecutive elements of a bucket on one rank's part, of one owner; alignment behind a range belongs to it."""

    owner: int
    start: int
    end: int


Run = tuple[Segment, ...]
"""Of one rank's part: adjoining segments, each of a later owner than the one before."""


def shares(bucket: Bucket) -> dict[int, int]:
    """Elements of each owner that has any, alignment inside its ranges included."""
    found: dict[int, int] = {}
    for part in bucket.ranges:
        found[part.owner] = found.get(part.owner, 0) + part.end - part.start
    return found


def handovers(bucket: Bucket, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """All-to-alls of a ring, in order: of each rank, the run of its part that it hands over (is handed).

    Together they are the whole bucket, in which each rank's part is `bucket.elements / ranks`; none where every part is
    its owner's.
    """
    return _handovers(bucket.ranges, bucket.elements, ranks)


@lru_cache(maxsize=1024)
def _handovers(ranges: tuple[Range, ...], elements: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    parts = _parts(ranges, elements, ranks)
    if all(segment.owner == rank for rank, part in enumerate(parts) for segment in part):
        return ()
    runs = [_runs(part) for part in parts]
    return tuple(
        tuple(of_part[number] if number < len(of_part) else () for of_part in runs)
        for number in range(max(map(len, runs)))
    )


def handed(bucket: Bucket, ranks: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Of each of `handovers`: elements that every rank hands over of its part, and is handed of its share."""
    return _handed(bucket.ranges, bucket.elements, ranks)


@lru_cache(maxsize=1024)
def _handed(
    ranges: tuple[Range, ...], elements: int, ranks: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    found = []
    for runs in _handovers(ranges, elements, ranks):
        there, owned = [0] * ranks, [0] * ranks
        for rank, run in enumerate(runs):
            for owner, start, end in run:
                if owner != rank:
                    there[rank] += end - start
                    owned[owner] += end - start
        found.append((tuple(there), tuple(owned)))
    return tuple(found)


def _parts(ranges: Sequence[Range], elements: int, ranks: int) -> list[list[Segment]]:
    """Segments of each rank's part, ascending."""
    part = elements // ranks
    found: list[list[Segment]] = [[] for _ in range(ranks)]
    borders = [0, *(later.start for later in ranges[1:]), elements]
    for held, (start, end) in zip(ranges, pairwise(borders), strict=True):
        while start < end:
            rank = start // part
            stop = min(end, (rank + 1) * part)
            # A part that only pads the bucket stays where it is.
            found[rank].append(Segment(held.owner if start < held.end else rank, start, stop))
            start = stop
    return found


def _runs(part: Sequence[Segment]) -> list[Run]:
    runs: list[list[Segment]] = []
    for segment in part:
        if not runs or segment.owner < runs[-1][-1].owner:
            runs.append([segment])
        elif segment.owner == runs[-1][-1].owner:
            runs[-1][-1] = runs[-1][-1]._replace(end=segment.end)
        else:
            runs[-1].append(segment)
    return [tuple(run) for run in runs]
