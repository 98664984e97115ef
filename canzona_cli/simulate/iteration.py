"""Forward, backward, and the data-parallel traffic under them:
one iteration up to reduced gradients, on a timeline.

One rank stands for each pipeline stage. The first forward pass waits module by module for gathered
parameters, the last backward pass hands gradients over module by module; micro-batches in between run
undisturbed. With several model chunks on a rank, that is so for each of them.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Literal, NamedTuple

from canzona_cli.config.schema import Layout
from canzona_cli.costs.buffers import forwards_ahead
from canzona_cli.costs.links import Transfer
from canzona_cli.costs.model import Module, StageTime
from canzona_cli.simulate.buffers import Chunk
from canzona_cli.simulate.timeline import Ran, Timeline

Direction = Literal["forward", "backward"]

_PHASES = ("data", "forward", "backward", "pipeline", "grad_reduce", "param_gather", "other")


_Message = tuple[Direction, int, int]
"""Direction, the part of the model that it leaves, micro-batch."""


class _Pass(NamedTuple):
    """A micro-batch through a model chunk."""

    direction: Direction
    chunk: int
    micro: int
    waits: bool = True
    """True where the rank goes on only once what it has computed has arrived. Megatron's p2p communication
    does, but for the backward transfers between model chunks while both directions take turns: one behind the
    next pass."""
    gathers: int | None = None
    """The model chunk that an aligned gathering starts with right before this pass."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The work of one pipeline stage's rank up to reduced gradients."""

    time: StageTime
    chunks: Sequence[Chunk]
    """The chunks in the order of the gradient buffers: last registered parameters first."""
    begin_s: float
    """The seconds before the first forward."""
    tail_s: float
    """The seconds after the gradient reduction until its result is complete."""
    early: Sequence[int] = ()
    """Chunks that the last step has started gathering, in this order."""
    chain: Sequence[int] | None = None
    """The order in which others follow: after one that was waited for, the one `ahead` places later here;
    None for all, the last one first."""
    aligned: bool = False
    """True where gatherings start by whole model chunks instead, as Megatron-LM's `align_param_gather` has
    them: the first two before the first pass, each other one when the chunk before it begins on the first
    stage."""
    meets: bool = False
    """True where it waits in there for the other stage with a copy of a tied embedding,
    to sum their gradients."""


