"""A small discrete-event simulator: tasks on streams, which may share links or a machine's processor cores.

A stream runs its tasks one after another, in the order in which they were added. A task starts when its
stream is free and all tasks it waits for have ended. It takes `seconds` at a fixed rate (computation,
latency), then `link_s` on its link, where each of n simultaneous transfers gets an n-th of the rate.

On a timeline with `cores`, a task that keeps cores busy takes `seconds + link_s` as long as there are enough
cores. If the running tasks want more cores than there are, all of them slow down alike, as under a fair
scheduler.

The result is deterministic: of simultaneous tasks the one added first goes first.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from canzona_cli.costs.links import Transfer


class Task(NamedTuple):
    """One entry of a timeline."""

    phase: str
    stream: Hashable
    seconds: float
    link: Hashable
    """The link that the task uses, or the processor; None if it uses neither."""
    link_s: float
    """The seconds on the link at its full rate."""
    cores: float
    """The number of processor cores that the task keeps busy; 0 for tasks on a link."""
    after: tuple[int, ...]
    """The numbers of the tasks that must end before this one starts."""


class Ran(NamedTuple):
    """The times of a task, and the task that it waited for."""

    start: float
    end: float
    ready: float
    """The time at which its stream was free; `start - ready` is the wait."""
    held_by: int | None
    """The task in `after` that ended last; None if the task started as soon as its stream was free."""


_PROCESSOR = ("processor",)
"""The key under which tasks that share cores are kept, in place of a link."""


@dataclass
class _Shared:
    """A link or the processor, with the tasks that share it."""

    cores: float | None = None
    """The number of cores of a processor; None for a link."""
    crowding: float = 1.0
    """The factor by which tasks take longer than with even shares, once they want twice as many cores as
    there are."""
    demand: float = 0.0
    """The number of cores that the active tasks would keep busy."""
    served: float = 0.0
    """The seconds at full rate that a task active since time 0 would have had."""
    at: float = 0.0
    """The time up to which `served` is computed."""
    active: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (value of `served` at which the task is done, task)."""

    @property
    def rate(self) -> float:
        """The rate of each active task, as a share of the full rate."""
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
    """Returns the factor by which tasks take longer where they want `load` times as many cores as there are.

    Args:
        crowding: see `ClusterConfig.crowding`; reached at a load of 2.
    """
    if load <= 1.0:
        return 1.0
    return load * (1.0 + (crowding - 1.0) * min(1.0, load - 1.0))


class Timeline:
    """A set of tasks: `add` them, then `run`.

    Args:
        cores: the number of cores that tasks share; None if tasks do not share cores, and `Task.cores` is
            ignored.
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
        """Appends a task to `stream`; returns its number, for the `after` of other tasks."""
        if self._cores is not None and cores > 0:
            seconds, link, link_s = 0.0, _PROCESSOR, seconds + link_s
        else:
            cores = 0.0
        self.tasks.append(
            Task(phase=phase, stream=stream, seconds=seconds, link=link, link_s=link_s, cores=cores, after=tuple(after))
        )
        return len(self.tasks) - 1

    def transfer(
        self,
        phase: str,
        stream: Hashable,
        moved: Transfer,
        *,
        link: Hashable,
        cores: float = 0.0,
        after: Sequence[int] = (),
    ) -> int:
        """Appends a transfer to `stream`; returns the number of the task that ends when the data has reached all
        ranks."""
        seconds = moved.latency_s - moved.fill_s
        number = self.add(phase, stream, seconds=seconds, link=link, link_s=moved.link_s, cores=cores, after=after)
        if not moved.fill_s:
            return number
        # The next chain starts on the first ranks while this one still reaches the last ranks, so the time to
        # fill the chain does not occupy the stream.
        return self.add(phase, ("chain", number), seconds=moved.fill_s, after=[number])

    def also_after(self, number: int, other: int) -> None:
        """Makes a task wait for task `other` too, which may have been added later."""
        task = self.tasks[number]
        self.tasks[number] = task._replace(after=(*task.after, other))

    def run_slowed(self, slowed_by: Mapping[Hashable, Sequence[Hashable]], share: float) -> list[Ran]:
        """Simulates the tasks, where transfers take a share of the units that compute; returns the times of each.

        Args:
            slowed_by: the streams of transfers that slow the tasks of a stream down, by that stream.
            share: the share of its units that a transfer takes. A task takes `share` times its overlap with
                transfers longer, by the overlap that it would have if nothing slowed it down.
        """
        ran = self.run()
        if not share:
            return ran
        on: dict[Hashable, list[tuple[int, Ran]]] = {}
        for number, (task, when) in enumerate(zip(self.tasks, ran, strict=True)):
            if when.end > when.start:
                on.setdefault(task.stream, []).append((number, when))
        for stream, others in slowed_by.items():
            for transfers in (on.get(other, []) for other in others):
                first = 0
                for number, computing in on.get(stream, []):
                    shared_s = 0.0
                    for _, transfer in islice(transfers, first, None):
                        if transfer.start >= computing.end:
                            break
                        shared_s += max(0.0, min(computing.end, transfer.end) - max(computing.start, transfer.start))
                        first += transfer.end <= computing.end
                    task = self.tasks[number]
                    self.tasks[number] = task._replace(seconds=task.seconds + share * shared_s)
        return self.run()

    def run(self) -> list[Ran]:
        """Simulates the tasks; returns the times of each.

        Raises:
            ValueError: tasks wait for each other in a cycle.
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
        # (time, kind, number). Kind 0: the `seconds` of task `number` are over. Kind 1: a transfer may have
        # ended on the link of task `number`.
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
                continue  # another transfer has joined since, and its event has the new end
            else:
                link.advance(now)
                _, done = heapq.heappop(link.active)
                link.demand -= tasks[done].cores
                finish(done, now)
            if link.active:
                heapq.heappush(events, (link.next_end(), 1, link.active[0][1]))

        if any(moment < 0 for moment in end):
            raise ValueError("tasks wait for each other in a cycle")
        return [self._ran(number, start[number], end, previous[number]) for number in range(len(tasks))]

    def _ran(self, number: int, start: float, end: list[float], before: int | None) -> Ran:
        ready = end[before] if before is not None else 0.0
        held_by = None
        if start > ready:
            held_by = max(self.tasks[number].after, key=lambda other: (end[other], -other))
        return Ran(start, end[number], ready, held_by)
