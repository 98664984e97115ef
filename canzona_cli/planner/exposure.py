"""The seconds that an iteration waits for updates, reductions and gatherings: an estimate that is quick enough
to compare a plan's candidates.

`simulate.iteration` computes the same for a whole pipeline. Here every stage has a clock of its own: it counts
the last backward pass, which starts reductions, and the first forward pass, which waits for gatherings, module
by module. Stages other than the first finish their backward passes earlier and start their forward passes
later, by one pass for each stage before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from canzona_cli.config.execution import overlaps_param_gather
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.gradients import zeroing_seconds
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import StageTime, stage_time, units_taken
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.chunks import Buffers, Chunk, Order, in_order
from canzona_cli.planner.plan import Bucket
from canzona_cli.planner.reduction import GATHERED_AHEAD, ReductionModel


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The seconds of an iteration for which a stage waits for one direction of data-parallel traffic."""

    exposed_s: float
    total_s: float
    """All seconds of the traffic, overlapped ones included."""


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
    """The waits of a run's iteration. They depend only on what a plan depends on, so not on sequence
    parallelism nor on the dispatcher of tokens, and collectives take as long as their parts, whatever was
    measured in whole steps.

    Args:
        layout: the resolved layout; its number of micro-batches does not matter.
    """

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        layout = replace(layout, num_microbatches=1, global_batch_size=layout.dp * layout.micro_batch_size)
        layout = replace(layout, sequence_parallel=layout.tp > 1)
        config = replace(config, parallel=replace(config.parallel, dispatcher=None))
        self._overlap_reduce = config.parallel.overlap_grad_reduce
        self._overlap_gather = overlaps_param_gather(config)
        self._units = units_taken(config, layout)
        self.stages = [_StageClock(config, layout, stage) for stage in range(layout.pp)]

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[list[Chunk]]:
        """Returns the chunks of each stage."""
        return [clock.chunks(buckets, matrices) for clock in self.stages]

    def reduced(self, chunks: Sequence[Sequence[Chunk]]) -> float:
        """Returns the seconds that reductions add to the iteration."""
        waits = [
            clock.reduced(of_stage, overlap=self._overlap_reduce)
            for clock, of_stage in zip(self.stages, chunks, strict=True)
        ]
        return self._price(waits)

    def gathered(self, chunks: Sequence[Sequence[Chunk]], busy: Mapping[int, float]) -> float:
        """Returns the seconds that updates and gatherings add to the iteration.

        Args:
            busy: the update seconds of each stage's slowest owner.
        """
        waits = [
            clock.gathered(of_stage, busy.get(stage, 0.0), overlap=self._overlap_gather)
            for stage, (clock, of_stage) in enumerate(zip(self.stages, chunks, strict=True))
        ]
        return self._price(waits)

    def roughly(
        self,
        outlines: Sequence[Sequence[Outline]],
        matrices: Sequence[Matrix],
        model: ReductionModel,
        busy: Mapping[int, float],
    ) -> float:
        """Estimates what a plan adds to the iteration, before its owners are known.

        Args:
            outlines: the buckets of each stage.
            busy: the update seconds of each stage.
        """
        chunks = [
            clock.outlined(of_stage, matrices, model) for clock, of_stage in zip(self.stages, outlines, strict=True)
        ]
        return self.reduced(chunks) + self.gathered(chunks, busy)

    def _price(self, waits: Sequence[Waits]) -> float:
        """Adds up the longest wait and what overlapped collectives take from the passes."""
        return max(wait.exposed_s for wait in waits) + self._units * max(wait.total_s for wait in waits)


