"""A lower bound on the seconds of matrix updates with their exchanges: no assignment of a run's matrices is
faster.

`bounds.lower_bound` bounds only the computation. But ranks also spend time on exchanges: the weight of a
hosted matrix is sent back, and a shared matrix waits for the squares of other ranks. In the fastest plan, the
busiest rank may therefore compute longer than `bounds.lower_bound`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, permutations, product

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.sharing import SharedCost, SharedCosts, shared_costs
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.bounds import packing_bound, simple_bound, stage_bound
from canzona_cli.planner.groups import expert_seconds
from canzona_cli.planner.pipeline import HostedPipeline, Job, make_jobs, planning_config
from canzona_cli.planner.plan import Plan

_MOST_UNITS = 8
"""The largest mean number of units per owner for which sets of units are listed. If owners have more units, the
bound for evenly divided work is close enough."""
_MOST_SETS = 300
_BISECTIONS = 8


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The time of matrix updates and their exchanges on a plan's slowest owner, and its lower bound."""

    seconds: float
    least: float
    """A lower bound on `seconds` for every assignment."""

    @property
    def gap(self) -> float:
        """The relative distance of `seconds` from `least`; 0.01 is one per cent."""
        return max(0.0, self.seconds / self.least - 1)  # below 0 only by rounding


def updates(config: RunConfig, layout: Layout, plan: Plan) -> Updates:
    """Computes the update time, and its bound, of the stage whose slowest owner takes longest."""
    pipeline = HostedPipeline.of(planning_config(config), layout)
    slowest_s = _slowest_owner_seconds(plan, pipeline)
    stage = max(slowest_s, key=slowest_s.__getitem__)
    possible = shared_costs(config, plan.subject.optimizer, layout, plan.matrices)
    least = max(
        plan.lower_bounds[stage] * pipeline.updating,
        least_seconds(plan.matrices, plan.costs, stage, layout.owners, possible, pipeline),
        _bound_with_experts(plan, stage, pipeline) if layout.ep > 1 else 0.0,
    )
    return Updates(seconds=slowest_s[stage], least=least)


def _bound_with_experts(plan: Plan, stage: int, pipeline: HostedPipeline) -> float:
    """Returns a lower bound on the busiest rank's seconds in a stage whose experts are divided among ranks
    and whose other matrices are hosted: the `stage_bound` of the updates, including the copies of
    exchanges."""
    cache: dict[Hashable, float] = {}
    seconds = []
    for matrix, cost in zip(plan.matrices, plan.costs, strict=True):
        key = matrix.expert_rank is None, _exchange_key(matrix), cost
        if key not in cache:
            exchanged = matrix.expert_rank is None and pipeline.tp > 1
            alone = pipeline.each_alone(cost, matrix.elements)
            cache[key] = _least_times(matrix, cost, None, pipeline).on_host if exchanged else alone
        seconds.append(cache[key])
    return stage_bound(plan.matrices, seconds, stage, plan.subject.layout)


def _slowest_owner_seconds(plan: Plan, pipeline: HostedPipeline) -> dict[int, float]:
    """Returns the seconds of the slowest owner of each stage, by stage."""
    experts_s = expert_seconds(plan.matrices, plan.costs, plan.assignment, pipeline)
    groups: dict[tuple[int, int], list[list[Job]]] = {}
    for group in sorted(plan.groups, key=lambda group: group.index):
        jobs = make_jobs(group.matrices, plan.matrices, plan.costs, plan.assignment)
        groups.setdefault((group.stage, group.owner), []).append(jobs)
    slowest_s: dict[int, float] = {}
    cache: dict[Hashable, float] = {}  # owners with the same costs on the same hosts take equally long
    for stage, owner in groups.keys() | experts_s.keys():
        of_owner = groups.get((stage, owner), [])
        owner_experts_s = experts_s.get((stage, owner), ())
        jobs = [job for group in of_owner for job in group]
        work = tuple((job.host, job.seconds, job.shared_cost, _exchange_key(job.matrix)) for job in jobs)
        key = (owner_experts_s, tuple(map(len, of_owner)), work)
        if key not in cache:
            cache[key] = pipeline.seconds(of_owner, experts_s=owner_experts_s)
        slowest_s[stage] = max(slowest_s.get(stage, 0.0), cache[key])
    return slowest_s


def _exchange_key(matrix: Matrix) -> Hashable:
    """Returns a key of all properties of a matrix on which the time of its exchanges depends."""
    return matrix.shape, matrix.kind, matrix.home, matrix.replicated


