"""Finds a rank that is slower than its peers while everybody waits for it.

In a synchronous job all steps take equally long on all ranks, so step times show nothing. What shows is a
rank's own time: data, forward and backward without the waits in them (`StepTiming.own_s`). That is the same
work on every rank of a pipeline stage, so in a healthy job the ranks of a stage are alike and take turns in
being last.

A rank is called a straggler when, in more than half of `WINDOW` steps, it was `LIMITS` times slower than the
median of its peers, and that cost the job `COST` of its time. Measured on four healthy gloo ranks that shared
two cores with other jobs: at most a fifth of a rank's steps were 1.5 times slower than its peers'.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.training.records import Journal

WINDOW: Final = 20
"""Steps between two comparisons, and in one."""
COST: Final = 0.05
LIMITS: Final[Mapping[str, float]] = {
    "cpu": 1.5,  # ranks that share cores get in each other's way
    "cuda": 1.25,  # each has a device of its own
}
"""The multiple of its peers' time that a rank may take, by the type of its device."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """One slow rank."""

    rank: int
    factor: float
    """Its own time over the median of the other ranks of its pipeline stage."""

    @property
    def detail(self) -> str:
        return f"rank {self.rank} is slow: its data, forward and backward take {self.factor:.2g} times its peers' time"


class StragglerWatch:
    """Every rank of the job has one and calls it after every step; rank 0 tells."""

    def __init__(self, world: World, timer: PhaseTimer, journal: Journal) -> None:
        self._world, self._timer, self._journal = world, timer, journal
        self._limit = LIMITS[world.device.type]
        self._own: list[float] = []
        self._step_s = 0.0
        self._first = True
        self._sent: tuple[int, float, Callable[[], list[float]]] | None = None
        """The step with which a window ended, its mean step, and what all ranks have told of it."""
        self._known: frozenset[int] = frozenset()

    def after_step(self, step: int) -> None:
        """Look at the newest step whose times are known. A small collective once in `WINDOW` steps, for whose
        outcome nobody waits: it is looked at a step later."""
        if self._sent is not None:
            ended, step_s, arrived = self._sent
            self._sent = None
            self._judge(ended, step_s, arrived())
        timing = self._timer.newest
        if timing is None:
            return
        if self._first:  # compiles, allocates, fills caches
            self._first = False
            return
        self._own.append(timing.own_s)
        self._step_s += timing.step_s / WINDOW
        if len(self._own) == WINDOW:
            self._sent = step, self._step_s, self._send()
            self._own, self._step_s = [], 0.0

    def _send(self) -> Callable[[], list[float]]:
        message = torch.tensor([*self._own, self._world.pp_rank], dtype=torch.float64)
        mine = message.to(self._world.device, non_blocking=True)
        everyone = mine.new_empty(self._world.world_size * len(mine))
        torch.distributed.all_gather_into_tensor(everyone, mine)
        return self._timer.fetch(everyone)

    def _judge(self, step: int, step_s: float, received: list[float]) -> None:
        rows = [received[start : start + WINDOW + 1] for start in range(0, len(received), WINDOW + 1)]
        times, stages = [row[:-1] for row in rows], [int(row[-1]) for row in rows]
        behind = list(stragglers(times, stages, step_s=step_s, limit=self._limit))
        for one in behind:
            if one.rank not in self._known:  # said once, and again only after it had recovered
                facts = vars(one)
                self._journal.incident("straggler", detail=one.detail, level="warning", step=step, **facts)
        self._known = frozenset(one.rank for one in behind)


def stragglers(
    own: Sequence[Sequence[float]], stages: Sequence[int], *, step_s: float, limit: float
) -> Iterator[Straggler]:
    """The slow ranks of one window.

    Args:
        own: [rank][step] seconds.
        stages: each rank's pipeline stage; a rank alone in its stage has nobody to be compared with.
        step_s: mean of the window.
    """
    for rank, times in enumerate(own):
        peers = [own[other] for other, stage in enumerate(stages) if stage == stages[rank] and other != rank]
        if not peers:
            continue
        usual = [statistics.median(step) for step in zip(*peers, strict=True)]
        slower = statistics.median(mine / theirs for mine, theirs in zip(times, usual, strict=True))
        own_s, peers_s = statistics.mean(times), statistics.mean(usual)
        if slower > limit and own_s - peers_s > COST * step_s:
            yield Straggler(rank=rank, factor=slower)
