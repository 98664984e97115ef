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

    def gathering_seconds(self, chunks: Sequence[Sequence[Chunk]], busy: Mapping[int, float]) -> float:
        """Returns the seconds that updates and gatherings add to the iteration.

        Args:
            busy: the update seconds of each stage's slowest owner.
        """
        added_s = late_s = 0.0
        for stage, (clock, of_stage) in enumerate(zip(self.stages, chunks, strict=True)):
            busy_s = busy.get(stage, 0.0)
            if self._overlap_gather:
                # `late_s` delays the input of the next stage.
                delay_s, late_s = clock.gathering_seconds(of_stage, busy_s, late_s)
            else:
                delay_s = busy_s + sum(chunk.gather.seconds for chunk in of_stage)
            added_s = max(added_s, delay_s)
        return added_s

    def estimate(
        self,
        outlines: Sequence[Sequence[Outline]],
        matrices: Sequence[Matrix],
        busy: Mapping[int, float],
    ) -> float:
        """Estimates the seconds that a plan adds to the iteration, before its owners are known.

        Args:
            outlines: the buckets of each stage.
            busy: the update seconds of each stage.
        """
        chunks = [
            clock.outline_chunks(of_stage, matrices) for clock, of_stage in zip(self.stages, outlines, strict=True)
        ]
        return self.reduction_seconds(chunks) + self.gathering_seconds(chunks, busy)


