"""Which step of a period each matrix refreshes its preconditioner at."""

import heapq
from collections.abc import Sequence


def stagger(costs: Sequence[float], period: int) -> list[int]:
    """Spread refreshes over a period so that its dearest step is as cheap as can be.

    Dearest first to the step with the least so far (Graham 1969: at most 4/3 of the best there is). The fullest step
    has offset 0, and so on: ranks that wait for each other have their full steps together.

    Args:
        costs: What a refresh of each matrix costs, in any unit.
        period: Steps between two refreshes of a matrix.

    Returns:
        An offset in [0, period) per matrix: it refreshes when (step + offset) % period == 0.

    Raises:
        ValueError: `period` is not positive.
    """
    if period < 1:
        raise ValueError(f"period is {period}; it has to be at least 1")
    steps = [(0.0, offset) for offset in range(period)]
    offsets = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, offset = steps[0]
        offsets[index] = offset
        heapq.heapreplace(steps, (load + costs[index], offset))
    fullest = {offset: place for place, (_, offset) in enumerate(sorted(steps, key=lambda step: (-step[0], step[1])))}
    return [fullest[offset] for offset in offsets]
