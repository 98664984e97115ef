"""The search for the fastest layouts of a run.

Layouts are simulated in the order of their estimates, until all remaining estimates exceed the fastest
simulated steps or a limit on simulations is reached. The estimates, and the memory of a layout, are only
computed when a quicker estimate says that the layout may be the next, and for a layout with more recomputation
only after the same layout with less. Most layouts are never looked at, because a bound that they have in common is too
high.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from canzona_cli.core.costs.buffers import default_bucket_elements
from canzona_cli.core.costs.gpus import with_layers_here
from canzona_cli.core.costs.memory import MemoryEstimate, capacity, estimate, headroom, least_recomputed
from canzona_cli.core.errors import ConfigError, DoesNotFit
from canzona_cli.core.model.matrices import matrix_shapes
from canzona_cli.core.planner.attempt import bucket_limits
from canzona_cli.core.planner.make import plan_of_run
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Execution, Layout, MuonTpMode, Setup
from canzona_cli.core.setup.execution import (
    RELEASED_TP_MODES,
    AnyStrategy,
    has_tp_modes,
    with_strategy,
    with_tp_mode,
)
from canzona_cli.core.simulate.estimate import (
    estimated_step_seconds,
    least_sequence_seconds,
    least_step_seconds,
    outlined_step_seconds,
)
from canzona_cli.core.simulate.possible import RECOMPUTE, LayoutGroup, fill, layout_groups, possible_layouts
from canzona_cli.core.simulate.predict import IterationParts, divide_iteration, simulate_run
from canzona_cli.core.simulate.step import StrategyResult


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One possible layout and the memory of its fullest rank."""

    layout: Layout
    memory: MemoryEstimate

    @property
    def fits(self) -> bool:
        return self.memory.fits


def candidates(setup: Setup) -> list[Candidate]:
    """Lists every possible layout of a run with its memory, in no particular order. There is at least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    return [Candidate(layout=layout, memory=estimate(setup, layout)) for layout in possible_layouts(setup)]


def any_fits(setup: Setup) -> bool:
    """Returns True if at least one possible layout fits in memory.

    Raises:
        ConfigError: the settings are impossible.
    """
    # The smallest micro-batch and full recomputation need the least memory. Layouts that need little come
    # last.
    train = setup.train
    least = replace(train, micro_batch_size=train.micro_batch_size or 1, recompute=train.recompute or "full")
    return any(estimate(setup, layout).fits for layout in reversed(possible_layouts(replace(setup, train=least))))


EQUAL_WITHIN = 1e-5
"""The relative difference up to which two step times are treated as equal."""

MARGIN = 1.007
"""The factor by which all remaining estimates must exceed the slowest of the best simulated steps before the
search stops. Estimates of layouts that are nearly the fastest hardly ever exceed simulations by more."""
MARGIN_WITH_EXPERTS = 1.012
"""The same factor for models with experts, whose traffic is harder to estimate."""
EXHAUSTIVE_RANKS = 1024
"""The largest number of ranks for which every layout within `MARGIN` is simulated."""
MAX_SIMULATIONS = 10
"""The limit on simulations for runs with more ranks, whose layouts take a second each to simulate, and for
models with more matrices than `MANY_MATRICES`. It is raised to the number of layouts that the search
returns."""
MANY_MATRICES = 4096
"""The number of matrices above which making a plan takes seconds. Only models with experts, or large models
with splitting per_head, have more."""
MAX_SIMULATIONS_MANY_MATRICES = 2
"""The same limit for models with more matrices than `MANY_MATRICES` if every layout needs a plan."""


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """A layout that was planned and simulated. Its times do not depend on this machine's number of cores."""

    layout: Layout
    iteration_s: float
    optimizer_s: float
    memory_bytes: int
    """The bytes on the fullest rank."""
    spent: IterationParts
    """The parts of the slowest rank's iteration."""
    tp_mode: MuonTpMode | None = None
    """The mode of Megatron's Muon; None for strategies that do not use it, and with one TP rank."""

    @property
    def per_sequence_s(self) -> float:
        """The seconds per sequence, for comparing layouts with different batches."""
        return self.iteration_s / self.layout.global_batch_size


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """The result of a search."""

    best: tuple[LayoutResult, ...]
    """The fastest layouts, as many as were requested, ordered by time. Of several layouts with equal times,
    only the simplest is included. Empty if no plan fits in memory."""
    legal: int
    """The number of layouts that were compared, see `layout_groups`."""
    simulated: int
    """The number of layouts that were simulated."""


