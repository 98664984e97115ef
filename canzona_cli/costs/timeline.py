"""A small discrete-event simulator of tasks on streams. Tasks may share links or a machine's processor cores.

A stream runs its tasks one after another, in the order in which they were added. A task starts when its
stream is free and all tasks it waits for have ended. It takes `seconds` at a fixed rate (computation,
latency), then `link_s` on its link, where each of n simultaneous transfers gets an n-th of the rate.

On a timeline with `cores`, a task that keeps cores busy takes `seconds + link_s` while there are enough
cores. If the running tasks need more cores than there are, all of them slow down equally, as under a fair
scheduler.

The result is deterministic: simultaneous tasks run in the order in which they were added.
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
    """The indices of the tasks that must end before this task starts."""


class TaskTimes(NamedTuple):
    """The times of a simulated task, and the task that it waited for."""

    start: float
    end: float
    ready: float
    """The time at which the task's stream became free. The task then waited `start - ready` seconds."""
    held_by: int | None
    """The task in `after` that ended last; None if the task started as soon as its stream was free."""


_PROCESSOR = ("processor",)
"""The `Task.link` of tasks that share cores."""


@dataclass
class _SharedResource:
    """A link or the processor, with the tasks that share it."""

    cores: float | None = None
    """The number of cores of a processor; None for a link."""
    crowding: float = 1.0
    """The factor by which tasks slow down in addition to sharing cores evenly, see
    `ClusterConfig.crowding`."""
    demand: float = 0.0
    """The number of cores that the active tasks need."""
    served: float = 0.0
    """The seconds at full rate that a task would have received by now if it had been active since time 0."""
    at: float = 0.0
    """The time up to which `served` is computed."""
    active: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (value of `served` at which the task is done, task)."""

    @property
    def rate(self) -> float:
        """The rate of each active task, as a share of the full rate."""
        if self.cores is None:
            return 1.0 / len(self.active)
        return 1.0 if self.demand <= self.cores else 1.0 / slowdown(self.demand / self.cores, self.crowding)

    def advance(self, now: float) -> None:
        if self.active:
            self.served += (now - self.at) * self.rate
        self.at = now

    def join(self, index: int, seconds: float, demand: float) -> None:
        heapq.heappush(self.active, (self.served + seconds, index))
        self.demand += demand

    def next_end(self) -> float:
        return self.at + max(0.0, self.active[0][0] - self.served) / self.rate


def slowdown(load: float, crowding: float) -> float:
    """Returns the factor by which tasks take longer if they need `load` times as many cores as there are.

    Args:
        crowding: see `ClusterConfig.crowding`; it applies in full from a load of 2.
    """
    if load <= 1.0:
        return 1.0
    return load * (1.0 + (crowding - 1.0) * min(1.0, load - 1.0))


class Timeline:
    """A set of tasks: `add` them, then `run`.

    Args:
        cores: the number of cores that tasks share; None if tasks do not share cores. `Task.cores` is then
            ignored.
        crowding: see `ClusterConfig.crowding`.
    """

    def __init__(self, cores: float | None = None, crowding: float = 1.0) -> None:
        self.tasks: list[Task] = []
        self._cores, self._crowding = cores, crowding
        self.shares_cores = cores is not None

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
        """Appends a task to `stream`; returns its index, for the `after` of other tasks."""
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
        """Appends a transfer to `stream`; returns the index of the task that ends when the data has reached
        all ranks."""
        seconds = moved.latency_s - moved.fill_s
        index = self.add(phase, stream, seconds=seconds, link=link, link_s=moved.link_s, cores=cores, after=after)
        if not moved.fill_s:
            return index
        # The next chain starts on the first ranks while this one still reaches the last ranks, so the time to
        # fill the chain does not occupy the stream.
        return self.add(phase, ("chain", index), seconds=moved.fill_s, after=[index])

    def add_dependency(self, index: int, other: int) -> None:
        """Makes the task `index` also wait for the task `other`, which may have been added later."""
        task = self.tasks[index]
        self.tasks[index] = task._replace(after=(*task.after, other))

    def run_slowed(self, slowed_by: Mapping[Hashable, Sequence[Hashable]], share: float) -> list[TaskTimes]:
        """Simulates tasks that are slowed down by transfers, which take some of the compute units; returns
        the times of each task.

        A task takes longer by `share` times its overlap with transfers. A first simulation without slowdown
        determines the overlaps.

        Args:
            slowed_by: for each stream that is slowed down, the streams of the transfers that do so.
            share: the share of the compute units that transfers take.
        """
        undisturbed = self.run()
        if not share:
            return undisturbed
        by_stream: dict[Hashable, list[tuple[int, TaskTimes]]] = {}
        for index, (task, times) in enumerate(zip(self.tasks, undisturbed, strict=True)):
            if times.end > times.start:
                by_stream.setdefault(task.stream, []).append((index, times))
        for stream, transfer_streams in slowed_by.items():
            for transfer_stream in transfer_streams:
                transfers = [times for _, times in by_stream.get(transfer_stream, [])]
                self._slow_down(by_stream.get(stream, []), transfers, share)
        return self.run()

    def _slow_down(
        self, computing: Sequence[tuple[int, TaskTimes]], transfers: Sequence[TaskTimes], share: float
    ) -> None:
        """Lengthens each task by `share` times its overlap with `transfers`; both are in order of time."""
        done = 0  # the number of transfers that ended before the task
        for index, times in computing:
            overlap_s = 0.0
            for transfer in islice(transfers, done, None):
                if transfer.start >= times.end:
                    break
                overlap_s += max(0.0, min(times.end, transfer.end) - max(times.start, transfer.start))
                if transfer.end <= times.end:
                    done += 1
            task = self.tasks[index]
            self.tasks[index] = task._replace(seconds=task.seconds + share * overlap_s)

    def run(self) -> list[TaskTimes]:
        """Simulates the tasks; returns the times of each.

        Raises:
            ValueError: tasks wait for each other in a cycle.
        """
        tasks = self.tasks
        previous = self._previous()
        missing = [len(task.after) + (before is not None) for task, before in zip(tasks, previous, strict=True)]
        waiters: list[list[int]] = [[] for _ in tasks]
        for index, (task, before) in enumerate(zip(tasks, previous, strict=True)):
            for other in (*task.after, *(() if before is None else (before,))):
                waiters[other].append(index)

        start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
        resources: dict[Hashable, _SharedResource] = {}
        # (time, kind, index). Kind 0: the `seconds` of task `index` are over. Kind 1: a transfer may have
        # ended on the link of task `index`.
        events: list[tuple[float, int, int]] = []
        for index, count in enumerate(missing):
            if count == 0:
                heapq.heappush(events, (tasks[index].seconds, 0, index))

        def finish(index: int, now: float) -> None:
            end[index] = now
            for waiter in waiters[index]:
                missing[waiter] -= 1
                if missing[waiter] == 0:
                    start[waiter] = now
                    heapq.heappush(events, (now + tasks[waiter].seconds, 0, waiter))

        while events:
            now, kind, index = heapq.heappop(events)
            task = tasks[index]
            if kind == 0 and (task.link is None or task.link_s == 0):
                finish(index, now)
                continue
            if task.link not in resources:
                cores = self._cores if task.link is _PROCESSOR else None
                resources[task.link] = _SharedResource(cores=cores, crowding=self._crowding)
            resource = resources[task.link]
            if kind == 0:
                resource.advance(now)
                resource.join(index, task.link_s, task.cores)
            elif not resource.active or now < resource.next_end():
                continue  # another transfer has joined in the meantime, and a later event has the new end
            else:
                resource.advance(now)
                _, done = heapq.heappop(resource.active)
                resource.demand -= tasks[done].cores
                finish(done, now)
            if resource.active:
                heapq.heappush(events, (resource.next_end(), 1, resource.active[0][1]))

        if any(moment < 0 for moment in end):
            raise ValueError("tasks wait for each other in a cycle")
        return [self._times_of(index, start[index], end, previous[index]) for index in range(len(tasks))]

    def _previous(self) -> list[int | None]:
        """Returns the index of the previous task on the stream of each task; None for the first task of a
        stream."""
        previous: list[int | None] = []
        last_of_stream: dict[Hashable, int] = {}
        for index, task in enumerate(self.tasks):
            previous.append(last_of_stream.get(task.stream))
            last_of_stream[task.stream] = index
        return previous

    def _times_of(self, index: int, start: float, end: list[float], before: int | None) -> TaskTimes:
        ready = end[before] if before is not None else 0.0
        held_by = None
        if start > ready:
            held_by = max(self.tasks[index].after, key=lambda other: (end[other], -other))
        return TaskTimes(start, end[index], ready, held_by)
