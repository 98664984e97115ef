"""The order of an owner's work: micro-groups and shared matrices within a step, and refreshes of
preconditioners over steps. The engine executes this order.

A micro-group goes through three stages, with an all-to-all after the first and the second
(`planner.exchange`):

    0     every rank   packs gradients
    1     hosts        unpack gradients, update their matrices, pack the weights
    2     every rank   unpacks weights

Stages of different groups are interleaved, so that ranks have work during an exchange: stage 0 of groups 0
and 1; then stage 1 of group 0 and stage 0 of group 2; then stage 1 of group 1, stage 0 of group 3 and stage 2
of group 0; and so on. One communicator runs the exchanges in this order. Each starts once all ranks of the TP
group have packed their messages and the previous exchange is done. The exchanges of the first two groups
(`ahead`) start before the gradient norm is known, so that they overlap with norm, clip and AdamW.

Shared matrices follow all groups and are in no exchange. Two at a time are interleaved (`turns`): while the
squares of one are communicated, the other computes.

A refresh (Shampoo, SOAP and their variants) takes as long as many plain updates, and in every step all ranks
wait for the slowest. So the refreshes of one rank are spread over the period, and the steps in which ranks
refresh most coincide.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.schema import KroneckerConfig, RunConfig
from canzona_cli.costs.update import ROUNDING, algorithm, peak_seconds, seconds
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.plan import Cell


def order(groups: int) -> Iterator[tuple[int, int]]:
    """Yields (group, stage) pairs in the order in which all ranks of the TP group execute them."""
    yield from ((group, 0) for group in range(ahead(groups)))
    for tick in range(groups + 1):
        for stage, group in ((1, tick), (0, tick + 2), (2, tick - 1)):
            if 0 <= group < groups:
                yield group, stage


LANES = 2
"""The number of shared matrices that are interleaved; the first, third, ... and the second, fourth, ... have
separate scratch."""


def turns(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (matrix, part) pairs of shared matrices in the order in which all ranks of the TP group execute
    them.

    Args:
        parts: the number of parts of each matrix's update; its squares are communicated between parts.
    """
    for first in range(0, len(parts), LANES):
        taking = range(first, min(first + LANES, len(parts)))
        for part in range(max(parts[matrix] for matrix in taking)):
            yield from ((matrix, part) for matrix in taking if part < parts[matrix])


def ahead(groups: int) -> int:
    """Returns the number of entries of `order` that are executed before the gradient norm is known."""
    return min(2, groups)


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The time of a rank's matrix updates."""

    every_s: float
    """The seconds of matrix updates in a step without refreshes."""
    refreshes_s: Sequence[float]
    """The seconds that each matrix's refresh adds."""


@dataclass(frozen=True, kw_only=True)
class Refreshes:
    """The steps in which matrices refresh."""

    turns: dict[int, int]
    """The turn of each matrix by index. A matrix refreshes when its number of completed steps plus its turn
    is a multiple of the period."""
    steps_s: tuple[float, ...]
    """The seconds of matrix updates on the slowest rank, by turn."""
    most_s: float
    """The seconds of matrix updates in a mean step of the rank with most to do in a period."""

    @property
    def mean_s(self) -> float:
        """The seconds of matrix updates in a mean step, each as long as on its slowest rank."""
        return sum(self.steps_s) / len(self.steps_s)


def refreshes(config: RunConfig, chosen: KroneckerConfig, ranks: Iterable[Sequence[Matrix]]) -> Refreshes:
    """Chooses the turns of all matrices; without `chosen.stagger` all refresh in the same step.

    Args:
        chosen: the run's optimizer.
        ranks: the matrices that each rank updates.
    """
    held, period = [list(matrices) for matrices in ranks], chosen.precondition_frequency
    works = [_work(config, matrices, period) for matrices in held]
    turns = take_turns(works, period) if chosen.stagger else [[0] * len(matrices) for matrices in held]
    return Refreshes(
        turns={
            matrix.index: turn
            for matrices, places in zip(held, turns, strict=True)
            for matrix, turn in zip(matrices, places, strict=True)
        },
        steps_s=slowest(works, turns, period),
        most_s=max((work.every_s + sum(work.refreshes_s) / period for work in works), default=0.0),
    )


def by_rank(matrices: Sequence[Matrix], cells: Sequence[Cell] | None) -> list[list[Matrix]]:
    """Lists the matrices that each rank updates; with `cells` None, a rank updates all of its stage's
    matrices."""
    by_cell: dict[tuple[int, Cell | None], list[Matrix]] = {}
    for matrix in matrices:
        by_cell.setdefault((matrix.stage, None if cells is None else cells[matrix.index]), []).append(matrix)
    return list(by_cell.values())


