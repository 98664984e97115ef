"""Chooses the cell of the DP x TP grid that updates each matrix.

                     host 0         host 1           host: TP rank; a matrix is sent along its row
                  +--------------+--------------+
    owner 0       | q.0 down.3   | k.0 v.0      |    q.0, k.0 and v.0 are one unit: they are interleaved in a parameter,
    owner 1       | up.0         | proj.1 up.1  |    so they have one owner, but may have different hosts
    owner 2       | gate.1       | down.0       |
    owner 3       | down.1       | gate.0 up.3  |    the busiest cell decides how long all ranks take
                  +--------------+--------------+
    owner: data-parallel rank; gradients are reduced to its row

Owners and hosts are balanced together, because a matrix cannot be divided. First every unit gets an owner
(`Owners`: balanced, or in natural order), then an owner's
matrices are packed onto its hosts. The result depends only on the arguments, so every rank computes the same.

Experts that are divided among ranks can only be updated by the ranks that store them; `planner.joint`
balances them together with all other matrices.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType

from canzona_cli.core.costs.sharing import HOSTED, SharedCost, SharedCosts
from canzona_cli.core.errors import DoesNotFit, Problem
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import Pool, alike_pools, pool_buckets, pool_matrices
from canzona_cli.core.planner.joint import balance_together
from canzona_cli.core.planner.packing import pack
from canzona_cli.core.planner.paper import balanced_cuts, even_start, greedy_hosts
from canzona_cli.core.planner.plan import Assignment, Cell, PlanSettings
from canzona_cli.core.planner.problem import Experts, Owners, Placement, PoolProblem
from canzona_cli.core.planner.seats import spread_bytes
from canzona_cli.core.setup import Mesh


def assign(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    layout: Mesh,
    settings: PlanSettings,
    memory_cap: int | None = None,
    *,
    bucket_elements: int | None = None,
    bytes_per_element: int = 4,
    shared_costs: SharedCosts = HOSTED,
) -> Assignment:
    """Returns the owner and host of every matrix, for the strategies that have a plan.

    - canzona: `_balance`, or `balance_together` if experts are divided among ranks;
    - paper: one cut in natural order, by alpha, and greedy hosts (`planner.paper`);
    - asc: the stage's buffer is divided evenly, and a unit belongs to the owner in whose share it starts. (If
      each bucket were divided, the first ranks would get every remainder.) Hosts are assigned round-robin in
      registration order. Nothing is balanced.

    Args:
        costs: the seconds of each matrix's update, positive; with strategy paper, the elements of the matrix.
        memory_cap: the elements of matrices that one cell may hold; None for no limit.
        bucket_elements: the size at which Megatron closes a bucket of the first stage; None for one bucket
            per model chunk.
        bytes_per_element: the bytes of an element in an exchange; only greedy hosts depend on it.
        shared_costs: the costs of the matrices that are shared, by index.

    Raises:
        DoesNotFit: no assignment within `memory_cap` was found.
    """
    cells: list[Cell] = [Cell(owner=0, host=0)] * len(matrices)
    shared: dict[int, SharedCost] = {}
    members, alike = pool_matrices(matrices), alike_pools(matrices)
    solved: dict[Hashable, list[int]] = {}
    """The matrices of the first of several stages that are alike and have the same costs, by what is alike."""

    def problem(pool: Pool) -> PoolProblem:
        return PoolProblem(
            pool=pool,
            matrices=matrices,
            costs=costs,
            shared_costs=shared_costs,
            buckets=pool_buckets(matrices, pool, layout, bucket_elements),
            mesh=layout,
        )

    for _, of_stage in groupby(members, key=lambda pool: pool.stage):
        stage, *expert_pools = of_stage
        indices = [matrix.index for pool in (stage, *expert_pools) for matrix in members[pool]]
        shared_of_stage = tuple(map(shared_costs.get, indices)) if shared_costs else ()
        key = *map(alike.__getitem__, (stage, *expert_pools)), tuple([costs[index] for index in indices])
        first = solved.setdefault((*key, shared_of_stage), indices)
        if first is not indices:
            for index, same_place in zip(indices, first, strict=True):
                cells[index] = cells[same_place]
                if same_place in shared:
                    shared[index] = shared_costs[index]
            continue
        experts = None
        if expert_pools:
            ranks = [[matrix.index for matrix in members[pool]] for pool in expert_pools]
            experts = Experts(problem=problem(expert_pools[0]), ranks=ranks)
        best = _solve(problem(stage), experts, settings, memory_cap, bytes_per_element)
        for index, cell in best.cells.items():
            cells[index] = cell
        shared |= {index: shared_costs[index] for index in best.shared}
    return Assignment(cells=tuple(cells), shared_costs=MappingProxyType(dict(sorted(shared.items()))))


def _solve(
    stage: PoolProblem,
    experts: Experts | None,
    settings: PlanSettings,
    memory_cap: int | None,
    bytes_per_element: int,
) -> Placement:
    """Returns the assignment of a stage.

    Args:
        stage: the problem of the matrices that all ranks of the stage store.
        experts: the stage's experts; None if experts are not divided among ranks.

    Raises:
        DoesNotFit: no assignment within `memory_cap` was found.
    """
    choose_owners: Callable[[PoolProblem], Owners] = _balance
    if settings.strategy == "asc":
        choose_owners = _cut_evenly
    elif settings.strategy == "paper":
        choose_owners = partial(_cut, alpha=settings.alpha)
    if settings.strategy != "canzona" or not experts:
        cells, shared = _choose_hosts(stage, settings, choose_owners(stage), bytes_per_element)
        cells |= _cells_of_experts(experts, choose_owners)
        placement = Placement(problem=stage, cells=cells, shared=shared)
        if memory_cap is None or placement.fullest <= memory_cap:
            return placement
    return _place_within(stage, experts, settings, memory_cap)


def _cells_of_experts(experts: Experts | None, choose_owners: Callable[[PoolProblem], Owners]) -> dict[int, Cell]:
    """Returns the cells of all experts if the heuristic `choose_owners` chooses their owners, which are the same for
    all expert-parallel ranks."""
    if experts is None:
        return {}
    owners = experts.in_order(choose_owners(experts.problem))
    return {index: cell for rank in range(len(experts.ranks)) for index, cell in experts.cells(rank, owners)}


def _cut_evenly(stage: PoolProblem) -> Owners:
    """Chooses owners by dividing the stage's buffer, in natural order, evenly."""
    parts = [part for parts in stage.parts for part in parts]
    starts = even_start([part.elements for part in parts], stage.owners)
    return {part.unit: owner for part, owner in zip(parts, starts, strict=True)}