def search(setup: Setup, count: int = 1) -> LayoutSearch:
    """Searches for the `count` layouts with the shortest simulated time per sequence that fit in memory.

    Args:
        count: the number of layouts to return.

    Raises:
        ConfigError: the settings are impossible.
    """
    setup = replace(setup, cluster=with_layers_here(setup.cluster))
    groups = layout_groups(setup)
    for free_bytes in (headroom(setup), 0):
        fastest = _fastest_within(setup, groups, capacity(setup) - free_bytes, count)
        if fastest.simulated:
            break
    return fastest


def fastest_with(
    setup: Setup, strategy: AnyStrategy, planned: Layout, tp_modes: Sequence[MuonTpMode] = RELEASED_TP_MODES
) -> LayoutResult | None:
    """Returns the fastest layout of the run with another strategy, which needs no plan; None if no layout
    fits in memory.

    Megatron's Muon is simulated in each of `tp_modes`, by default all that the supported Megatron can run.
    The planned layout is always simulated too, because a search with a limit on simulations may miss it. On
    GPUs, the fastest layout is also simulated with the bucket sizes that are tried for plans, because a user
    of this strategy could set them with `parallel.bucket_elements`.
    """
    other = with_strategy(setup, strategy)
    runs = [with_tp_mode(other, mode) for mode in tp_modes] if has_tp_modes(other) else [other]
    same_layout = [_simulate(run, planned) for run in runs if estimate(run, planned).fits]
    searched = [result for run in runs for result in search(run).best]
    results = [*searched, *(simulated.complete() for simulated in same_layout if simulated)]
    fastest = min(results, key=lambda result: result.per_sequence_s, default=None)
    if fastest is None or not setup.bucket_size_open:
        return fastest
    # `fastest` already has the first size, the default.
    _, *bucket_sizes = bucket_limits(default_bucket_elements(fastest.layout.owners))
    other = with_tp_mode(other, fastest.tp_mode or other.engine.muon_tp_mode)
    runs = [replace(other, parallel=replace(other.parallel, bucket_elements=size)) for size in bucket_sizes]
    simulated = [_simulate(run, fastest.layout) for run in runs if estimate(run, fastest.layout).fits]
    return min([fastest, *(result.complete() for result in simulated if result)], key=lambda result: result.iteration_s)


def _fastest_within(setup: Setup, groups: Sequence[LayoutGroup], limit: int, count: int) -> LayoutSearch:
    """Searches for the `count` fastest layouts that need at most `limit` bytes, see `_fastest_first`."""
    best: dict[float, _SimulatedLayout] = {}
    without_recomputation_s: dict[Layout, float] = {}
    """The seconds per sequence of simulated layouts, by the same layout without recomputation. A layout with
    more recomputation is never faster, so it can be skipped."""
    simulated = 0
    simulations = max(count, _simulation_limit(setup))
    margin = MARGIN_WITH_EXPERTS if setup.model.num_experts else MARGIN

    def slowest_s() -> float:
        """Returns the seconds above which a layout is not one of the `count` fastest."""
        return max(sorted(best)[:count]) * (1 + EQUAL_WITHIN) if len(best) >= count else math.inf

    def latest_s() -> float:
        """Returns the estimate above which no layout is simulated."""
        return -math.inf if best and simulated >= simulations else margin * slowest_s()

    for _, layout in _fastest_first(setup, groups, limit, latest_s):
        not_recomputed = replace(layout, recompute="none")
        if without_recomputation_s.get(not_recomputed, 0.0) > slowest_s():
            continue
        simulated += 1
        result = _simulate(setup, layout)
        if result is not None:
            # Rounded, because equal times may differ by the order of summation.
            seconds = float(f"{result.result.iteration_s / layout.global_batch_size:.5e}")
            without_recomputation_s[not_recomputed] = seconds
            best[seconds] = min(result, best.get(seconds, result), key=lambda either: _simplest_first(either.layout))
    fastest = tuple(best[seconds].complete() for seconds in sorted(best)[:count])
    return LayoutSearch(best=fastest, legal=sum(len(group.recomputes) for group in groups), simulated=simulated)