def take_turns(ranks: Sequence[RankWork], period: int) -> list[list[int]]:
    """Chooses a turn in [0, period) for each of a rank's refreshes.

    Takes the turns of `step_by_step` if the mean step is shorter and the longest step no longer than with
    those of `one_by_one`.
    """
    separate = [one_by_one(rank.refreshes_s, period) for rank in ranks]
    joint = step_by_step(ranks, period)
    separate_s, joint_s = (slowest(ranks, turns, period) for turns in (separate, joint))
    shorter = max(joint_s) <= max(separate_s) * (1 + ROUNDING) and sum(joint_s) < sum(separate_s)
    return joint if shorter else separate


def one_by_one(costs: Sequence[float], period: int) -> list[int]:
    """Spreads one rank's refreshes over a period so that its longest step is short; returns the turn of each.

    The costliest refresh first, each goes to the step with the least so far (Graham 1969: at most 4/3 of the
    optimum). Turns are numbered from the fullest step to the emptiest, so that the full steps of ranks that
    wait for each other coincide.

    Args:
        costs: the cost of each refresh, in any unit.

    Raises:
        ValueError: `period` is not positive.
    """
    if period < 1:
        raise ValueError(f"period is {period}; it has to be at least 1")
    steps = [(0.0, turn) for turn in range(period)]
    turns = [0] * len(costs)
    for index in _costliest_first(costs):
        load, turn = steps[0]
        turns[index] = turn
        heapq.heapreplace(steps, (load + costs[index], turn))
    fullest = {turn: place for place, (_, turn) in enumerate(sorted(steps, key=lambda step: (-step[0], step[1])))}
    return [fullest[turn] for turn in turns]


def step_by_step(ranks: Sequence[RankWork], period: int) -> list[list[int]]:
    """Chooses all ranks' turns so that few steps are long.

    Each step lasts as long as the longest step of the rank that is hardest to spread (`one_by_one`, over the
    remaining refreshes and steps). Every rank refreshes as much as it can in that time, costliest first,
    because all ranks wait for this step anyway, and keeps the rest for later steps.
    """
    left = [_costliest_first(rank.refreshes_s) for rank in ranks]
    turns = [[0] * len(rank.refreshes_s) for rank in ranks]
    for turn in range(period):
        pairs = list(zip(ranks, left, strict=True))
        end = max((_longest_step(rank, remaining, period - turn) for rank, remaining in pairs), default=0.0)
        for number, (rank, remaining) in enumerate(pairs):
            load, left[number] = rank.every_s, []
            for index in remaining:
                if load + rank.refreshes_s[index] <= end * (1 + ROUNDING):
                    load += rank.refreshes_s[index]
                    turns[number][index] = turn
                else:
                    left[number].append(index)
    return turns


def slowest(ranks: Sequence[RankWork], turns: Sequence[Sequence[int]], period: int) -> tuple[float, ...]:
    """Returns the seconds of matrix updates on the slowest rank, by turn."""
    steps = [0.0] * period
    for rank, turns_of_rank in zip(ranks, turns, strict=True):
        loads = [rank.every_s] * period
        for turn, refresh_s in zip(turns_of_rank, rank.refreshes_s, strict=True):
            loads[turn] += refresh_s
        steps = [max(pair) for pair in zip(steps, loads, strict=True)]
    return tuple(steps)


def _costliest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _longest_step(rank: RankWork, left: Sequence[int], steps: int) -> float:
    """Returns the seconds of a rank's longest step if `one_by_one` spreads the refreshes `left` over `steps`."""
    rest = replace(rank, refreshes_s=[rank.refreshes_s[index] for index in left])
    return max(slowest([rest], [one_by_one(rest.refreshes_s, steps)], steps))


def _work(config: RunConfig, matrices: Sequence[Matrix], period: int) -> RankWork:
    """Splits the seconds of a rank's updates into those of every step and those that refreshes add."""
    how, cluster = algorithm(config), config.cluster
    means = [seconds(how, *matrix.shape, cluster) for matrix in matrices]
    peaks = [peak_seconds(how, *matrix.shape, cluster) for matrix in matrices]
    # With a period of one step peak and mean are equal, because every update refreshes.
    extra = [(peak - mean) * period / max(1, period - 1) for mean, peak in zip(means, peaks, strict=True)]
    return RankWork(every_s=sum(means) - sum(extra) / period, refreshes_s=extra)