class IterationTimeline:
    """Simulates on construction.

    Args:
        timeline: empty; its cores, if it has any, are shared by all ranks.
        ahead: see `StageWork.chain`.
        units: share of a rank's computing units that its data-parallel collectives take from forward and
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
        self._last = [0] * len(stages)
        self._gathered: list[dict[int, int]] = [{} for _ in stages]
        """The tasks that gather a chunk of a stage's buffers, by stage."""
        self._reducing: list[list[int]] = [[] for _ in stages]
        """The tasks that reduce chunks, by stage."""
        for stage, work in enumerate(stages):
            self._compute_task(stage, "other", work.begin_s)
            for number in work.early:
                self._gather(stage, number, ())
            if work.aligned:
                for model_chunk in (0, 1):
                    self._gather_chunk(stage, model_chunk)
        self._sent: dict[_Message, int] = {}
        self._asked: dict[_Message, int] = {}
        """The task behind which the rank that a message is for asks for it."""
        self._leaving: list[int | None] = [None] * len(stages)
        """The message that a stage's rank has not waited for, by stage."""
        self._build()
        ran = self._timeline.run()
        if units:
            self._slow_down(ran, units)
            ran = self._timeline.run()
        self._computed = [ran[last].end for last in self._last]
        self._streams: dict[Hashable, list[tuple[str, Ran, str | None]]] = {}
        for task, when in zip(self._timeline.tasks, ran, strict=True):
            held_by = None if when.held_by is None else self._timeline.tasks[when.held_by].phase
            self._streams.setdefault(task.stream, []).append((task.phase, when, held_by))
        reduced = [self._reduced(stage, ran) for stage in range(layout.pp)]
        met = max((end for end, work in zip(reduced, stages, strict=True) if work.meets), default=0.0)
        self.reduced_s = [
            (max(end, met) if work.meets else end) + work.tail_s for end, work in zip(reduced, stages, strict=True)
        ]
        """The time at which a stage's gradients are reduced, by stage."""

    def phases(self, stage: int) -> dict[str, float]:
        """Seconds of the stage's rank up to reduced gradients,
        waits under what was waited for; and totals."""
        seconds = dict.fromkeys(_PHASES, 0.0)
        moved = {"grad_reduce": 0.0, "param_gather": 0.0}
        for _, phase, start, end in self._compute(stage):
            seconds[phase] += end - start
        for phase, ran in self._on(("data", stage)):
            moved[phase] += ran.end - ran.start
        seconds["grad_reduce"] += self.reduced_s[stage] - self._computed[stage]
        seconds["grad_reduce_total"] = max(seconds["grad_reduce"], moved["grad_reduce"] + self._stages[stage].tail_s)
        seconds["param_gather_total"] = moved["param_gather"]
        return seconds

    def segments(self, stage: int) -> Iterator[tuple[Literal["compute", "data"], str, float, float]]:
        """(stream, phase, start, end) of what the stage's rank does; waiting is left out."""
        for waiting, phase, start, end in self._compute(stage):
            if not waiting:
                yield "compute", phase, start, end
        for phase, ran in self._on(("data", stage)):
            yield "data", phase, ran.start, ran.end

    def _build(self) -> None:
        """Add every stage's passes in the order of its 1F1B schedule,
        each once what it waits for is there."""
        schedules = [_one_f_one_b(self._layout, stage) for stage in range(self._layout.pp)]
        asking = [_asking(steps, together=self._layout.vpp > 1) for steps in schedules]
        for stage, asked in enumerate(asking):
            self._ask(stage, asked.get((-1, True), ()))
        done = [0] * len(schedules)
        while any(count < len(steps) for count, steps in zip(done, schedules, strict=True)):
            for stage, (steps, asked) in enumerate(zip(schedules, asking, strict=True)):
                while done[stage] < len(steps) and self._arrived(stage, steps[done[stage]]):
                    number = done[stage]
                    self._pass(stage, steps[number], asked.get((number, False), ()))
                    self._ask(stage, asked.get((number, True), ()))
                    done[stage] += 1

    def _slow_down(self, ran: Sequence[Ran], units: float) -> None:
        """Lengthen what computes while the stage's data-parallel collectives travel,
        by `units` of the time shared."""
        on: dict[Hashable, list[tuple[int, Ran]]] = {}
        for number, (task, when) in enumerate(zip(self._timeline.tasks, ran, strict=True)):
            if when.end > when.start:
                on.setdefault(task.stream, []).append((number, when))
        for stage in range(len(self._stages)):
            transfers, first = on.get(("data", stage), []), 0
            for number, computing in on.get(("compute", stage), []):
                shared_s = 0.0
                for _, transfer in islice(transfers, first, None):
                    if transfer.start >= computing.end:
                        break
                    shared_s += max(0.0, min(computing.end, transfer.end) - max(computing.start, transfer.start))
                    first += transfer.end <= computing.end
                self._timeline.lengthen(number, units * shared_s)

    def _arrived(self, stage: int, step: _Pass) -> bool:
        source = self._source(stage, step)
        return source is None or (step.direction, source, step.micro) in self._sent

    def _ask(self, stage: int, steps: Sequence[_Pass]) -> None:
        """Lets the rank receive, from now on, what these passes start from:
        a message travels once both ends wait."""
        for step in steps:
            source = self._source(stage, step)
            if source is not None:
                message = step.direction, source, step.micro
                self._asked[message] = self._last[stage]
                if message in self._sent:
                    self._timeline.also_after(self._sent[message], self._last[stage])

    def _source(self, stage: int, step: _Pass) -> int | None:
        """The part of the model whose output a pass starts from."""
        part = step.chunk * self._layout.pp + stage + (-1 if step.direction == "forward" else 1)
        return part if 0 <= part < self._layout.pp * self._layout.vpp else None

    def _pass(self, stage: int, step: _Pass, asked: Sequence[_Pass]) -> None:
        """`asked`: passes whose messages are asked for as what this pass computes is sent."""
        time, layout, direction = self._stages[stage].time, self._layout, step.direction
        first = direction == "forward" and step.micro == 0
        last = direction == "backward" and step.micro == layout.num_microbatches - 1
        source = self._source(stage, step)
        if source is not None:
            self._compute_task(stage, "pipeline", after=[self._sent[direction, source, step.micro]])
        if self._stages[stage].aligned and step.gathers is not None:
            self._gather_chunk(stage, step.gathers)
        if first or last:
            self._compute_task(stage, direction, time.pass_s)
        if first:
            self._first_forward(stage, step.chunk)
        elif last:
            self._last_backward(stage, step.chunk)
        else:
            way = int(direction == "backward")
            if self._timeline.shares_cores:
                self._work(stage, direction, time.computed[step.chunk][way], time.moves[step.chunk][way])
            else:
                self._compute_task(stage, direction, time.passes[step.chunk][way])
        self._ask(stage, asked)
        part = step.chunk * layout.pp + stage
        if part != (layout.pp * layout.vpp - 1 if direction == "forward" else 0):
            message = direction, part, step.micro
            asking = [self._asked[message]] if message in self._asked else []
            send = self._timeline.add(
                "pipeline",
                ("send", stage, direction),
                seconds=time.hop.latency_s,
                link=(stage, time.hop.link),
                link_s=time.hop.link_s,
                cores=time.hop.cores * self._layout.owners * layout.tp,
                after=[self._last[stage], *asking],
            )
            self._sent[message] = send
            awaited = send if step.waits else self._leaving[stage]
            if awaited is not None:
                self._compute_task(stage, "pipeline", after=[awaited])
            self._leaving[stage] = None if step.waits else send

    def _first_forward(self, stage: int, model_chunk: int) -> None:
        """Module by module, starting gatherings as Megatron chains them.

        A module waits for its own buckets, starts those nobody has started, and behind each one that has
        landed, one that comes later in the chain.
        """
        work = self._stages[stage]
        time, chunks = work.time, work.chunks
        chain = range(len(chunks))[::-1] if work.chain is None else work.chain
        follows = {} if work.aligned else dict(zip(chain, chain[self._ahead :], strict=False))
        needed: dict[int, list[int]] = {}
        for number, chunk in enumerate(chunks):
            needed.setdefault(chunk.module, []).insert(0, number)
        for place in time.places[model_chunk]:
            awaited = [self._last[stage]]
            for number in needed.get(place, ()) if self._overlap_gather else ():
                self._gather(stage, number, awaited)
                awaited.append(self._gathered[stage][number])
                if number in follows:
                    self._gather(stage, follows[number], awaited)
            self._module(stage, "forward", time.modules[place], awaited[1:])

    def _gather_chunk(self, stage: int, model_chunk: int) -> None:
        """Start gathering everything of a model chunk, in the order of its buffers."""
        places = self._stages[stage].time.places[model_chunk]
        for number, chunk in enumerate(self._stages[stage].chunks):
            if chunk.module in places:
                self._gather(stage, number, [self._last[stage]])

    def _gather(self, stage: int, number: int, after: Sequence[int]) -> None:
        """Start gathering a chunk, unless somebody has."""
        if number not in self._gathered[stage]:
            transfer = self._stages[stage].chunks[number].gather
            self._gathered[stage][number] = self._transfer(stage, "param_gather", transfer, after)

    def _last_backward(self, stage: int, model_chunk: int) -> None:
        time = self._stages[stage].time
        ready: dict[int, list[Transfer]] = {}
        for chunk in self._stages[stage].chunks:
            ready.setdefault(chunk.module if self._overlap_reduce else 0, []).append(chunk.reduce)
        for place in reversed(time.places[model_chunk]):
            self._module(stage, "backward", time.modules[place], ())
            for transfer in ready.get(place, ()):
                self._reducing[stage].append(self._transfer(stage, "grad_reduce", transfer, [self._last[stage]]))

    def _module(self, stage: int, direction: Direction, module: Module, after: Sequence[int]) -> None:
        seconds = module.forward_s if direction == "forward" else module.backward_s + module.again_s
        self._work(stage, direction, seconds, module.moves[direction == "backward"], after)

    def _work(
        self, stage: int, direction: Direction, seconds: float, moves: Transfer, after: Sequence[int] = ()
    ) -> None:
        """Compute for `seconds`, then take part in the collectives."""
        if self._timeline.shares_cores:
            # Apart, for computing keeps other cores busy than communicating does.
            self._compute_task(stage, direction, seconds, after)
            seconds, after = 0.0, ()
        self._last[stage] = self._timeline.add(
            direction,
            ("compute", stage),
            seconds=seconds + moves.latency_s,
            link=(stage, moves.link),
            link_s=moves.link_s,
            cores=moves.cores * self._layout.owners,
            after=after,
        )

    def _compute_task(self, stage: int, phase: str, seconds: float = 0.0, after: Sequence[int] = ()) -> None:
        self._last[stage] = self._timeline.add(
            phase,
            ("compute", stage),
            seconds=seconds,
            cores=float(self._layout.owners * self._layout.tp) if seconds else 0.0,
            after=after,
        )

    def _transfer(self, stage: int, phase: str, transfer: Transfer, after: Sequence[int]) -> int:
        number = self._timeline.add(
            phase,
            ("data", stage),
            seconds=transfer.latency_s - transfer.fill_s,
            link=(stage, transfer.link),
            link_s=transfer.link_s,
            cores=transfer.cores * self._layout.tp,
            after=after,
        )
        if not transfer.fill_s:
            return number
        # The next chain starts on the first ranks while the last ones still wait for this one.
        return self._timeline.add(phase, ("chain", stage, number), seconds=transfer.fill_s, after=[number])

    def _reduced(self, stage: int, ran: Sequence[Ran]) -> float:
        """End of the stage's last reduction; of its backward where there is none after it."""
        return max([self._computed[stage], *(ran[number].end for number in self._reducing[stage])])

    def _on(self, stream: Hashable) -> Iterator[tuple[str, Ran]]:
        return ((phase, ran) for phase, ran, _ in self._streams.get(stream, ()))

    def _compute(self, stage: int) -> Iterator[tuple[bool, str, float, float]]:
        """(whether it is waiting, phase, start, end) without gaps."""
        for phase, ran, held_by in self._streams["compute", stage]:
            if held_by is not None:
                yield True, held_by, ran.ready, ran.start
            yield False, phase, ran.start, ran.end


