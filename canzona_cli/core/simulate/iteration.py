"""Simulates an iteration up to the reduction of its gradients: forward, backward, and the data-parallel
traffic that overlaps with them.

One rank represents each pipeline stage. In each of its model chunks, the first forward pass waits for
gathered parameters module by module, and the last backward pass starts gradient reductions module by module.
The passes in between are not interrupted.

In this module, a chunk is a bucket with its transfers (`planner.chunks.Chunk`). A part of the model on a
stage is always called a model chunk.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from canzona_cli.core.costs.buffers import warmup_forwards
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import StageTime
from canzona_cli.core.costs.modules import Module
from canzona_cli.core.costs.timeline import Task, TaskTimes, Timeline
from canzona_cli.core.planner.chunks import STREAMS, Chunk
from canzona_cli.core.setup import Layout

Direction = Literal["forward", "backward"]

_PHASES = ("data", "forward", "backward", "pipeline", "dispatch", "grad_reduce", "param_gather", "other")


_Message = tuple[Direction, int, int]
"""A message between stages: (direction, index of the sending model chunk in the whole model, micro-batch)."""


class _Pass(NamedTuple):
    """The forward or backward pass of one micro-batch through one model chunk."""

    direction: Direction
    chunk: int
    micro: int
    waits: bool = True
    """True if the rank continues only after the output of this pass has arrived, as usual in Megatron. False
    for backward passes of interleaved schedules while both directions alternate."""
    gathers: int | None = None
    """The model chunk whose gathering starts right before this pass (`StageWork.aligned`)."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The work of a rank of a pipeline stage up to the reduction of its gradients."""

    time: StageTime
    chunks: Sequence[Chunk]
    """The chunks in the order of the gradient buffers, which begin with the parameters that were registered
    last."""
    begin_s: float
    """The seconds before the first forward pass."""
    tail_s: float
    """The seconds of communication that follows the gradient reduction
    (`planner.chunks.seconds_after_reduction`)."""
    early: Sequence[int] = ()
    """The chunks whose gathering the previous step has started, in this order."""
    chain: Sequence[int] | None = None
    """The order in which chunks are gathered. When the forward pass has waited for a chunk, the gathering of
    the chunk `ahead` positions later starts. None for all chunks in reverse order."""
    aligned: bool = False
    """True if all gatherings of a model chunk start together (Megatron-LM's `align_param_gather`). Those of
    the first two model chunks start before the first pass, and those of each later model chunk when the first
    stage starts the previous model chunk."""
    shares_embedding: bool = False
    """True if the stage has one of the two copies of a tied embedding. The two stages sum its gradients, so
    the stage that is ready first waits for the other."""


