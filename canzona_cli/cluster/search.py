"""The possible layouts of a run, and the search for the fastest.

Every layout that keeps the user's settings gets a quick estimate. A layout with more recomputation gets it
only after the same layout with less. Layouts are simulated in the order of their estimates, until all
remaining estimates exceed the fastest simulated steps or a limit on simulations is reached.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import groupby, product
from operator import attrgetter

from canzona_cli.cluster.gpus import with_layers_here
from canzona_cli.cluster.remembered import remember, search_file
from canzona_cli.config.execution import (
    RELEASED_TP_MODES,
    AnyStrategy,
    has_tp_modes,
    with_strategy,
    with_tp_mode,
)
from canzona_cli.config.layout_rules import divisors, layout_problems, may_have_whole_experts, possible_tp
from canzona_cli.config.schema import Execution, Layout, MuonTpMode, Recompute, RunConfig
from canzona_cli.config.settings import problem_with, with_own_values
from canzona_cli.config.stages import possible_pp, possible_vpp
from canzona_cli.costs.buffers import default_bucket_elements
from canzona_cli.costs.memory import MemoryEstimate, estimate
from canzona_cli.errors import ConfigError, DoesNotFit, Problem, refuse
from canzona_cli.model.matrices import matrix_shapes
from canzona_cli.planner.attempt import bucket_limits
from canzona_cli.planner.make import plan_of_run
from canzona_cli.planner.memory import memory_of
from canzona_cli.planner.plan import Plan
from canzona_cli.run.codec import load_if_valid
from canzona_cli.simulate.estimate import estimated_step_seconds
from canzona_cli.simulate.predict import IterationParts, divide_iteration, simulate_run
from canzona_cli.simulate.step import StrategyResult

BATCH_TOLERANCE = 0.125
"""The largest relative difference between a chosen batch and `train.batch_tokens`. Without this limit,
another number of GPUs could silently change the training job."""
MICRO_BATCHES = (8, 4, 2, 1)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One possible layout and the memory of its fullest rank."""

    layout: Layout
    memory: MemoryEstimate

    @property
    def fits(self) -> bool:
        return self.memory.fits


def candidates(config: RunConfig) -> list[Candidate]:
    """Lists every possible layout of a run with its memory, in no particular order. There is at least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    return [Candidate(layout=layout, memory=estimate(config, layout)) for layout in possible_layouts(config)]


def any_fits(config: RunConfig) -> bool:
    """Returns True if at least one possible layout fits in memory.

    Raises:
        ConfigError: the settings are impossible.
    """
    # The smallest micro-batch and full recomputation need the least memory. Layouts that need little come
    # last.
    train = config.train
    least = replace(train, micro_batch_size=train.micro_batch_size or 1, recompute=train.recompute or "full")
    return any(estimate(config, layout).fits for layout in reversed(possible_layouts(replace(config, train=least))))


def possible_layouts(config: RunConfig) -> list[Layout]:
    """Lists every layout that keeps the user's settings, even if it does not fit in memory. There is at
    least one.

    Raises:
        ConfigError: the settings are impossible.
    """
    refuse(with_own_values(config, layout_problems(config)))
    layouts = list(_layouts(config))
    if not layouts:
        raise ConfigError(_no_batch(config))
    return layouts


def fill(config: RunConfig, layout: Layout) -> RunConfig:
    """Returns `config` with the layout filled in and the schedule and the number of nodes completed."""
    mesh = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "sequence_parallel")}
    batch = {name: getattr(layout, name) for name in ("micro_batch_size", "global_batch_size", "recompute")}
    return replace(
        config,
        parallel=replace(config.parallel, **mesh),
        train=replace(config.train, **batch),
        schedule=config.schedule.complete(config.train.steps),
        cluster=replace(config.cluster, nodes=config.cluster.nodes or -(-config.gpus // config.cluster.gpus_per_node)),
    )


def _layouts(config: RunConfig) -> Iterator[Layout]:
    """Yields every layout that keeps the user's settings and divides the batch."""
    parallel, train = config.parallel, config.train
    micro_batches = MICRO_BATCHES if train.micro_batch_size is None else (train.micro_batch_size,)
    recomputes = RECOMPUTE if train.recompute is None else (train.recompute,)
    for tp, pp, vpp, cp, dp in _meshes(config):
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            supported = config.cluster.fused_layers or config.model.num_experts > 0
            sequence_parallel = tp > 1 and supported and train.seq_length % (tp * cp) == 0
        # Tensor parallelism cuts experts that are not divided among ranks.
        tp_divides_experts = config.model.ffn_hidden_size % tp == 0
        eps = [ep for ep in expert_parallel_sizes(config, tp * cp * dp) if ep > 1 or tp_divides_experts]
        for micro in micro_batches:
            batch = _global_batch(config, _batch_multiple(pp, vpp, dp, micro))
            if batch is None:
                continue
            for ep, recompute in product(eps, recomputes):
                yield Layout(
                    tp=tp,
                    pp=pp,
                    vpp=vpp,
                    cp=cp,
                    dp=dp,
                    ep=ep,
                    micro_batch_size=micro,
                    num_microbatches=batch // (dp * micro),
                    global_batch_size=batch,
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                )


