"""Simulated steps: how long an iteration takes under each strategy, and what it is spent on.

One steady-state iteration from the first forward to the last updated weight: parameters of the last step are gathered
under the forward, gradients are reduced under the last backward, then norm and clip, exchange and update, AdamW. One
rank stands for each pipeline stage up to the update (collectives keep the others in step with it); the update itself
is simulated for every rank that has its own. Where ranks share a machine's cores (`ClusterConfig.cores`), all that
runs at the same time shares them. See `assumptions` for what is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from canzona_cli.config.execution import AnyStrategy, Execution, execution_of, with_strategy
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.model.matrix import Matrix
from canzona_cli.planner.activations import stage_weights
from canzona_cli.planner.buckets import element_bytes
from canzona_cli.planner.cost import Implementation, memory_rate, step_factor
from canzona_cli.planner.links import Groups, Links, Transfer, strided
from canzona_cli.planner.plan import Assignment, Bucket, MicroGroup
from canzona_cli.run.phases import IN_STEP, Phase, Stream
from canzona_cli.run.prediction import SimulatedEvent
from canzona_cli.simulate.buffers import Buffers, Chunk
from canzona_cli.simulate.iteration import IterationTimeline
from canzona_cli.simulate.model_time import stage_time
from canzona_cli.simulate.timeline import crowded
from canzona_cli.simulate.update import UpdateModel
from canzona_cli.simulate.update_phase import Cell, UpdatePhase

NORM_BYTES, CLIP_BYTES = 4, 8
"""Memory traffic per fp32 gradient element: read for the norm; read and written by the clip."""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy's iteration, in the words of the breakdown."""

    strategy: AnyStrategy
    iteration_s: float
    optimizer_s: float
    """From reduced gradients to the next forward, with the exchange as if hidden under nothing: norm and clip, exchange
    (total), matrix update, AdamW's update, and what the forward waits for gathered parameters."""
    optimizer_exposed_s: float
    """The same with the exchange's exposed part only: how much longer an iteration is for it."""
    phases: Mapping[str, float]
    """Seconds of the slowest rank: `IN_STEP` adds up to `iteration_s`; the `_total`s ran (partly) under others."""
    mean_phases: Mapping[str, float]
    """The same, averaged over all ranks; who is done earlier waits in `other`."""
    slowest_rank: int
    update_balance: float
    """Seconds of matrix updates, max over mean of all ranks; 1.0 is perfect, and where there are none."""
    updates_end_s: tuple[float, ...]
    """By stage: when its last rank has finished its updates."""
    events: tuple[SimulatedEvent, ...]
    """Timelines of the slowest rank and, where another one differs, of the one that has least to update."""


def simulate(
    config: RunConfig,
    layout: Layout,
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    assignment: Assignment | None,
    buckets: Sequence[Bucket],
    groups: Sequence[MicroGroup],
    strategy: AnyStrategy,
) -> StrategyResult:
    """One iteration of `strategy`.

    Args:
        costs: seconds to update each whole matrix on one rank.
        assignment: owners and hosts; layerwise uses owners alone; None for sc and adamw, which have neither.
        buckets: of the matrices' buffer; layerwise's have equal padded shards. Empty for sc and adamw.
        groups: micro-groups, for canzona and asc.
    """
    config = with_strategy(config, strategy)
    return _Simulation(config, layout, matrices, costs, assignment, buckets, groups, strategy).result()


