"""How low the slowest rank's update time can possibly be, whoever assigns the matrices."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from canzona_cli.model.matrix import Matrix

_TINY = 1e-9
_FINEST = 24
"""Largest k of the rounding functions u_k that are tried."""
_BISECTIONS = 30
_KINDS = 24
"""Distinct costs the functions are summed over."""
_MOST_IN_A_BIN = 8
"""Costs of which more fit into one bin are not lifted."""
_ORDERS = 4
"""Orders of lifting that are tried."""


def lower_bound(matrices: Sequence[Matrix], costs: Sequence[float], stage: int, dp: int, tp: int) -> float:
    """Seconds that the slowest cell of a stage's dp x tp grid needs at least.

    The largest of three relaxations, each a bound because dropping or merging constraints cannot raise the optimum:

    1. every matrix on its own into dp * tp cells (units forgotten);
    2. every unit into dp owners: the tp cells of an owner work on its units, so its slowest needs at least
       1 / tp of the owner's sum, and the fullest owner is bounded by packing whole units into dp bins;
    3. the matrices of one unit have one owner: they go into tp cells.

    With tp = 1 a cell is an owner and the second is the exact problem. Each is bounded by `packing_bound`.
    """
    units: dict[int, list[float]] = defaultdict(list)
    for matrix, cost in zip(matrices, costs, strict=True):
        if matrix.stage == stage:
            units[matrix.unit].append(cost)
    if not units:
        return 0.0
    alone = [cost for members in units.values() for cost in members]
    whole = [sum(members) for members in units.values()]
    bounds = [packing_bound(alone, dp * tp), packing_bound(whole, dp) / tp]
    bounds += [packing_bound(members, tp) for members in {tuple(sorted(members)) for members in units.values()}]
    return max(bounds)


def packing_bound(costs: Sequence[float], bins: int) -> float:
    """Height that the fullest of `bins` bins has at least when whole items of positive `costs` go into them.

    Proof, term by term:

    - *mean*: the heights add up to the sum of the costs, so one is at least sum / bins;
    - *largest*: some bin holds the largest item;
    - *pigeonhole*: of the k * bins + 1 largest items some bin holds k + 1, which weigh at least as much as the k + 1
      smallest of them;
    - *dual feasible functions* (Lueker 1983; Fekete and Schepers 2001): f on [0, 1] with sum f(x_i) <= 1 whenever
      sum x_i <= 1. Were every bin at most T high, then x_i = cost_i / T would add up to at most 1 in each, hence
      sum f(x_i) <= bins over all items. Where that fails, every packing is higher than T. `_mass` has the functions;
    - *lifted weights*: likewise for any weights of the items under which no set that fits below T weighs more than 1,
      see `_lifted`.

    T is bisected between the bound so far and twice that. Whatever the bisection
    meets, its lower end has been proven too low for any packing.
    """
    bound = simple_bound(costs, bins)
    counts = _coarse(sorted(Counter(costs).items()))
    low, high = bound, 2 * bound
    for _ in range(_BISECTIONS):
        height = (low + high) / 2
        if any(mass > bins * (1 + _TINY) for mass in chain(_mass(counts, height), _lifted(counts, height))):
            low = height
        else:
            high = height
        if high - low <= 1e-6 * low:
            break
    return low


def simple_bound(costs: Sequence[float], bins: int) -> float:
    """The first three terms of `packing_bound`."""
    if not costs:
        return 0.0
    items = sorted(costs, reverse=True)
    bound = max(sum(items) / bins, items[0])
    for k in range(1, (len(items) - 1) // bins + 1):
        bound = max(bound, sum(items[k * bins - k : k * bins + 1]))
    return bound


def _coarse(counts: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `_KINDS` distinct costs, ascending: neighbours become their least, which only lowers the optimum."""
    width = -(-len(counts) // _KINDS)
    chunks = [counts[start : start + width] for start in range(0, len(counts), width)]
    return [(chunk[0][0], sum(count for _, count in chunk)) for chunk in chunks]


def _mass(counts: Sequence[tuple[float, int]], height: float) -> Iterator[float]:
    """sum f(cost / height) for every function tried, with x = cost / height.

    - U_l (0 <= l <= 1/2): 1 for x > 1 - l, x in between, 0 for x < l. Feasible: an item above 1 - l leaves room only
      for items below l.
    - u_k: x where (k + 1) x is whole, else floor((k + 1) x) / k. Feasible: let the whole ones of a bin add up to
      a / (k + 1). Over the others sum floor((k + 1) x) < k + 1 - a, so it is at most k - a, and in all
      a / (k + 1) + (k - a) / k <= 1.
    - p_l: floor(1 / l) = n places per bin. An item of l <= x <= 1/2 takes 1 / n, one above 1/2 takes
      1 - floor((1 - x) / l) / n, because beside it only floor((1 - x) / l) items of at least l fit.

    l only matters at the costs themselves. u_k after U_l is feasible too. Every comparison leans by `_TINY` to the side
    of less mass, so that a rounding error proves nothing.
    """
    sizes = [(cost / height, count) for cost, count in counts]
    thresholds = [0.0, *(x for x, _ in sizes if 0 < x <= 0.5)]
    for least in thresholds:
        kept = [(1.0 if x > 1 - least + _TINY else x, n) for x, n in sizes if x >= least]
        yield sum(x * n for x, n in kept)
        for k in range(1, _FINEST):
            yield sum(_u(k, x) * n for x, n in kept)
        if least > 0:
            places = math.floor(1 / least + _TINY)
            yield sum(_p(least, places, x) * n for x, n in kept)


def _u(k: int, x: float) -> float:
    scaled = (k + 1) * x
    if abs(scaled - round(scaled)) <= _TINY * (k + 1):
        # Whole, or a hair off: the lower of the two readings is safe either way.
        return min(x, math.floor(scaled - 2 * _TINY * (k + 1)) / k) if scaled < k + 1 else x
    return math.floor(scaled) / k


def _p(least: float, places: int, x: float) -> float:
    if x > 0.5 + _TINY:
        return 1 - math.floor((1 - x) / least + _TINY) / places
    return 1 / places


def _lifted(counts: Sequence[tuple[float, int]], height: float) -> Iterator[float]:
    """Total weight of all items, for several feasible weightings found by sequential lifting (Padberg 1975).

    Costs are weighted one after another: as much as leaves every set that fits under `height` at 1 or less, given the
    weights so far and zero for the rest, over all ways to fill a bin. Hence every set weighs at most 1 in the end,
    whatever the order; each cost is tried as the first, the others follow from the largest down. Costs of which many
    fit into a bin keep weight zero, so that there are few ways to fill it.
    """
    coarse = [(cost, count) for cost, count in reversed(counts) if cost * (_MOST_IN_A_BIN + 1) > height * (1 + _TINY)]
    for first in range(min(len(coarse), _ORDERS)):
        order = [coarse[first], *coarse[:first], *coarse[first + 1 :]]
        weights: list[float] = []
        for number, (cost, count) in enumerate(order):
            room = [height * (1 + _TINY) - taken * cost for taken in range(1, count + 1)]
            fits = [(taken, left) for taken, left in enumerate(room, start=1) if left >= 0]
            known = order[:number]
            weights.append(min((1 - _heaviest(known, weights, left)) / taken for taken, left in fits) if fits else 0.0)
        yield sum(weight * count for weight, (_, count) in zip(weights, order, strict=True))


def _heaviest(items: Sequence[tuple[float, int]], weights: Sequence[float], room: float) -> float:
    """Largest weight of a set of `items` that fits into `room`: all of them are tried."""
    if not items:
        return 0.0
    (cost, count), weight = items[0], weights[0]
    if weight == 0:
        return _heaviest(items[1:], weights[1:], room)
    most = min(count, int(room / cost))
    return max(taken * weight + _heaviest(items[1:], weights[1:], room - taken * cost) for taken in range(most + 1))
