"""TP ranks for the matrices of one owner, and owners' cells out of a packing of the whole grid."""

import heapq
from collections.abc import Mapping, Sequence

from canzona_cli.planner.packing import pack


class HostPacker:
    """Hosts for the matrices of one owner, balanced; owners with the same costs are packed once."""

    def __init__(self, costs: Sequence[float], tp: int) -> None:
        self._costs = costs
        self._tp = tp
        self._known: dict[tuple[float, ...], tuple[tuple[int, ...], float]] = {}

    def hosts(self, matrices: Sequence[int]) -> list[int]:
        """TP rank of each of an owner's matrices."""
        order, (hosts, _) = self._look_up(matrices)
        found = [0] * len(matrices)
        for position, host in zip(order, hosts, strict=True):
            found[position] = host
        return found

    def height(self, matrices: Sequence[int]) -> float:
        """Seconds of that owner's busiest host."""
        return self._look_up(matrices)[1][1] if matrices else 0.0

    def _look_up(self, matrices: Sequence[int]) -> tuple[list[int], tuple[tuple[int, ...], float]]:
        order = sorted(range(len(matrices)), key=lambda p: (-self._costs[matrices[p]], p))
        key = tuple(self._costs[matrices[p]] for p in order)
        if key not in self._known:
            packing = pack(key, self._tp)
            hosts = [0] * len(key)
            for host, items in enumerate(packing.bins):
                for item in items:
                    hosts[item] = host
            self._known[key] = (tuple(hosts), packing.height)
        return order, self._known[key]


def deal(loads: Sequence[float], owners: int) -> list[int]:
    """Owner of each cell, as many cells each: the heaviest with the lightest, so that owners have alike sums."""
    ranked = sorted(range(len(loads)), key=lambda cell: (-loads[cell], cell))
    found = [0] * len(loads)
    for position, cell in enumerate(ranked):
        lap, place = divmod(position, owners)
        found[cell] = owners - 1 - place if lap % 2 else place
    return found


def by_owner(units: Mapping[int, Sequence[int]], owner_of: Mapping[int, int], owners: int) -> list[list[int]]:
    """Matrices of each owner, ascending."""
    held: list[list[int]] = [[] for _ in range(owners)]
    for unit, owner in owner_of.items():
        held[owner] += units[unit]
    return [sorted(matrices) for matrices in held]


def capped(
    units: Mapping[int, Sequence[int]],
    costs: Sequence[float],
    elements: Sequence[int],
    owners: int,
    tp: int,
    cap: int,
) -> dict[int, tuple[int, int]] | None:
    """(owner, host) of each matrix with at most `cap` elements in a cell; None if none was found.

    Costliest units first onto the least busy owner with room on its hosts; if that strands a unit, the largest first
    onto the emptiest.
    """
    for weights in (costs, elements):
        found = _capped(units, weights, elements, owners, tp, cap)
        if found is not None:
            return found
    return None


def _capped(
    units: Mapping[int, Sequence[int]],
    weights: Sequence[float],
    elements: Sequence[int],
    owners: int,
    tp: int,
    cap: int,
) -> dict[int, tuple[int, int]] | None:
    loads = [[0.0] * tp for _ in range(owners)]
    room = [[cap] * tp for _ in range(owners)]
    heap = [(0.0, owner) for owner in range(owners)]
    found: dict[int, tuple[int, int]] = {}
    for unit in sorted(units, key=lambda u: (-sum(weights[index] for index in units[u]), u)):
        members = sorted(units[unit], key=lambda index: (-weights[index], index))
        passed: list[tuple[float, int]] = []
        while heap:
            load, owner = heapq.heappop(heap)
            hosts = _place(members, weights, elements, loads[owner], room[owner])
            if hosts is None:
                passed.append((load, owner))
                continue
            for index, host in zip(members, hosts, strict=True):
                found[index] = (owner, host)
                loads[owner][host] += weights[index]
                room[owner][host] -= elements[index]
            passed.append((sum(loads[owner]), owner))
            break
        else:
            return None
        for entry in passed:
            heapq.heappush(heap, entry)
    return found


def _place(
    members: Sequence[int],
    weights: Sequence[float],
    elements: Sequence[int],
    loads: Sequence[float],
    room: Sequence[int],
) -> list[int] | None:
    """Least busy host with room for each member; None where one has none."""
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
