"""Simulates a step of a strategy: the seconds of an iteration and of each of its phases.

The simulation covers one steady-state iteration from the first forward pass to the last updated weight. The
gathering of the previous step's new parameters overlaps with the forward passes, the reduction of gradients
with the last backward pass. Then come gradient norm and clipping, exchanges and matrix updates, and AdamW. Up
to the updates, one rank represents each pipeline stage, because collectives keep the stage's ranks in step;
updates are simulated for every rank whose work differs. On a machine whose ranks share cores
(`ClusterConfig.cores`), all concurrent work shares the cores. `compare.assumptions` lists the simulation's
assumptions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType

from canzona_cli.config.execution import AnyStrategy, aligns_param_gather, overlaps_param_gather, with_strategy
from canzona_cli.config.schema import Execution, KroneckerConfig, Layout, RunConfig
from canzona_cli.costs.gradients import NormClip, zeroing_seconds
from canzona_cli.costs.links import Groups, Transfer
from canzona_cli.costs.model import stage_time, units_taken
from canzona_cli.costs.timeline import Timeline, slowdown
from canzona_cli.costs.update import ROUNDING, implementation, step_factor
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.families import flops_per_token
from canzona_cli.planner.chunks import Chunk, ChunkBuilder, GatheringOrder, seconds_after_reduction
from canzona_cli.planner.order import matrices_by_rank, refreshes
from canzona_cli.planner.plan import rank_buckets
from canzona_cli.planner.reduction import GATHERED_AHEAD, ReductionModel
from canzona_cli.run.breakdown import SimulatedEvent
from canzona_cli.run.phases import IN_STEP, Phase, Stream
from canzona_cli.simulate.iteration import IterationTimeline, StageWork
from canzona_cli.simulate.update import Workload
from canzona_cli.simulate.update_phase import CellUpdate, UpdatePhase


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """The simulated iteration of one strategy, by phase of the breakdown (`run.phases`)."""

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


def simulate(config: RunConfig, layout: Layout, workload: Workload) -> StrategyResult:
    """Simulates one iteration of the workload's strategy.

    Raises:
        ConfigError: the profile's factors make the iteration faster than the processor's peak FLOP rate
            allows.
    """
    config = with_strategy(config, workload.strategy)
    result = _Simulation(config, layout, _average_over_steps(config, workload)).result()
    tokens = layout.global_batch_size * config.train.seq_length
    cluster, flops = config.cluster, tokens * flops_per_token(config.model, config.train.seq_length)
    utilisation = flops / (result.iteration_s * layout.world_size * cluster.bf16_tflops * 1e12)
    if utilisation > 1:
        factors = {name: getattr(cluster, name) for name in ("forward_factor", "backward_factor")}
        name, factor = min(factors.items(), key=itemgetter(1))
        reason = f"makes model FLOP utilisation {utilisation:.0%} of cluster.bf16_tflops={cluster.bf16_tflops:g}"
        fix = f"use cluster.{name}=1.0, or measure it: canzona calibrate"
        raise ConfigError(Problem(key=f"cluster.{name}", value=factor, reason=reason, fix=fix))
    return result


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The times of a simulated step, by cell or by stage, in seconds from the step's start."""

    iteration: IterationTimeline
    cells: Sequence[CellUpdate]
    clipped: Sequence[float]
    """The time at which each cell's gradients have been clipped."""
    gather_s: Sequence[float]
    """The seconds of gathering after the updates of a stage's slowest rank, by stage; 0 if gathering overlaps
    with the next forward pass."""
    early_s: Sequence[float]
    """The seconds of gathering that overlaps with updates, by stage."""
    agree_s: float
    """The seconds that ranks take, at the end of the step, to agree on its result."""

    @cached_property
    def updated(self) -> list[float]:
        """The time at which each cell's last matrix has been updated."""
        return [end + cell.seconds for end, cell in zip(self.clipped, self.cells, strict=True)]

    @cached_property
    def done(self) -> list[float]:
        """The time at which each stage's slowest rank has finished its updates and the gathering that
        follows."""
        last = [0.0] * len(self.gather_s)
        for cell, end in zip(self.cells, self.updated, strict=True):
            last[cell.team.stage] = max(last[cell.team.stage], end)
        return [end + gather_s for end, gather_s in zip(last, self.gather_s, strict=True)]

    @property
    def end(self) -> float:
        return max(self.done) + self.agree_s

    @cached_property
    def phases(self) -> list[dict[str, float]]:
        """The seconds of each phase, by cell."""
        before = [self.iteration.phases(stage) for stage in range(len(self.gather_s))]
        return [self._phases(index, before[cell.team.stage]) for index, cell in enumerate(self.cells)]

    def _phases(self, index: int, before: Mapping[str, float]) -> dict[str, float]:
        cell, phases = self.cells[index], dict(before)
        # Without overlap the stage gathers once its slowest rank is done; waiting for that rank is attributed
        # to gathering.
        gathered = self.done[cell.team.stage] - self.updated[index] if self.gather_s[cell.team.stage] else 0.0
        packed_s = cell.update.packed_s
        phases["norm_clip"] = self.clipped[index] - self.iteration.reduced_s[cell.team.stage] - packed_s
        phases["exchange"] = cell.update.exchange_s + packed_s
        phases["exchange_total"] = cell.update.exchange_total_s
        phases["matrix_update"] = cell.update.matrix_update_s
        phases["adamw_update"] = cell.adamw_s
        phases["param_gather"] += gathered
        phases["param_gather_total"] += gathered + self.early_s[cell.team.stage]
        phases["other"] += self.end - self.updated[index] - gathered
        return phases

    @property
    def slowest(self) -> int:
        """The index of the cell that is done last."""
        return self._latest(
            [end + self.gather_s[c.team.stage] for end, c in zip(self.updated, self.cells, strict=True)]
        )

    @property
    def first(self) -> int:
        """The index of the cell whose updates are done first."""
        return min(range(len(self.cells)), key=lambda index: (self.updated[index], index))

    def optimizer_s(self) -> float:
        """Returns the seconds that the iteration waits for the optimizer.

        A wait for another stage's backward pass is not included, although runs measure it in norm_clip, or in
        grad_reduce for a tied embedding. The time is that of the cell whose gathering ends last, which need
        not be in the stage whose updates end last.
        """
        ends = [end + phases["param_gather"] for end, phases in zip(self.updated, self.phases, strict=True)]
        last = self._latest(ends)
        return self.updated[last] - max(self.iteration.reduced_s) + self.phases[last]["param_gather"]

    @staticmethod
    def _latest(ends: Sequence[float]) -> int:
        """Returns the index of the cell that ends last; the first index if several end at the same time up to
        rounding."""
        latest = (1 - ROUNDING) * max(ends)
        return next(index for index, end in enumerate(ends) if end >= latest)