def expert_parallel_sizes(config: RunConfig, cells: int) -> tuple[int, ...]:
    """Returns the possible expert-parallel sizes of a stage with `cells` ranks.

    Unless the user sets `parallel.ep`, experts are divided only among GPUs. CPU ranks share their cores, so moving
    experts to other ranks would not make them faster.
    """
    if config.parallel.ep is not None:
        return (config.parallel.ep,)
    if not config.model.num_experts or config.cluster.device == "cpu":
        return (1,)
    return tuple(ep for ep in divisors(config.model.num_experts) if cells % ep == 0)


def _batch_multiple(pp: int, vpp: int, dp: int, micro: int) -> int:
    """Returns the number of sequences of which a global batch must be a multiple.

    Interleaved schedules need micro-batches in groups of `pp`.
    """
    return dp * micro * (pp if vpp > 1 else 1)


def _meshes(config: RunConfig) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields every possible (tp, pp, vpp, cp, dp) for the number of GPUs. tp * cp exceeds the GPUs of a node
    only if the user sets tp or cp."""
    parallel, model, sequence = config.parallel, config.model, config.train.seq_length
    per_node = min(config.cluster.gpus_per_node, config.gpus)
    cuts_sequence = parallel.sequence_parallel or model.num_experts > 0
    possible = possible_tp(model, whole_experts=may_have_whole_experts(config))
    tps = tuple(tp for tp in possible if tp <= per_node) if parallel.tp is None else (parallel.tp,)
    pps = possible_pp(model.num_layers) if parallel.pp is None else (parallel.pp,)
    for tp in tps:
        cps: tuple[int, ...] = (parallel.cp or 1,)
        if parallel.cp is None:
            # A rank has two slices of each sequence, so 2 * cp has to divide its length.
            cps = tuple(cp for cp in range(1, per_node // tp + 1) if cp == 1 or sequence % (2 * cp) == 0) or (1,)
        for cp in cps:
            if parallel.sequence_parallel and tp == 1:
                continue
            if cuts_sequence and tp > 1 and sequence % (tp * cp):
                continue
            for pp in pps:
                if config.gpus % (tp * pp * cp) == 0 and config.gpus // pp % (parallel.ep or 1) == 0:
                    for vpp in possible_vpp(model.num_layers, pp):
                        if parallel.vpp in (None, vpp):
                            yield tp, pp, vpp, cp, config.gpus // (tp * pp * cp)


def _global_batch(config: RunConfig, step: int) -> int | None:
    """Returns the number of sequences in an optimizer step, which is a multiple of `step`; None if no
    multiple matches the settings."""
    train = config.train
    if train.global_batch_size is not None:
        return train.global_batch_size if train.global_batch_size % step == 0 else None
    target = train.batch_tokens / train.seq_length
    batch = max(1, round(target / step)) * step
    return batch if abs(batch - target) <= BATCH_TOLERANCE * target else None


def _no_batch(config: RunConfig) -> Problem:
    """Describes why a run has no possible layout: no parallel sizes divide the number of GPUs, or no layout
    divides the batch. All other problems have been reported earlier (`layout_problems`)."""
    train = config.train
    micro = train.micro_batch_size or 1
    steps = sorted({_batch_multiple(pp, vpp, dp, micro) for _, pp, vpp, _, dp in _meshes(config)})
    if not steps:
        reason = "no combination of parallel sizes that the model and the other settings allow divides this number"
        return problem_with(config, "gpus", reason, "leave parallel.* null, or use another number of GPUs")
    if train.global_batch_size is not None:
        above = min(-(-train.global_batch_size // step) * step for step in steps)
        reason = f"is not a multiple of dp * micro-batch for any layout on {config.gpus} GPUs (smallest: {steps[0]})"
        return problem_with(config, "train.global_batch_size", reason, f"use {above}, or fewer GPUs")
    target = train.batch_tokens / train.seq_length
    nearest = min((max(1, round(target / step)) * step for step in steps), key=lambda batch: abs(batch - target))
    reason = (
        f"is {target:g} sequences of {train.seq_length} tokens, and {config.gpus} GPUs cannot "
        f"divide any batch within {BATCH_TOLERANCE:.1%} of this number (nearest: {nearest})"
    )
    fix = f"use train.batch_tokens={nearest * train.seq_length}, train.global_batch_size={nearest}, or fewer GPUs"
    return problem_with(config, "train.batch_tokens", reason, fix)


EQUAL_WITHIN = 1e-5
"""The relative difference up to which two step times are treated as equal."""

MARGIN = 1.005
"""The factor by which all remaining estimates must exceed the slowest of the best simulated steps before the
search stops. Estimates hardly ever exceed simulations by more."""
MARGIN_WITH_EXPERTS = 1.03
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
    """The number of layouts from which the search chose, see `_eligible`."""
    simulated: int
    """The number of layouts that were simulated."""


def search(config: RunConfig, count: int = 1) -> LayoutSearch:
    """Searches for the `count` layouts with the shortest simulated time per sequence that fit in memory.
    Results are cached in files.

    Raises:
        ConfigError: the settings are impossible.
    """
    config = replace(config, cluster=with_layers_here(config.cluster))
    file = search_file(config, count)
    result = load_if_valid(file, LayoutSearch)
    if result is None or not _still_valid(config, result):
        result = _search(config, count)
        remember(file, result)
    return result


def fastest_with(config: RunConfig, strategy: AnyStrategy, planned: Layout) -> LayoutResult | None:
    """Returns the fastest layout of the run with another strategy, which needs no plan; None if no layout
    fits in memory.

    Megatron's Muon is simulated in every mode that the supported Megatron can run. The planned layout is
    always simulated too, because a search with a limit on simulations may miss it. On GPUs, the fastest
    layout is also simulated with the bucket sizes that are tried for plans, because a user of this strategy
    could set them with `parallel.bucket_elements`.
    """
    other = with_strategy(config, strategy)
    runs = [with_tp_mode(other, mode) for mode in RELEASED_TP_MODES] if has_tp_modes(other) else [other]
    same_layout = [_simulate(run, planned) for run in runs if estimate(run, planned).fits]
    searched = [result for run in runs for result in search(run).best]
    results = [*searched, *(simulated.complete() for simulated in same_layout if simulated)]
    fastest = min(results, key=lambda result: result.per_sequence_s, default=None)
    if fastest is None or config.cluster.device == "cpu" or config.parallel.bucket_elements is not None:
        return fastest
    # `fastest` already has the first size, the default.
    _, *bucket_sizes = bucket_limits(default_bucket_elements(fastest.layout.owners))
    other = with_tp_mode(other, fastest.tp_mode or other.engine.muon_tp_mode)
    runs = [replace(other, parallel=replace(other.parallel, bucket_elements=size)) for size in bucket_sizes]
    simulated = [_simulate(run, fastest.layout) for run in runs if estimate(run, fastest.layout).fits]
    return min([fastest, *(result.complete() for result in simulated if result)], key=lambda result: result.iteration_s)


def _search(config: RunConfig, count: int) -> LayoutSearch:
    """Performs a search without the cache, see `search`."""
    fitting = _eligible(config)
    best: dict[float, _SimulatedLayout] = {}
    simulated_keys: set[tuple[Layout, float, float]] = set()
    without_recomputation_s: dict[Layout, float] = {}
    """The seconds per sequence of simulated layouts, by the same layout without recomputation. A layout with
    more recomputation is never faster, so it can be skipped."""
    simulated = 0
    limit = max(count, _simulation_limit(config))
    margin = MARGIN_WITH_EXPERTS if config.model.num_experts else MARGIN
    for estimated_s, layout in _quickest_first(config, fitting):
        slowest_s = max(sorted(best)[:count]) * (1 + EQUAL_WITHIN) if len(best) >= count else math.inf
        if estimated_s > margin * slowest_s or (best and simulated >= limit):
            break
        # A layout with k times the context parallelism and k times the micro-batch has the same tokens,
        # messages and owners. If the estimate is equal too, so is attention, and a simulation would give the
        # same result.
        unsliced = replace(layout, cp=1, dp=layout.owners, micro_batch_size=1)
        step_key = (unsliced, layout.micro_batch_size / layout.cp, estimated_s)
        not_recomputed = replace(layout, recompute="none")
        if step_key in simulated_keys or without_recomputation_s.get(not_recomputed, 0.0) > slowest_s:
            continue
        simulated += 1
        result = _simulate(config, layout)
        if result is not None:
            simulated_keys.add(step_key)
            # Rounded, because equal times may differ by the order of summation.
            seconds = float(f"{result.result.iteration_s / layout.global_batch_size:.5e}")
            without_recomputation_s[not_recomputed] = seconds
            best[seconds] = min(result, best.get(seconds, result), key=lambda either: _simplest_first(either.layout))
    fastest = tuple(best[seconds].complete() for seconds in sorted(best)[:count])
    return LayoutSearch(best=fastest, legal=sum(map(len, fitting)), simulated=simulated)


def _simulation_limit(config: RunConfig) -> float:
    """Returns the maximum number of layouts to simulate."""
    many = config.model.num_layers * len(matrix_shapes(config)) > MANY_MATRICES
    if many and config.execution is Execution.PLANNED:
        return MAX_SIMULATIONS_MANY_MATRICES
    return MAX_SIMULATIONS if many or config.gpus > EXHAUSTIVE_RANKS else math.inf


def _eligible(config: RunConfig) -> list[list[Layout]]:
    """Returns the layouts to choose from: those that leave the profile's headroom free or, if there are none,
    those that fit in memory. Layouts that differ only in recomputation are in one list, in order of
    increasing recomputation."""
    leaves_headroom, fitting = list[list[Layout]](), list[list[Layout]]()
    for _, alike in groupby(possible_layouts(config), attrgetter("tp", "pp", "vpp", "cp", "ep", "micro_batch_size")):
        group = list(alike)
        fitting_of_group: list[Layout] = []
        for index, layout in enumerate(group):
            memory = estimate(config, layout)
            if memory.leaves_headroom:  # so do the later layouts: more recomputation never needs more memory
                leaves_headroom.append(group[index:])
                break
            if memory.fits:
                fitting_of_group.append(layout)
        if fitting_of_group:
            fitting.append(fitting_of_group)
    return leaves_headroom or fitting


def _quickest_first(config: RunConfig, layouts: Iterable[Sequence[Layout]]) -> Iterator[tuple[float, Layout]]:
    """Yields layouts with their estimated seconds per sequence, fastest first.

    Args:
        layouts: see `_eligible`. A layout is estimated only after the previous layout of its list has been
            yielded, because more recomputation never makes a layout faster.
    """

    def entry(group: Sequence[Layout]) -> tuple[float, tuple[int, ...], Sequence[Layout]]:
        layout = group[0]
        seconds = estimated_step_seconds(config, layout) / layout.global_batch_size
        return seconds, _simplest_first(layout), group

    queue = [entry(group) for group in layouts]
    heapify(queue)
    while queue:
        seconds, _, (layout, *rest) = queue[0]
        if rest:
            heapreplace(queue, entry(rest))
        else:
            heappop(queue)
        yield seconds, layout


@dataclass(frozen=True, kw_only=True)
class _SimulatedLayout:
    """A layout with its plan and the result of its simulation."""

    run: RunConfig
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


def _simulate(config: RunConfig, layout: Layout) -> _SimulatedLayout | None:
    """Plans and simulates a layout; returns None if no plan fits in memory, or if the settings are
    refused."""
    run = fill(config, layout)
    try:
        plan = plan_of_run(run, layout)
    except (ConfigError, DoesNotFit):
        return None
    return _SimulatedLayout(run=run, layout=layout, plan=plan, result=simulate_run(run, layout, plan))


def _simplest_first(layout: Layout) -> tuple[int, ...]:
    """Returns a sort key that puts the simplest layout first."""
    recompute = RECOMPUTE.index(layout.recompute)
    return layout.pp, layout.vpp, layout.cp, layout.tp, layout.ep, recompute, -layout.micro_batch_size


def _still_valid(config: RunConfig, remembered: LayoutSearch) -> bool:
    """Returns True if cached layouts are possible for the run and fit.

    A cache file may be from another run or from before a rule changed. Its layout must then not be used.
    """
    layouts = {tried.layout for tried in remembered.best}
    return layouts <= set(possible_layouts(config)) and all(estimate(config, layout).fits for layout in layouts)
