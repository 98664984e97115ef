"""Times work on one rank, or on all ranks of a team at once."""

import datetime
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from canzona_cli.core.megatron.parallel import gather

Work = Callable[[], None]


LEAST, MOST = 3, 400
"""The minimum and maximum number of samples in a measurement. There are fewer than `LEAST` only if they would
take more than four times the budget."""
_SAMPLE_S = 1e-3
"""The minimum length of a sample in seconds. A sample of faster work consists of several calls."""


class Team:
    """The first `size` ranks of the job, which measure while the other ranks sleep.

    The ranks synchronise over gloo even on GPUs, because a rank that waits in gloo does not occupy a core.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Makes the team's gloo group. All ranks of the job have to call this."""
        self.rank, self.size, self.device = rank, size, device
        self.member = rank < size
        self._group = dist.new_group(list(range(size)), backend="gloo", timeout=datetime.timedelta(minutes=10))

    def meet(self) -> None:
        """Waits until all members have called this."""
        if self.size > 1:
            dist.barrier(group=member_group(self._group))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gathers the values of all members on every member, in rank order."""
        return gather([*values], list[float], group=member_group(self._group))

    def decide(self, value: float) -> float:
        """Returns the largest of all members' values, so that all members make the same decision."""
        return max(member_value for (member_value,) in self.gather([value]))

    def samples(self, work: Work, budget_s: float) -> list[float]:
        """Measures the seconds of one call of `work` while all members run it; returns the samples of all
        members."""
        self.meet()
        return list(chain.from_iterable(self.gather(repeat(work, self.device, budget_s))))


def member_group(group: dist.ProcessGroup | int) -> dist.ProcessGroup:
    """Returns the result of `new_group` as a process group. This rank has to be a member of the group."""
    assert isinstance(group, dist.ProcessGroup), "not a member"
    return group


def repeat(work: Work, device: torch.device, budget_s: float) -> list[float]:
    """Measures the seconds of one call of `work`, with as many samples as the budget allows.

    The first call, which warms up, is not a sample. If it is short, neither is the second, which determines
    the number of calls in a sample.
    """
    first_s = time_calls(work, device)
    calls = max(1, round(_SAMPLE_S / max(time_calls(work, device), 1e-7))) if first_s < _SAMPLE_S else 1
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        samples.append(time_calls(work, device, calls))
        spent_s = time.perf_counter() - begin
        if len(samples) >= MOST or spent_s > 4 * budget_s or (spent_s > budget_s and len(samples) >= LEAST):
            return samples


def time_calls(work: Work, device: torch.device, calls: int = 1) -> float:
    """Returns the mean seconds of `calls` consecutive calls, by `clock`."""
    wait(device)
    begin = clock(device)
    for _ in range(calls):
        work()
    wait(device)
    return (clock(device) - begin) / calls


def clock(device: torch.device) -> float:
    """Reads a clock in seconds with an arbitrary start: processor time on CPU ranks with one thread,
    otherwise wall time.

    A rank that shares a core sleeps while other ranks run. A sleep is longer than most measured operations,
    so wall time would include either a whole sleep or none. Processor time excludes sleep and other programs,
    but includes the effect of other ranks on the caches.
    """
    single_threaded = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if single_threaded else time.perf_counter()


def wait(device: torch.device) -> None:
    """Waits for a GPU to finish; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
