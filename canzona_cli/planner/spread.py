"""Which of several interchangeable units an owner gets, so that every bucket's bytes spread over the owners.

Layers repeat, so units of the same costs and sizes are interchangeable: how many of each an owner updates decides the
balance of compute, and this decides which, without touching that balance.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from canzona_cli.planner.geometry import Parameter, Part


def spread(
    buckets: Sequence[Sequence[Parameter]], owner_of: Mapping[int, int], alike: Mapping[int, Hashable]
) -> dict[int, int]:
    """Owner of each unit: of every kind in `alike`, each owner keeps as many as in `owner_of`.

    Bucket by bucket, a kind goes to the owners with the fewest bytes of the bucket so far, then to those with most of
    that kind still to come. Inside a bucket gate and up of a layer get the same or neighbouring owners, so that few
    parameters lie across a border between two owners.
    """
    left: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for unit, owner in sorted(owner_of.items()):
        left[alike[unit]][owner] += 1
    found: dict[int, int] = {}
    for bucket in buckets:
        held: Counter[int] = Counter()
        kinds: dict[Hashable, list[Part]] = defaultdict(list)
        # Parameters of several parts first: their parts are then next to each other in the list.
        for parameter in sorted(bucket, key=lambda parameter: -len(parameter.parts)):
            for part in parameter.parts:
                kinds[alike[part.unit]].append(part)
        for kind, parts in sorted(kinds.items(), key=lambda item: -item[1][0].elements):
            free = left[kind]
            chosen: list[int] = []
            while len(chosen) < len(parts):
                ranked = sorted(free, key=lambda owner: (held[owner], -free[owner], owner))
                for owner in ranked[: len(parts) - len(chosen)]:
                    chosen.append(owner)
                    held[owner] += parts[0].elements
                    free[owner] -= 1
                    if not free[owner]:
                        del free[owner]
            for part, owner in zip(parts, sorted(chosen), strict=True):
                found[part.unit] = owner
    return found