class IterationTimeline:
    """The simulation of one iteration up to the reduction of its gradients. The constructor runs it.

    Args:
        timeline: an empty timeline; if it has cores, all ranks share them.
        ahead: see `StageWork.chain`.
        units: the share of a GPU's compute units that data-parallel collectives take from forward and
            backward.
    """

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[StageWork],
        timeline: Timeline,
        *,
        overlap_reduce: bool,
        overlap_gather: bool,
        ahead: int = 1,
        units: float = 0.0,
    ) -> None:
        self._layout, self._stages = layout, stages
        self._overlap_reduce, self._overlap_gather = overlap_reduce, overlap_gather
        self._ahead, self._timeline = ahead, timeline
        self._last_tasks = [0] * len(stages)
        """The last task added to each stage's compute stream."""
        self._gathered: list[dict[int, int]] = [{} for _ in stages]
        """The task, by stage and chunk, of each gathering that has started."""
        self._reducing: list[list[int]] = [[] for _ in stages]
        """The last task of each chunk's reduction, by stage."""
        self._waits: list[list[int]] = [[] for _ in stages]
        """The tasks for which each stage's next computation waits, one after another."""
        for stage, work in enumerate(stages):
            self._compute_task(stage, "other", work.begin_s)
            for index in work.early:
                self._gather(stage, index, ())
            if work.aligned:
                for model_chunk in (0, 1):
                    self._gather_chunk(stage, model_chunk)
        self._sent: dict[_Message, int] = {}
        """The task that sends each message."""
        self._unawaited: list[int | None] = [None] * len(stages)
        """The task of each stage that sends a message for which the rank has not waited yet; None if there is
        no such task. The rank waits for it when it next sends a message without waiting, and after its last
        pass."""
        self._build()
        slowed_by: dict[Hashable, list[Hashable]] = {
            ("compute", stage): [(stream, stage) for stream in STREAMS] for stage in range(layout.pp)
        }
        task_times = self._timeline.run_slowed(slowed_by, units)
        self._computed_s = [task_times[task].end for task in self._last_tasks]
        self._ends = [times.end for times in task_times]
        """The time at which each task ends."""
        self._streams: dict[Hashable, list[tuple[Task, TaskTimes]]] = {}
        for task, times in zip(self._timeline.tasks, task_times, strict=True):
            self._streams.setdefault(task.stream, []).append((task, times))
        # The time at which each stage's last reduction ends, or its backward pass if that ends later.
        reduced = [
            max([computed, *(task_times[task].end for task in reducing)])
            for computed, reducing in zip(self._computed_s, self._reducing, strict=True)
        ]
        shared_s = max((end for end, work in zip(reduced, stages, strict=True) if work.shares_embedding), default=0.0)
        self.reduced_s = [
            (max(end, shared_s) if work.shares_embedding else end) + work.tail_s
            for end, work in zip(reduced, stages, strict=True)
        ]
        """The time at which each stage's gradients have been reduced."""

    def phases(self, stage: int) -> dict[str, float]:
        """Returns the seconds of each phase on a rank of the stage, up to the reduction of its gradients.

        A wait belongs to the phase of the task that ended it; the `_total`s include transfers that overlap
        with computation.
        """
        seconds = dict.fromkeys(_PHASES, 0.0)
        totals = {"grad_reduce": 0.0, "param_gather": 0.0}
        for _, phase, start, end in self._compute(stage):
            seconds[phase] += end - start
        for phase, start, end in self._transfers(stage):
            totals[phase] += end - start
        # Sending tokens to experts counts as dispatch, not as forward or backward.
        dispatches = [module.moves for module in self._stages[stage].time.modules if module.dispatched]
        for index, direction in enumerate(("forward", "backward")):
            dispatch_s = self._layout.num_microbatches * sum(moves[index].seconds for moves in dispatches)
            seconds[direction] -= dispatch_s
            seconds["dispatch"] += dispatch_s
        seconds["grad_reduce"] += self.reduced_s[stage] - self._computed_s[stage]
        seconds["grad_reduce_total"] = max(seconds["grad_reduce"], totals["grad_reduce"] + self._stages[stage].tail_s)
        seconds["param_gather_total"] = totals["param_gather"]
        return seconds

    def segments(self, stage: int) -> Iterator[tuple[Literal["compute", "data"], str, float, float]]:
        """Yields the (stream, phase, start, end) of each activity of the stage's rank, without waits."""
        for waiting, phase, start, end in self._compute(stage):
            if not waiting:
                yield "compute", phase, start, end
        for phase, start, end in self._transfers(stage):
            yield "data", phase, start, end

    def _build(self) -> None:
        """Adds every stage's passes in the order of its 1F1B schedule. Each pass is added after the pass
        whose output it needs."""
        schedules = [_one_f_one_b(self._layout, stage) for stage in range(self._layout.pp)]
        passes_added = [0] * len(schedules)
        while any(count < len(steps) for count, steps in zip(passes_added, schedules, strict=True)):
            for stage, steps in enumerate(schedules):
                while passes_added[stage] < len(steps) and self._arrived(stage, steps[passes_added[stage]]):
                    self._pass(stage, steps[passes_added[stage]])
                    passes_added[stage] += 1
        for stage, send in enumerate(self._unawaited):
            if send is not None:
                self._waits[stage].append(send)
            self._end_waits(stage)

    def _arrived(self, stage: int, step: _Pass) -> bool:
        """Returns True if the sending of a pass's input has been added to the timeline."""
        source = self._source(stage, step)
        return source is None or (step.direction, source, step.micro) in self._sent

    def _source(self, stage: int, step: _Pass) -> int | None:
        """Returns the index in the whole model of the model chunk whose output a pass needs; None at the ends
        of the model."""
        model_chunk = step.chunk * self._layout.pp + stage + (-1 if step.direction == "forward" else 1)
        return model_chunk if 0 <= model_chunk < self._layout.pp * self._layout.vpp else None

    def _pass(self, stage: int, step: _Pass) -> None:
        """Adds the tasks of a pass, in this order: receive, gatherings, computation, send."""
        time, layout, direction = self._stages[stage].time, self._layout, step.direction
        is_first = direction == "forward" and step.micro == 0
        is_last = direction == "backward" and step.micro == layout.num_microbatches - 1
        source = self._source(stage, step)
        if source is not None:
            self._waits[stage].append(self._sent[direction, source, step.micro])
        if self._stages[stage].aligned and step.gathers is not None:
            self._end_waits(stage)
            self._gather_chunk(stage, step.gathers)
        if is_first or is_last:
            self._compute_task(stage, direction, time.pass_s)
        if is_first:
            self._first_forward(stage, step.chunk)
        elif is_last:
            self._last_backward(stage, step.chunk)
        else:
            index = int(direction == "backward")
            if self._timeline.shares_cores:
                self._work(stage, direction, time.computed[step.chunk][index], time.moves[step.chunk][index])
            else:
                self._compute_task(stage, direction, time.passes[step.chunk][index])
        model_chunk = step.chunk * layout.pp + stage
        if model_chunk != (layout.pp * layout.vpp - 1 if direction == "forward" else 0):
            message = direction, model_chunk, step.micro
            send = self._timeline.add(
                "pipeline",
                ("send", stage, direction),
                seconds=time.hop.latency_s,
                link=(stage, time.hop.link),
                link_s=time.hop.link_s,
                cores=time.hop.cores * self._layout.owners * layout.tp,
                after=[self._last_tasks[stage]],
            )
            self._sent[message] = send
            awaited: int | None = send
            if not step.waits:
                awaited, self._unawaited[stage] = self._unawaited[stage], send
            if awaited is not None:
                self._waits[stage].append(awaited)

    def _end_waits(self, stage: int) -> None:
        """Adds a task at whose end the stage's waits are over."""
        if self._waits[stage]:
            self._compute_task(stage, "pipeline")

    def _first_forward(self, stage: int, model_chunk: int) -> None:
        """Adds the first forward pass module by module, with gatherings chained as in Megatron.

        A module starts the gathering of its buckets, unless it has started already, and waits for all of
        them. After each bucket, the gathering of a later bucket starts (`StageWork.chain`).
        """
        work = self._stages[stage]
        time, chunks = work.time, work.chunks
        order = range(len(chunks))[::-1] if work.chain is None else work.chain
        next_gathered = {} if work.aligned else dict(zip(order, order[self._ahead :], strict=False))
        chunks_of_module: dict[int, list[int]] = {}
        for index, chunk in reversed(list(enumerate(chunks))):
            chunks_of_module.setdefault(chunk.module, []).append(index)
        for place in time.places[model_chunk]:
            awaited = [self._last_tasks[stage]]
            for index in chunks_of_module.get(place, ()) if self._overlap_gather else ():
                self._gather(stage, index, awaited)
                awaited.append(self._gathered[stage][index])
                if index in next_gathered:
                    self._gather(stage, next_gathered[index], awaited)
            self._module(stage, "forward", time.modules[place], awaited[1:])

    def _gather_chunk(self, stage: int, model_chunk: int) -> None:
        """Starts gathering all buckets of a model chunk, in the order of the buffers."""
        places = self._stages[stage].time.places[model_chunk]
        for index, chunk in enumerate(self._stages[stage].chunks):
            if chunk.module in places:
                self._gather(stage, index, [self._last_tasks[stage]])

    def _gather(self, stage: int, index: int, after: Sequence[int]) -> None:
        """Starts gathering a chunk, unless its gathering has already started."""
        if index not in self._gathered[stage]:
            chunk = self._stages[stage].chunks[index]
            self._gathered[stage][index] = self._transfer(chunk, stage, "param_gather", after)

    def _last_backward(self, stage: int, model_chunk: int) -> None:
        """Adds the last backward pass module by module. The reduction of a bucket starts after the module
        that completes it or, if reductions do not overlap, at the end of the backward pass."""
        time = self._stages[stage].time
        completed_by: dict[int, list[Chunk]] = {}
        for chunk in self._stages[stage].chunks:
            completed_by.setdefault(chunk.module if self._overlap_reduce else 0, []).append(chunk)
        for place in reversed(time.places[model_chunk]):
            self._module(stage, "backward", time.modules[place], ())
            for chunk in completed_by.get(place, ()):
                self._reducing[stage].append(self._transfer(chunk, stage, "grad_reduce", [self._last_tasks[stage]]))

    def _module(self, stage: int, direction: Direction, module: Module, after: Sequence[int]) -> None:
        seconds = module.forward_s if direction == "forward" else module.backward_s + module.again_s
        self._work(stage, direction, seconds, module.moves[direction == "backward"], after)

    def _work(
        self, stage: int, direction: Direction, seconds: float, moves: Transfer, after: Sequence[int] = ()
    ) -> None:
        """Adds `seconds` of computation followed by the collectives `moves`."""
        if self._timeline.shares_cores:
            # Two tasks, because computing and communicating keep different numbers of cores busy.
            self._compute_task(stage, direction, seconds, after)
            seconds, after = 0.0, ()
        self._last_tasks[stage] = self._timeline.add(
            direction,
            ("compute", stage),
            seconds=seconds + moves.latency_s,
            link=(stage, moves.link),
            link_s=moves.link_s,
            cores=moves.cores * self._layout.owners,
            after=after,
        )

    def _compute_task(self, stage: int, phase: str, seconds: float = 0.0, after: Sequence[int] = ()) -> None:
        waits, self._waits[stage] = self._waits[stage], []
        self._last_tasks[stage] = self._timeline.add(
            phase,
            ("compute", stage),
            seconds=seconds,
            cores=float(self._layout.owners * self._layout.tp) if seconds else 0.0,
            after=[*waits, *after] if waits else after,
        )

    def _transfer(
        self, chunk: Chunk, stage: int, phase: Literal["grad_reduce", "param_gather"], after: Sequence[int]
    ) -> int:
        """Adds a transfer of a chunk to its data stream; returns the task at whose end the transfer has
        arrived."""
        transfer = chunk.reduce if phase == "grad_reduce" else chunk.gather
        return self._timeline.transfer(
            phase,
            (chunk.stream, stage),
            transfer,
            link=(stage, transfer.link),
            cores=transfer.cores * self._layout.tp,
            after=after,
        )

    def _transfers(self, stage: int) -> Iterator[tuple[str, float, float]]:
        """Yields (phase, start, end) of the stage's data-parallel transfers. A transfer starts no earlier
        than the previous one ends, so that time in which several streams transfer is counted once."""
        transfers = [entry for stream in STREAMS for entry in self._streams.get((stream, stage), ())]
        end = 0.0
        for task, times in sorted(transfers, key=lambda entry: entry[1].start):
            start, end = max(times.start, end), max(times.end, end)
            yield task.phase, start, end

    def _compute(self, stage: int) -> Iterator[tuple[bool, str, float, float]]:
        """Yields the (waiting, phase, start, end) of the compute stream, without gaps. `waiting` is True for
        a wait, which has the phase of the task that ended it."""
        for task, times in self._streams["compute", stage]:
            if times.held_by is not None:
                phase, ready = self._timeline.tasks[times.held_by].phase, times.ready
                # A rank waits for messages one after another, but for all gatherings of a module at once.
                for end in map(self._ends.__getitem__, task.after if phase == "pipeline" else (times.held_by,)):
                    if end > ready:
                        yield True, phase, ready, end
                        ready = end
            yield False, task.phase, times.start, times.end


