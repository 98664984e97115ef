"""Tests torch on this machine for `canzona doctor`, and prints the findings as one line of JSON.

This module runs as a separate process, because importing torch takes seconds and a broken installation may
crash. Two threads act as ranks: they connect with gloo over the loopback interface and all-reduce a tensor.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

_TIMEOUT = timedelta(seconds=15)


def main() -> None:
    """Tests torch and prints the findings."""
    import torch

    findings: dict[str, object] = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
    }
    if torch.distributed.is_available():
        findings["gloo_built"] = torch.distributed.is_gloo_available()
        findings["gloo_error"] = _gloo_error()
        findings["nccl"] = _nccl_version() if torch.distributed.is_nccl_available() else None
    print(json.dumps(findings))


def _gloo_error() -> str | None:
    """Tries an all-reduce over two ranks with gloo. Returns the error's text; None if it succeeds."""
    import torch
    from torch._C._distributed_c10d import HashStore  # the module in which its type is declared
    from torch.distributed import ProcessGroupGloo

    store = HashStore()

    def all_reduce(rank: int) -> float:
        total = torch.tensor([rank + 1.0])
        ranks = ProcessGroupGloo(store, rank, 2, _TIMEOUT)
        ranks.allreduce([total]).wait()  # type: ignore[attr-defined]
        return total.item()

    try:
        with ThreadPoolExecutor(2) as threads:
            totals = list(threads.map(all_reduce, (0, 1)))
    except Exception as error:  # any error is a finding
        return f"{type(error).__name__}: {error}"
    return None if totals == [3.0, 3.0] else f"the all-reduce of 1 and 2 returned {totals}"


def _nccl_version() -> str | None:
    import torch

    try:
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except Exception:  # a CPU build may claim to have NCCL without its library
        return None
    return ".".join(map(str, version))


if __name__ == "__main__":
    main()
