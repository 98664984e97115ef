"""Simulates a step of a strategy: the seconds of an iteration and of each of its phases.

The simulation covers one steady-state iteration from the first forward pass to the last updated weight. The
gathering of the previous step's new parameters overlaps with the forward passes, the reduction of gradients
with the last backward pass. Gradient norm and clipping follow, and then exchanges, matrix updates and AdamW's
update, in the strategy's order. Up to the updates, one rank represents each pipeline stage, because
collectives keep the stage's ranks in step; updates are simulated for every rank whose work differs. On a
machine whose ranks share cores (`ClusterConfig.cores`), all concurrent work shares the cores.
`compare.assumptions` returns the simulation's assumptions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from canzona_cli.core.costs.links import Groups, Transfer
from canzona_cli.core.costs.model import NormClip, preparation_seconds, stage_time, units_taken
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.costs.update import ROUNDING, UpdateTime, algorithm_of, period_seconds, step_factor
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.model.matrices import Matrix, Shape
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.phases import IN_STEP, Stream
from canzona_cli.core.planner.chunks import Chunk, ChunkBuilder, GatheringOrder, seconds_after_reduction
from canzona_cli.core.planner.plan import Cell, rank_buckets
from canzona_cli.core.planner.reduction import GATHERED_AHEAD, ReductionModel
from canzona_cli.core.setup import Execution, KroneckerConfig, Layout, MuonTpMode, Setup
from canzona_cli.core.setup.execution import (
    AnyStrategy,
    aligns_param_gather,
    overlaps_param_gather,
    with_strategy,
    with_tp_mode,
)
from canzona_cli.core.simulate.iteration import IterationTimeline, StageWork
from canzona_cli.core.simulate.prediction import SimulatedEvent
from canzona_cli.core.simulate.update import Workload
from canzona_cli.core.simulate.update_phase import CellUpdate, UpdatePhase


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """The simulated iteration of one strategy, by phase of the breakdown (`core.phases`)."""

    strategy: AnyStrategy
    iteration_s: float
    optimizer_s: float
    """The seconds that the optimizer adds to the iteration: norm and clipping, AdamW's update, matrix
    updates, exchanges that do not overlap with updates, and the forward pass's wait for gathered
    parameters."""
    phases: Mapping[str, float]
    """The seconds of each phase on the slowest rank. The phases of `IN_STEP` add up to `iteration_s`; the
    `_total`s also include the time that overlaps with other phases."""
    mean_phases: Mapping[str, float]
    """The phases averaged over all ranks; a rank that finishes early waits in `other`."""
    slowest_rank: int
    update_balance: float
    """The seconds of matrix updates on the busiest rank relative to the mean over ranks. 1.0 is perfect, and
    also the value if there are no matrix updates."""
    make_events: Callable[[], tuple[SimulatedEvent, ...]] = field(repr=False, compare=False)
    """The function that returns `events`, which are computed only when they are needed."""

    @cached_property
    def events(self) -> tuple[SimulatedEvent, ...]:
        """The timelines of the slowest rank and of the rank that finishes its updates first, if they
        differ."""
        return self.make_events()


def simulate(setup: Setup, layout: Layout, workload: Workload) -> StrategyResult:
    """Simulates one iteration of the workload's strategy.

    Raises:
        ConfigError: the profile makes the iteration faster than its `bf16_tflops` allows.
    """
    return simulate_tp_modes(setup, layout, workload, [setup.engine.muon_tp_mode])[0]


def simulate_tp_modes(
    setup: Setup, layout: Layout, workload: Workload, modes: Sequence[MuonTpMode]
) -> list[StrategyResult]:
    """Simulates one iteration of the workload's strategy with each of several values of `engine.muon_tp_mode`, which
    differ only in the matrix updates. With several modes, the strategy has no plan.

    Raises:
        ConfigError: see `simulate`.
    """
    setup = with_tp_mode(with_strategy(setup, workload.strategy), modes[0])
    first = _Simulation(setup, layout, _average_over_steps(setup, workload))
    results = [first.result(), *(first.in_tp_mode(mode).result() for mode in modes[1:])]
    for result in results:
        _check_utilisation(setup, layout, result)
    return results


def _check_utilisation(setup: Setup, layout: Layout, result: StrategyResult) -> None:
    """Refuses a profile that makes the iteration faster than its `bf16_tflops` allows."""
    tokens = layout.global_batch_size * setup.train.seq_length
    cluster, flops = setup.cluster, tokens * flops_per_token(setup.model, setup.train.seq_length)
    utilisation = flops / (result.iteration_s * layout.world_size * cluster.bf16_tflops * 1e12)
    if utilisation > 1:
        name, factor = "pass_factors", min(cluster.pass_factors)
        reason = f"makes model FLOP utilisation {utilisation:.0%} of cluster.bf16_tflops={cluster.bf16_tflops:g}"
        fix = "use cluster.pass_factors=[1,1], or measure it: canzona calibrate"
        if factor >= 1:
            name, factor = "bf16_tflops", cluster.bf16_tflops
            reason = f"makes model FLOP utilisation {utilisation:.0%}, because other rates of the profile are higher"
            fix = "raise it, or lower the rates that are too high, such as cluster.matmul_tflops"
        raise ConfigError(Problem(key=f"cluster.{name}", value=factor, reason=reason, fix=fix))


class _Simulation:
    """A simulated step of one strategy. The constructor runs it. Times are seconds from the step's start."""

    def __init__(self, setup: Setup, layout: Layout, workload: Workload) -> None:
        self._setup, self._layout, self._workload = setup, layout, workload
        self._planned = setup.execution is Execution.PLANNED
        cluster, stages = setup.cluster, range(layout.pp)
        machines = Groups.of(layout, cluster).world.machines
        cores = self._cores = None if cluster.cores is None else float(cluster.cores * machines)
        chunks = [self._chunks(stage) for stage in stages]
        orders = [GatheringOrder() for _ in stages]
        overlap_gather = overlaps_param_gather(setup)
        overlapped = None
        if self._planned and overlap_gather:
            orders = [self._order(stage, chunks[stage]) for stage in stages]
            overlapped = [
                [of_stage[index].gather for index in order.overlapped]
                for of_stage, order in zip(chunks, orders, strict=True)
            ]
        # The updates are simulated first, because they determine how much gathering is left for the forward
        # pass.
        self._cells, windows_s = UpdatePhase(setup, layout, workload, cores=cores).run(overlapped)
        self._early_s = [0.0] * layout.pp
        """The seconds of gathering that overlaps with updates, by stage."""
        if overlapped is not None:
            for stage, window_s in enumerate(windows_s):
                chunks[stage], self._early_s[stage] = _subtract_early_gathering(
                    chunks[stage], orders[stage].overlapped, window_s
                )
        self._iteration = IterationTimeline(
            layout,
            [self._stage_work(stage, chunks[stage], orders[stage]) for stage in stages],
            Timeline(cores),
            overlap_reduce=setup.parallel.overlap_grad_reduce,
            overlap_gather=overlap_gather,
            ahead=GATHERED_AHEAD if self._planned else 1,
            units=units_taken(setup, layout),
        )
        self._before = [self._iteration.phases(stage) for stage in stages]
        """The seconds of each phase up to the reduction of gradients, by stage."""
        gathers_late = not (overlap_gather or setup.execution.everywhere)
        self._gather_s = [
            sum(chunk.gather.seconds for chunk in of_stage) if gathers_late else 0.0 for of_stage in chunks
        ]
        """The seconds of gathering after the updates of a stage's slowest rank, by stage; 0 if gathering
        overlaps with the next forward pass."""
        # The factor by which sharing cores slows down work that all ranks do at the same time.
        self._crowd = 1.0 if cores is None else max(1.0, layout.world_size / cores)
        self._finish()

    def in_tp_mode(self, mode: MuonTpMode) -> "_Simulation":
        """Returns the step with another `engine.muon_tp_mode`; forward, backward and gradients stay the same."""
        assert not self._planned
        other = copy(self)
        other._setup = with_tp_mode(self._setup, mode)
        other._cells, _ = UpdatePhase(other._setup, self._layout, self._workload, cores=self._cores).run(None)
        other._finish()
        return other

    def _finish(self) -> None:
        """Places norm and clipping between the reduction of gradients and the updates, and computes when each
        cell is done."""
        crowd = self._crowd
        norm_clip, reduced_s = NormClip(self._setup, self._layout), self._iteration.reduced_s
        norm_element_s, clip_element_s = crowd * norm_clip.norm_element_s, crowd * norm_clip.clip_element_s
        packed = [(reduced_s[cell.team.stage] + cell.update.packed_s, cell.team.elements) for cell in self._cells]
        normed_s = max(end_s + elements * norm_element_s for end_s, elements in packed) + norm_clip.all_reduce_s
        self._clipped_s = [normed_s + cell.team.clipped * clip_element_s for cell in self._cells]
        """The time at which each cell's gradients have been clipped."""
        self._updated_s = [end_s + cell.seconds for end_s, cell in zip(self._clipped_s, self._cells, strict=True)]
        """The time at which each cell's last matrix has been updated."""
        slowest_s = [0.0] * self._layout.pp
        for cell, updated_s in zip(self._cells, self._updated_s, strict=True):
            slowest_s[cell.team.stage] = max(slowest_s[cell.team.stage], updated_s)
        self._done_s = [updated_s + gather_s for updated_s, gather_s in zip(slowest_s, self._gather_s, strict=True)]
        """The time at which each stage's slowest rank has finished its updates and gathered parameters."""
        # At the end of the step, ranks agree on its result.
        self._end_s = max(self._done_s) + norm_clip.all_reduce_s
        self._phases = [self._phases_of(index, self._before[cell.team.stage]) for index, cell in enumerate(self._cells)]
        """The seconds of each phase, by cell."""

    def result(self) -> StrategyResult:
        cells, updated_s = self._cells, self._updated_s
        slowest = _latest([end + self._gather_s[cell.team.stage] for end, cell in zip(updated_s, cells, strict=True)])
        fastest = min(range(len(cells)), key=lambda index: (updated_s[index], index))
        indices = [slowest, fastest] if updated_s[fastest] < updated_s[slowest] else [slowest]
        return StrategyResult(
            strategy=self._workload.strategy,
            iteration_s=self._end_s,
            optimizer_s=self._optimizer_s(),
            phases=MappingProxyType(_sort_phases(self._phases[slowest])),
            mean_phases=MappingProxyType(self._mean_phases()),
            slowest_rank=self._rank(cells[slowest]),
            update_balance=_balance(cells),
            make_events=lambda: tuple(event for index in indices for event in self._events(index)),
        )

    def _phases_of(self, index: int, phases_before: Mapping[str, float]) -> dict[str, float]:
        cell, phases = self._cells[index], dict(phases_before)
        # Without overlap the stage gathers once its slowest rank is done; waiting for that rank is attributed
        # to gathering.
        gathered_s = self._done_s[cell.team.stage] - self._updated_s[index] if self._gather_s[cell.team.stage] else 0.0
        packed_s = cell.update.packed_s
        phases["norm_clip"] = self._clipped_s[index] - self._iteration.reduced_s[cell.team.stage] - packed_s
        phases["exchange"] = cell.update.exchange_s + packed_s
        phases["exchange_total"] = cell.update.exchange_total_s
        phases["matrix_update"] = cell.update.matrix_update_s
        phases["adamw_update"] = cell.adamw_s
        phases["param_gather"] += gathered_s
        phases["param_gather_total"] += gathered_s + self._early_s[cell.team.stage]
        phases["other"] += self._end_s - self._updated_s[index] - gathered_s
        return phases

    def _optimizer_s(self) -> float:
        """Returns the seconds that the iteration waits for the optimizer.

        A wait for another stage's backward pass is not included, although in a run's breakdown it is part of
        norm_clip, or of grad_reduce for a tied embedding. The time is that of the cell whose gathering ends
        last, which need not be in the stage whose updates end last.
        """
        ends_s = [end_s + phases["param_gather"] for end_s, phases in zip(self._updated_s, self._phases, strict=True)]
        latest = _latest(ends_s)
        return self._updated_s[latest] - max(self._iteration.reduced_s) + self._phases[latest]["param_gather"]

    def _stage_work(self, stage: int, chunks: Sequence[Chunk], order: GatheringOrder) -> StageWork:
        config, layout = self._setup, self._layout
        padding = sum(bucket.padding for bucket in rank_buckets(self._workload.buckets, stage))
        return StageWork(
            time=stage_time(config, layout, stage),
            chunks=chunks,
            begin_s=preparation_seconds(config, layout, stage, padding),
            early=order.early,
            chain=order.afterwards if self._planned else None,
            aligned=aligns_param_gather(config, layout),
            tail_s=seconds_after_reduction(config, layout, stage),
            shares_embedding=config.model.tied_embeddings and stage in (0, layout.pp - 1),
        )

    def _chunks(self, stage: int) -> list[Chunk]:
        """Lists a stage's chunks in the order of Megatron's buffers. The buffer of AdamW's parameters comes
        first, because the model's first parameter, the embedding, is in it."""
        config, layout, execution = self._setup, self._layout, self._setup.execution
        buffers = ChunkBuilder(config, layout, stage, stage_time(config, layout, stage), ReductionModel(config, layout))
        if execution.has_owners:
            chunks = buffers.adamw(planned=self._planned)
            chunks += buffers.matrices(self._workload.buckets, self._workload.matrices)
        else:
            chunks = buffers.everything(sharded=not execution.everywhere)
        reducing, gathering = step_factor(config, "grad_reduce"), step_factor(config, "param_gather")
        return [
            chunk._replace(reduce=chunk.reduce.scaled(reducing), gather=chunk.gather.scaled(gathering))
            for chunk in chunks
        ]

    def _order(self, stage: int, chunks: Sequence[Chunk]) -> GatheringOrder:
        """Returns the order in which a stage's chunks are gathered."""
        adamw_count = len(chunks) - len(rank_buckets(self._workload.buckets, stage))
        return GatheringOrder.of(chunks, adamw_count, stage_time(self._setup, self._layout, stage).places)

    def _rank(self, cell: CellUpdate) -> int:
        """Returns the lowest rank that a cell represents. In rank numbers, tp varies fastest, then cp and dp,
        then pp."""
        return cell.host + self._layout.tp * (cell.team.owner + self._layout.owners * cell.team.stage)

    def _mean_phases(self) -> dict[str, float]:
        """Returns the phases averaged over all ranks."""
        ranks = [cell.team.ranks for cell in self._cells]
        return {
            name: math.fsum(count * phases[name] for count, phases in zip(ranks, self._phases, strict=True))
            / sum(ranks)
            for name in _sort_phases(self._phases[0])
        }

    def _events(self, index: int) -> list[SimulatedEvent]:
        """Returns the timeline of the cell at `index`, as events of its first rank."""
        cell, iteration = self._cells[index], self._iteration
        rank, stage = self._rank(cell), cell.team.stage
        clipped = self._clipped_s[index]
        segments: list[tuple[Stream, str, float, float]] = list(iteration.segments(stage))
        reduced = iteration.reduced_s[stage]
        segments.append(("compute", "norm_clip", reduced + cell.update.packed_s, clipped))
        # The engine runs AdamW first, so that the gathering of its parameters overlaps with the matrix
        # updates.
        adamw_first_s = cell.adamw_s if self._planned else 0.0
        begin = clipped + adamw_first_s
        for stream, phase, start, end in cell.update.segments:
            origin = begin if start >= 0 else reduced + cell.update.begun_s
            segments.append((stream, phase, origin + start, origin + end))
        updated = clipped + cell.seconds
        adamw = (clipped, begin) if adamw_first_s else (updated - cell.adamw_s, updated)
        segments.append(("compute", "adamw_update", *adamw))
        if self._early_s[stage]:
            segments.append(("data", "param_gather", begin, begin + self._early_s[stage]))
        if self._gather_s[stage]:
            segments.append(("data", "param_gather", updated, updated + self._gather_s[stage]))
        return [
            SimulatedEvent(rank=rank, stream=stream, phase=phase, start_s=start, end_s=end)
            for stream, phase, start, end in _merge_segments(segments)
        ]