def _asking(steps: Sequence[_Pass], *, together: bool) -> dict[tuple[int, bool], list[_Pass]]:
    """Tells after which pass a rank asks for what its passes start from,
    and whether also after what that one sends.

    It asks one pass early. A call of Megatron's sends to one neighbour and receives from it, `together` from
    the other one instead: then next to the previous pass of the same direction.
    """
    passes: dict[tuple[int, bool], list[_Pass]] = {}
    last: dict[Direction, int] = {}
    for number, step in enumerate(steps):
        if together:
            behind = (last[step.direction], False) if step.direction in last else (number - 1, True)
        else:
            behind = (number - 1, number == 0 or steps[number - 1].direction == step.direction)
        passes.setdefault(behind, []).append(step)
        last[step.direction] = number
    return passes


def _one_f_one_b(layout: Layout, stage: int) -> list[_Pass]:
    """Narayanan et al. 2021 (arXiv 2104.04473): forwards to fill the pipeline, then in turns, then the rest.

    Model chunks take turns after as many micro-batches as there are stages, as Megatron's
    `get_schedule_table` has it.
    """
    pp, vpp, count = layout.pp, layout.vpp, layout.num_microbatches
    turns = [
        (chunk, micro)
        for first in range(0, count, pp)
        for chunk in range(vpp)
        for micro in range(first, min(first + pp, count))
    ]
    # A stage gathers as many passes earlier as its number, so that all stages start to at about the same
    # time.
    gathers = [chunk + 1 if 0 < chunk < vpp - 1 and micro == 0 else None for chunk, micro in turns[stage:]]
    forwards = [
        _Pass("forward", chunk, micro, gathers=number) for (chunk, micro), number in zip_longest(turns, gathers)
    ]
    ahead = forwards_ahead(layout, stage)
    backwards = [
        _Pass("backward", vpp - 1 - chunk, micro, waits=vpp == 1 or number >= len(turns) - ahead)
        for number, (chunk, micro) in enumerate(turns)
    ]
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *chain.from_iterable(pairs), *backwards[len(forwards) - ahead :]]
