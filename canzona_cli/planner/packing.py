"""Scheduling on identical machines (P || Cmax): whole items into bins so that the fullest bin is as low as possible.

Items of the same cost are interchangeable, and a model has few distinct ones, so everything works on counts of costs:
the price of a packing hardly depends on how many items or bins there are. Deterministic: ties go to the lower index,
and searches stop after a count of nodes, never after a time.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from canzona_cli.planner.bounds import packing_bound, simple_bound

CLOSE_ENOUGH = 1e-3
"""A packing this close to its bound is not improved further."""
HALVINGS = 9
"""Bisections of the height between the bound and what largest-first reached."""
NODES = 1500
"""Combinations looked at to fill one bin."""
SEARCHED = 100
"""Distinct costs up to which a packing is searched; with more, largest first has sizes for every gap."""

Pattern = tuple[int, ...]
"""How many items of each distinct cost one bin holds."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """`bins[b]` are the indices of the items in bin b, ascending."""

    bins: tuple[tuple[int, ...], ...]
    height: float
    """Cost in the fullest bin."""


def pack(costs: Sequence[float], bins: int) -> Packing:
    """Packs items of `costs` into `bins` bins; within a percent or two of the best height where bins hold many items.

    Largest first onto the least loaded (Graham 1969), then, while that is off its lower bound, bisection over the
    height with bins filled one after another as full as the remaining items allow (minimum bin slack; Gupta and
    Ho 1999), as in MULTIFIT (Coffman, Garey, Johnson 1978), and last, exchanges with the fullest bin.
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
            # The bound itself is tried first: it is often reached.
            limit = low * (1 + CLOSE_ENOUGH / 2) if step == 0 else (low + high) / 2
            found = _fill(classes, bins, limit, accept_slack=accept_slack)
            if found is None:
                low = limit
                continue
            if _height(classes, found) < _height(classes, best):
                best = found
            high = min(limit, _height(classes, best))
            if high <= bound * (1 + CLOSE_ENOUGH):
                break
    if _height(classes, best) > bound * (1 + CLOSE_ENOUGH):
        best = _exchange(classes, best, bound)
    return Packing(bins=tuple(classes.hand_out(best)), height=_height(classes, best))


@dataclass(frozen=True, kw_only=True)
class _Classes:
    """Distinct costs, descending, and the items that have them, ascending."""

    costs: tuple[float, ...]
    items: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(costs: Sequence[float]) -> "_Classes":
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
        """Items for each pattern, dealt so that neighbours in the list of items land in different bins."""
        shares: list[list[int]] = [[] for _ in patterns]
        for kind, items in enumerate(self.items):
            queue, left = iter(items), [pattern[kind] for pattern in patterns]
            while any(left):
                for index, count in enumerate(left):
                    if count:
                        shares[index].append(next(queue))
                        left[index] -= 1
        return (tuple(sorted(share)) for share in shares)


def _height(classes: _Classes, patterns: Sequence[Pattern]) -> float:
    return max(classes.load(pattern) for pattern in dict.fromkeys(patterns))


def _largest_first(classes: _Classes, bins: int) -> list[Pattern]:
    heap = [(0.0, index) for index in range(bins)]
    held = [[0] * len(classes.costs) for _ in range(bins)]
    for kind, (cost, count) in enumerate(zip(classes.costs, classes.counts, strict=True)):
        for _ in range(count):
            load, index = heap[0]
            heapq.heapreplace(heap, (load + cost, index))
            held[index][kind] += 1
    return [tuple(pattern) for pattern in held]


def _fill(classes: _Classes, bins: int, limit: float, *, accept_slack: bool) -> list[Pattern] | None:
    """Packs under `limit`, bin by bin, each starting with the largest item left; None if items remain.

    accept_slack: take the first combination that wastes no more than each remaining bin may waste on average; this
    spends large items first. Otherwise the fullest, which spends the small ones that fit everywhere.
    """
    counts, left = classes.counts, bins
    total = sum(cost * count for cost, count in zip(classes.costs, counts, strict=True))
    patterns: list[Pattern] = []
    while any(counts):
        if left == 0 or total > left * limit * (1 + 1e-12):
            return None
        slack = max(0.0, limit - total / left) if accept_slack else 0.0
        pattern = _Filler(costs=classes.costs, counts=counts, limit=limit, enough=limit - slack).best()
        if pattern is None:
            return None
        # The same combination stays the best one for as long as there are items for it; with slack to give away,
        # what the next bin may waste grows or shrinks, so it is chosen anew.
        times = min(left, *(have // take for have, take in zip(counts, pattern, strict=True) if take))
        patterns += [pattern] * times
        counts = [have - take * times for have, take in zip(counts, pattern, strict=True)]
        total -= times * classes.load(pattern)
        left -= times
    return patterns + [(0,) * len(counts)] * left


@dataclass(kw_only=True)
class _Filler:
    """Searches the combination that fills one bin best, large items first."""

    costs: Sequence[float]
    counts: Sequence[int]
    limit: float
    enough: float
    """A load at which the search is over."""
    nodes: int = NODES
    found: Pattern | None = None
    found_load: float = -1.0

    def best(self) -> Pattern | None:
        first = next(kind for kind, count in enumerate(self.counts) if count)
        if self.costs[first] > self.limit * (1 + 1e-12):
            return None
        self._descend(first, [0] * len(self.costs), 0.0, least=1)
        return self.found

    def _descend(self, start: int, taken: list[int], load: float, *, least: int = 0) -> bool:
        """True when the search may stop. Recurses once for each cost that is taken, not for each there is."""
        self.nodes -= 1
        if load > self.found_load and least == 0:
            self.found, self.found_load = tuple(taken), load
        if self.found_load >= self.enough * (1 - 1e-9) or self.nodes <= 0:
            return self.found is not None
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
                break  # the first must be taken
        return False


def _exchange(classes: _Classes, patterns: Sequence[Pattern], bound: float) -> list[Pattern]:
    """Lowers the fullest bin by redistributing it with one other bin, until no such pair helps."""
    packed = list(patterns)
    loads = [classes.load(pattern) for pattern in packed]
    for _ in range(4 * len(packed)):
        top = max(range(len(packed)), key=lambda b: (loads[b], -b))
        if loads[top] <= bound * (1 + CLOSE_ENOUGH):
            break
        seen: set[Pattern] = set()
        for other in sorted(range(len(packed)), key=lambda b: (loads[b], b)):
            if packed[other] in seen or loads[other] >= loads[top]:
                continue
            seen.add(packed[other])
            pooled = [a + b for a, b in zip(packed[top], packed[other], strict=True)]
            half = (loads[top] + loads[other]) / 2
            # A share just under half leaves just over half; the closest to half is the best split.
            share = _Filler(costs=classes.costs, counts=pooled, limit=half, enough=half).best()
            if share is None:
                continue
            rest = tuple(a - b for a, b in zip(pooled, share, strict=True))
            if classes.load(rest) < loads[top] * (1 - 1e-9):
                packed[top], packed[other] = share, rest
                loads[top], loads[other] = classes.load(share), classes.load(rest)
                break
        else:
            break
    return packed
