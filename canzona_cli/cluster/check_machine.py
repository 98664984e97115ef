"""Doctor's checks of memory, cores, disks, network, limits and environment variables."""

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from canzona_cli.cluster.findings import Finding, Status
from canzona_cli.cluster.machine import processor_name
from canzona_cli.run.machine import cores

_GIB = 2**30
_MASTER_PORT = 29500
_RESOLVE_TIMEOUT_S = 3.0

_LEFT_OVER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "NVTE_", "OMP_", "MKL_", "KMP_", "CUBLAS_", "PYTORCH_")
_NAMES = ("CANZONA_CACHE", "ONEDNN_MAX_CPU_ISA")


def machine() -> Iterator[Finding]:
    """Cores, instruction sets and memory this process may use; containers and Slurm may grant less than there is."""
    import psutil

    allowed, quota = cores(), _cgroup_cores()
    value = f"{allowed} of {os.cpu_count()}" + (f", quota {quota:g}" if quota is not None and quota < allowed else "")
    yield Finding(
        group="machine",
        name="CPU cores",
        status="ok",
        value=f"{value}, {processor_name()}",
        meaning="CPU ranks share them; more ranks than cores works, slowly",
    )
    flags = _cpu_flags()
    if flags:
        sets = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
        fast = bool({"amx_bf16", "avx512_bf16"} & flags)
        yield Finding(
            group="machine",
            name="instructions",
            status="ok" if fast else "info",
            value=", ".join(sets) or "none of AMX, AVX-512, AVX2",
            meaning="bf16 has hardware support" if fast else "bf16 is emulated on this CPU",
        )
    memory = psutil.virtual_memory()
    limit = _cgroup_memory()
    total = min(memory.total, limit or memory.total)
    available = min(memory.available, total)
    low = available < 3 * _GIB
    yield Finding(
        group="machine",
        name="memory",
        status="warn" if low else "ok",
        value=f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB" + (" (container)" if limit else ""),
        meaning="a CPU rank takes about 0.75 GiB before its model",
        fix="close other programs, or use fewer ranks: gpus=2" if low else "",
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def _cgroup_memory() -> int | None:
    """The container's memory limit in bytes (cgroup v2), if there is one."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cgroup_cores() -> float | None:
    """The container's CPU quota in cores (cgroup v2), if there is one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def limits(*, gpus: int) -> Iterator[Finding]:
    """Resource limits that large jobs run into."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most_files = _limit(hard) if hard != resource.RLIM_INFINITY else 65536
    for name, limit, meaning, fix in (
        ("open files", resource.RLIMIT_NOFILE, "every pair of ranks holds connections open", f"ulimit -n {most_files}"),
        (
            "processes",
            resource.RLIMIT_NPROC,
            "threads count too: each rank starts tens of them",
            "ulimit -u 4096, or ask the administrator for more",
        ),
    ):
        soft, _ = resource.getrlimit(limit)
        few = soft != resource.RLIM_INFINITY and soft < 1024
        yield Finding(
            group="machine",
            name=name,
            status="warn" if few else "ok",
            value=_limit(soft),
            meaning=meaning,
            fix=fix if few else "",
        )
    if gpus:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        low = soft != resource.RLIM_INFINITY
        yield Finding(
            group="machine",
            name="locked memory",
            status="info",
            value=_limit(soft),
            meaning="InfiniBand under NCCL wants it unlimited (ulimit -l)" if low else "as InfiniBand wants it",
        )


def _limit(value: int) -> str:
    import resource

    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def storage(*, run_root: Path, cache: Path, gpus: int) -> Iterator[Finding]:
    """Room and permission where runs, prepared data and temporary files go; shared memory."""
    writable = "with a directory you may write to"
    yield _place("runs", run_root, "run directories go here", "warn", f"run.root=DIR {writable}")
    yield _place("cache", cache, "prepared corpora go here", "warn", f"CANZONA_CACHE=DIR {writable}")
    yield _place("temporary", Path(tempfile.gettempdir()), "workers start from here", "fail", f"TMPDIR=DIR {writable}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        small = total < _GIB
        yield Finding(
            group="storage",
            name="/dev/shm",
            status="ok" if not small else "warn" if gpus else "info",
            value=f"{total / _GIB:.1f} GiB",
            meaning="NCCL passes data between GPUs of one machine through it",
            fix="start the container with --shm-size=8g or --ipc=host" if small and gpus else "",
        )


def _place(name: str, path: Path, meaning: str, severity: Status, fix: str) -> Finding:
    existing = path.expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = f"{path}: {existing} cannot be written"
        return Finding(group="storage", name=name, status=severity, value=found, meaning=meaning, fix=fix)
    free = shutil.disk_usage(existing).free
    low = free < 2 * _GIB
    return Finding(
        group="storage",
        name=name,
        status="warn" if low else "ok",
        value=f"{path}, {free / _GIB:.1f} GiB free",
        meaning=meaning,
        fix=f"free some space, or {fix}" if low else "",
    )


def network() -> Iterator[Finding]:
    """Loopback, the port that runs over several machines meet at, and the resolution of this machine's name."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            bound = f"listening on 127.0.0.1 works (port {server.getsockname()[1]})"
        problem = ""
    except OSError as error:
        bound = problem = str(error)
    yield Finding(
        group="network",
        name="loopback",
        status="fail" if problem else "ok",
        value=bound,
        meaning="the ranks of one machine meet there",
        fix="allow this user to listen on 127.0.0.1 (sandbox, firewall, container network)" if problem else "",
    )
    try:
        socket.create_server(("127.0.0.1", _MASTER_PORT)).close()
        taken = False
    except OSError:
        taken = True
    yield Finding(
        group="network",
        name=f"port {_MASTER_PORT}",
        status="info" if taken else "ok",
        value="in use" if taken else "free",
        meaning="torchrun's usual meeting point of several machines; a run on one machine takes any free port"
        + ("; name another in cluster.rdzv_endpoint" if taken else ""),
    )
    yield _hostname()


def _hostname() -> Finding:
    name = socket.gethostname()
    answer: list[str] = []

    def look_up() -> None:
        try:
            answer.append(str(socket.getaddrinfo(name, None)[0][4][0]))
        except OSError as error:
            answer.append(f"! {error.strerror or error}")

    # In a thread, because a resolver without an answer blocks for many seconds and has no timeout of its own.
    started = time.monotonic()
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    took = time.monotonic() - started
    fine = bool(answer) and not answer[0].startswith("! ")
    found = answer[0].removeprefix("! ") if answer else f"no answer after {took:.0f} s"
    if fine and found.startswith(("127.", "::1")):
        return Finding(
            group="network",
            name="host name",
            status="info",
            value=f"{name} is {found}",
            meaning="fine on one machine; for several, gloo needs GLOO_SOCKET_IFNAME with the interface between them",
        )
    return Finding(
        group="network",
        name="host name",
        status="ok" if fine else "warn",
        value=f"{name} is {found}" if fine else f"{name} does not resolve, {found}",
        meaning="ranks on several machines find each other by it"
        if fine
        else "gloo over several machines cannot start",
        fix="" if fine else f"add it to /etc/hosts (ADDRESS {name}), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def environment() -> Iterator[Finding]:
    """Variables that change what torch, NCCL or gloo do."""
    left_over = [name for name in _LEFT_OVER if name in os.environ]
    if left_over:
        yield Finding(
            group="environment",
            name="left over",
            status="warn",
            value=", ".join(f"{name}={os.environ[name]}" for name in left_over),
            meaning="torchrun sets these for its workers; outside of one they mislead tools",
            fix=f"unset {' '.join(left_over)}",
        )
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    for name in names:
        yield Finding(
            group="environment", name=name, status="info", value=os.environ[name] or "(empty)", meaning=_meaning(name)
        )
    if not names and not left_over:
        yield Finding(
            group="environment",
            name="variables",
            status="ok",
            value="none of CUDA_*, NCCL_*, GLOO_*, OMP_*, ... is set",
            meaning="everything has its default",
        )


def _meaning(name: str) -> str:
    known = {
        "CUDA_VISIBLE_DEVICES": "which GPUs a run sees",
        "OMP_NUM_THREADS": "threads of each rank; unset, canzona shares the cores out",
        "MKL_NUM_THREADS": "threads of each rank; unset, canzona shares the cores out",
        "GLOO_SOCKET_IFNAME": "the interface gloo uses, also for runs on one machine",
        "NCCL_SOCKET_IFNAME": "the interface NCCL starts on",
        "NCCL_DEBUG": "how much NCCL writes to the logs",
        "NCCL_P2P_DISABLE": "1 keeps GPUs from talking directly: slow",
        "NCCL_IB_DISABLE": "1 keeps NCCL off InfiniBand: slow between machines",
        "CUDA_LAUNCH_BLOCKING": "1 makes every kernel wait: for debugging only",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1 is what tensor parallelism with overlap wants",
        "CANZONA_CACHE": "where prepared corpora go",
        "ONEDNN_MAX_CPU_ISA": "caps the instruction sets of CPU matrix products",
    }
    return known.get(name, "changes how workers run; kept as it is")
