"""The order of an owner's work within a step: micro-groups, then shared matrices. The engine executes this
order.

A micro-group goes through three stages, with an all-to-all after the first and the second
(`planner.exchange`):

    0     every rank   packs gradients
    1     hosts        unpack gradients, update their matrices, pack the weights
    2     every rank   unpacks weights

Stages of different groups are interleaved, so that ranks have work during an exchange: stage 0 of groups 0
and 1; then stage 1 of group 0 and stage 0 of group 2; then stage 1 of group 1, stage 0 of group 3 and stage 2
of group 0; and so on. One communicator runs the exchanges in this order. An exchange starts once all ranks of
the TP group have packed their messages and the previous exchange is done. The gradient exchanges of the first
two groups (`entries_before_norm`) start before the gradient norm is known, so that they overlap with norm,
clip and AdamW.

Shared matrices follow all groups and are in no exchange. Two matrices at a time are interleaved
(`shared_order`): while the squares of one are communicated, the other is computed.
"""

from collections.abc import Iterator, Sequence


def order(groups: int) -> Iterator[tuple[int, int]]:
    """Yields (group, stage) pairs in the order in which all ranks of the TP group execute them."""
    yield from ((group, 0) for group in range(entries_before_norm(groups)))
    for tick in range(groups + 1):
        for stage, group in ((1, tick), (0, tick + 2), (2, tick - 1)):
            if 0 <= group < groups:
                yield group, stage


LANES = 2
"""The number of shared matrices that are interleaved. Matrices at even and at odd places have separate
scratch."""


def shared_order(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (matrix, part) pairs of shared matrices in the order in which all ranks of the TP group execute
    them.

    Args:
        parts: the number of parts of each matrix's update; its squares are communicated between parts.
    """
    for start in range(0, len(parts), LANES):
        interleaved = range(start, min(start + LANES, len(parts)))
        for part in range(max(parts[matrix] for matrix in interleaved)):
            yield from ((matrix, part) for matrix in interleaved if part < parts[matrix])


def entries_before_norm(groups: int) -> int:
    """Returns the number of entries of `order` that are executed before the gradient norm is known."""
    return min(2, groups)
