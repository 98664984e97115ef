"""Records the steps of single ranks of a large job, without the job: real steps on a process group that only writes
down.

A rank runs in a process of its own on torch's fake process group, whose collectives return at once and leave a rank
with its own values, as if all ranks had the same. Every launch of a collective, every wait for one and every value the
host reads from a tensor is recorded in the order in which the rank's host comes to it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup, Work
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.collectives import COLLECTIVES, READS, RENAMED, on_the_host, to_host
from tests.cuda_stand_in import tensors_in

Kind = Literal["launch", "wait", "read", "phase"]


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: Kind
    name: str
    """The name of a collective, of the operator that read a value, or of the phase that begins."""
    phase: str = "other"
    group: tuple[int, ...] = ()
    """Global ranks of the communicator."""
    elements: int = 0
    dtype: str = ""
    root: int | None = None
    """Rank inside the group that a reduction ends at or a broadcast comes from."""
    number: int = -1
    """The number of a launch on this rank; a wait has the number of the launch it waits for."""


class Recorder:
    """Writes down what this rank's host does while `active`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.active = False
        self.phase = "other"
        self._launched: list[Work] = []  # kept, so that no other work gets the same id
        self._numbers: dict[int, int] = {}
        self._inside = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Records for the rest of the process's life: wrapped functions are never unwrapped while they may be
        called."""
        with pytest.MonkeyPatch.context() as patch:
            for name in COLLECTIVES:
                patch.setattr(ProcessGroup, name, self._launching(name, getattr(ProcessGroup, name)))
            for kind in (Work, FakeWork):
                patch.setattr(kind, "wait", self._waiting(kind.wait))
            for name in READS:
                patch.setattr(torch.Tensor, name, self._reading(name, getattr(torch.Tensor, name)))
            # What a collective would fill holds zeros, not whatever was there.
            patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
            yield

    def mark(self, phase: str) -> None:
        self.phase = phase
        self._note(Event(kind="phase", name=phase, phase=phase))

    def _note(self, event: Event) -> None:
        if self.active:
            self.events.append(event)

    def _launching(self, name: str, original: Callable[..., Work]) -> Callable[..., Work]:
        def launch(group: ProcessGroup, *args: object, **kwargs: object) -> Work:
            work = original(group, *args, **kwargs)
            tensors = list(tensors_in(args[:1]))
            self._note(
                Event(
                    kind="launch",
                    name=RENAMED.get(name, name),
                    phase=self.phase,
                    group=tuple(torch.distributed.get_process_group_ranks(group)),
                    elements=sum(tensor.numel() for tensor in tensors),
                    dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                    root=next((value for value in map(_root, args) if value is not None), None),
                    number=len(self._launched),
                )
            )
            self._numbers[id(work)] = len(self._launched)
            self._launched.append(work)
            return work

        return launch

    def _waiting(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def wait(work: Work, *args: object, **kwargs: object) -> bool:
            self._note(Event(kind="wait", name="wait", phase=self.phase, number=self._numbers.get(id(work), -1)))
            return original(work, *args, **kwargs)

        return wait

    def _reading(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def read(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            outermost, self._inside = not self._inside, True
            waits = name != "to" or to_host(args, kwargs)
            if outermost and waits and not on_the_host(sys._getframe(1)):
                self._note(Event(kind="read", name=name, phase=self.phase, elements=tensor.numel()))
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._inside = not outermost

        return read


def become(rank: int, world_size: int) -> None:
    """Make this process that rank of a job of which no other process exists."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    original = torch.distributed.init_process_group

    def init(*args: object, **kwargs: object) -> None:
        original("fake", store=FakeStore(), rank=rank, world_size=world_size)

    torch.distributed.init_process_group = init


def _root(options: object) -> int | None:
    return getattr(options, "rootRank", None)
