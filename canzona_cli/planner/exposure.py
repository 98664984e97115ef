"""Estimates the seconds that an iteration waits for updates, reductions and gatherings, quickly enough to
compare a plan's candidates.

`simulate.iteration` computes these waits for a whole pipeline, on the same `Timeline`. Here each stage has
two separate timelines: one for the last backward pass, during which reductions start, and one for the first
forward pass, which waits for gatherings. Stages after the first finish their backward passes earlier and
start their forward passes later, by one pass for each stage before them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from canzona_cli.config.execution import overlaps_param_gather
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import StageTime, stage_time, units_taken, zeroing_seconds
from canzona_cli.costs.timeline import TaskTimes, Timeline
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.chunks import STREAMS, Chunk, ChunkBuilder, GatheringOrder, Stream, merge_streams
from canzona_cli.planner.plan import Bucket
from canzona_cli.planner.reduction import GATHERED_AHEAD, ReductionModel


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A bucket whose owners are not known yet."""

    elements: int
    largest: int
    """The elements of the largest part that must have one owner."""
    matrices: tuple[int, ...]
    experts: bool = False
    """True for experts with an `expert_rank`."""


class Exposure:
    """The estimator of the seconds that an iteration of a run waits for communication and updates.

    Waits depend only on the inputs of a plan. Settings that do not change a plan, such as sequence
    parallelism and the dispatcher of tokens, therefore have no effect.

    Args:
        layout: the resolved layout; its number of micro-batches has no effect.
    """

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        layout = replace(layout, num_microbatches=1, global_batch_size=layout.dp * layout.micro_batch_size)
        layout = replace(layout, sequence_parallel=layout.tp > 1)
        config = replace(config, parallel=replace(config.parallel, dispatcher=None))
        self._overlap_reduce = config.parallel.overlap_grad_reduce
        self._overlap_gather = overlaps_param_gather(config)
        self.reductions = ReductionModel(config, layout)
        self.stages = [_StageClock(config, layout, stage, self.reductions) for stage in range(layout.pp)]

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[list[Chunk]]:
        """Returns the chunks of each stage."""
        return [clock.chunks(buckets, matrices) for clock in self.stages]

    def reduction_seconds(self, chunks: Sequence[Sequence[Chunk]]) -> float:
        """Returns the seconds that reductions add to the iteration."""
        if not self._overlap_reduce:
            return max(sum(chunk.reduce.seconds for chunk in of_stage) for of_stage in chunks)
        added_s = slowed_s = 0.0
        for clock, of_stage in reversed(list(zip(self.stages, chunks, strict=True))):
            late_s, slowed_here_s = clock.reduction_seconds(of_stage)
            added_s = max(added_s, slowed_s + late_s)
            slowed_s += slowed_here_s
        return added_s

    def gathering_seconds(self, chunks: Sequence[Sequence[Chunk]], updates_s: Mapping[int, float]) -> float:
        """Returns the seconds that updates and gatherings add to the iteration.

        Args:
            updates_s: the update seconds of each stage's slowest owner.
        """
        added_s = late_s = 0.0
        for stage, (clock, of_stage) in enumerate(zip(self.stages, chunks, strict=True)):
            update_s = updates_s.get(stage, 0.0)
            if self._overlap_gather:
                # `late_s` delays the input of the next stage.
                delay_s, late_s = clock.gathering_seconds(of_stage, update_s, late_s)
            else:
                delay_s = update_s + sum(chunk.gather.seconds for chunk in of_stage)
            added_s = max(added_s, delay_s)
        return added_s

    def estimate(
        self, outlines: Sequence[Sequence[Outline]], matrices: Sequence[Matrix], updates_s: Mapping[int, float]
    ) -> float:
        """Estimates the seconds that a plan adds to the iteration, before its owners are known.

        Args:
            outlines: the buckets of each stage.
            updates_s: the update seconds of each stage.
        """
        chunks = [
            clock.outline_chunks(of_stage, matrices) for clock, of_stage in zip(self.stages, outlines, strict=True)
        ]
        return self.reduction_seconds(chunks) + self.gathering_seconds(chunks, updates_s)


