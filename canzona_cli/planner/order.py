"""The order of an owner's work: micro-groups and shared matrices in a step, which the engine runs, and
refreshes of preconditioners over steps.

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

A refresh (Shampoo, SOAP and their kin) takes as long as many plain updates, and in every step all ranks wait
for the slowest. So refreshes take turns: those of one rank are spread over the period, and steps that are
full on one rank are full on all.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from canzona_cli.config.schema import KroneckerConfig, RunConfig
from canzona_cli.costs.update import ROUNDING, algorithm, peak_seconds, seconds
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.plan import Cell


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


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """A rank's matrix updates."""

    every_s: float
    """The seconds of every step, without refreshes."""
    refreshes_s: Sequence[float]
    """The seconds of each matrix's refresh."""


@dataclass(frozen=True, kw_only=True)
class Refreshes:
    """The steps in which matrices refresh."""

    turns: dict[int, int]
    """The turn of each matrix: it refreshes when the steps it has made and this add up to a multiple of the period."""
    steps_s: tuple[float, ...]
    """The seconds of matrix updates on the slowest rank, by turn."""
    most_s: float
    """The seconds in a mean step of the rank that has most to do in a period."""

    @property
    def mean_s(self) -> float:
        """The seconds of matrix updates in a mean step, each as long as on its slowest rank."""
        return sum(self.steps_s) / len(self.steps_s)


def refreshes(config: RunConfig, chosen: KroneckerConfig, ranks: Iterable[Sequence[Matrix]]) -> Refreshes:
    """Turns of all matrices.

    Args:
        chosen: the run's optimizer.
        ranks: the matrices that each of them updates.
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
    """Lists what each rank updates: each cell of a stage, or, without cells, each stage."""
    by_cell: dict[tuple[int, Cell | None], list[Matrix]] = {}
    for matrix in matrices:
        by_cell.setdefault((matrix.stage, None if cells is None else cells[matrix.index]), []).append(matrix)
    return list(by_cell.values())


def take_turns(ranks: Sequence[RankWork], period: int) -> list[list[int]]:
    """A turn in [0, period) of each rank's refreshes: `one_by_one` or `step_by_step`, by which steps are
    shorter on average and none longer than the longest of the other."""
    alone = [one_by_one(rank.refreshes_s, period) for rank in ranks]
    together = step_by_step(ranks, period)
    usual, other = (slowest(ranks, turns, period) for turns in (alone, together))
    return together if max(other) <= max(usual) * (1 + ROUNDING) and sum(other) < sum(usual) else alone


def one_by_one(costs: Sequence[float], period: int) -> list[int]:
    """Spread refreshes over a period so that its dearest step is as cheap as can be.

    Dearest first to the step with the least so far (Graham 1969: at most 4/3 of the best there is). The
    fullest step has turn 0, and so on: ranks that wait for each other have their full steps together.

    Args:
        costs: the cost of each refresh, in any unit.

    Raises:
        ValueError: `period` is not positive.
    """
    if period < 1:
        raise ValueError(f"period is {period}; it has to be at least 1")
    steps = [(0.0, turn) for turn in range(period)]
    turns = [0] * len(costs)
    for index in _dearest_first(costs):
        load, turn = steps[0]
        turns[index] = turn
        heapq.heapreplace(steps, (load + costs[index], turn))
    fullest = {turn: place for place, (_, turn) in enumerate(sorted(steps, key=lambda step: (-step[0], step[1])))}
    return [fullest[turn] for turn in turns]


def step_by_step(ranks: Sequence[RankWork], period: int) -> list[list[int]]:
    """Turns with which as few steps as can be are long.

    The first step lasts as long as the rank that is worst to spread needs it to (`one_by_one`); until then
    the others refresh all they can, dearest first, instead of keeping it for a step that nobody would have to
    wait in. Then the second step likewise, with what is left.
    """
    left = [_dearest_first(rank.refreshes_s) for rank in ranks]
    turns = [[0] * len(rank.refreshes_s) for rank in ranks]
    for turn in range(period):
        pairs = list(zip(ranks, left, strict=True))
        end = max((_dearest_step(rank, turns_of_rank, period - turn) for rank, turns_of_rank in pairs), default=0.0)
        for number, (rank, turns_of_rank) in enumerate(pairs):
            load, left[number] = rank.every_s, []
            for index in turns_of_rank:
                if load + rank.refreshes_s[index] <= end * (1 + ROUNDING):
                    load += rank.refreshes_s[index]
                    turns[number][index] = turn
                else:
                    left[number].append(index)
    return turns


def slowest(ranks: Sequence[RankWork], turns: Sequence[Sequence[int]], period: int) -> tuple[float, ...]:
    """Seconds of matrix updates on the slowest rank, by turn."""
    steps = [0.0] * period
    for rank, turns_of_rank in zip(ranks, turns, strict=True):
        loads = [rank.every_s] * period
        for turn, refresh_s in zip(turns_of_rank, rank.refreshes_s, strict=True):
            loads[turn] += refresh_s
        steps = [max(pair) for pair in zip(steps, loads, strict=True)]
    return tuple(steps)


def _dearest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _dearest_step(rank: RankWork, left: Sequence[int], steps: int) -> float:
    rest = replace(rank, refreshes_s=[rank.refreshes_s[index] for index in left])
    return max(slowest([rest], [one_by_one(rest.refreshes_s, steps)], steps))


def _work(config: RunConfig, matrices: Sequence[Matrix], period: int) -> RankWork:
    how, cluster = algorithm(config), config.cluster
    means = [seconds(how, *matrix.shape, cluster) for matrix in matrices]
    peaks = [peak_seconds(how, *matrix.shape, cluster) for matrix in matrices]
    # With a period of one step they are equal: every update has its refresh.
    extra = [(peak - mean) * period / max(1, period - 1) for mean, peak in zip(means, peaks, strict=True)]
    return RankWork(every_s=sum(means) - sum(extra) / period, refreshes_s=extra)