class _StageClock:
    """The estimator of the waits of one rank of a stage."""

    def __init__(self, config: RunConfig, layout: Layout, stage: int, reductions: ReductionModel) -> None:
        self._stage, self._stages = stage, layout.pp
        self._units, self._reductions = units_taken(config, layout), reductions
        self.time: StageTime = stage_time(config, layout, stage)
        self._zero_s = zeroing_seconds(config, layout, stage)
        self._hop_s = self.time.hop.seconds
        self._buffers = ChunkBuilder(config, layout, stage, self.time, reductions)

    @cached_property
    def _others(self) -> list[Chunk]:
        return self._buffers.others(planned=True)

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters, followed by the chunks of the plan's buckets."""
        return [*self._others, *self._buffers.matrices(buckets, matrices)]

    def outline_chunks(self, outlines: Sequence[Outline], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters, followed by estimated chunks of matrices
        (`Exposure.estimate`)."""
        chunks: dict[Stream, list[Chunk]] = {stream: [] for stream in STREAMS}
        for bucket in outlines:
            reduced, gathered = (
                self._reductions.estimate(bucket.elements, bucket.largest, kind, experts=bucket.experts)
                for kind in ("reduce_scatter", "all_gather")
            )
            module = self._buffers.first_module(matrices[index] for index in bucket.matrices)
            stream: Stream = "experts" if bucket.experts else "data"
            chunks[stream].append(Chunk(module=module, reduce=reduced, gather=gathered, stream=stream))
        return [*self._others, *merge_streams(chunks.values())]

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
        work, ends = _Pass(chunk.reduce for chunk in chunks), []
        for position, places in enumerate(reversed(self.time.places)):
            if position:
                # Before the last micro-batch, the other pp - 1 of its group of pp pass through this model
                # chunk, and its gradient travels once around the pipeline.
                work.compute((self._stages - 1) * self._pass_s(places, 1) + self._stages * self._hop_s)
            work.compute(self.time.pass_s)
            for place in reversed(places):
                module = self.time.modules[place]
                work.compute(module.backward_s + module.again_s, module.moves[1])
                ends += [
                    work.transfer(chunk.reduce, chunk.stream, [work.now()]) for chunk in chunks_of_module.get(place, ())
                ]
        last = work.now()
        ran = work.run(self._units)
        end_s = max(ran[number].end for number in (last, *ends))
        earlier_s = self._stage * (self._hop_s + self._pass_s(self.time.places[0], 1))
        late_s, slowed_s = end_s - work.computed_s - earlier_s, ran[last].end - work.computed_s
        return late_s, slowed_s

    def gathering_seconds(self, chunks: Sequence[Chunk], busy_s: float, late_s: float) -> tuple[float, float]:
        """Simulates the updates, and the gatherings up to the end of the first forward pass.

        Args:
            busy_s: the update seconds of the stage's slowest owner.
            late_s: the second value that this method returned for the previous stage.

        Returns:
            The seconds that updates and gatherings add to the pass through all model chunks, and to the pass
            through the first model chunk.
        """
        order = GatheringOrder.of(chunks, len(self._others), self.time.places)
        work = _Pass(chunk.gather for chunk in chunks)
        follows = dict(zip(order.afterwards, order.afterwards[GATHERED_AHEAD:], strict=False))
        tasks: dict[int, int] = {}

        def gather(number: int, after: Sequence[int]) -> None:
            if number not in tasks:
                tasks[number] = work.transfer(chunks[number].gather, chunks[number].stream, after)

        updated = work.timeline.add("update", "update", seconds=busy_s)
        for number in order.overlapped:
            gather(number, ())
        for number in order.afterwards[:GATHERED_AHEAD]:
            gather(number, [updated])
        needed: dict[int, list[int]] = {}
        for number, chunk in enumerate(chunks):
            needed.setdefault(chunk.module, []).insert(0, number)
        earlier_s = self._stage * (self._hop_s + self._pass_s(self.time.places[0], 0))
        work.wait([updated])
        work.compute(self._zero_s)
        if self._stage:
            work.wait([work.timeline.add("pipeline", "pipeline", seconds=self._zero_s + earlier_s + late_s)])
        ends = []
        for model_chunk, places in enumerate(self.time.places):
            if model_chunk:
                # The input of the model chunk has passed through the other stages.
                before = self.time.places[model_chunk - 1]
                work.compute((self._stages - 1) * self._pass_s(before, 0) + self._stages * self._hop_s)
            work.compute(self.time.pass_s)
            for place in places:
                module, awaited = self.time.modules[place], list[int]()
                for number in needed.get(place, ()):
                    gather(number, [work.now(), *awaited])
                    awaited.append(tasks[number])
                    if number in follows:
                        gather(follows[number], [work.now(), *awaited])
                if awaited:
                    work.wait(awaited)
                work.compute(module.forward_s, module.moves[0])
            ends.append((work.now(), work.computed_s))
        ran = work.run(self._units)
        late = [ran[number].end - computed_s - earlier_s for number, computed_s in ends]
        return late[-1], late[0]

    def _pass_s(self, places: range, direction: Literal[0, 1]) -> float:
        """Returns the seconds of the forward (0) or backward (1) pass through the model chunk at `places`."""
        return self.time.passes[self.time.places.index(places)][direction]


class _Pass:
    """The timeline of a pass through a stage and of the data-parallel transfers at the same time."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.timeline, self.computed_s = Timeline(), 0.0
        self._links = {transfer.link for transfer in transfers if not transfer.cores}
        """The links that the pass shares with transfers."""
        self._last, self._seconds = self.timeline.add("compute", "compute"), 0.0
        self._after: list[int] = []

    def compute(self, seconds: float, moves: Transfer = Transfer()) -> None:
        """Adds computation, followed by the pass's collectives `moves`."""
        self.computed_s += seconds + moves.seconds
        self._seconds += seconds + moves.latency_s
        if moves.link_s and moves.link in self._links:
            self._flush(moves)
        else:
            self._seconds += moves.link_s

    def wait(self, tasks: Iterable[int]) -> None:
        """Makes computation that is added later wait for tasks."""
        self.now()
        self._after.extend(tasks)

    def now(self) -> int:
        """Returns the task at whose end all computation added so far is done."""
        if self._seconds or self._after:
            self._flush(Transfer())
        return self._last

    def transfer(self, transfer: Transfer, stream: Stream, after: Sequence[int]) -> int:
        """Adds a transfer; returns the task at whose end it has arrived at all ranks."""
        return self.timeline.transfer("data", stream, transfer, link=transfer.link, after=after)

    def run(self, units: float) -> list[TaskTimes]:
        """Simulates the pass; returns the times of each task. Transfers take the share `units` of the compute
        units from computation."""
        return self.timeline.run_slowed({"compute": STREAMS}, units)

    def _flush(self, moves: Transfer) -> None:
        self._last = self.timeline.add(
            "compute", "compute", seconds=self._seconds, link=moves.link, link_s=moves.link_s, after=self._after
        )
        self._seconds, self._after = 0.0, []
