"""Balances experts that are divided among ranks together with the matrices that all ranks of a stage store.

An expert can only be updated by the ranks that store it, so expert-parallel ranks cannot help one another:

    expert-parallel rank 0   | cell 0: q.0 proj.1 e e e e | cell 2: e e e e e e e e |    cells of equal height
    expert-parallel rank 1   | cell 1: q.1 e e e e e      | cell 3: proj.0 k v e e e e |

First the other matrices are divided evenly among the expert-parallel ranks, and each is assigned to the least
busy cell of its rank. Then the experts of each expert-parallel rank, which are many and similar, fill up its
cells: each goes into the least busy cell, the costliest first.
"""

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence

from canzona_cli.planner.plan import Cell
from canzona_cli.planner.problem import PoolProblem
from canzona_cli.planner.seats import spread_bytes


def balance_together(
    stage: PoolProblem, experts: Sequence[PoolProblem], memory_cap: int | None
) -> dict[int, Cell] | None:
    """Returns the cell of every matrix of a stage; None if a matrix does not fit.

    Args:
        stage: the problem of the matrices that all ranks of the stage store.
        experts: the problem of each expert-parallel rank's experts.
        memory_cap: the elements of matrices that one cell may hold; None for no limit.
    """
    grid = _Grid(stage, experts, memory_cap)
    cells = {index: Cell.at(cell, stage.mesh) for index, cell in grid.place_others()}
    for problem in experts:
        cells.update(grid.place_experts(problem))
    placed = len(cells) == sum(len(members) for problem in (stage, *experts) for members in problem.units.values())
    return cells if placed else None


class _Grid:
    """The load of a stage's cells while matrices are placed, by the cell's index `owner * tp + host`."""

    def __init__(self, stage: PoolProblem, experts: Sequence[PoolProblem], memory_cap: int | None) -> None:
        mesh = stage.mesh
        self._stage, self._mesh = stage, mesh
        self._busy_s = [0.0] * mesh.cells
        self._room = [sys.maxsize if memory_cap is None else memory_cap] * mesh.cells
        self._rank_total_s = [sum(map(problem.cost, problem.units)) for problem in experts]
        """The update seconds of each expert-parallel rank, summed over its cells."""
        self._cache: dict[tuple[tuple[float, int], ...], list[int]] = {}
        """A cache of the owners of an expert-parallel rank's units, by the (seconds, room) of each of its
        cells."""

    def place_others(self) -> Iterator[tuple[int, int]]:
        """Places the matrices that all ranks store; yields (matrix, cell) for each matrix that fits."""
        stage, mesh = self._stage, self._mesh
        tp, ep = mesh.tp, mesh.ep
        for unit in sorted(stage.units, key=lambda unit: (-stage.cost(unit), unit)):
            costliest, *others = sorted(stage.units[unit], key=lambda index: (-stage.costs[index], index))
            for rank in sorted(range(ep), key=lambda rank: (self._rank_total_s[rank], rank)):
                free = self._with_room(costliest, mesh.expert_cells(rank))
                if free:
                    break
            else:
                continue
            cell = min(free, key=lambda cell: (self._busy_s[cell], cell))
            self._put(costliest, cell)
            yield costliest, cell
            # The other matrices of the unit have the same owner.
            row = range(cell // tp * tp, cell // tp * tp + tp)
            for index in others:
                free = self._with_room(index, row)
                if free:
                    best = min(free, key=lambda cell: (self._rank_total_s[cell % ep], self._busy_s[cell], cell))
                    self._put(index, best)
                    yield index, best

    def _with_room(self, index: int, cells: range) -> list[int]:
        needed = self._stage.matrices[index].elements
        return [cell for cell in cells if self._room[cell] >= needed]

    def _put(self, index: int, cell: int) -> None:
        cost = self._stage.costs[index]
        self._busy_s[cell] += cost
        self._rank_total_s[self._mesh.expert_rank(cell)] += cost
        self._room[cell] -= self._stage.matrices[index].elements

    def place_experts(self, problem: PoolProblem) -> Mapping[int, Cell]:
        """Places an expert-parallel rank's experts; returns the cell of each expert, or nothing if an expert
        does not fit."""
        rank = problem.pool.expert_rank
        assert rank is not None
        cells = self._mesh.expert_cells(rank)
        busy_s = [self._busy_s[cell] for cell in cells]
        room = [self._room[cell] for cell in cells]
        key = tuple(zip(busy_s, room, strict=True))
        if key not in self._cache:
            # Expert-parallel ranks have equal experts, so ranks with equal cells are filled in the same way.
            owners = _fill(problem, busy_s, room)
            all_fit = len(owners) == len(problem.units)
            spread = spread_bytes(problem.buckets, owners, problem.kinds) if all_fit else {}
            self._cache[key] = [spread[unit] for unit in problem.units if unit in spread]
        cell_of = [problem.pool.cell(owner, self._mesh) for owner in range(len(cells))]
        return {
            index: cell_of[owner]
            for members, owner in zip(problem.units.values(), self._cache[key], strict=False)
            for index in members
        }


def _fill(problem: PoolProblem, busy_s: Sequence[float], room: list[int]) -> dict[int, int]:
    """Assigns an expert-parallel rank's units, the costliest first, each to the least busy owner with room;
    returns the owner of each unit that fits.

    Args:
        busy_s: the seconds that each owner already has.
        room: the elements that each owner may still hold; updated by the function.
    """
    heap = [(seconds, owner) for owner, seconds in enumerate(busy_s)]
    heapq.heapify(heap)
    owners: dict[int, int] = {}
    for unit in sorted(problem.units, key=lambda unit: (-problem.cost(unit), unit)):
        needed = sum(problem.matrices[index].elements for index in problem.units[unit])
        full: list[tuple[float, int]] = []
        while heap and room[heap[0][1]] < needed:
            full.append(heapq.heappop(heap))
        if heap:
            seconds, owner = heap[0]
            heapq.heapreplace(heap, (seconds + problem.cost(unit), owner))
            owners[unit] = owner
            room[owner] -= needed
        for entry in full:
            heapq.heappush(heap, entry)
    return owners