class _StageClock:
    """The estimator of the waits of one rank of a stage."""

    def __init__(self, config: RunConfig, layout: Layout, stage: int, reductions: ReductionModel) -> None:
        self._stage, self._pp, self._reductions = stage, layout.pp, reductions
        self._units = units_taken(config, layout)
        self.time: StageTime = stage_time(config, layout, stage)
        self._zero_s = zeroing_seconds(config, layout, stage)
        self._hop_s = self.time.hop.seconds
        self._builder = ChunkBuilder(config, layout, stage, self.time, reductions)

    @cached_property
    def _adamw(self) -> list[Chunk]:
        return self._builder.adamw(planned=True)

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters, followed by the chunks of the plan's buckets."""
        return [*self._adamw, *self._builder.matrices(buckets, matrices)]

    def outline_chunks(self, outlines: Sequence[Outline], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters, followed by estimated chunks of matrices
        (`Exposure.estimate`)."""
        chunks: dict[Stream, list[Chunk]] = {stream: [] for stream in STREAMS}
        for bucket in outlines:
            reduced, gathered = (
                self._reductions.estimate(bucket.elements, bucket.largest, kind, experts=bucket.experts)
                for kind in ("reduce_scatter", "all_gather")
            )
            module = self._builder.first_module(matrices[index] for index in bucket.matrices)
            stream: Stream = "experts" if bucket.experts else "data"
            chunks[stream].append(Chunk(module=module, reduce=reduced, gather=gathered, stream=stream))
        return [*self._adamw, *merge_streams(chunks.values())]

    def reduction_seconds(self, chunks: Sequence[Chunk]) -> tuple[float, float]:
        """Simulates the last backward pass and the reductions of its gradients.

        Returns:
            The seconds from the time at which the first stage's pass would end without reductions to the end
            of this stage's reductions, negative if the reductions end earlier; and the seconds that the
            reductions add to this stage's pass.
        """
        chunks_of_module: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            chunks_of_module.setdefault(chunk.module, []).append(chunk)
        backward = _Pass(chunk.reduce for chunk in chunks)
        arrivals: list[int] = []
        for position, places in enumerate(reversed(self.time.places)):
            if position:
                # Before the last micro-batch, the other pp - 1 of its group of pp pass through this model
                # chunk, and its gradient travels once around the pipeline.
                backward.compute((self._pp - 1) * self._pass_s(places, 1) + self._pp * self._hop_s)
            backward.compute(self.time.pass_s)
            for place in reversed(places):
                module = self.time.modules[place]
                backward.compute(module.backward_s + module.again_s, module.moves[1])
                for chunk in chunks_of_module.get(place, ()):
                    arrivals.append(backward.transfer(chunk.reduce, chunk.stream, [backward.now()]))
        last_module = backward.now()
        times = backward.run(self._units)
        end_s = max(times[task].end for task in (last_module, *arrivals))
        earlier_s = self._stage * (self._hop_s + self._pass_s(self.time.places[0], 1))
        late_s, slowed_s = end_s - backward.computed_s - earlier_s, times[last_module].end - backward.computed_s
        return late_s, slowed_s

    def gathering_seconds(self, chunks: Sequence[Chunk], update_s: float, input_late_s: float) -> tuple[float, float]:
        """Simulates the updates, and the gatherings up to the end of the first forward pass.

        Args:
            update_s: the update seconds of the stage's slowest owner.
            input_late_s: the second value that this method returned for the previous stage.

        Returns:
            The seconds that updates and gatherings add to the pass through all model chunks, and to the pass
            through the first model chunk.
        """
        order = GatheringOrder.of(chunks, len(self._adamw), self.time.places)
        forward = _Pass(chunk.gather for chunk in chunks)
        next_gathered = dict(zip(order.afterwards, order.afterwards[GATHERED_AHEAD:], strict=False))
        tasks: dict[int, int] = {}

        def gather(index: int, after: Sequence[int]) -> None:
            if index not in tasks:
                tasks[index] = forward.transfer(chunks[index].gather, chunks[index].stream, after)

        updated = forward.timeline.add("update", "update", seconds=update_s)
        for index in order.overlapped:
            gather(index, ())
        for index in order.afterwards[:GATHERED_AHEAD]:
            gather(index, [updated])
        chunks_of_module: dict[int, list[int]] = {}
        for index, chunk in reversed(list(enumerate(chunks))):
            chunks_of_module.setdefault(chunk.module, []).append(index)
        earlier_s = self._stage * (self._hop_s + self._pass_s(self.time.places[0], 0))
        forward.wait([updated])
        forward.compute(self._zero_s)
        if self._stage:
            input_s = self._zero_s + earlier_s + input_late_s
            forward.wait([forward.timeline.add("pipeline", "pipeline", seconds=input_s)])
        ends = []
        for model_chunk, places in enumerate(self.time.places):
            if model_chunk:
                # The input of the model chunk has passed through the other stages.
                earlier_chunk = self.time.places[model_chunk - 1]
                forward.compute((self._pp - 1) * self._pass_s(earlier_chunk, 0) + self._pp * self._hop_s)
            forward.compute(self.time.pass_s)
            for place in places:
                module, awaited = self.time.modules[place], list[int]()
                for index in chunks_of_module.get(place, ()):
                    gather(index, [forward.now(), *awaited])
                    awaited.append(tasks[index])
                    if index in next_gathered:
                        gather(next_gathered[index], [forward.now(), *awaited])
                if awaited:
                    forward.wait(awaited)
                forward.compute(module.forward_s, module.moves[0])
            ends.append((forward.now(), forward.computed_s))
        times = forward.run(self._units)
        late_s = [times[task].end - computed_s - earlier_s for task, computed_s in ends]
        return late_s[-1], late_s[0]

    def _pass_s(self, places: range, direction: Literal[0, 1]) -> float:
        """Returns the seconds of the forward (0) or backward (1) pass through the model chunk at `places`."""
        return self.time.passes[self.time.places.index(places)][direction]


class _Pass:
    """The timeline of a pass through a stage and of the data-parallel transfers at the same time."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.timeline, self.computed_s = Timeline(), 0.0
        self._links = {transfer.link for transfer in transfers if not transfer.cores}
        """The links that the pass shares with transfers."""
        self._last_task = self.timeline.add("compute", "compute")
        self._pending_s = 0.0
        """The seconds of computation that have not been added to the timeline yet."""
        self._awaited: list[int] = []
        """The tasks that the pending computation waits for."""

    def compute(self, seconds: float, moves: Transfer = Transfer()) -> None:
        """Adds computation, followed by the pass's collectives `moves`."""
        self.computed_s += seconds + moves.seconds
        self._pending_s += seconds + moves.latency_s
        if moves.link_s and moves.link in self._links:
            self._flush(moves)
        else:
            self._pending_s += moves.link_s

    def wait(self, tasks: Iterable[int]) -> None:
        """Makes computation that is added later wait for tasks."""
        self.now()
        self._awaited.extend(tasks)

    def now(self) -> int:
        """Returns the task at whose end all computation added so far is done."""
        if self._pending_s or self._awaited:
            self._flush(Transfer())
        return self._last_task

    def transfer(self, transfer: Transfer, stream: Stream, after: Sequence[int]) -> int:
        """Adds a transfer; returns the task at whose end it has arrived at all ranks."""
        return self.timeline.transfer("data", stream, transfer, link=transfer.link, after=after)

    def run(self, units: float) -> list[TaskTimes]:
        """Simulates the pass; returns the times of each task. Transfers take the share `units` of the compute
        units from computation."""
        return self.timeline.run_slowed({"compute": STREAMS}, units)

    def _flush(self, moves: Transfer) -> None:
        self._last_task = self.timeline.add(
            "compute", "compute", seconds=self._pending_s, link=moves.link, link_s=moves.link_s, after=self._awaited
        )
        self._pending_s, self._awaited = 0.0, []