@dataclass(frozen=True, order=True, kw_only=True)
class _LeastTimes:
    """The least seconds that the update of a matrix can take, if it is hosted and if it is shared."""

    on_host: float
    """The seconds of the host's work, excluding waits, if the matrix is hosted."""
    on_others: float
    """The seconds of each other rank's work if the matrix is hosted."""
    back: float
    """The seconds that it takes to send back the weight if the matrix is hosted."""
    hosted: float
    """The seconds from packing the gradient to storing the weight, if the matrix is hosted."""
    on_each: float
    """The seconds of every rank's work, excluding waits, if the matrix is shared; infinite if it may not be
    shared."""
    alone: float
    """The seconds with waits, if the matrix is the only shared matrix of its owner. With several shared
    matrices, the work of one may hide the waits of another."""

    @property
    def least(self) -> float:
        return min(self.hosted, self.alone)


_Unit = tuple[_LeastTimes, ...]
"""The matrices of a unit, all of which have the same owner."""


def least_seconds(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    stage: int,
    owners: int,
    shared_costs: SharedCosts,
    pipeline: HostedPipeline,
) -> float:
    """Returns a lower bound on the slowest owner's seconds in a stage, as `HostedPipeline.seconds` counts
    them.

    A first bound assumes that the ranks of an owner can divide its work evenly. A bisection then looks for a
    better bound t. For each t, it lists the sets of units that one owner may be able to update within t, and
    chooses weights for kinds of units so that no set weighs more than 1. If all units together weigh more
    than the number of owners, every assignment takes longer than t. (The weights are a dual solution of the
    linear program that covers all units with sets.)

    With tp = 1 nothing is exchanged, and units are packed into owners. Experts with an `expert_rank` are left
    out, see `_bound_with_experts`.

    Args:
        shared_costs: the costs of the matrices that may be shared, by index.
    """
    members = [
        (matrix, cost)
        for matrix, cost in zip(matrices, costs, strict=True)
        if matrix.stage == stage and matrix.expert_rank is None
    ]
    if pipeline.tp == 1:
        return _least_without_tp(members, owners, pipeline)
    units = _count_units(members, shared_costs, pipeline)
    if not units:
        return 0.0
    kinds = _Kinds(units=tuple(units), counts=tuple(units.values()), owners=owners, tp=pipeline.tp)
    if sum(kinds.counts) > _MOST_UNITS * owners:
        return kinds.evenly_divided
    low = kinds.evenly_divided
    high = 1.5 * max(low, *(times.least for unit in units for times in unit))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if kinds.take_longer(middle) else (low, middle)
    return low


def _least_without_tp(members: Sequence[tuple[Matrix, float]], owners: int, pipeline: HostedPipeline) -> float:
    """Computes `least_seconds` with tp = 1."""
    jobs_of_unit: dict[int, list[Job]] = {}
    for matrix, cost in members:
        jobs_of_unit.setdefault(matrix.unit, []).append(Job(matrix=matrix, host=0, seconds=cost))
    # `alone` adds the launch for each unit, but an owner launches its updates only once.
    begin_s = pipeline.begin_s
    return begin_s + packing_bound([pipeline.alone(unit) - begin_s for unit in jobs_of_unit.values()], owners)


def _count_units(
    members: Sequence[tuple[Matrix, float]], shared_costs: SharedCosts, pipeline: HostedPipeline
) -> Counter[_Unit]:
    """Counts the units of a stage by kind."""
    cache: dict[Hashable, _LeastTimes] = {}
    by_unit: dict[int, list[_LeastTimes]] = {}
    for matrix, cost in members:
        shared_cost = shared_costs.get(matrix.index)
        key = (_exchange_key(matrix), cost, shared_cost)
        if key not in cache:
            cache[key] = _least_times(matrix, cost, shared_cost, pipeline)
        by_unit.setdefault(matrix.unit, []).append(cache[key])
    return Counter(tuple(sorted(unit, reverse=True)) for unit in by_unit.values())