def _place_within(
    stage: PoolProblem, experts: Experts | None, settings: PlanSettings, memory_cap: int | None
) -> Placement:
    """Assigns a stage's matrices within `memory_cap`, without sharing any. Strategy canzona
    assigns stages with experts in this way. Otherwise, it is the last resort if `memory_cap` is exceeded.

    Raises:
        DoesNotFit: no assignment was found; or `memory_cap` is exceeded with mode shared or strategy paper,
            which do not allow another assignment.
    """
    if experts:
        cells = balance_together(stage, experts, memory_cap)
    else:
        assert memory_cap is not None
        elements = [matrix.elements for matrix in stage.matrices]
        # Placing the largest matrices first may succeed if placing the costliest first leaves a matrix
        # without room.
        cells = _assign_capped(stage, stage.costs, elements, memory_cap) or _assign_capped(
            stage, elements, elements, memory_cap
        )
        if settings.mode == "shared":
            cells = None
    if cells is None or (settings.strategy == "paper" and memory_cap is not None):
        raise DoesNotFit(_does_not_fit(stage, experts, memory_cap or 0))
    return Placement(problem=stage, cells=cells, shared=frozenset())


def _balance(stage: PoolProblem) -> Owners:
    """Packs units into the cells of the grid, deals the cells to owners, and spreads each bucket's bytes over
    owners."""
    units = list(stage.units)
    costs = [stage.cost(unit) for unit in units]
    packing = pack(costs, stage.owners * stage.tp)
    dealt = deal([sum(costs[item] for item in items) for items in packing.bins], stage.owners)
    owners = {units[item]: dealt[cell] for cell, items in enumerate(packing.bins) for item in items}
    return spread_bytes(stage.buckets, owners, stage.kinds)


def _cut(stage: PoolProblem, alpha: float) -> Owners:
    """Cuts buckets between owners in natural order, balanced by cost (`balanced_cuts`)."""
    weights = [[stage.cost(part.unit) for part in parts] for parts in stage.parts]
    return {
        part.unit: owner
        for parts, owners in zip(stage.parts, balanced_cuts(weights, stage.owners, alpha), strict=True)
        for part, owner in zip(parts, owners, strict=True)
    }


