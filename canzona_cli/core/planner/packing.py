"""Packs items into bins so that the fullest bin is as low as possible: scheduling on identical machines (P ||
Cmax). `planner.bounds` has lower bounds.

Items of the same cost are interchangeable, and a model has few distinct costs. The functions here therefore
work on the number of items of each cost, so that more items or bins hardly take more time. Results are
deterministic: ties are broken by the lower index, and searches stop after a number of nodes, never after a
time.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.core.costs.sharing import HOSTED, SharedCosts
from canzona_cli.core.planner.bounds import packing_bound, simple_bound

CLOSE_ENOUGH = 1e-3
"""The relative distance from the lower bound below which a packing is not improved further."""
HALVINGS = 9
"""The number of heights that one search tries, between the lower bound and the best height so far."""
NODES = 1500
"""The largest number of combinations that are tried to fill one bin."""
SEARCHED = 100
"""The largest number of distinct costs for which better packings than largest-first are searched. With more
distinct costs, largest-first has an item that fits every gap."""
Pattern = tuple[int, ...]
"""The number of items of each distinct cost in one bin."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A distribution of items over bins."""

    bins: tuple[tuple[int, ...], ...]
    """The indices of the items in each bin, ascending."""
    height: float
    """The summed cost of the items in the fullest bin."""


def pack(costs: Sequence[float], bins: int) -> Packing:
    """Packs items of `costs` into `bins` bins. If bins hold many items, the height exceeds the best possible
    height by at most one or two per cent.

    1. Put the largest items first into the least loaded bin (Graham 1969).
    2. While the result is above its lower bound, bisect the height as MULTIFIT does (Coffman, Garey, Johnson
       1978), filling one bin after another as full as the remaining items allow (minimum bin slack; Gupta and
       Ho 1999).

    With more than `SEARCHED` distinct costs, step 2 is skipped.
    """
    classes = _Classes.of(costs)
    best = _largest_first(classes, bins)
    bound = simple_bound(costs, bins)
    if _height(classes, best) > bound * (1 + CLOSE_ENOUGH):
        bound = packing_bound(costs, bins)
    if len(classes.costs) > SEARCHED:
        return Packing(bins=tuple(classes.hand_out(best)), height=_height(classes, best))
    for accept_slack in (True, False):
        low, high = bound, _height(classes, best)
        if high <= bound * (1 + CLOSE_ENOUGH):
            break
        for step in range(HALVINGS):
            # The bound itself is tried first, because it is often reached.
            limit = low * (1 + CLOSE_ENOUGH / 2) if step == 0 else (low + high) / 2
            filled = _fill(classes, bins, limit, accept_slack=accept_slack)
            if filled is None:
                # A failure of the heuristic does not prove that no packing is this low: only `low` is raised,
                # not `bound`.
                low = limit
                continue
            if _height(classes, filled) < _height(classes, best):
                best = filled
            high = min(limit, _height(classes, best))
            if high <= bound * (1 + CLOSE_ENOUGH):
                break
    return Packing(bins=tuple(classes.hand_out(best)), height=_height(classes, best))


@dataclass(frozen=True, kw_only=True)
class _Classes:
    """The items grouped by cost."""

    costs: tuple[float, ...]
    """The distinct costs, descending."""
    items: tuple[tuple[int, ...], ...]
    """The indices of the items of each cost, ascending."""

    @staticmethod
    def of(costs: Sequence[float]) -> "_Classes":
        """Groups the items with these costs."""
        members: dict[float, list[int]] = {}
        for index, cost in enumerate(costs):
            members.setdefault(cost, []).append(index)
        ordered = sorted(members, reverse=True)
        return _Classes(costs=tuple(ordered), items=tuple(tuple(members[cost]) for cost in ordered))

    @property
    def counts(self) -> list[int]:
        return [len(items) for items in self.items]

    def load(self, pattern: Pattern) -> float:
        return sum(count * cost for count, cost in zip(pattern, self.costs, strict=True))

    def hand_out(self, patterns: Sequence[Pattern]) -> Iterator[tuple[int, ...]]:
        """Returns the items of each bin, given the bins' patterns. Items of one cost are dealt round-robin,
        so that neighbouring items are in different bins."""
        contents: list[list[int]] = [[] for _ in patterns]
        for kind, items in enumerate(self.items):
            queue = iter(items)
            missing = [pattern[kind] for pattern in patterns]
            while any(missing):
                for index, count in enumerate(missing):
                    if count:
                        contents[index].append(next(queue))
                        missing[index] -= 1
        return (tuple(sorted(items_of_bin)) for items_of_bin in contents)


def _height(classes: _Classes, patterns: Sequence[Pattern]) -> float:
    return max(classes.load(pattern) for pattern in dict.fromkeys(patterns))