class _Simulation:
    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        matrices: Sequence[Matrix],
        costs: Sequence[float],
        assignment: Assignment | None,
        buckets: Sequence[Bucket],
        groups: Sequence[MicroGroup],
        strategy: AnyStrategy,
    ) -> None:
        self._config, self._layout, self._strategy = config, layout, strategy
        self._matrices = matrices
        self._buckets = buckets
        self._execution = execution_of(config)
        self._implementation: Implementation = "canzona" if self._execution.ours else "megatron"
        self._owners = layout.dp * layout.cp
        cluster = config.cluster
        self._links = Links(cluster=cluster)
        self._world = Groups.of(layout, cluster).world
        self._cores = None if cluster.cores is None else float(cluster.cores * self._world.machines)
        # What all ranks do at the same time takes longer by this where cores are few.
        crowd = 1.0 if self._cores is None else crowded(layout.world_size / self._cores, cluster.crowding)
        self._rate = memory_rate(cluster) / crowd
        self._updates = UpdatePhase(
            config,
            layout,
            matrices,
            UpdateModel(config, layout, matrices, costs, self._implementation),
            assignment,
            groups,
            cores=self._cores,
            adamw_factor=self._factor("adamw_update"),
        )

    def result(self) -> StrategyResult:
        config, layout = self._config, self._layout
        stages = [stage_time(config, layout, stage) for stage in range(layout.pp)]
        gathers = not self._execution.everywhere
        overlap = config.parallel.overlap_grad_reduce
        overlap_gather = gathers and overlap and config.parallel.overlap_param_gather
        chunks = [self._chunks(stage) for stage in range(layout.pp)]
        early = [0.0] * layout.pp
        gathers_early = overlap_gather and self._execution is Execution.PLANNED
        under = [[chunk.gather for chunk in own[: self._others(stage)]] for stage, own in enumerate(chunks)]
        cells, windows = self._updates.run(under if gathers_early else None)
        if gathers_early:
            for stage in range(layout.pp):
                chunks[stage], early[stage] = _gathered_early(chunks[stage], self._others(stage), windows[stage])
        iteration = IterationTimeline(
            layout,
            stages,
            chunks,
            first_matrices_early=self._execution is Execution.PLANNED,
            overlap_reduce=overlap,
            overlap_gather=overlap_gather,
            cores=self._cores,
            crowding=config.cluster.crowding,
            begin_s=[self._zero_s(stage) for stage in range(layout.pp)],
            tail_s=[self._after_reduction(stage) for stage in range(layout.pp)],
        )
        gather_s = [0.0 if overlap_gather or not gathers else _gathered(found) for found in chunks]

        by_stage = [[n for n, cell in enumerate(cells) if cell.stage == stage] for stage in range(layout.pp)]
        before = [iteration.phases(stage) for stage in range(layout.pp)]
        agree = self._links.all_reduce(8.0, self._world).seconds if self._world.size > 1 else 0.0
        norm = self._factor("norm_clip")
        read_s, scaled_s = norm * NORM_BYTES / self._rate, norm * CLIP_BYTES / self._rate
        normed = max(iteration.reduced_s[c.stage] + c.elements * read_s for c in cells) + agree
        clipped = [normed + c.elements * scaled_s for c in cells]
        updated = [end + c.seconds for end, c in zip(clipped, cells, strict=True)]
        done = [max(updated[number] for number in by_stage[stage]) + gather_s[stage] for stage in range(layout.pp)]
        end = max(done) + agree

        def phases(number: int) -> dict[str, float]:
            cell = cells[number]
            found = dict(before[cell.stage])
            own_end = updated[number]
            # Without overlap the stage gathers once its slowest rank is done; waiting for that one is gathering too.
            gathered = done[cell.stage] - own_end if gather_s[cell.stage] else 0.0
            found["norm_clip"] = clipped[number] - iteration.reduced_s[cell.stage]
            found["exchange"] = cell.update.exchange_s
            found["exchange_total"] = cell.update.exchange_total_s
            found["matrix_update"] = cell.update.matrix_update_s
            found["adamw_update"] = cell.adamw_s
            found["param_gather"] += gathered
            found["param_gather_total"] += gathered + early[cell.stage]
            found["other"] += end - own_end - gathered
            return found

        slowest = max(range(len(cells)), key=lambda n: (updated[n] + gather_s[cells[n].stage], -n))
        least = min(range(len(cells)), key=lambda n: (updated[n], n))
        mine = phases(slowest)
        # Waiting for another stage's backward is measured under norm_clip, but no part of the optimizer step. The rank
        # that waits longest in all decides: another stage may gather longer than the one that updates last.
        longest = max(range(len(cells)), key=lambda n: (updated[n] + phases(n)["param_gather"], -n))
        exposed = updated[longest] - max(iteration.reduced_s) + phases(longest)["param_gather"]
        shown = [slowest, least] if updated[least] < updated[slowest] else [slowest]
        events = [self._events(iteration, cells[n], clipped[n], gather_s, early) for n in shown]
        return StrategyResult(
            strategy=self._strategy,
            iteration_s=end,
            optimizer_s=exposed + cells[longest].update.exchange_hidden_s,
            optimizer_exposed_s=exposed,
            phases=MappingProxyType(_ordered(mine)),
            mean_phases=MappingProxyType(self._mean([(cell.ranks, phases(n)) for n, cell in enumerate(cells)])),
            slowest_rank=self._rank(cells[slowest]),
            update_balance=_balance(cells),
            updates_end_s=tuple(done),
            events=tuple(event for found in events for event in found),
        )

    def _chunks(self, stage: int) -> list[Chunk]:
        """In the order of Megatron's buffers: AdamW's own first, for the embedding is the first parameter."""
        buffers = Buffers(self._config, self._layout, stage, stage_time(self._config, self._layout, stage).modules)
        if not self._execution.has_owners:
            found = buffers.everything(sharded=not self._execution.everywhere)
        else:
            found = [*buffers.others(), *buffers.matrices(self._buckets, self._matrices)]
        reducing, gathering = self._factor("grad_reduce"), self._factor("param_gather")
        return [
            replace(chunk, reduce=chunk.reduce.times(reducing), gather=chunk.gather.times(gathering)) for chunk in found
        ]

    def _others(self, stage: int) -> int:
        """How many of the stage's chunks are AdamW's own; they come first."""
        return len(self._chunks(stage)) - sum(bucket.stage == stage for bucket in self._buckets)

    def _factor(self, phase: Phase) -> float:
        return step_factor(self._config.cluster, phase, self._implementation)

    def _zero_s(self, stage: int) -> float:
        """Gradient buffers are set to zero before the first forward."""
        weights = stage_weights(self._config, self._layout, stage)
        _, grad = element_bytes(self._config)
        padding = sum(bucket.padding for bucket in self._buckets if bucket.stage == stage)
        return (weights.matrices + weights.others + padding) * grad / self._rate

    def _after_reduction(self, stage: int) -> float:
        """Synchronous: norms' gradients over TP under sequence parallelism, a tied embedding's over its two stages."""
        layout, model = self._layout, self._config.model
        _, grad = element_bytes(self._config)
        total = 0.0
        if layout.sequence_parallel and layout.tp > 1:
            norms = model.num_layers // layout.pp * (2 * model.hidden_size + 2 * model.head_dim)
            total += self._links.all_reduce(norms * grad, Groups.of(layout, self._config.cluster).tp).seconds
        if model.tied_embeddings and layout.pp > 1 and stage in (0, layout.pp - 1):
            apart = self._owners * layout.tp * (layout.pp - 1)
            ends = strided(apart, 2, layout.world_size, self._config.cluster.gpus_per_node)
            total += self._links.all_reduce(model.vocab_size * model.hidden_size // layout.tp * grad, ends).seconds
        return total

    def _rank(self, cell: Cell) -> int:
        """tp innermost, then cp and dp, then pp."""
        return cell.host + self._layout.tp * (cell.owner + self._owners * cell.stage)

    def _mean(self, phases: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
        total = sum(ranks for ranks, _ in phases)
        names = _ordered(phases[0][1])
        return {name: math.fsum(ranks * found[name] for ranks, found in phases) / total for name in names}

    def _events(
        self,
        iteration: IterationTimeline,
        cell: Cell,
        clipped: float,
        gather_s: Sequence[float],
        early: Sequence[float],
    ) -> list[SimulatedEvent]:
        rank, stage = self._rank(cell), cell.stage
        found: list[tuple[Stream, str, float, float]] = list(iteration.segments(stage))
        found.append(("compute", "norm_clip", iteration.reduced_s[stage], clipped))
        # AdamW goes first in the engine, so that its parameters travel under the matrix updates.
        first = cell.adamw_s if self._execution is Execution.PLANNED else 0.0
        begin = clipped + first
        found += [(stream, phase, begin + a, begin + b) for stream, phase, a, b in cell.update.segments]
        updated = clipped + cell.seconds
        found.append(("compute", "adamw_update", *((clipped, begin) if first else (updated - cell.adamw_s, updated))))
        if early[stage]:
            found.append(("data", "param_gather", begin, begin + early[stage]))
        if gather_s[stage]:
            found.append(("data", "param_gather", updated, updated + gather_s[stage]))
        return [
            SimulatedEvent(rank=rank, stream=stream, phase=phase, start_s=start, end_s=end)
            for stream, phase, start, end in _merged(found)
        ]


def assumptions() -> tuple[str, ...]:
    """What the simulated times rest on, one sentence each."""
    return (
        "Achieved rates and bandwidths are the cluster profile's; large collectives reach 80% of the link inside a "
        "machine and 90% between machines, each hop adds the profile's latency.",
        "Every rank has a device of its own, or an even share of the machine's cores where the profile counts them; "
        "every rank computes at the same speed; the slowest of each collective decides. No stragglers, no jitter, no "
        "host-bound launches, no data loading.",
        "Communication takes no computing units away: what overlaps runs at full speed on both sides.",
        "Transfers at the same time on one rank's link share it evenly; the network between machines has full "
        "bisection bandwidth.",
        "Where a bucket's gradients travel all-to-all, each owner adds the copies up before the next bucket travels.",
        "Rings and per-owner chains send each byte once through every rank; an all-to-all takes as long as its busiest "
        "sender or receiver.",
        "Tensor-parallel collectives of forward and backward are not hidden.",
        "Gradients are reduced per bucket under the last micro-batch's backward, and parameters gathered one bucket "
        "ahead of the next forward, as Megatron-core 0.19 does; 1F1B pipeline schedule.",
        "canzona and asc update AdamW's parameters before the matrices, gather them under the matrix updates, and "
        "start gathering the first layer's matrices with the last update.",
        "Matrices are split the same way and updated by the same arithmetic under every strategy; layerwise and sc "
        "repeat it on every tensor-parallel rank after a synchronous gather in fp32.",
        "Two micro-groups are in flight; gradients travel in engine.exchange_dtype, weights in the model's type.",
        "Shampoo and SOAP pay their refreshes spread evenly over the refresh period.",
        "Gradients are clipped in every step.",
    )


def _gathered_early(chunks: Sequence[Chunk], others: int, window: float) -> tuple[list[Chunk], float]:
    """What is left to gather in the forward once AdamW's `others` have had `window` seconds, and what was gathered.

    In the order the forward needs them, which is from the last chunk of a buffer to its first.
    """
    left, spent = list(chunks), 0.0
    for number in reversed(range(others)):
        seconds = chunks[number].gather.seconds
        done = min(seconds, window - spent)
        spent += done
        rest = Transfer(link=chunks[number].gather.link, link_s=seconds - done)
        left[number] = replace(chunks[number], gather=rest)
    return left, spent


def _balance(cells: Sequence[Cell]) -> float:
    total = math.fsum(cell.ranks * cell.update.matrix_update_s for cell in cells)
    if total == 0:
        return 1.0
    return max(cell.update.matrix_update_s for cell in cells) * sum(cell.ranks for cell in cells) / total


def _gathered(chunks: Sequence[Chunk]) -> float:
    return sum(chunk.gather.seconds for chunk in chunks)


def _ordered(phases: Mapping[str, float]) -> dict[str, float]:
    """In the breakdown's order, totals behind what they belong to."""
    names = [name for phase in IN_STEP for name in (phase, f"{phase}_total")]
    return {name: phases[name] for name in names if name in phases}


def _merged(
    segments: Sequence[tuple[Stream, str, float, float]],
) -> list[tuple[Stream, str, float, float]]:
    """By start; neighbours of one stream and phase that touch become one."""
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
