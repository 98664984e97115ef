"""The order in which an owner's TP group works through its micro-groups and shared matrices:
the engine runs it.

A micro-group goes through three stages, with an all-to-all between each two (`planner.exchange`):

    0     every rank   packs gradients
    1     hosts        unpack gradients, update their matrices, pack the weights
    2     every rank   unpacks weights

Two groups are ahead in stage 0, and stage 2 follows one group after stage 1, so that there is something to do
while an exchange is on its way: 0 of groups 0 and 1; then 1 of group 0, 0 of group 2; 1 of group 1, 0 of
group 3, 2 of group 0; and so on. One communicator carries the exchanges in that order. Each starts once all
ranks of the group have packed for it and the exchange before it is done. The first exchanges start before the
gradient norm is known (`ahead`): norm, clip and AdamW hide them.

Shared matrices follow all groups and travel in none. Two of them take turns (`turns`): while the squares of
one travel, the other computes.
"""

from collections.abc import Iterator, Sequence


def order(groups: int) -> Iterator[tuple[int, int]]:
    """Yields (group, stage) pairs, as all ranks of the TP group go through them."""
    yield from ((group, 0) for group in range(ahead(groups)))
    for tick in range(groups + 1):
        for stage, group in ((1, tick), (0, tick + 2), (2, tick - 1)):
            if 0 <= group < groups:
                yield group, stage


LANES = 2
"""Shared matrices that take turns, each with scratch of its own: one of an even place, one of an odd one."""


def turns(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (matrix, part) pairs of shared matrices, as all ranks of the TP group go through them.

    Args:
        parts: the parts of each matrix, between which its squares travel.
    """
    for first in range(0, len(parts), LANES):
        taking = range(first, min(first + LANES, len(parts)))
        for part in range(max(parts[matrix] for matrix in taking)):
            yield from ((matrix, part) for matrix in taking if part < parts[matrix])


def ahead(groups: int) -> int:
    """The number of places at the front of `order` that come before the gradients' norm is known."""
    return min(2, groups)
