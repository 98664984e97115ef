"""Doctor's checks of memory, cores, disks, network, limits and environment variables."""

import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from canzona_cli.cluster.findings import TORCHRUN_VARIABLES, Finding, Status, info, judged
from canzona_cli.cluster.gpu_needs import interface_problem
from canzona_cli.cluster.machine import LOOPBACK, LOOPBACK_FIX, cpu_fact, loopback_problem, processor_name
from canzona_cli.run.machine import cores, existing_folder

_GIB = 2**30
_MASTER_PORT = 29500
_RANKS = 8
"""How many try to meet: those of a machine with eight GPUs."""
_RESOLVE_TIMEOUT_S = 3.0
_CGROUP = Path("/sys/fs/cgroup")

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "NVTE_", "OMP_", "MKL_", "KMP_", "CUBLAS_", "PYTORCH_")
_NAMES = ("CANZONA_CACHE", "ONEDNN_MAX_CPU_ISA")
_MEANINGS = {
    "CUDA_VISIBLE_DEVICES": "which GPUs a run sees",
    "OMP_NUM_THREADS": "threads of each rank; unset, canzona shares the cores out",
    "MKL_NUM_THREADS": "threads of each rank; unset, canzona shares the cores out",
    "GLOO_SOCKET_IFNAME": "the interface gloo uses, also for runs on one machine",
    "NCCL_SOCKET_IFNAME": "the interface NCCL starts on",
    "NCCL_DEBUG": "how much NCCL writes to the logs",
    "NCCL_P2P_DISABLE": "1 keeps GPUs from talking directly: slow",
    "NCCL_IB_DISABLE": "1 keeps NCCL off InfiniBand: slow between machines",
    "CUDA_LAUNCH_BLOCKING": "1 makes every kernel wait: for debugging only",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 keeps reductions and gatherings from overlapping",
    "CANZONA_CACHE": "where prepared corpora go",
    "ONEDNN_MAX_CPU_ISA": "caps the instruction sets of CPU matrix products",
}


def machine() -> Iterator[Finding]:
    """Cores, instruction sets and memory this process may use; containers and Slurm may grant less than there is."""
    allowed, quota = cores(), _cgroup_cores()
    value = f"{allowed} of {os.cpu_count()}" + (f", quota {quota:g}" if quota is not None and quota < allowed else "")
    meaning = "CPU ranks share them; more ranks than cores works, slowly"
    yield judged("machine", "CPU cores", True, f"{value}, {processor_name()}", meaning)
    flags = set(cpu_fact("flags", "Features").split())
    if flags:
        value = ", ".join(name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags)
        fast = bool({"amx_bf16", "avx512_bf16"} & flags)
        meaning = "bf16 has hardware support" if fast else "none for bf16"
        value = value or "none of AMX, AVX-512, AVX2"
        yield judged("machine", "instructions", fast, value, meaning, otherwise="info")
    memory = psutil.virtual_memory()
    limit = _cgroup_memory()
    total = min(memory.total, limit or memory.total)
    available = min(memory.available, total)
    value = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB" + (" (container)" if limit else "")
    fix = "close other programs, or use fewer ranks: gpus=2"
    meaning = "a CPU rank takes about 0.75 GiB before its model"
    yield judged("machine", "memory", available >= 3 * _GIB, value, meaning, fix)


