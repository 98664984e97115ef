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
the TP group have packed their messages and the previous exchange is done. The exchanges of the first two
groups (`entries_before_norm`) start before the gradient norm is known, so that they overlap with norm, clip
and AdamW.

Shared matrices follow all groups and are in no exchange. Two matrices at a time are interleaved
(`shared_order`): while the squares of one are communicated, the other is computed.

With Shampoo, SOAP and their variants, the steps of a refresh period take different times (`refreshes`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.update import algorithm_of, period_seconds
from canzona_cli.model.matrices import Matrix
from canzona_cli.optimizers.facts import Algorithm
from canzona_cli.planner.plan import Cell


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
    for first in range(0, len(parts), LANES):
        interleaved = range(first, min(first + LANES, len(parts)))
        for part in range(max(parts[matrix] for matrix in interleaved)):
            yield from ((matrix, part) for matrix in interleaved if part < parts[matrix])


def entries_before_norm(groups: int) -> int:
    """Returns the number of entries of `order` that are executed before the gradient norm is known."""
    return min(2, groups)


@dataclass(frozen=True, kw_only=True)
class Refreshes:
    """The time of the matrix updates in the steps of a refresh period."""

    steps_s: tuple[float, ...]
    """The seconds of matrix updates on the slowest rank, for each step of the period."""
    most_s: float
    """The mean seconds of matrix updates per step on the rank with the most work in a period."""

    @property
    def mean_s(self) -> float:
        """The mean seconds of matrix updates per step, if every step takes as long as its slowest rank."""
        return sum(self.steps_s) / len(self.steps_s)

    @property
    def excess_s(self) -> float:
        """The seconds by which the longest step exceeds the mean step. The longest iteration exceeds the mean
        iteration by the same time, because nothing overlaps with the updates of the slowest rank."""
        return max(self.steps_s) - self.mean_s


def refreshes(config: RunConfig, ranks: Iterable[Sequence[Matrix]]) -> Refreshes:
    """Adds up the time of updates in each step of a refresh period. All matrices begin the period in the same
    step.

    Args:
        ranks: the matrices that each rank updates.
    """
    algorithm = algorithm_of(config)
    seconds_of_ranks: list[list[float]] = []
    for matrices in ranks:
        in_period = [_seconds_in_period(algorithm, matrix, config) for matrix in matrices]
        seconds_of_ranks.append([sum(step) for step in zip(*in_period, strict=True)])
    return Refreshes(
        steps_s=tuple(max(step) for step in zip(*seconds_of_ranks, strict=True)),
        most_s=max(sum(steps) / len(steps) for steps in seconds_of_ranks),
    )


def _seconds_in_period(algorithm: Algorithm, matrix: Matrix, config: RunConfig) -> Sequence[float]:
    """Returns the seconds of a matrix's update in each step of a refresh period."""
    steps = period_seconds(algorithm, *matrix.shape, config.cluster)
    # A matrix whose sides are all longer than max_preconditioner_dim is never refreshed: its steps are equal.
    return steps * algorithm.refresh_period if len(steps) == 1 else steps


def matrices_by_rank(matrices: Sequence[Matrix], cells: Sequence[Cell] | None) -> list[list[Matrix]]:
    """Lists the matrices that each rank updates. If `cells` is None, a rank updates all matrices of its
    stage."""
    by_cell: dict[tuple[int, Cell | None], list[Matrix]] = {}
    for matrix in matrices:
        by_cell.setdefault((matrix.stage, None if cells is None else cells[matrix.index]), []).append(matrix)
    return list(by_cell.values())