def _latest(ends: Sequence[float]) -> int:
    """Returns the index of the cell that ends last; the first index if several end at the same time up to
    rounding."""
    latest = (1 - ROUNDING) * max(ends)
    return next(index for index, end in enumerate(ends) if end >= latest)


@dataclass(frozen=True, kw_only=True)
class Refreshes:
    """The time of the matrix updates in the steps of a refresh period."""

    steps_s: tuple[float, ...]
    """The seconds of matrix updates on the slowest rank, for each step of the period."""
    most_s: float
    """The mean seconds of matrix updates per step on the rank with the most work in a period."""

    @property
    def mean_s(self) -> float:
        """The mean seconds of matrix updates per step, if every step takes as long as its slowest rank."""
        return sum(self.steps_s) / len(self.steps_s)

    @property
    def excess_s(self) -> float:
        """The seconds by which the longest step exceeds the mean step. The longest iteration exceeds the mean
        iteration by the same time, because nothing overlaps with the updates of the slowest rank."""
        return max(self.steps_s) - self.mean_s


def refreshes(setup: Setup, matrices: Sequence[Matrix], cells: Sequence[Cell] | None) -> Refreshes:
    """Adds up the time of updates in each step of a refresh period. All matrices begin the period in the same
    step.

    Args:
        cells: the cell that updates each matrix; None if every rank updates all matrices of its stage.
    """
    by_rank: dict[tuple[int, Cell | None], list[Matrix]] = {}
    for matrix in matrices:
        by_rank.setdefault((matrix.stage, None if cells is None else cells[matrix.index]), []).append(matrix)
    algorithm = algorithm_of(setup)
    shapes = {matrix.shape for matrix in matrices}  # few, even with many thousands of experts
    steps_of_shape = {shape: _seconds_in_period(algorithm, shape, setup) for shape in shapes}
    seconds_of_ranks = list[list[float]]()
    for matrices_of_rank in by_rank.values():
        in_period = [steps_of_shape[matrix.shape] for matrix in matrices_of_rank]
        seconds_of_ranks.append([sum(step) for step in zip(*in_period, strict=True)])
    return Refreshes(
        steps_s=tuple(max(step) for step in zip(*seconds_of_ranks, strict=True)),
        most_s=max(sum(steps) / len(steps) for steps in seconds_of_ranks),
    )


