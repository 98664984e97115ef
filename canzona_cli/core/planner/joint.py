"""Balances experts that are divided among ranks together with the matrices that all ranks of a stage store.

An expert can only be updated by the ranks that store it, so expert-parallel ranks cannot help one another:

    expert-parallel rank 0   | cell 0: q.0 proj.1 e e e e | cell 2: e e e e e e e e |    cells of equal height
    expert-parallel rank 1   | cell 1: q.1 e e e e e      | cell 3: proj.0 k v e e e e |

First each other matrix is assigned to the least busy cell of the least busy expert-parallel rank. Then the experts of
each expert-parallel rank, which are many and similar, fill up its cells: each goes into the least busy cell, the
costliest first.
"""

import heapq
import sys
from collections.abc import Sequence

from canzona_cli.core.planner.plan import Cell
from canzona_cli.core.planner.problem import Experts, PoolProblem
from canzona_cli.core.planner.seats import spread_bytes


def balance_together(stage: PoolProblem, experts: Experts, memory_cap: int | None) -> dict[int, Cell] | None:
    """Returns the cell of every matrix of a stage; None if a matrix does not fit.

    Args:
        stage: the problem of the matrices that all ranks of the stage store.
        experts: the stage's experts.
        memory_cap: the elements of matrices that one cell may hold; None for no limit.
    """
    mesh = stage.mesh
    placed: dict[int, int] = {}
    busy_s, room = [0.0] * mesh.cells, [sys.maxsize if memory_cap is None else memory_cap] * mesh.cells
    total_s = [0.0] * mesh.ep
    """The update seconds of each expert-parallel rank, without its experts, which are equal on all ranks."""
    for unit in sorted(stage.units, key=lambda unit: (-stage.cost(unit), unit)):
        cells = range(mesh.cells)
        for index in sorted(stage.units[unit], key=lambda index: (-stage.costs[index], index)):
            elements = stage.matrices[index].elements
            free = [cell for cell in cells if room[cell] >= elements]
            if not free:
                return None
            cell = min(free, key=lambda cell: (total_s[mesh.expert_rank(cell)], busy_s[cell], cell))
            placed[index] = cell
            busy_s[cell] += stage.costs[index]
            total_s[mesh.expert_rank(cell)] += stage.costs[index]
            room[cell] -= elements
            # The other matrices of the unit have the same owner.
            cells = range(cell // mesh.tp * mesh.tp, (cell // mesh.tp + 1) * mesh.tp)
    cells_of = {index: Cell.at(cell, mesh) for index, cell in placed.items()}
    problem, filled = experts.problem, dict[tuple[tuple[float, int], ...], list[int]]()
    """The owner of each matrix of an expert-parallel rank, by the (seconds, room) of each of its cells."""
    for rank in range(mesh.ep):
        cells = mesh.expert_cells(rank)
        key = tuple((busy_s[cell], room[cell]) for cell in cells)
        if key not in filled:
            owners = _fill(problem, [busy_s[cell] for cell in cells], [room[cell] for cell in cells])
            if len(owners) < len(problem.units):
                return None
            filled[key] = experts.in_order(spread_bytes(problem.buckets, owners, problem.kinds))
        cells_of.update(experts.cells(rank, filled[key]))
    return cells_of


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