def _least_times(matrix: Matrix, cost: float, shared_cost: SharedCost | None, pipeline: HostedPipeline) -> _LeastTimes:
    """Computes the least seconds of one matrix, hosted and shared, whatever else its owner updates."""
    on_host, on_others, back, hosted = list[float](), list[float](), list[float](), list[float]()
    for host in range(pipeline.tp):
        load = pipeline.new_load([Job(matrix=matrix, host=host, seconds=cost)])
        packing, hosting, storing = ([sum(s for _, s in parts) for parts in stage] for stage in load.work)
        on_host.append(hosting[host] - pipeline.begin_s)  # a micro-group is launched only once
        on_others.append(min(packing[rank] + storing[rank] for rank in range(pipeline.tp) if rank != host))
        back.append(load.exchanges[1].seconds)
        # Without the time of sending the gradient, which may overlap with the gradient norm.
        hosted.append(max(packing) + hosting[host] + back[-1] + max(storing))
    shared = [Job(matrix=matrix, host=0, seconds=cost, shared_cost=shared_cost)]
    return _LeastTimes(
        on_host=min(on_host),
        on_others=min(on_others),
        back=min(back),
        hosted=min(hosted),
        on_each=math.inf if shared_cost is None else pipeline.updating * shared_cost.each,
        alone=math.inf if shared_cost is None else pipeline.seconds([shared]),
    )


@dataclass(frozen=True, kw_only=True)
class _Kinds:
    """The units of a stage by kind, and the grid that they are assigned to."""

    units: tuple[_Unit, ...]
    counts: tuple[int, ...]
    """The number of units of each kind."""
    owners: int
    tp: int

    @cached_property
    def evenly_divided(self) -> float:
        """The lower bound on the slowest owner's seconds if an owner's ranks could divide its work evenly."""
        whole = [
            sum(min(times.on_host, self.tp * times.on_each) for times in unit)
            for unit, number in zip(self.units, self.counts, strict=True)
            for _ in range(number)
        ]
        return packing_bound(whole, self.owners) / self.tp

    def take_longer(self, seconds: float) -> bool:
        """Returns True if, in every assignment, some owner takes longer than `seconds`; False if this is not
        proven."""
        sets = self._sets(seconds)
        if sets is None:
            return False
        for order in permutations(range(len(self.units))):
            weights = _weights(sets, order)
            if weights is None:
                return True
            total = sum(weight * number for weight, number in zip(weights, self.counts, strict=True))
            if total > self.owners * (1 + 1e-9):
                return True
        return False

    def _sets(self, seconds: float) -> list[tuple[int, ...]] | None:
        """Lists the sets of units that an owner may be able to update within `seconds`, as the number of
        units of each kind; None if there are too many sets."""
        sets: list[tuple[int, ...]] = [()]
        for kind in range(len(self.units)):
            extended = []
            for chosen in sets:
                for number in count():
                    if not self._may_finish((*chosen, number), seconds):
                        break
                    extended.append((*chosen, number))
                    if len(extended) > _MOST_SETS or number == self.counts[kind]:
                        break
            if len(extended) > _MOST_SETS:
                return None
            sets = extended
        return sets

    def _may_finish(self, counts: Sequence[int], seconds: float) -> bool:
        """Returns False if it is certain that an owner takes longer than `seconds` for a set of units."""
        held = Counter[_LeastTimes]()
        for unit, number in zip(self.units, counts, strict=False):
            for times in unit:
                held[times] += number
        ranges = [range(number + 1) if times.on_each <= seconds else range(1) for times, number in held.items()]
        return any(_may_fit(held, shared_counts, seconds, self.tp) for shared_counts in product(*ranges))


def _may_fit(held: Counter[_LeastTimes], shared_counts: Sequence[int], seconds: float, tp: int) -> bool:
    """Returns False only if an owner certainly takes longer than `seconds` to update the matrices in `held`.

    Args:
        shared_counts: the number of shared matrices of each kind in `held`; the others are hosted.
    """
    shared = list(Counter(dict(zip(held, shared_counts, strict=True))).elements())
    hosted = list((held - Counter(shared)).elements())
    if any(times.hosted > seconds for times in hosted):
        return False
    if len(shared) == 1 and shared[0].alone > seconds:
        return False
    # Every rank works on every hosted matrix, and its host works longer than the others.
    on_all = sum(times.on_each for times in shared) + sum(times.on_others for times in hosted)
    back = min((times.back for times in hosted), default=0.0)
    return on_all + simple_bound([times.on_host - times.on_others for times in hosted], tp) + back <= seconds


def _weights(sets: Sequence[Sequence[int]], order: Sequence[int]) -> list[float] | None:
    """Returns a weight for each kind, so that no set weighs more than 1. In the given `order`, each kind gets
    the largest weight that the earlier weights allow. Returns None if a kind is in no set, so that no owner
    can update it in time."""
    weights = [0.0] * len(order)
    for kind in order:
        allowed = [
            (1 - sum(weight * number for weight, number in zip(weights, counts, strict=True))) / counts[kind]
            for counts in sets
            if counts[kind]
        ]
        if not allowed:
            return None
        weights[kind] = max(0.0, min(allowed))
    return weights
