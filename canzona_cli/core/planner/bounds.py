"""Lower bounds on the busiest rank's update time: no assignment is faster."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from canzona_cli.core.costs.sharing import HOSTED, SharedCosts
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.setup import Mesh

RESOLUTION = 1e-6
"""The relative width of the interval at which the bisection for a bound stops."""
_TINY = 1e-9
"""A relative tolerance for rounding errors."""
_FINEST = 24
"""The number of functions u_k that `_mass` tries: k < 24."""
_BISECTIONS = 30
_KINDS = 24
"""The largest number of distinct costs over which `_mass` sums its functions, see `_coarsen`."""


def stage_bound(
    matrices: Sequence[Matrix], costs: Sequence[float], stage: int, mesh: Mesh, shared_costs: SharedCosts = HOSTED
) -> float:
    """Returns a lower bound, in seconds, on the update time of a stage's slowest cell: the larger of
    `lower_bound` and the bound for packing an expert-parallel rank's experts into the cells that store them."""
    experts: dict[int, list[float]] = {}
    for matrix, cost in zip(matrices, costs, strict=True):
        if matrix.stage == stage and matrix.expert_rank is not None:
            experts.setdefault(matrix.expert_rank, []).append(cost)
    return max(
        lower_bound(matrices, costs, stage, mesh.owners, mesh.tp, shared_costs),
        *(packing_bound(members, mesh.expert_owners) for members in {tuple(sorted(m)) for m in experts.values()}),
        0.0,
    )


def _bisect(bound: float, is_too_low: Callable[[float], bool]) -> float:
    """Raises a proven lower bound on a height, by bisection between it and twice its value.

    Args:
        is_too_low: a function that returns True for a height only if every packing is higher.
    """
    low, high = bound, 2 * bound
    for _ in range(_BISECTIONS):
        height = (low + high) / 2
        low, high = (height, high) if is_too_low(height) else (low, height)
        if high - low <= RESOLUTION * low:
            break
    return low


def lower_bound(
    matrices: Sequence[Matrix], costs: Sequence[float], stage: int, dp: int, tp: int, shared_costs: SharedCosts = HOSTED
) -> float:
    """Returns a lower bound, in seconds, on the update time of the slowest cell in a stage's dp x tp grid.

    It is the largest bound of three relaxations. Each is valid, because dropping or merging constraints
    cannot raise the optimum:

    1. pack matrices into dp * tp cells, as if matrices of a unit could have different owners;
    2. pack units into dp owners: the tp cells of an owner work on its units, so its slowest cell needs at
       least 1 / tp of the fullest owner's sum;
    3. pack the matrices of one unit, which have one owner, into tp cells.

    With tp = 1, a cell is an owner, and relaxation 2 is the exact problem. `packing_bound` bounds each
    relaxation.

    A matrix that may be shared (in `shared_costs`) counts with the cost of its cheaper mode: in relaxations 1
    and 3, the hosted update or one rank's part of the shared update; in relaxation 2, the hosted update or
    all ranks' parts.
    """
    on_one_cell: dict[int, list[float]] = defaultdict(list)  # by unit, the seconds of each matrix on one cell
    on_all_cells: dict[int, float] = defaultdict(float)  # by unit, the seconds of its matrices on all the owner's cells
    for matrix, cost in zip(matrices, costs, strict=True):
        if matrix.stage == stage:
            shared_cost = shared_costs.get(matrix.index)
            on_one_cell[matrix.unit].append(cost if shared_cost is None else min(cost, shared_cost.each))
            on_all_cells[matrix.unit] += cost if shared_cost is None else min(cost, tp * shared_cost.each)
    if not on_one_cell:
        return 0.0
    every_matrix = [cost for members in on_one_cell.values() for cost in members]
    bound = max(packing_bound(every_matrix, dp * tp), packing_bound([*on_all_cells.values()], dp) / tp)
    for members in {tuple(sorted(members)) for members in set(map(tuple, on_one_cell.values()))}:
        if 2 * simple_bound(members, tp) > bound:  # `packing_bound` is at most twice the simple bound
            bound = max(bound, packing_bound(members, tp))
    return bound


