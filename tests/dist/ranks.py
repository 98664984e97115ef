"""Real gloo ranks for tests: forked from one process that has already imported torch and Megatron.

Importing them takes seconds of a core; forking takes milliseconds. Each rank is a process of its own with its own
process group over loopback, exactly as under torchrun.
"""

import ctypes
import gc
import importlib.metadata
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # which every rank would import anew with its first torch optimizer
from torch.distributed import distributed_c10d

from canzona_cli.core.optimizers import cpu_matmuls
from tests.waiting import PATIENCE_S

cpu_matmuls.install()  # as workers do
# Each rank's torch would look through all installed packages for backends.
INSTALLED = importlib.metadata.entry_points()

# Forking is only safe while this process has no thread pool of its own.
torch.set_num_threads(1)

# Nor one of autograd's: after that no fork can compute gradients. The first backward pass starts one for each device
# that torch knows of by then, once and for all. This one comes at collection, before any test has a stand-in of a GPU.
torch.autograd.backward(torch.ones((), requires_grad=True))


def run_ranks[T](world_size: int, function: Callable[[], T], *, timeout_s: float = PATIENCE_S) -> list[T]:
    """Call `function` on `world_size` ranks; what it returned on each, in rank order.

    Raises:
        AssertionError: with the tracebacks of the ranks that failed, or the numbers of those that hung.
    """
    _use_huge_pages()
    context = multiprocessing.get_context("fork")
    port = free_port()
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, world_size, port, sender))
        process.start()
        # Before the next rank is forked: it would keep this pipe open, and nobody would see that this rank has died.
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return collect(receivers, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


MADV_COLLAPSE = 25
"""The advice of Linux 6.1 that turns mapped memory into huge pages now (linux/mman.h); Python has no name for it."""
HUGE_PAGE = 2 << 20


@cache
def _use_huge_pages() -> None:
    """Moves this process's memory to huge pages, once, so that forks take less time.

    A fork copies the page table, and half a gigabyte of Python, torch and Megatron has 120,000 small pages. With huge
    ones, forking a rank and its first two steps take a fifth less. Kernels before 6.1 refuse the advice, and nothing
    changes.
    """
    madvise = ctypes.CDLL(None).madvise
    for mapping in Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else ():
        addresses, permissions, _, _, inode, *_ = mapping.split()
        if permissions == "rw-p" and inode == "0":
            start, end = (int(address, 16) // HUGE_PAGE for address in addresses.split("-"))
            if end > start + 1:
                first, size = (start + 1) * HUGE_PAGE, (end - start - 1) * HUGE_PAGE
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_COLLAPSE)


def free_port() -> int:
    """Returns a free port below those that Linux gives to outgoing connections (32768 and up): a connection could take
    one of those before rank 0 listens."""
    while True:
        port = random.randrange(15_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def collect[T](receivers: Sequence[Connection], timeout_s: float) -> list[T]:
    """Collects each rank's result, in rank order.

    Raises:
        AssertionError: as `run_ranks`.
    """
    deadline = time.monotonic() + timeout_s
    results: dict[int, T] = {}
    failures: list[str] = []
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        # Once one rank has failed, the others may wait for it for ever.
        patience = max(0.0, deadline - time.monotonic()) if not failures else 1.0
        ready = [receiver for receiver in wait(list(waiting), patience) if isinstance(receiver, Connection)]
        if not ready:
            failures += [f"rank {rank} hangs" for rank in waiting.values()]
            break
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                ok, value = receiver.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died without a word"
            if ok:
                results[rank] = value
            else:
                failures.append(value)
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(len(receivers))]


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("ranks tell each other nothing by pickles: canzona_cli.core.megatron.parallel")


def _rank[T](function: Callable[[], T], rank: int, world_size: int, port: int, sender: Connection) -> None:
    os.environ |= environment(rank, world_size, port)
    torch.set_num_threads(1)
    assert hasattr(distributed_c10d, "_unpickler"), "torch reads pickles from other ranks by another name now"
    distributed_c10d._unpickler = _refuse  # type: ignore[assignment]
    importlib.metadata.entry_points = INSTALLED.select
    # With every seed, torch would format the whole stack for each kind of device that is not here.
    traceback.format_stack = lambda *_: []
    # What was there before lives on: without this each collection, and a run makes some, would go through a million
    # objects of torch and Megatron, and copy their memory.
    gc.freeze()
    try:
        sender.send((True, function()))
        # `run_ranks` ends this rank once all have answered: others may still be reading from rank 0's store.
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
    except BaseException:
        sender.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    sender.close()
    # Skip destructors: a process group that is still open would wait for its peers.
    os._exit(0)