def _seconds_in_period(algorithm: Algorithm, shape: Shape, setup: Setup) -> Sequence[float]:
    """Returns the seconds of a matrix's update in each step of a refresh period."""
    steps = period_seconds(algorithm, *shape, setup.cluster)
    # A matrix whose sides are all longer than max_preconditioner_dim is never refreshed: its steps are equal.
    return steps * algorithm.refresh_period if len(steps) == 1 else steps


def _average_over_steps(setup: Setup, workload: Workload) -> Workload:
    """Scales the costs of an optimizer with refreshes, because a different rank may be slowest in each step:
    the busiest rank's mean time becomes the mean, over steps, of the slowest rank's time. Other optimizers
    keep their costs.
    """
    assignment, optimizer = workload.assignment, setup.optimizer
    if not isinstance(optimizer, KroneckerConfig) or not workload.matrices:
        return workload
    refreshed = refreshes(setup, workload.matrices, None if assignment is None else assignment.cells)
    scale = refreshed.mean_s / refreshed.most_s
    costs = [scale * cost for cost in workload.costs]
    return replace(workload, costs=costs, times=[UpdateTime(cost) for cost in costs])


def _subtract_early_gathering(
    chunks: Sequence[Chunk], overlapped: Sequence[int], window_s: float
) -> tuple[list[Chunk], float]:
    """Subtracts up to `window_s` seconds from the gathering of the `overlapped` chunks, in this order.

    Returns:
        All chunks, each with the seconds of gathering that are left for the forward pass; and the seconds
        that were subtracted.
    """
    reduced = list(chunks)
    spent_s = 0.0
    for index in overlapped:
        seconds = chunks[index].gather.seconds
        done_s = min(seconds, window_s - spent_s)
        spent_s += done_s
        rest = Transfer(link=chunks[index].gather.link, link_s=seconds - done_s)
        reduced[index] = chunks[index]._replace(gather=rest)
    return reduced, spent_s