def packing_bound(costs: Sequence[float], bins: int) -> float:
    """Returns a lower bound on the height of the fullest of `bins` bins that hold items of positive `costs`.

    Proof, term by term:

    - *mean*: the heights add up to the sum of the costs, so some bin is at least sum / bins high;
    - *largest*: some bin holds the largest item;
    - *pigeonhole*: of the k * bins + 1 largest items some bin holds k + 1, which cost at least as much as
      the k + 1 smallest of these items;
    - *dual feasible functions* (Lueker 1983; Fekete and Schepers 2001): f on [0, 1] with sum f(x_i) <= 1
      whenever sum x_i <= 1. If every bin were at most T high, x_i = cost_i / T would add up to at most 1 in
      each bin, so that sum f(x_i) <= bins over all items. If this sum is larger, every packing is higher than
      T. `_mass` tries several functions f.

    T is bisected between the bound of the first three terms and twice this bound. The lower end of the
    interval is always a proven bound.
    """
    return _packing_bound(tuple(sorted(costs)), bins)


@lru_cache(maxsize=128)
def _packing_bound(costs: tuple[float, ...], bins: int) -> float:
    """Computes `packing_bound` of sorted costs. The results are cached, because stages and strategies of a
    run often have matrices of the same costs."""
    counts = _coarsen(sorted(Counter(costs).items()))

    def is_too_low(height: float) -> bool:
        return any(mass > bins * (1 + _TINY) for mass in _mass(counts, height))

    return _bisect(simple_bound(costs, bins), is_too_low)


def simple_bound(costs: Sequence[float], bins: int) -> float:
    """Returns the largest of the first three terms of `packing_bound`."""
    if not costs:
        return 0.0
    items = sorted(costs, reverse=True)
    bound = max(sum(items) / bins, items[0])
    for k in range(1, (len(items) - 1) // bins + 1):
        bound = max(bound, sum(items[k * bins - k : k * bins + 1]))
    return bound


def _coarsen(counts: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Reduces ascending (cost, number of items) pairs to at most `_KINDS`. The lowest of several neighbouring
    costs replaces the others, which can only lower the optimum."""
    width = -(-len(counts) // _KINDS)
    chunks = [counts[start : start + width] for start in range(0, len(counts), width)]
    return [(chunk[0][0], sum(count for _, count in chunk)) for chunk in chunks]


def _mass(counts: Sequence[tuple[float, int]], height: float) -> Iterator[float]:
    """Yields sum f(x) over all items for every function f tried, with x = cost / height.

    - U_l (0 <= l <= 1/2): 1 for x > 1 - l, x in between, 0 for x < l. Feasible: an item above 1 - l leaves
      room only for items below l.
    - u_k: x where (k + 1) x is an integer, else floor((k + 1) x) / k. Feasible: let the items of a bin with
      integer (k + 1) x add up to a / (k + 1). Over the others sum floor((k + 1) x) < k + 1 - a, so it is at
      most k - a, and all items together have at most a / (k + 1) + (k - a) / k <= 1.

    Only values of l that equal some x matter. Applying u_k after U_l is feasible too, and leaves the values 0
    and 1 unchanged. Every comparison has a tolerance of `_TINY` towards less mass, so that a rounding error
    cannot raise the bound.

    Args:
        counts: (cost, number of items) pairs, ascending by cost.
    """
    xs = [cost / height for cost, _ in counts]
    full = [float(n) for _, n in counts]
    rows: list[list[float]] = []  # rows[k]: u_k(x) of every cost (x for k = 0), times the number of its items
    for least in [0.0, *(x for x in xs if 0 < x <= 0.5)]:
        first, filled = bisect_left(xs, least), bisect_right(xs, 1 - least + _TINY)
        for k in range(_FINEST):
            if k == len(rows):
                rows.append([(_u(k, x) if k else x) * n for x, (_, n) in zip(xs, counts, strict=True)])
            yield sum(rows[k][first:filled] + full[filled:])


def _u(k: int, x: float) -> float:
    """Returns u_k(x) of `_mass`."""
    scaled = (k + 1) * x
    if abs(scaled - round(scaled)) <= _TINY * (k + 1):
        # An integer up to rounding: the lower of both cases is a valid bound whichever applies.
        return min(x, math.floor(scaled - 2 * _TINY * (k + 1)) / k) if scaled < k + 1 else x
    return math.floor(scaled) / k