def _one_f_one_b(layout: Layout, stage: int) -> list[_Pass]:
    """Lists a stage's passes in the 1F1B order of Narayanan et al. 2021 (arXiv 2104.04473).

    Forward passes fill the pipeline, then forward and backward passes alternate, then the remaining backward
    passes follow. The model chunk changes after every `pp` micro-batches, as in Megatron's
    `get_schedule_table`.
    """
    pp, vpp, count = layout.pp, layout.vpp, layout.num_microbatches
    turns = [
        (chunk, micro)
        for start in range(0, count, pp)
        for chunk in range(vpp)
        for micro in range(start, min(start + pp, count))
    ]
    # Stage n starts a gathering n passes earlier in its schedule than stage 0, so that all stages start it at
    # about the same time.
    gathers = [chunk + 1 if 0 < chunk < vpp - 1 and micro == 0 else None for chunk, micro in turns[stage:]]
    forwards = [_Pass("forward", chunk, micro, gathers=index) for (chunk, micro), index in zip_longest(turns, gathers)]
    warm_up = warmup_forwards(layout, stage)
    backwards = [
        _Pass("backward", vpp - 1 - chunk, micro, waits=vpp == 1 or index >= len(turns) - warm_up)
        for index, (chunk, micro) in enumerate(turns)
    ]
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return [*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :]]