class _Simulation:
    """The simulation of one strategy's step."""

    def __init__(self, config: RunConfig, layout: Layout, workload: Workload) -> None:
        self._config, self._layout, self._workload = config, layout, workload
        self._execution = config.execution
        cluster = config.cluster
        machines = Groups.of(layout, cluster).world.machines
        self._cores = None if cluster.cores is None else float(cluster.cores * machines)
        self._crowd = 1.0 if self._cores is None else slowdown(layout.world_size / self._cores, cluster.crowding)
        """The factor by which sharing cores slows down work that all ranks do at the same time."""
        self._updates = UpdatePhase(config, layout, workload, cores=self._cores)

    def result(self) -> StrategyResult:
        step = self._step()
        cells, slowest, first = step.cells, step.slowest, step.first
        numbers = [slowest, first] if step.updated[first] < step.updated[slowest] else [slowest]
        mean = self._mean([(cell.team.ranks, phases) for cell, phases in zip(cells, step.phases, strict=True)])
        return StrategyResult(
            strategy=self._workload.strategy,
            iteration_s=step.end,
            optimizer_s=step.optimizer_s(),
            phases=MappingProxyType(_sort_phases(step.phases[slowest])),
            mean_phases=MappingProxyType(mean),
            slowest_rank=self._rank(cells[slowest]),
            update_balance=_balance(cells),
            make_events=lambda: tuple(event for index in numbers for event in self._events(step, index)),
        )

    def _step(self) -> _Step:
        """Simulates the update phase and the iteration up to the reduction of gradients, and places norm and
        clipping between the two.

        The updates are simulated first, because they determine how much gathering is left for the forward
        pass.
        """
        config, layout, planned = self._config, self._layout, self._execution is Execution.PLANNED
        gathers = not self._execution.everywhere
        overlap = config.parallel.overlap_grad_reduce
        overlap_gather = overlaps_param_gather(config)
        chunks = [self._chunks(stage) for stage in range(layout.pp)]
        early_s = [0.0] * layout.pp
        orders = [GatheringOrder() for _ in chunks]
        if planned and overlap_gather:
            orders = [self._order(stage, of_chunk) for stage, of_chunk in enumerate(chunks)]
            overlapped = [
                [of_chunk[index].gather for index in order.overlapped]
                for of_chunk, order in zip(chunks, orders, strict=True)
            ]
            cells, windows = self._updates.run(overlapped)
            for stage, (of_chunk, order, window) in enumerate(zip(chunks, orders, windows, strict=True)):
                chunks[stage], early_s[stage] = _subtract_early_gathering(of_chunk, order.overlapped, window)
        else:
            cells, _ = self._updates.run(None)
        iteration = IterationTimeline(
            layout,
            [
                StageWork(
                    time=stage_time(config, layout, stage),
                    chunks=of_chunk,
                    begin_s=self._zero_s(stage),
                    early=orders[stage].early,
                    chain=orders[stage].afterwards if planned else None,
                    aligned=aligns_param_gather(config, layout),
                    tail_s=seconds_after_reduction(config, layout, stage),
                    shares_embedding=config.model.tied_embeddings and stage in (0, layout.pp - 1),
                )
                for stage, of_chunk in enumerate(chunks)
            ],
            Timeline(self._cores, config.cluster.crowding),
            overlap_reduce=overlap,
            overlap_gather=overlap_gather,
            ahead=GATHERED_AHEAD if planned else 1,
            units=units_taken(config, layout),
        )
        norm_clip = NormClip.of(config, layout)
        read_s, scaled_s = self._crowd * norm_clip.norm_element_s, self._crowd * norm_clip.clip_element_s
        agree_s = norm_clip.all_reduce_s
        packed = ((iteration.reduced_s[cell.team.stage] + cell.update.packed_s, cell.team.elements) for cell in cells)
        normed = max(end + elements * read_s for end, elements in packed) + agree_s
        return _Step(
            iteration=iteration,
            cells=cells,
            clipped=[normed + cell.team.clipped * scaled_s for cell in cells],
            gather_s=[
                0.0 if overlap_gather or not gathers else sum(chunk.gather.seconds for chunk in of_chunk)
                for of_chunk in chunks
            ],
            early_s=early_s,
            agree_s=agree_s,
        )

    def _chunks(self, stage: int) -> list[Chunk]:
        """Lists a stage's chunks in the order of Megatron's buffers. The buffer of AdamW's parameters comes
        first, because the model's first parameter, the embedding, is in it."""
        time, reductions = stage_time(self._config, self._layout, stage), ReductionModel(self._config, self._layout)
        buffers = ChunkBuilder(self._config, self._layout, stage, time, reductions)
        if not self._execution.has_owners:
            buckets = buffers.everything(sharded=not self._execution.everywhere)
        else:
            buckets = [
                *buffers.others(planned=self._execution is Execution.PLANNED),
                *buffers.matrices(self._workload.buckets, self._workload.matrices),
            ]
        reducing, gathering = self._factor("grad_reduce"), self._factor("param_gather")
        return [
            replace(chunk, reduce=chunk.reduce.scaled(reducing), gather=chunk.gather.scaled(gathering))
            for chunk in buckets
        ]

    def _order(self, stage: int, chunks: Sequence[Chunk]) -> GatheringOrder:
        """Returns the order in which a stage's chunks are gathered."""
        others = len(chunks) - len(rank_buckets(self._workload.buckets, stage))
        return GatheringOrder.of(chunks, others, stage_time(self._config, self._layout, stage).places)

    def _factor(self, phase: Phase) -> float:
        return step_factor(self._config.cluster, phase, implementation(self._config))

    def _zero_s(self, stage: int) -> float:
        """Returns the seconds to set the gradient buffers to zero, before the first forward pass."""
        padding = sum(bucket.padding for bucket in rank_buckets(self._workload.buckets, stage))
        return zeroing_seconds(self._config, self._layout, stage, padding)

    def _rank(self, cell: CellUpdate) -> int:
        """Returns the lowest rank that a cell represents. In rank numbers, tp varies fastest, then cp and dp,
        then pp."""
        return cell.host + self._layout.tp * (cell.team.owner + self._layout.owners * cell.team.stage)

    def _mean(self, phases: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
        total = sum(ranks for ranks, _ in phases)
        names = _sort_phases(phases[0][1])
        return {name: math.fsum(ranks * phases_of[name] for ranks, phases_of in phases) / total for name in names}

    def _events(self, step: _Step, index: int) -> list[SimulatedEvent]:
        """Returns the timeline of the cell at `index`, as events of its first rank."""
        cell, iteration, clipped = step.cells[index], step.iteration, step.clipped[index]
        rank, stage = self._rank(cell), cell.team.stage
        segments: list[tuple[Stream, str, float, float]] = list(iteration.segments(stage))
        reduced = iteration.reduced_s[stage]
        segments.append(("compute", "norm_clip", reduced + cell.update.packed_s, clipped))
        # The engine runs AdamW first, so that the gathering of its parameters overlaps with the matrix
        # updates.
        first = cell.adamw_s if self._execution is Execution.PLANNED else 0.0
        begin = clipped + first
        for stream, phase, start, end in cell.update.segments:
            origin = begin if start >= 0 else reduced + cell.update.begun_s
            segments.append((stream, phase, origin + start, origin + end))
        updated = clipped + cell.seconds
        segments.append(
            ("compute", "adamw_update", *((clipped, begin) if first else (updated - cell.adamw_s, updated)))
        )
        if step.early_s[stage]:
            segments.append(("data", "param_gather", begin, begin + step.early_s[stage]))
        if step.gather_s[stage]:
            segments.append(("data", "param_gather", updated, updated + step.gather_s[stage]))
        return [
            SimulatedEvent(rank=rank, stream=stream, phase=phase, start_s=start, end_s=end)
            for stream, phase, start, end in _merge_segments(segments)
        ]


def _average_over_steps(config: RunConfig, workload: Workload) -> Workload:
    """Scales the costs of an optimizer with refreshes to account for a different rank being slowest in each
    step: the busiest rank's mean time becomes the mean, over steps, of the time of each step's slowest rank.
    Other optimizers keep their costs.
    """
    assignment, optimizer = workload.assignment, config.optimizer
    if not isinstance(optimizer, KroneckerConfig) or not workload.matrices:
        return workload
    ranks = matrices_by_rank(workload.matrices, None if assignment is None else assignment.cells)
    refreshed = refreshes(config, ranks)
    return replace(workload, costs=[refreshed.mean_s / refreshed.most_s * cost for cost in workload.costs])


def _subtract_early_gathering(
    chunks: Sequence[Chunk], overlapped: Sequence[int], window: float
) -> tuple[list[Chunk], float]:
    """Subtracts up to `window` seconds from the gathering of the `overlapped` chunks, in this order.

    Returns:
        All chunks, each with the seconds of gathering that are left for the forward pass; and the seconds
        that were subtracted.
    """
    left, spent = list(chunks), 0.0
    for index in overlapped:
        seconds = chunks[index].gather.seconds
        done = min(seconds, window - spent)
        spent += done
        rest = Transfer(link=chunks[index].gather.link, link_s=seconds - done)
        left[index] = replace(chunks[index], gather=rest)
    return left, spent


def _balance(cells: Sequence[CellUpdate]) -> float:
    total = math.fsum(cell.team.ranks * cell.update.matrix_update_s for cell in cells)
    if total == 0:
        return 1.0
    return max(cell.update.matrix_update_s for cell in cells) * sum(cell.team.ranks for cell in cells) / total


def _sort_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """Sorts phases in the order of the breakdown, each `_total` after its phase."""
    names = [name for phase in IN_STEP for name in (phase, f"{phase}_total")]
    return {name: phases[name] for name in names if name in phases}


def _merge_segments(
    segments: Sequence[tuple[Stream, str, float, float]],
) -> list[tuple[Stream, str, float, float]]:
    """Sorts segments by start, and joins adjacent segments of the same stream and phase."""
    merged: list[tuple[Stream, str, float, float]] = []
    last: dict[Stream, int] = {}
    for stream, phase, start, end in sorted(segments, key=lambda s: (s[2], s[3], s[0])):
        if end <= start:
            continue
        before = last.get(stream)
        if before is not None and merged[before][1] == phase and start <= merged[before][3] + 1e-9:
            merged[before] = (stream, phase, merged[before][2], max(end, merged[before][3]))
            continue
        last[stream] = len(merged)
        merged.append((stream, phase, start, end))
    return merged
