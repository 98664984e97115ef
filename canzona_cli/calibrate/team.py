"""Ranks that measure at the same time, and the clock they use."""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from canzona_cli.megatron.messages import gather


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What a member has measured, as it tells the others."""

    values: tuple[float, ...]


LEAST, MOST = 3, 400
"""Repetitions of a measurement; fewer only where three would take four times the budget."""
_SAMPLE_S = 1e-3
"""Several calls of anything quicker make one sample."""


class Team:
    """The first `size` ranks of the job; the others wait without using a processor.

    They meet over gloo even where the measured collectives are NCCL's: a gloo rank sleeps while it waits.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Collective: every rank of the job calls it."""
        self.rank, self.size, self.device = rank, size, device
        self.member = rank < size
        self._group = dist.new_group(list(range(size)), backend="gloo", timeout=datetime.timedelta(minutes=10))

    def meet(self) -> None:
        if self.size > 1:
            dist.barrier(group=joined(self._group))

    def gather(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        """The values of all members in rank order, on all members."""
        return [theirs.values for theirs in gather(_Values(values=tuple(values)), group=joined(self._group))]

    def decide(self, value: float) -> float:
        """The largest of all members' values, so that all make the same choice."""
        return max(theirs for (theirs,) in self.gather([value]))

    def samples(self, work: Callable[[], None], budget_s: float) -> list[float]:
        """Seconds of one call of `work` while all members run it at the same time; the samples of all of them."""
        self.meet()
        return [sample for own in self.gather(repeat(work, self.device, budget_s)) for sample in own]


def joined(group: dist.ProcessGroup | int) -> dist.ProcessGroup:
    """The result of `new_group` on a rank that is a member; on other ranks it is a number."""
    assert isinstance(group, dist.ProcessGroup), "not a member"
    return group


def repeat(work: Callable[[], None], device: torch.device, budget_s: float) -> list[float]:
    """Seconds of one call, as many samples as the budget allows, after one call that does not count."""
    first = timed(work, device)
    calls = max(1, round(_SAMPLE_S / max(timed(work, device), 1e-7))) if first < _SAMPLE_S else 1
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        samples.append(timed(work, device, calls))
        spent = time.perf_counter() - begin
        if len(samples) >= MOST or spent > 4 * budget_s or (spent > budget_s and len(samples) >= LEAST):
            return samples


def timed(work: Callable[[], None], device: torch.device, calls: int = 1) -> float:
    """Seconds of one call, the mean of `calls` in a row, by `clock`."""
    wait(device)
    begin = clock(device)
    for _ in range(calls):
        work()
    wait(device)
    return (clock(device) - begin) / calls


def clock(device: torch.device) -> float:
    """Seconds since whenever: the wall clock's, or of a CPU rank's only thread the processor's.

    Of ranks that take turns on a core each sleeps while others run, for longer than most of what is measured takes: its
    wall clock shows either nothing of that or all. Its processor time is what it takes of a core, with the caches that
    the others leave it, and without what other programs take.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