def _choose_hosts(
    stage: PoolProblem, settings: PlanSettings, owner_of: Owners, bytes_per_element: int
) -> tuple[dict[int, Cell], set[int]]:
    """Chooses the hosts of every owner's matrices; returns the cell of each matrix, and the shared
    matrices."""
    cells: dict[int, Cell] = {}
    shared: set[int] = set()
    for owner, indices in enumerate(stage.matrices_of_owners(owner_of)):
        if not indices:
            continue
        if settings.strategy == "asc":
            hosts: Sequence[int] = [position % stage.tp for position in range(len(indices))]
        elif settings.strategy == "paper":
            hosts = greedy_hosts(stage.matrices, indices, stage.tp, settings.capacity(bytes_per_element))
        else:
            hosts = stage.packer.hosts(indices)
            shared.update(stage.shared_costs.keys() & set(indices))
        for index, host in zip(indices, hosts, strict=True):
            cells[index] = Cell(owner=owner, host=host)
    return cells, shared


def _does_not_fit(stage: PoolProblem, experts: Experts | None, memory_cap: int) -> Problem:
    """Describes a stage whose matrices exceed `memory_cap` elements on some rank."""
    of_stage = [index for unit in stage.units.values() for index in unit]
    of_ranks = [] if experts is None else [index for of_rank in experts.ranks for index in of_rank]
    sizes = [stage.matrices[index].elements for index in of_stage + of_ranks]
    total, cells = sum(sizes), stage.mesh.cells
    least = max(-(-total // cells), max(sizes))
    obstacle = f"if {cells} ranks hold {total:,} elements, one of them holds at least {least:,}"
    if least <= memory_cap:
        obstacle = f"no division of {total:,} elements among {cells} ranks was found in which none holds more"
    return Problem(
        key="gpus",
        value=f"{stage.owners} x {stage.tp} ranks of a stage",
        reason=f"a rank has memory for {memory_cap:,} elements of matrices, but {obstacle}",
        fix="use more GPUs, or another parallel.tp and parallel.pp",
    )


def deal(loads: Sequence[float], owners: int) -> list[int]:
    """Deals cells to owners, the same number of cells to each owner; returns the owner of each cell.

    Cells are dealt in descending order of load, alternately forwards and backwards, so that owners' sums are
    similar.
    """
    ranked = sorted(range(len(loads)), key=lambda cell: (-loads[cell], cell))
    owner_of = [0] * len(loads)
    for position, cell in enumerate(ranked):
        lap, place = divmod(position, owners)
        owner_of[cell] = owners - 1 - place if lap % 2 else place
    return owner_of


def _assign_capped(
    stage: PoolProblem, weights: Sequence[float], elements: Sequence[int], cap: int
) -> dict[int, Cell] | None:
    """Assigns matrices to cells of at most `cap` elements; returns None if a unit does not fit.

    The heaviest units are assigned first. Each goes to the owner with the lowest total weight among those
    whose hosts have room for it.
    """
    loads = [[0.0] * stage.tp for _ in range(stage.owners)]
    room = [[cap] * stage.tp for _ in range(stage.owners)]
    heap = [(0.0, owner) for owner in range(stage.owners)]
    cells: dict[int, Cell] = {}
    for unit in sorted(stage.units, key=lambda u: (-sum(weights[index] for index in stage.units[u]), u)):
        members = sorted(stage.units[unit], key=lambda index: (-weights[index], index))
        visited: list[tuple[float, int]] = []
        while heap:
            load, owner = heapq.heappop(heap)
            hosts = _place(members, weights, elements, loads[owner], room[owner])
            if hosts is None:
                visited.append((load, owner))
                continue
            for index, host in zip(members, hosts, strict=True):
                cells[index] = Cell(owner=owner, host=host)
                loads[owner][host] += weights[index]
                room[owner][host] -= elements[index]
            visited.append((sum(loads[owner]), owner))
            break
        else:
            return None
        for entry in visited:
            heapq.heappush(heap, entry)
    return cells


def _place(
    members: Sequence[int],
    weights: Sequence[float],
    elements: Sequence[int],
    loads: Sequence[float],
    room: Sequence[int],
) -> list[int] | None:
    """Chooses for each matrix in `members` the least busy host with room for it; returns None if a matrix
    fits on no host."""
    loads, room = list(loads), list(room)
    hosts = []
    for index in members:
        free = [host for host in range(len(room)) if room[host] >= elements[index]]
        if not free:
            return None
        host = min(free, key=lambda h: (loads[h], h))
        loads[host] += weights[index]
        room[host] -= elements[index]
        hosts.append(host)
    return hosts