def _cgroup_memory() -> int | None:
    """The container's memory limit in bytes (cgroup v2), if there is one."""
    try:
        return int((_CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cgroup_cores() -> float | None:
    """The container's CPU quota in cores (cgroup v2), if there is one."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def limits(*, gpus: int) -> Iterator[Finding]:
    """Resource limits that large jobs run into."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else hard}"
    yield judged("machine", "open files", _ample(soft), _limit(soft), "every pair of ranks holds connections open", fix)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    meaning = "threads count too: each rank starts tens of them"
    fix = "ulimit -u 4096, or ask the administrator for more"
    yield judged("machine", "processes", _ample(soft), _limit(soft), meaning, fix)
    if gpus:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        low = soft != resource.RLIM_INFINITY
        meaning = "InfiniBand under NCCL wants it unlimited (ulimit -l)" if low else "as InfiniBand wants it"
        yield info("machine", "locked memory", _limit(soft), meaning)


def _ample(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= 1024


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def storage(*, run_root: Path, cache: Path, gpus: int) -> Iterator[Finding]:
    """Room and permission where runs, prepared data and temporary files go; shared memory."""
    writable = "with a directory you may write to"
    yield _place("runs", run_root, "run directories go here", f"run.root=DIR {writable}")
    yield _place("cache", cache, "prepared corpora go here", f"CANZONA_CACHE=DIR {writable}")
    temporary = Path(tempfile.gettempdir())
    yield _place("temporary", temporary, "workers start from here", f"TMPDIR=DIR {writable}", unwritable="fail")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        meaning = "NCCL passes data between GPUs of one machine through it"
        fix = "start the container with --shm-size=8g or --ipc=host" if gpus else ""
        otherwise: Status = "warn" if gpus else "info"
        value = f"{total / _GIB:.1f} GiB"
        yield judged("storage", "/dev/shm", total >= _GIB, value, meaning, fix, otherwise=otherwise)


def _place(name: str, path: Path, meaning: str, fix: str, *, unwritable: Status = "warn") -> Finding:
    existing = existing_folder(path.expanduser().absolute())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        value = f"{path}: {existing} cannot be written"
        return judged("storage", name, False, value, meaning, fix, otherwise=unwritable)
    free = shutil.disk_usage(existing).free
    value = f"{path}, {free / _GIB:.1f} GiB free"
    return judged("storage", name, free >= 2 * _GIB, value, meaning, f"free some space, or {fix}")


def network() -> Iterator[Finding]:
    """Loopback, the port that runs over several machines meet at, and the resolution of this machine's name."""
    problem = loopback_problem(_RANKS)
    value = problem or f"{_RANKS} ranks can meet on {LOOPBACK}"
    meaning = "the ranks of one machine meet there"
    yield judged("network", "loopback", problem is None, value, meaning, LOOPBACK_FIX, otherwise="fail")
    meaning = "torchrun's usual meeting point of several machines; a run on one machine takes any free port"
    try:
        socket.create_server(("127.0.0.1", _MASTER_PORT)).close()
        yield judged("network", f"port {_MASTER_PORT}", True, "free", meaning)
    except OSError:
        yield info("network", f"port {_MASTER_PORT}", "in use", f"{meaning}; name another in cluster.rdzv_endpoint")
    yield _hostname()


def _hostname() -> Finding:
    name = socket.gethostname()
    address, why = "", f"no answer after {_RESOLVE_TIMEOUT_S:.0f} s"

    def look_up() -> None:
        nonlocal address, why
        try:
            address = str(socket.getaddrinfo(name, None)[0][4][0])
        except OSError as error:
            why = error.strerror or str(error)

    # In a thread, because a resolver without an answer blocks for many seconds and has no timeout of its own.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    if address.startswith(("127.", "::1")):
        meaning = "fine on one machine; for several, gloo needs GLOO_SOCKET_IFNAME with the interface between them"
        return info("network", "host name", f"{name} is {address}", meaning)
    if address:
        meaning = "ranks on several machines find each other by it"
        return judged("network", "host name", True, f"{name} is {address}", meaning)
    fix = f"add it to /etc/hosts (ADDRESS {name}), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    meaning = "gloo over several machines cannot start"
    return judged("network", "host name", False, f"{name} does not resolve, {why}", meaning, fix)


def environment() -> Iterator[Finding]:
    """Variables that change what torch, NCCL or gloo do."""
    left_over = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if left_over:
        value = ", ".join(f"{name}={os.environ[name]}" for name in left_over)
        meaning = "torchrun sets these for its workers; outside of one they mislead tools"
        yield judged("environment", "left over", False, value, meaning, f"unset {' '.join(left_over)}")
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    for name in names:
        value, meaning = os.environ[name], _MEANINGS.get(name, "changes how workers run; kept as it is")
        problem = interface_problem(value, alone=True) if name == "NCCL_SOCKET_IFNAME" else None
        if problem is None:
            yield info("environment", name, value or "(empty)", meaning)
        else:
            yield judged("environment", name, False, value, problem.reason, problem.fix)
    if not names and not left_over:
        value = "none of CUDA_*, NCCL_*, GLOO_*, OMP_*, ... is set"
        yield judged("environment", "variables", True, value, "everything has its default")