def _balance(cells: Sequence[CellUpdate]) -> float:
    total = math.fsum(cell.team.ranks * cell.update.matrix_update_s for cell in cells)
    if total == 0:
        return 1.0
    return max(cell.update.matrix_update_s for cell in cells) * sum(cell.team.ranks for cell in cells) / total


def _sort_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """Sorts phases in the order of the breakdown, each `_total` after its phase."""
    names = [name for phase in IN_STEP for name in (phase, f"{phase}_total")]
    return {name: phases[name] for name in names if name in phases}


def _merge_segments(segments: Sequence[tuple[Stream, str, float, float]]) -> list[tuple[Stream, str, float, float]]:
    """Sorts segments by start, and joins adjacent segments of the same stream and phase."""
    merged: list[tuple[Stream, str, float, float]] = []
    last_of_stream: dict[Stream, int] = {}
    for stream, phase, start, end in sorted(segments, key=lambda s: (s[2], s[3], s[0])):
        if end <= start:
            continue
        previous = last_of_stream.get(stream)
        if previous is not None and merged[previous][1] == phase and start <= merged[previous][3] + 1e-9:
            merged[previous] = (stream, phase, merged[previous][2], max(end, merged[previous][3]))
            continue
        last_of_stream[stream] = len(merged)
        merged.append((stream, phase, start, end))
    return merged
