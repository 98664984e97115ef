"""Estimates the seconds that an iteration waits for updates, reductions and gatherings, quickly enough to
compare a plan's candidates.

`simulate.iteration` computes these waits for a whole pipeline, on the same `Timeline`. Here the first stage has two
separate timelines: one for the last backward pass, during which reductions start, and one for the first forward pass,
which waits for gatherings.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import preparation_seconds, stage_time, units_taken
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.chunks import STREAMS, Chunk, ChunkBuilder, GatheringOrder, Stream, merge_streams
from canzona_cli.core.planner.plan import Bucket
from canzona_cli.core.planner.reduction import GATHERED_AHEAD, ReductionModel
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.core.setup.execution import overlaps_param_gather


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A bucket whose owners are not known yet."""

    elements: int
    largest: int
    """The elements of the largest part that must have one owner."""
    matrices: tuple[int, ...]
    """The first matrix of each parameter."""
    experts: bool = False
    """True for experts with an `expert_rank`."""


class Exposure:
    """The estimator of the seconds that an iteration of a run waits for communication and updates, on a rank of the
    first pipeline stage. Megatron cuts only this stage's buffers into buckets, and its gradients are ready last, so
    the other stages wait no longer.

    Waits depend only on the inputs of a plan. Settings that do not change a plan, such as sequence
    parallelism and the dispatcher of tokens, therefore have no effect.

    Args:
        layout: the resolved layout; its number of micro-batches has no effect.
    """

    def __init__(self, setup: Setup, layout: Layout) -> None:
        layout = replace(layout, num_microbatches=1, global_batch_size=layout.dp * layout.micro_batch_size)
        layout = replace(layout, sequence_parallel=layout.tp > 1)
        setup = replace(setup, parallel=replace(setup.parallel, dispatcher=None))
        self._overlap_reduce = setup.parallel.overlap_grad_reduce
        self._overlap_gather = overlaps_param_gather(setup)
        self.reductions = ReductionModel(setup, layout)
        self._pp, self._units = layout.pp, units_taken(setup, layout)
        self._time = stage_time(setup, layout, 0)
        self._begin_s = preparation_seconds(setup, layout, 0)
        self._builder = ChunkBuilder(setup, layout, 0, self._time, self.reductions)

    @cached_property
    def _adamw(self) -> list[Chunk]:
        return self._builder.adamw(planned=True)

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters, followed by the chunks of the plan's buckets."""
        return [*self._adamw, *self._builder.matrices(buckets, matrices)]

    def estimate(self, outlines: Sequence[Outline], matrices: Sequence[Matrix], update_s: float) -> float:
        """Estimates the seconds that a plan adds to the iteration, before its owners are known."""
        chunks: dict[Stream, list[Chunk]] = {stream: [] for stream in STREAMS}
        for bucket in outlines:
            reduced, gathered = (
                self.reductions.estimate(bucket.elements, bucket.largest, kind, experts=bucket.experts)
                for kind in ("reduce_scatter", "all_gather")
            )
            module = self._builder.first_module(matrices[index] for index in bucket.matrices)
            stream: Stream = "experts" if bucket.experts else "data"
            chunks[stream].append(Chunk(module=module, reduce=reduced, gather=gathered, stream=stream))
        estimated = [*self._adamw, *merge_streams(chunks.values())]
        return self.reduction_seconds(estimated) + self.gathering_seconds(estimated, update_s)

    def reduction_seconds(self, chunks: Sequence[Chunk]) -> float:
        """Simulates the last backward pass and the reductions of its gradients; returns the seconds that reductions
        add to the iteration."""
        if not self._overlap_reduce:
            return sum(chunk.reduce.seconds for chunk in chunks)
        chunks_of_module: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            chunks_of_module.setdefault(chunk.module, []).append(chunk)
        backward = _Pass(chunk.reduce for chunk in chunks)
        arrivals: list[int] = []
        for position, places in enumerate(reversed(self._time.places)):
            if position:
                # Before the last micro-batch, the other pp - 1 of its group of pp pass through this model
                # chunk, and its gradient travels once around the pipeline.
                backward.compute((self._pp - 1) * self._pass_s(places, 1) + self._pp * self._time.hop.seconds)
            backward.compute(self._time.pass_s)
            for place in reversed(places):
                module = self._time.modules[place]
                backward.compute(module.backward_s + module.again_s, module.moves[1])
                for chunk in chunks_of_module.get(place, ()):
                    arrivals.append(backward.transfer(chunk.reduce, chunk.stream, [backward.now()]))
        ends = [backward.now(), *arrivals]
        ended = backward.run(self._units)
        return max(0.0, max(ended[task] for task in ends) - backward.computed_s)  # below 0 only by rounding

    def gathering_seconds(self, chunks: Sequence[Chunk], update_s: float) -> float:
        """Simulates the updates, and the gatherings up to the end of the first forward pass; returns the seconds that
        they add to the iteration.

        Args:
            update_s: the update seconds of the slowest owner of any stage.
        """
        if not self._overlap_gather:
            return update_s + sum(chunk.gather.seconds for chunk in chunks)
        order = GatheringOrder.of(chunks, len(self._adamw), self._time.places)
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
        forward.wait([updated])
        forward.compute(self._begin_s)
        for model_chunk, places in enumerate(self._time.places):
            if model_chunk:
                # The input of the model chunk has passed through the other stages.
                earlier_chunk = self._time.places[model_chunk - 1]
                forward.compute((self._pp - 1) * self._pass_s(earlier_chunk, 0) + self._pp * self._time.hop.seconds)
            forward.compute(self._time.pass_s)
            for place in places:
                module, awaited = self._time.modules[place], list[int]()
                for index in chunks_of_module.get(place, ()):
                    gather(index, [forward.now(), *awaited])
                    awaited.append(tasks[index])
                    if index in next_gathered:
                        gather(next_gathered[index], [forward.now(), *awaited])
                if awaited:
                    forward.wait(awaited)
                forward.compute(module.forward_s, module.moves[0])
        end = forward.now()
        return max(0.0, forward.run(self._units)[end] - forward.computed_s)

    def _pass_s(self, places: range, direction: Literal[0, 1]) -> float:
        """Returns the seconds of the forward (0) or backward (1) pass through the model chunk at `places`."""
        return self._time.passes[self._time.places.index(places)][direction]


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

    def run(self, units: float) -> list[float]:
        """Simulates the pass; returns the end of each task. Transfers take the share `units` of the compute
        units from computation."""
        return self.timeline.ends_slowed({"compute": STREAMS}, units)

    def _flush(self, moves: Transfer) -> None:
        self._last_task = self.timeline.add(
            "compute", "compute", seconds=self._pending_s, link=moves.link, link_s=moves.link_s, after=self._awaited
        )
        self._pending_s, self._awaited = 0.0, []