def _largest_first(classes: _Classes, bins: int) -> list[Pattern]:
    """Packs items largest first, each into the least loaded bin."""
    heap = [(0.0, index) for index in range(bins)]
    held = [[0] * len(classes.costs) for _ in range(bins)]
    for kind, (cost, count) in enumerate(zip(classes.costs, classes.counts, strict=True)):
        for _ in range(count):
            load, index = heap[0]
            heapq.heapreplace(heap, (load + cost, index))
            held[index][kind] += 1
    return [tuple(pattern) for pattern in held]


def _fill(classes: _Classes, bins: int, limit: float, *, accept_slack: bool) -> list[Pattern] | None:
    """Fills one bin after another up to the height `limit`, each beginning with the largest remaining item.
    Returns None if the bins do not hold all items.

    Args:
        accept_slack: True to take the first combination that wastes no more than the remaining bins may waste
            on average, which uses large items first. False to take the fullest combination, which also uses
            small items that would fit anywhere.
    """
    counts, bins_left = classes.counts, bins
    total = sum(cost * count for cost, count in zip(classes.costs, counts, strict=True))
    patterns: list[Pattern] = []
    while any(counts):
        if bins_left == 0 or total > bins_left * limit * (1 + 1e-12):
            return None
        slack = max(0.0, limit - total / bins_left) if accept_slack else 0.0
        pattern = _Filler(costs=classes.costs, counts=counts, limit=limit, enough=limit - slack).best()
        if pattern is None:
            return None
        # Repeat the combination while there are items for it, because without slack it would be chosen again.
        times = min(bins_left, *(have // take for have, take in zip(counts, pattern, strict=True) if take))
        patterns += [pattern] * times
        counts = [have - take * times for have, take in zip(counts, pattern, strict=True)]
        total -= times * classes.load(pattern)
        bins_left -= times
    return patterns + [(0,) * len(counts)] * bins_left


@dataclass(kw_only=True)
class _Filler:
    """The search for the combination of items that fills one bin best. Large items are tried first."""

    costs: Sequence[float]
    counts: Sequence[int]
    limit: float
    enough: float
    """A load at which the search stops."""
    nodes: int = NODES
    pattern: Pattern | None = None
    pattern_load: float = -1.0

    def best(self) -> Pattern | None:
        """Returns the fullest combination found that contains the largest remaining item; None if that item
        exceeds the limit."""
        largest = next(kind for kind, count in enumerate(self.counts) if count)
        if self.costs[largest] > self.limit * (1 + 1e-12):
            return None
        self._descend(largest, [0] * len(self.costs), 0.0, least=1)
        return self.pattern

    def _descend(self, start: int, taken: list[int], load: float, *, least: int = 0) -> bool:
        """Tries all ways to add items to `taken`, of the costs at index `start` and later; returns True if
        the search may stop.

        The recursion is as deep as the number of different costs in the combination.

        Args:
            least: 1 if at least one item of the cost at `start` must be taken, otherwise 0.
        """
        self.nodes -= 1
        if load > self.pattern_load and least == 0:
            self.pattern, self.pattern_load = tuple(taken), load
        if self.pattern_load >= self.enough * (1 - 1e-9) or self.nodes <= 0:
            return self.pattern is not None
        room = self.limit * (1 + 1e-12) - load
        for kind in range(start, len(self.costs)):
            cost = self.costs[kind]
            most = min(self.counts[kind], int(room / cost))
            for count in range(most, 0, -1):
                taken[kind] = count
                if self._descend(kind + 1, taken, load + count * cost):
                    return True
            taken[kind] = 0
            if least:
                break  # at least one item of the first cost must be taken
        return False


class HostPacker:
    """The packer that chooses the hosts of an owner's matrices. Owners with the same costs are packed only once.

    Args:
        costs: the cost of each matrix if one host updates it.
        shared_costs: the costs of the matrices that are shared, by index; these have host 0.
    """

    def __init__(self, costs: Sequence[float], tp: int, shared_costs: SharedCosts = HOSTED) -> None:
        self._costs, self._tp, self._shared_costs = costs, tp, shared_costs
        self._cache: dict[tuple[float, ...], tuple[int, ...]] = {}

    def hosts(self, matrices: Sequence[int]) -> list[int]:
        """Returns the host of each of an owner's matrices, which are given by index."""
        hosted = [index for index in matrices if index not in self._shared_costs]
        costs = tuple(self._costs[index] for index in hosted)
        if costs not in self._cache:
            bins = pack(costs, self._tp).bins if costs else ()
            host_of = {item: host for host, items in enumerate(bins) for item in items}
            self._cache[costs] = tuple(host_of[item] for item in range(len(costs)))
        host_of_matrix = dict(zip(hosted, self._cache[costs], strict=True))
        return [host_of_matrix.get(index, 0) for index in matrices]
