"""Real gloo ranks for tests: forked from one process that has already imported torch and Megatron.

Importing them takes seconds of a core; forking takes milliseconds. Each rank is a process of its own with its own
process group over loopback, exactly as under torchrun.
"""

import gc
import importlib.metadata
import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch
import torch._dynamo  # which every rank would import anew with its first torch optimizer
from torch.distributed import distributed_c10d

from canzona_cli.optimizers import cpu_matmuls
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


def free_port() -> int:
    """Below the ports that outgoing connections take by themselves (32768 and up on Linux): one of those could have it
    by the time rank 0 listens."""
    while True:
        port = random.randrange(15_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def collect[T](receivers: Sequence[Connection], timeout_s: float) -> list[T]:
    """What each rank has answered, in rank order.

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
    raise AssertionError("ranks tell each other nothing by pickles: canzona_cli.megatron.parallel")


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