class _StageClock:
    """The clock of one stage's rank."""

    def __init__(self, config: RunConfig, layout: Layout, stage: int) -> None:
        self._stage, self._stages, self._turns = stage, layout.pp, layout.pp - 1
        self._config, self._layout = config, layout
        self.time: StageTime = stage_time(config, layout, stage)
        self._zero_s = zeroing_seconds(config, layout, stage)
        self._hop_s = self.time.hop.seconds
        self._buffers = Buffers(config, layout, stage, self.time)

    @cached_property
    def _others(self) -> list[Chunk]:
        return self._buffers.others(planned=True)

    @cached_property
    def _forward(self) -> list[float]:
        return [module.forward_s + module.moves[0].seconds for module in self.time.modules]

    @cached_property
    def _backward(self) -> list[float]:
        return [module.backward_s + module.again_s + module.moves[1].seconds for module in self.time.modules]

    def _forward_s(self, places: range) -> float:
        """Returns the seconds of a forward pass through the modules of a model chunk."""
        return self.time.pass_s + sum(self._forward[place] for place in places)

    def _backward_s(self, places: range) -> float:
        return self.time.pass_s + sum(self._backward[place] for place in places)

    def chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters and those of the plan's buckets, as `Order.of` wants them."""
        return [*self._others, *self._buffers.matrices(buckets, matrices)]

    def outlined(self, outlines: Sequence[Outline], matrices: Sequence[Matrix], model: ReductionModel) -> list[Chunk]:
        """Returns the chunks of AdamW's parameters and estimated chunks of matrices, see `Exposure.roughly`."""
        chunks: dict[bool, list[Chunk]] = {False: [], True: []}
        for bucket in outlines:
            reduced, gathered = (
                model.roughly(bucket.elements, bucket.largest, kind, experts=bucket.experts)
                for kind in ("reduce_scatter", "all_gather")
            )
            module = self._buffers.first_module(matrices[index] for index in bucket.matrices)
            chunks[bucket.experts].append(Chunk(module=module, reduce=reduced, gather=gathered))
        return [*self._others, *in_order(chunks.values())]

    def reduced(self, chunks: Sequence[Chunk], *, overlap: bool) -> Waits:
        """Returns the wait for reductions after the first stage's last backward pass."""
        total_s = sum(chunk.reduce.seconds for chunk in chunks)
        if not overlap:
            return Waits(exposed_s=total_s, total_s=0.0)
        ready: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            ready.setdefault(chunk.module, []).append(chunk)
        streams, now, end = _Streams(), 0.0, 0.0
        for number, places in enumerate(reversed(self.time.places)):
            if number:
                # The other micro-batches of the model chunk go first.
                now += self._turns * self._backward_s(places) + self._stages * self._hop_s
            now += self.time.pass_s
            for place in reversed(places):
                now += self._backward[place]
                for chunk in ready.get(place, ()):
                    end = max(end, streams.run(chunk.reduce, now, apart=chunk.apart))
        earlier_s = self._stage * (self._hop_s + self._backward_s(self.time.places[0]))
        return Waits(exposed_s=max(0.0, end - now - earlier_s), total_s=total_s)

    def gathered(self, chunks: Sequence[Chunk], busy_s: float, *, overlap: bool) -> Waits:
        """Returns the updates and the wait for gatherings up to the end of the first forward pass."""
        total_s = sum(chunk.gather.seconds for chunk in chunks)
        if not overlap:
            return Waits(exposed_s=busy_s + total_s, total_s=0.0)
        order, streams = Order.of(chunks, len(self._others), self.time.places), _Streams()
        follows = dict(zip(order.afterwards, order.afterwards[GATHERED_AHEAD:], strict=False))
        done: dict[int, float] = {}

        def gather(number: int, now: float) -> None:
            if number not in done:
                done[number] = streams.run(chunks[number].gather, now, apart=chunks[number].apart)

        for number in order.overlapped:
            gather(number, 0.0)
        for number in order.afterwards[:GATHERED_AHEAD]:
            gather(number, busy_s)
        needed: dict[int, list[int]] = {}
        for number, chunk in enumerate(chunks):
            needed.setdefault(chunk.module, []).insert(0, number)
        earlier_s = self._stage * (self._hop_s + self._forward_s(self.time.places[0]))
        now, waited_s = busy_s + self._zero_s + earlier_s, 0.0
        for model_chunk, places in enumerate(self.time.places):
            if model_chunk:
                # Its input has passed through the other stages.
                before = self.time.places[model_chunk - 1]
                now += self._turns * self._forward_s(before) + self._stages * self._hop_s
            now += self.time.pass_s
            for place in places:
                for number in needed.get(place, ()):
                    gather(number, now)
                    waited_s += max(0.0, done[number] - now)
                    now = max(now, done[number])
                    if number in follows:
                        gather(follows[number], now)
                now += self._forward[place]
        return Waits(exposed_s=busy_s + waited_s, total_s=total_s)


class _Streams:
    """The streams of the matrices' transfers and of AdamW's (`Chunk.apart`), which share the links."""

    def __init__(self) -> None:
        self._free = {True: 0.0, False: 0.0}
        self._link_free = 0.0

    def run(self, transfer: Transfer, now: float, *, apart: bool) -> float:
        """Returns the time at which a transfer that is ready `now` has arrived at all ranks."""
        begin = max(self._free[apart], now) + transfer.latency_s - transfer.fill_s
        self._free[apart] = self._link_free = max(begin, self._link_free) + transfer.link_s
        return self._free[apart] + transfer.fill_s
