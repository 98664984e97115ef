"""Which cell of the DP x TP grid updates which matrix.

Owners and hosts are balanced together, because a matrix cannot be divided: what counts is the busiest cell of the
whole grid. The result depends on nothing but the arguments, so every rank computes the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout
from canzona_cli.errors import DoesNotFit, Problem
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.bounds import lower_bound
from canzona_cli.planner.contiguous import balanced_cuts, even_start
from canzona_cli.planner.geometry import Parameter, cut, owners, stage_parameters, stages
from canzona_cli.planner.hosts import HostPacker, by_owner, capped, deal
from canzona_cli.planner.micro_groups import greedy_hosts
from canzona_cli.planner.packing import CLOSE_ENOUGH, pack
from canzona_cli.planner.spread import spread
from canzona_cli.planner.types import Assignment, Cell, PlanSettings

BLENDS = (0.0, 0.25, 0.5, 0.75)
"""Weights of compute against bytes that are tried where alpha < 1, besides compute alone."""

Owners = dict[int, int]
"""Owner of each unit."""


def assign(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    layout: Layout,
    settings: PlanSettings,
    memory_cap: int | None = None,
    *,
    bucket_elements: int | None = None,
    bytes_per_element: int = 4,
) -> Assignment:
    """Owner and host of every matrix, for strategies canzona and asc.

    - canzona, layouts owner and aligned: `_balanced`; layout contiguous: the best of several cuts in natural order;
    - asc: in every bucket the owner is the rank whose even share a unit starts in, hosts take turns in registration
      order. Nothing is balanced.

    alpha weighs what candidates are compared by: alpha * (busiest cell / lower bound) + (1 - alpha) * (bytes of every
    bucket's busiest owner / their lower bound). Candidates do not depend on alpha, hence compute balance can only
    improve as alpha grows, and byte balance as it falls.

    Args:
        costs: Seconds of each matrix's update, positive.
        memory_cap: Elements of whole matrices that one cell may hold; None for any.
        bucket_elements: Size at which Megatron closes a bucket of the first stage; None for one bucket.
        bytes_per_element: In an exchange; only the paper's greedy hosts depend on it, see `micro_groups`.

    Raises:
        DoesNotFit: no assignment within `memory_cap` was found.
    """
    cells: list[Cell] = [Cell(owner=0, host=0)] * len(matrices)
    for stage in stages(matrices):
        problem = _Stage.of(matrices, costs, layout, settings, stage, bucket_elements)
        for index, cell in _solve(problem, settings, memory_cap, bytes_per_element):
            cells[index] = cell
    return Assignment(cells=tuple(cells))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """One stage's part of the problem."""

    matrices: Sequence[Matrix]
    costs: Sequence[float]
    buckets: Sequence[Sequence[Parameter]]
    units: Mapping[int, tuple[int, ...]]
    """Matrices of each unit."""
    owners: int
    tp: int
    bound: float
    """Seconds the busiest cell needs at least."""
    packer: HostPacker

    @staticmethod
    def of(
        matrices: Sequence[Matrix],
        costs: Sequence[float],
        layout: Layout,
        settings: PlanSettings,
        stage: int,
        bucket_elements: int | None,
    ) -> "_Stage":
        parameters = stage_parameters(matrices, stage, layout.tp)
        ranks = owners(layout)
        padded = settings.layout == "aligned" and settings.strategy != "asc"
        if padded:
            # Padding lies at the border of two shards, so a parameter cannot lie across one.
            parameters = [parameter.undivided() for parameter in parameters]
        return _Stage(
            matrices=matrices,
            costs=costs,
            buckets=cut(parameters, bucket_elements, stage=stage, shards=ranks if padded else None),
            units={part.unit: part.matrices for parameter in parameters for part in parameter.parts},
            owners=ranks,
            tp=layout.tp,
            bound=lower_bound(matrices, costs, stage, ranks, layout.tp),
            packer=HostPacker(costs, layout.tp),
        )

    def cost(self, unit: int) -> float:
        return sum(self.costs[index] for index in self.units[unit])

    def held(self, owner_of: Owners) -> list[list[int]]:
        return by_owner(self.units, owner_of, self.owners)

    def height(self, owner_of: Owners) -> float:
        """Seconds of the busiest cell, hosts packed."""
        return max(self.packer.height(matrices) for matrices in self.held(owner_of))

    def reach(self, owner_of: Owners) -> float:
        """Elements of every bucket's busiest owner, added up: what unevenly spread buckets take to travel."""
        total = 0
        for bucket in self.buckets:
            held: Counter[int] = Counter()
            for parameter in bucket:
                for part in parameter.parts:
                    held[owner_of[part.unit]] += part.elements
            total += max(held.values())
        return float(total)

    def least_reach(self) -> float:
        total = 0.0
        for bucket in self.buckets:
            parts = [part.elements for parameter in bucket for part in parameter.parts]
            total += max(sum(parts) / self.owners, max(parts))
        return total


def _solve(
    stage: _Stage, settings: PlanSettings, memory_cap: int | None, bytes_per_element: int
) -> Iterator[tuple[int, Cell]]:
    if settings.strategy == "asc":
        owner_of = _even_start(stage)
    elif settings.layout == "contiguous":
        owner_of = _pick(stage, settings.alpha, _contiguous(stage))
    else:
        balanced = _balanced(stage)
        owner_of = balanced
        if settings.alpha < 1:
            least = stage.height(balanced) * (1 - 1e-9)
            # Balanced for compute alone it stays the answer to alpha = 1, so nothing may be better at that.
            blended = [found for blend in BLENDS if stage.height(found := _blended(stage, blend)) >= least]
            owner_of = _pick(stage, settings.alpha, [balanced, *blended])
    cells = dict(_hosted(stage, settings, owner_of, bytes_per_element))
    if memory_cap is not None and _fullest(stage, cells) > memory_cap:
        elements = [matrix.elements for matrix in stage.matrices]
        within = capped(stage.units, stage.costs, elements, stage.owners, stage.tp, memory_cap)
        if within is None:
            raise DoesNotFit(_too_much(stage, memory_cap))
        cells = {index: Cell(owner=owner, host=host) for index, (owner, host) in within.items()}
    yield from cells.items()


def _balanced(stage: _Stage) -> Owners:
    """The best of three ways to divide one packing problem into two, then bytes spread over buckets.

    Whole units into owners, which suffices where owners hold many; the largest matrix of each unit into the cells of
    the grid and cells dealt to owners, because k and v are small and fit in anywhere; the same with whole units. Each
    is followed by packing every owner's matrices onto its hosts. With tp = 1 all are the first. Stops at the first
    that reaches the bound.
    """
    best: Owners = {}
    lowest = float("inf")
    ways: list[Callable[[_Stage], Owners]] = [_units_to_owners]
    if stage.tp > 1:
        ways += [_leaders_to_cells, _units_to_cells]
    for way in ways:
        found = way(stage)
        height = stage.height(found)
        if height < lowest * (1 - 1e-9):
            best, lowest = found, height
        if lowest <= stage.bound * (1 + CLOSE_ENOUGH):
            break
    kinds = {
        unit: tuple(sorted((stage.costs[index], stage.matrices[index].elements) for index in members))
        for unit, members in stage.units.items()
    }
    return spread(stage.buckets, best, kinds)


def _units_to_owners(stage: _Stage) -> Owners:
    units = list(stage.units)
    packing = pack([stage.cost(unit) for unit in units], stage.owners)
    return {units[item]: owner for owner, items in enumerate(packing.bins) for item in items}


def _units_to_cells(stage: _Stage) -> Owners:
    units = list(stage.units)
    return _cells_to_owners(stage, units, [stage.cost(unit) for unit in units])


def _leaders_to_cells(stage: _Stage) -> Owners:
    units = list(stage.units)
    return _cells_to_owners(stage, units, [max(stage.costs[index] for index in stage.units[unit]) for unit in units])


def _cells_to_owners(stage: _Stage, units: Sequence[int], costs: Sequence[float]) -> Owners:
    packing = pack(costs, stage.owners * stage.tp)
    dealt = deal([sum(costs[item] for item in items) for items in packing.bins], stage.owners)
    return {units[item]: dealt[cell] for cell, items in enumerate(packing.bins) for item in items}


def _blended(stage: _Stage, blend: float) -> Owners:
    """Bucket by bucket, a unit at a time to the owner with the least mix of compute so far and bytes in the bucket."""
    compute = [0.0] * stage.owners
    goal = sum(map(stage.cost, stage.units)) / stage.owners
    found: Owners = {}
    for bucket in sorted(stage.buckets, key=lambda bucket: -sum(parameter.elements for parameter in bucket)):
        parts = [part for parameter in bucket for part in parameter.parts]
        share = sum(part.elements for part in parts) / stage.owners
        held = [0] * stage.owners
        for part in sorted(parts, key=lambda part: (-part.elements, -stage.cost(part.unit))):
            score = [blend * compute[o] / goal + (1 - blend) * held[o] / share for o in range(stage.owners)]
            owner = min(range(stage.owners), key=lambda o: (score[o], compute[o], o))
            found[part.unit] = owner
            held[owner] += part.elements
            compute[owner] += stage.cost(part.unit)
    return found


def _contiguous(stage: _Stage) -> list[Owners]:
    """Cuts in natural order, weighed by cost and by elements, for five values of the paper's alpha."""
    pieces = [[part for parameter in bucket for part in parameter.parts] for bucket in stage.buckets]
    weights = (
        [[stage.cost(part.unit) for part in parts] for parts in pieces],
        [[float(part.elements) for part in parts] for parts in pieces],
    )
    found = []
    for by in weights:
        for alpha in (*BLENDS, 1.0):
            cuts = balanced_cuts(by, stage.owners, alpha)
            found.append(
                {
                    part.unit: owner
                    for parts, owned in zip(pieces, cuts, strict=True)
                    for part, owner in zip(parts, owned, strict=True)
                }
            )
    return found


def _even_start(stage: _Stage) -> Owners:
    found: Owners = {}
    for bucket in stage.buckets:
        parts = [part for parameter in bucket for part in parameter.parts]
        owned = even_start([part.elements for part in parts], stage.owners)
        found.update((part.unit, owner) for part, owner in zip(parts, owned, strict=True))
    return found


def _pick(stage: _Stage, alpha: float, candidates: Sequence[Owners]) -> Owners:
    least = stage.least_reach()
    prices = [(stage.height(found) / stage.bound, stage.reach(found) / least) for found in candidates]
    # Among equals the better balanced by the other measure, else one with alpha = 1 could be needlessly uneven.
    order = sorted(
        range(len(candidates)),
        key=lambda c: (alpha * prices[c][0] + (1 - alpha) * prices[c][1], prices[c][0] + prices[c][1], c),
    )
    return candidates[order[0]]


def _hosted(
    stage: _Stage, settings: PlanSettings, owner_of: Owners, bytes_per_element: int
) -> Iterator[tuple[int, Cell]]:
    for owner, indices in enumerate(stage.held(owner_of)):
        if settings.strategy == "asc":
            hosts = [position % stage.tp for position in range(len(indices))]
        elif settings.grouping == "greedy":
            hosts = greedy_hosts(
                stage.matrices, stage.costs, indices, stage.tp, settings.c_max_bytes, bytes_per_element
            )
        else:
            hosts = stage.packer.hosts(indices)
        for index, host in zip(indices, hosts, strict=True):
            yield index, Cell(owner=owner, host=host)


def _fullest(stage: _Stage, cells: Mapping[int, Cell]) -> int:
    held: Counter[Cell] = Counter()
    for index, cell in cells.items():
        held[cell] += stage.matrices[index].elements
    return max(held.values())


def _too_much(stage: _Stage, memory_cap: int) -> Problem:
    indices = [index for members in stage.units.values() for index in members]
    total = sum(stage.matrices[index].elements for index in indices)
    largest = max(stage.matrices[index].elements for index in indices)
    cells = stage.owners * stage.tp
    return Problem(
        key="gpus",
        value=f"{stage.owners} x {stage.tp} ranks of a stage",
        reason=(
            f"one rank has memory for matrices of {memory_cap:,} elements; {total:,} over {cells} ranks need "
            f"{max(-(-total // cells), largest):,} or more"
        ),
        fix="use more GPUs, or another parallel.tp and parallel.pp",
    )
