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
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from canzona_cli.core.costs.links import Transfer


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


class _Order(NamedTuple):
    """The tasks that each task of a timeline waits for, by index."""

    previous: Sequence[int | None]
    """The previous task on the task's stream; None for the first task of a stream."""
    missing: list[int]
    """The number of tasks that must end before the task starts."""
    waiters: Sequence[Sequence[int]]
    """The tasks that wait for the task."""


_PROCESSOR = ("processor",)
"""The `Task.link` of tasks that share cores."""


@dataclass
class _SharedResource:
    """A link or the processor, with the tasks that share it."""

    cores: float | None = None
    """The number of cores of a processor; None for a link."""
    demand: float = 0.0
    """The number of cores that the active tasks need."""
    served: float = 0.0
    """The seconds at full rate that a task would have received by now if it had been active since time 0."""
    at: float = 0.0
    """The time up to which `served` is computed."""
    active: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (value of `served` at which the task is done, task)."""
    rate: float = 1.0
    """The rate of each active task, as a share of the full rate."""
    next_end: float = math.inf
    """The time at which the next active task ends, if no other task joins."""

    def advance(self, now: float) -> None:
        """Serves the active tasks up to `now`."""
        if self.active:
            self.served += (now - self.at) * self.rate
        self.at = now

    def share(self) -> None:
        """Divides the resource anew, after a task has joined or ended."""
        if not self.active:
            self.next_end = math.inf
            return
        if self.cores is None:
            self.rate = 1.0 / len(self.active)
        else:
            self.rate = 1.0 if self.demand <= self.cores else 1.0 / (self.demand / self.cores)
        self.next_end = self.at + max(0.0, self.active[0][0] - self.served) / self.rate


class Timeline:
    """A set of tasks: `add` them, then `run`.

    Args:
        cores: the number of cores that tasks share; None if tasks do not share cores. `Task.cores` is then
            ignored.
    """

    def __init__(self, cores: float | None = None) -> None:
        self.tasks: list[Task] = []
        self._cores = cores
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
        self.tasks.append(Task(phase, stream, seconds, link, link_s, cores, tuple(after)))
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

    def run_slowed(self, slowed_by: Mapping[Hashable, Sequence[Hashable]], share: float) -> list[TaskTimes]:
        """Simulates tasks that are slowed down by transfers, which take some of the compute units; returns
        the times of each task.

        A task takes longer by `share` times its overlap with transfers. A first simulation without slowdown
        determines the overlaps.

        Args:
            slowed_by: for each stream that is slowed down, the streams of the transfers that do so.
            share: the share of the compute units that transfers take.
        """
        return self._task_times(*self._slowed(slowed_by, share))

    def ends_slowed(self, slowed_by: Mapping[Hashable, Sequence[Hashable]], share: float) -> list[float]:
        """Returns the end of each task, as `run_slowed` does with the other times."""
        _, _, end = self._slowed(slowed_by, share)
        return end

    def _slowed(
        self, slowed_by: Mapping[Hashable, Sequence[Hashable]], share: float
    ) -> tuple[_Order, list[float], list[float]]:
        """Simulates tasks as `run_slowed` does; returns their order, and the start and the end of each."""
        order, seconds = self._order(), [task.seconds for task in self.tasks]
        start, end = self._times(order, seconds)
        if not share:
            return order, start, end
        # The tasks that take time, by the streams that are looked at.
        by_stream: dict[Hashable, list[int]] = {
            stream: [] for slowed, transfers in slowed_by.items() for stream in (slowed, *transfers)
        }
        for index, task in enumerate(self.tasks):
            indices = by_stream.get(task.stream)
            if indices is not None and end[index] > start[index]:
                indices.append(index)
        for stream, transfer_streams in slowed_by.items():
            for transfer_stream in transfer_streams:
                transfers = [(start[index], end[index]) for index in by_stream[transfer_stream]]
                if transfers:
                    computing = [(index, start[index], end[index]) for index in by_stream[stream]]
                    _slow_down(seconds, computing, transfers, share)
        return order, *self._times(order, seconds)

    def run(self) -> list[TaskTimes]:
        """Simulates the tasks; returns the times of each.

        Raises:
            ValueError: tasks wait for each other in a cycle.
        """
        return self._task_times(*self._slowed({}, 0.0))

    def _order(self) -> _Order:
        """Returns the tasks that each task follows. It does not depend on how long the tasks take."""
        previous: list[int | None] = []
        missing: list[int] = []
        waiters: list[list[int]] = [[] for _ in self.tasks]
        last_of_stream: dict[Hashable, int] = {}
        for index, task in enumerate(self.tasks):
            before = last_of_stream.get(task.stream)
            last_of_stream[task.stream] = index
            previous.append(before)
            for other in task.after:
                waiters[other].append(index)
            if before is None:
                missing.append(len(task.after))
            else:
                waiters[before].append(index)
                missing.append(len(task.after) + 1)
        return _Order(previous=previous, missing=missing, waiters=waiters)

    def _times(self, order: _Order, seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        """Simulates the tasks; returns the start and the end of each.

        Only tasks that share a link or the processor are simulated in order of time. The end of any other task
        follows at once when all tasks that it waits for have ended.

        Args:
            seconds: the `Task.seconds` of each task, lengthened if it is slowed down.

        Raises:
            ValueError: tasks wait for each other in a cycle.
        """
        tasks, waiters, missing = self.tasks, order.waiters, order.missing.copy()
        start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
        resources: dict[Hashable, _SharedResource] = {}
        # (time, kind, index). Kind 0: the `seconds` of task `index` are over. Kind 1: a transfer may have
        # ended on the link of task `index`.
        events: list[tuple[float, int, int]] = []
        push, pop = heapq.heappush, heapq.heappop
        # The tasks whose start is known, and transfers that have just ended.
        ready = [index for index, count in enumerate(missing) if count == 0]
        while True:
            while ready:
                index = ready.pop()
                ends = end[index]
                if ends < 0:
                    ends, task = start[index] + seconds[index], tasks[index]
                    if task.link is not None and task.link_s != 0:
                        push(events, (ends, 0, index))
                        continue
                    end[index] = ends
                for waiter in waiters[index]:
                    if start[waiter] < ends:
                        start[waiter] = ends
                    missing[waiter] -= 1
                    if missing[waiter] == 0:
                        ready.append(waiter)
            if not events:
                break
            now, kind, index = pop(events)
            task = tasks[index]
            resource = resources.get(task.link)
            if resource is None:
                cores = self._cores if task.link is _PROCESSOR else None
                resource = resources[task.link] = _SharedResource(cores=cores)
            if kind == 0:
                if not resource.active and resource.cores is None:
                    ends = now + (resource.served + task.link_s - resource.served)
                    if not events or (ends, 1, index) < events[0]:  # usually, nothing else happens during a transfer
                        resource.served += ends - now
                        end[index] = ends
                        ready.append(index)
                        continue
                resource.advance(now)
                push(resource.active, (resource.served + task.link_s, index))
                resource.demand += task.cores
            elif now < resource.next_end:
                continue  # another transfer has joined in the meantime, and a later event has the new end
            else:
                resource.advance(now)
                _, done = pop(resource.active)
                resource.demand -= tasks[done].cores
                end[done] = now
                ready.append(done)
            resource.share()
            if resource.active:
                push(events, (resource.next_end, 1, resource.active[0][1]))
        if any(missing):
            raise ValueError("tasks wait for each other in a cycle")
        return start, end

    def _task_times(self, order: _Order, start: Sequence[float], end: Sequence[float]) -> list[TaskTimes]:
        times: list[TaskTimes] = []
        for index, (before, begins, ends) in enumerate(zip(order.previous, start, end, strict=True)):
            ready = 0.0 if before is None else end[before]
            held_by = None
            if begins > ready:
                after = self.tasks[index].after
                held_by = after[0] if len(after) == 1 else max(after, key=lambda other: (end[other], -other))
            times.append(TaskTimes(begins, ends, ready, held_by))
        return times


def _slow_down(
    seconds: list[float],
    computing: Sequence[tuple[int, float, float]],
    transfers: Sequence[tuple[float, float]],
    share: float,
) -> None:
    """Lengthens the `seconds` of each computing task by `share` times its overlap with `transfers`; both are in order
    of time.

    Args:
        computing: the index, start and end of each task.
        transfers: the start and end of each transfer.
    """
    done, count = 0, len(transfers)  # the number of transfers that ended before the task, and of all
    for index, start, end in computing:
        overlap_s = 0.0
        for place in range(done, count):
            transfer_start, transfer_end = transfers[place]
            if transfer_start >= end:
                break
            begins = start if start > transfer_start else transfer_start
            overlap_s += max(0.0, (end if end < transfer_end else transfer_end) - begins)
            if transfer_end <= end:
                done += 1
        if overlap_s:
            seconds[index] += share * overlap_s
        elif done == count:
            break