def _simulation_limit(setup: Setup) -> float:
    """Returns the maximum number of layouts to simulate."""
    many = setup.model.num_layers * len(matrix_shapes(setup)) > MANY_MATRICES
    if many and setup.execution is Execution.PLANNED:
        return MAX_SIMULATIONS_MANY_MATRICES
    return MAX_SIMULATIONS if many or setup.gpus > EXHAUSTIVE_RANKS else math.inf


def _fastest_first(
    setup: Setup, groups: Iterable[LayoutGroup], limit: int, latest_s: Callable[[], float]
) -> Iterator[tuple[float, Layout]]:
    """Yields the layouts that need at most `limit` bytes with their estimated seconds per sequence, fastest
    first, up to those of `latest_s`, which may become less from layout to layout.

    Layouts that differ only in pp, vpp and dp have a lower bound in common, and enter the queue once it is the lowest.
    A layout enters with a lower bound of its estimate. When it is first in the queue and fits, it
    enters again with its estimate, and a last time with a closer estimate. More recomputation never makes a
    layout faster, so the next layout of a group enters after the estimate of the previous one.
    """
    estimators = (least_step_seconds, estimated_step_seconds, outlined_step_seconds)
    queue: list[tuple[float, int, tuple[int, ...], LayoutGroup]] = []

    def add(group: LayoutGroup, level: int, least_s: float) -> None:
        layout = group.first
        try:
            seconds = estimators[level](setup, layout)
        except ConfigError:
            return
        # No estimate moves a layout in front of layouts that have left the queue.
        seconds = max(least_s, seconds / layout.global_batch_size)
        heappush(queue, (seconds, -level, _simplest_first(layout), group))

    families: dict[tuple[int, int, int, int], list[LayoutGroup]] = {}
    for group in groups:
        families.setdefault((group.tp, group.cp, group.ep, group.micro_batch_size), []).append(group)
    bounded = [(least_sequence_seconds(setup, family[0].first), family) for family in families.values()]
    bounded.sort(key=lambda bound: -bound[0])
    while queue or bounded:
        if bounded and (not queue or bounded[-1][0] <= queue[0][0]):
            least_s, family = bounded.pop()
            for group in family:
                add(group, 0, least_s)
            continue
        seconds, level, _, group = heappop(queue)
        if seconds > latest_s():
            return
        if level == 0:
            place = least_recomputed(setup, group.layouts, limit)
            if place is not None:
                add(group.without(place), 0 if place else 1, seconds)
        elif level == -1:
            add(group, 2, seconds)
            if len(group.recomputes) > 1:
                add(group.without(1), 0, seconds)
        else:
            yield seconds, group.first


@dataclass(frozen=True, kw_only=True)
class _SimulatedLayout:
    """A layout with its plan and the result of its simulation."""

    run: Setup
    """The configuration with the layout filled in."""
    layout: Layout
    plan: Plan | None
    """The plan; None for strategies without one."""
    result: StrategyResult

    def complete(self) -> LayoutResult:
        """Returns the result with the memory and the parts of the step, which are computed only for the
        fastest layouts."""
        run, layout, plan = self.run, self.layout, self.plan
        return LayoutResult(
            layout=layout,
            iteration_s=self.result.iteration_s,
            optimizer_s=self.result.optimizer_s,
            memory_bytes=memory_of(run, layout, plan).total,
            spent=divide_iteration(run, layout, self.result),
            tp_mode=run.engine.muon_tp_mode if layout.tp > 1 and has_tp_modes(run) else None,
        )


def _simulate(setup: Setup, layout: Layout) -> _SimulatedLayout | None:
    """Plans and simulates a layout; returns None if no plan fits in memory, or if the settings are
    refused."""
    run = fill(setup, layout)
    try:
        plan = plan_of_run(run, layout)
    except (ConfigError, DoesNotFit):
        return None
    return _SimulatedLayout(run=run, layout=layout, plan=plan, result=simulate_run(run, layout, plan))


def _simplest_first(layout: Layout) -> tuple[int, ...]:
    """Returns a sort key that puts the simplest layout first."""
    recompute = RECOMPUTE.index(layout.recompute)
    return layout.pp, layout.vpp, layout.cp, layout.tp, layout.ep, recompute, -layout.micro_batch_size
