"""Times reductions to owners, in three orders of owners, and one reduce-scatter.

    python -m gpu_parts.chains DEVICE RANKS FILE.json

NCCL reduces along a chain of ranks, and each reduction has to fill the chain with chunks of data. Consecutive
reductions overlap if the next owner is the same rank or the next rank. A reduce-scatter over a ring fills the ring only
once.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

REDUCTIONS: Final = 16
BYTES: Final = 64 << 20
"""The bytes of each reduction."""
REPEATS: Final = 9


def measure_rank(rank: int, ranks: int, device: str, file: Path) -> None:
    """Measures the collectives on one rank; rank 0 writes the times to `file`."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_DIST_USE_NCCL2="0")  # as the launcher sets them
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{file.absolute()}.store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    elements = (BYTES if device == "cuda" else 1 << 12) // 4
    buffers = [torch.zeros(elements, device=device) for _ in range(REDUCTIONS)]
    ring = torch.zeros(REDUCTIONS * elements // ranks * ranks, device=device)
    part = ring.new_empty(ring.numel() // ranks)
    orders = {
        "one owner": [0] * REDUCTIONS,
        "ascending": [place % ranks for place in range(REDUCTIONS)],
        "descending": [-place % ranks for place in range(REDUCTIONS)],
    }
    times = {name: seconds(partial(_reduce, buffers, owners), device) for name, owners in orders.items()}
    times["reduce_scatter"] = seconds(lambda: dist.reduce_scatter_tensor(part, ring), device)
    if rank == 0:
        file.write_text(json.dumps(times), encoding="utf-8")
    dist.destroy_process_group()


def _reduce(buffers: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
    for buffer, owner in zip(buffers, owners, strict=True):
        dist.reduce(buffer, dst=owner)


def seconds(work: Callable[[], object], device: str) -> float:
    """Measures collectives; returns the median over repetitions of the slowest rank's seconds."""
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            elapsed = torch.tensor(start.elapsed_time(end) / 1e3, device=device)
        else:
            begun = time.perf_counter()
            work()
            elapsed = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(float(elapsed))
    return statistics.median(times[2:])


if __name__ == "__main__":
    device, ranks, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.multiprocessing.spawn(measure_rank, args=(ranks, device, file), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
