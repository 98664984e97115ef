"""Real gloo ranks that stay: forked once, they take one call after another.

The first steps of a forked process cost more than later ones: pages are copied, kernels and imports come for the first
time. Where many tests make small runs, that was most of what they took. Each call is a job of its own all the same: it
joins by a new port and builds its own process groups, model and optimizer, and Megatron's state is taken down after it.

Ranks do not see what a test has patched in this process or its environment, and would keep what a call patches on
them: such a test needs ranks of its own, `tests.dist.ranks.run_ranks`.
"""

import atexit
import gc
import io
import marshal
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Final

import torch

from canzona_cli.megatron import parallel
from tests.dist.ranks import collect, environment, free_port
from tests.waiting import PATIENCE_S

_LOOK_S: Final = 5.0
"""How often an idle rank looks whether the tests are still there."""


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """A rank that waits for calls."""

    process: ForkProcess
    calls: Connection
    answers: Connection


_ranks: list[_Standing] = []


def standing_ranks[T](world_size: int, function: Callable[[], T], *, timeout_s: float = PATIENCE_S) -> list[T]:
    """As `run_ranks`, on ranks that earlier calls may have used.

    Args:
        function: with whatever it closes over, by value: it is pickled. What it changes of that stays on the ranks.

    Raises:
        AssertionError: as `run_ranks`; later calls get new ranks then.
    """
    call, port = _pickled(function), free_port()
    while len(_ranks) < world_size:
        _ranks.append(_stand(len(_ranks)))
    members = _ranks[:world_size]
    try:
        for member in members:
            member.calls.send((world_size, port, call))
        found: list[T] = collect([member.answers for member in members], timeout_s)
        for member in members:
            member.calls.send("all have answered")
    except BaseException:
        _end()
        raise
    return found


@atexit.register
def _end() -> None:
    for member in _ranks:
        member.process.kill()
        member.process.join()
    _ranks.clear()


def _stand(rank: int) -> _Standing:
    context = multiprocessing.get_context("fork")
    taken, calls = context.Pipe(duplex=False)
    answers, told = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(rank, taken, told), daemon=True)
    process.start()
    taken.close()
    told.close()
    return _Standing(process=process, calls=calls, answers=answers)


def _serve(rank: int, calls: Connection, answers: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end their ranks
    torch.set_num_threads(1)
    tests = os.getppid()
    while True:
        # What is alive now is not looked at again by the collections of runs; see `run_ranks`.
        gc.freeze()
        while not calls.poll(_LOOK_S):
            if os.getppid() != tests:
                os._exit(1)  # they were killed
        world_size, port, call = calls.recv()
        os.environ |= environment(rank, world_size, port)
        try:
            answers.send((True, pickle.loads(call)()))
        except BaseException:
            answers.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        # Nobody leaves while others still need the store or an answer; after a failure nobody is left.
        calls.recv()
        parallel.shutdown()
        if gc.get_freeze_count():  # the training loop thaws everything; all of it would be looked at
            gc.collect()


class _Pickler(pickle.Pickler):
    """Also takes functions defined within others, with what they share, and the read-only mappings of plans."""

    # typeshed knows no sixth entry of a reduction: how a state is set.
    def reducer_override(self, obj: object) -> object:  # type: ignore[override]
        if isinstance(obj, CellType):
            return _cell, (), (obj.cell_contents,), None, None, _fill
        if isinstance(obj, MappingProxyType):
            return _read_only, (dict(obj),)
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:
            code = marshal.dumps(obj.__code__)
            return _function, (code, obj.__module__, obj.__defaults__, obj.__kwdefaults__, obj.__closure__)
        return NotImplemented


def _pickled(function: Callable[[], object]) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(function)
    return file.getvalue()


# Types that cannot be found by their own names.
def _cell() -> CellType:
    return CellType()


def _read_only(values: dict[object, object]) -> MappingProxyType[object, object]:
    return MappingProxyType(values)


def _fill(cell: CellType, contents: tuple[object]) -> None:
    [cell.cell_contents] = contents


def _function(
    code: bytes,
    module: str,
    defaults: tuple[object, ...] | None,
    keyword_defaults: dict[str, object] | None,
    closure: tuple[CellType, ...] | None,
) -> FunctionType:
    loaded = marshal.loads(code)
    assert isinstance(loaded, CodeType)
    made = FunctionType(loaded, vars(sys.modules[module]), argdefs=defaults, closure=closure)
    made.__kwdefaults__ = keyword_defaults
    return made
