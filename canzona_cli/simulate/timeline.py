"""A small discrete-event simulator: tasks on streams, some of which share a link,
or a machine's processor cores.

A stream runs its tasks one after another, in the order they were added. A task starts when the stream is free
and everything it waits for has ended, takes `seconds` that nothing stretches (computation, latency), then
`link_s` on its link, where n transfers at a time get an n-th of the rate each.

On a timeline with `cores` a task that keeps some busy takes `seconds + link_s` while there are enough of
them; where the running tasks want more cores than there are, all of them slow down alike, as under a fair
scheduler.

Deterministic: ties go to the earlier task.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Task(NamedTuple):
    """One entry of a timeline."""

    phase: str
    stream: Hashable
    seconds: float
    link: Hashable
    """None where it uses none."""
    link_s: float
    cores: float
    """Processor cores it keeps busy; it then uses no link."""
    after: tuple[int, ...]


class Ran(NamedTuple):
    """The times of a task, and what held it up."""

    start: float
    end: float
    ready: float
    """The time at which its stream was free for it; `start - ready` is the wait."""
    held_by: int | None
    """The task of another stream it waited for last; None where it did not wait."""


_PROCESSOR = ("processor",)
"""The cores that tasks share, in the place of a link."""


@dataclass
class _Shared:
    """A link, or the cores, in use. `served` is the seconds of full rate that each task on it has had so far."""

    cores: float | None = None
    """None for a link."""
    crowding: float = 1.0
    """The number of times longer than even shares tasks take that want twice the cores there are, or more."""
    demand: float = 0.0
    """Cores that active tasks would keep busy."""
    served: float = 0.0
    at: float = 0.0
    active: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (served at which it is done, task)."""

    @property
    def rate(self) -> float:
        """The rate of each active task, as a share of full."""
        if self.cores is None:
            return 1.0 / len(self.active)
        return 1.0 if self.demand <= self.cores else 1.0 / crowded(self.demand / self.cores, self.crowding)

    def advance(self, now: float) -> None:
        if self.active:
            self.served += (now - self.at) * self.rate
        self.at = now

    def join(self, number: int, seconds: float, demand: float) -> None:
        heapq.heappush(self.active, (self.served + seconds, number))
        self.demand += demand

    def next_end(self) -> float:
        return self.at + max(0.0, self.active[0][0] - self.served) / self.rate


def crowded(load: float, crowding: float) -> float:
    """Returns how many times longer a task takes than alone where `demand` times the cores are demand that
    there are."""
    if load <= 1.0:
        return 1.0
    return load * (1.0 + (crowding - 1.0) * min(1.0, load - 1.0))


class Timeline:
    """Add tasks, then `run`.

    Args:
        cores: the machine's cores; None if tasks share none, and their demand for cores means nothing.
        crowding: see `ClusterConfig.crowding`.
    """

    def __init__(self, cores: float | None = None, crowding: float = 1.0) -> None:
        self.tasks: list[Task] = []
        self._cores, self._crowding = cores, crowding

    @property
    def shares_cores(self) -> bool:
        return self._cores is not None

    def add(
        self,
        phase: str,
        stream: Hashable,
        *,
        seconds: float = 0.0,
        link: Hashable = None,
        link_s: float = 0.0,
        cores: float = 0.0,
        after: Sequence[int] = (),
    ) -> int:
        """Append a task to `stream`; returns its number, to be waited for with `after`."""
        if self._cores is not None and cores > 0:
            seconds, link, link_s = 0.0, _PROCESSOR, seconds + link_s
        else:
            cores = 0.0
        self.tasks.append(
            Task(phase=phase, stream=stream, seconds=seconds, link=link, link_s=link_s, cores=cores, after=tuple(after))
        )
        return len(self.tasks) - 1

    def also_after(self, number: int, other: int) -> None:
        """Let a task wait for another one, too, which may have been added behind it."""
        task = self.tasks[number]
        self.tasks[number] = task._replace(after=(*task.after, other))

    def lengthen(self, number: int, seconds: float) -> None:
        """Make a task take longer."""
        task = self.tasks[number]
        self.tasks[number] = task._replace(seconds=task.seconds + seconds)

    def run(self) -> list[Ran]:
        """Start and end of every task.

        Raises:
            ValueError: tasks wait for one another in a circle.
        """
        tasks = self.tasks
        missing = [len(task.after) for task in tasks]
        waiters: list[list[int]] = [[] for _ in tasks]
        previous: list[int | None] = [None] * len(tasks)
        tail: dict[Hashable, int] = {}
        for number, task in enumerate(tasks):
            for other in task.after:
                waiters[other].append(number)
            before = tail.get(task.stream)
            if before is not None:
                previous[number] = before
                waiters[before].append(number)
                missing[number] += 1
            tail[task.stream] = number

        start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
        links: dict[Hashable, _Shared] = {}
        # (time, kind, number): 0 a task's own seconds are over, 1 the link of task `number` may have an end.
        events: list[tuple[float, int, int]] = []
        for number, count in enumerate(missing):
            if count == 0:
                heapq.heappush(events, (tasks[number].seconds, 0, number))

        def finish(number: int, now: float) -> None:
            end[number] = now
            for waiter in waiters[number]:
                missing[waiter] -= 1
                if missing[waiter] == 0:
                    start[waiter] = now
                    heapq.heappush(events, (now + tasks[waiter].seconds, 0, waiter))

        while events:
            now, kind, number = heapq.heappop(events)
            task = tasks[number]
            if kind == 0 and (task.link is None or task.link_s == 0):
                finish(number, now)
                continue
            if task.link not in links:
                cores = self._cores if task.link is _PROCESSOR else None
                links[task.link] = _Shared(cores=cores, crowding=self._crowding)
            link = links[task.link]
            if kind == 0:
                link.advance(now)
                link.join(number, task.link_s, task.cores)
            elif not link.active or now < link.next_end():
                continue  # another transfer joined meanwhile; its event knows the new end
            else:
                link.advance(now)
                _, done = heapq.heappop(link.active)
                link.demand -= tasks[done].cores
                finish(done, now)
            if link.active:
                heapq.heappush(events, (link.next_end(), 1, link.active[0][1]))

        if any(moment < 0 for moment in end):
            raise ValueError("tasks wait for one another in a circle")
        return [self._ran(number, start[number], end, previous[number]) for number in range(len(tasks))]

    def _ran(self, number: int, start: float, end: list[float], before: int | None) -> Ran:
        ready = end[before] if before is not None else 0.0
        held_by = None
        if start > ready:
            held_by = max(self.tasks[number].after, key=lambda other: (end[other], -other))
        return Ran(start, end[number], ready, held_by)
