"""This machine without torch: its processor and GPUs, and whether a calibrated profile was measured on another one.

GPUs are read by nvidia-smi, which comes with the driver, else from /proc. CUDA_VISIBLE_DEVICES is honoured as
CUDA reads it: the first entry that names no device hides all that follow it.
"""

import hashlib
import os
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.config.schema import ClusterConfig, Device
from canzona_cli.run.machine import cores, tool_output

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_CPU_INFO = Path("/proc/cpuinfo")
_SMI_FIELDS = ("name", "memory.total", "uuid", "driver_version")
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_MACHINE_ID = Path("/etc/machine-id")
LOOPBACK = "127.0.0.1"
"""The address at which the ranks of one machine meet."""
LOOPBACK_FIX = (
    "bring the interface up (ip link set lo up), let this user listen there (sandbox, firewall, container network), "
    "or free ports: net.ipv4.ip_local_port_range says which there are"
)
_ANSWER_S = 5.0


def machine_facts(device: Device) -> dict[str, str | int | float]:
    """Processor, cores, memory and torch, and the GPU for a profile of GPUs.
    Nothing that names the machine."""
    import psutil  # here, as packaging below: a plan asks this module for nothing that needs them

    facts: dict[str, str | int | float] = {
        "device": device,
        "processor": processor_name(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "torch": torch_version(),
        "machine": fingerprint(),
    }
    if device == "cuda":
        facts["gpu"] = gpu_name()
    return facts


def profile_mismatches(cluster: ClusterConfig) -> tuple[str, ...]:
    """Lists how the machine a profile was measured on differs from this one;
    empty for a profile written by hand."""
    mismatches = list(_differences(cluster)) if cluster.calibrated else []
    if not mismatches:
        return ()
    return (
        f"cluster profile {cluster.name} was measured on another machine ({'; '.join(mismatches)}): its times may not "
        "hold here; measure this one with `canzona calibrate`",
    )


def with_layers_here(cluster: ClusterConfig) -> ClusterConfig:
    """Decides whether layers come from Transformer Engine, where that is left open.

    They do if it is installed. A machine without GPUs can only plan for others, which are assumed to have it.
    """
    if cluster.transformer_engine is not None:
        return cluster
    missing = cluster.fused_layers and bool(visible_gpus()) and find_spec("transformer_engine") is None
    return replace(cluster, transformer_engine=cluster.fused_layers and not missing)


def processor_name() -> str:
    """Returns the processor's name as the system gives it; the bare architecture if it does not."""
    return cpu_fact("model name") or platform.processor() or platform.machine()


def cpu_fact(*names: str) -> str:
    """Returns what the kernel says of the first core under any of these names; empty if nothing."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def gpu_name() -> str:
    """The first visible GPU's; "none" without one."""
    return next((gpu.name for gpu in gpu_inventory()), "none")


def torch_version() -> str:
    """Returns the version of the installed torch, without importing it."""
    return installed_version("torch") or "none"


def installed_version(package: str) -> str | None:
    """Returns the version of a package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirement(package: str) -> "Requirement | None":
    """Returns canzona's requirement of a package, optional ones too; None without one,
    or if not installed itself."""
    from packaging.requirements import Requirement

    try:
        asked = map(Requirement, metadata.requires("canzona") or ())
    except metadata.PackageNotFoundError:
        return None
    return next((needed for needed in asked if needed.name == package), None)


def admits(requirement: "Requirement", version: str) -> bool:
    """Returns True if a version satisfies a requirement;
    a pre-release counts as its release (2.10.0a0 is a 2.10)."""
    from packaging.version import Version

    return requirement.specifier.contains(Version(version).base_version)


def fingerprint() -> str:
    """Eight hexadecimal digits that tell two machines apart and name neither."""
    try:
        identity = _MACHINE_ID.read_text(encoding="utf-8").strip()
    except OSError:
        identity = platform.node()
    return hashlib.sha256(f"canzona {identity} {processor_name()}".encode()).hexdigest()[:8]


def loopback_problem(ranks: int) -> str | None:
    """Says why so many ranks, each with a port of its own, could not meet on this machine;
    None if they could."""
    try:
        with ExitStack() as sockets:
            for _ in range(ranks + 1):  # torchrun's store has one, too
                server = sockets.enter_context(socket.create_server((LOOPBACK, 0)))
                sockets.enter_context(socket.create_connection(server.getsockname(), timeout=_ANSWER_S))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _differences(cluster: ClusterConfig) -> Iterator[str]:
    measured = cluster.measured_on
    here: dict[str, str | int] = {"processor": processor_name(), "cores": cores(), "torch": torch_version()}
    if cluster.device == "cuda":
        # The GPU does the work; the processor that feeds it does not make a profile another machine's.
        here = {"gpu": gpu_name(), "torch": torch_version()}
    for name, value in here.items():
        then = measured.get(name)
        if then is not None and _plain(then) != _plain(value):
            yield f"{name} {then} there, {value} here"


def _plain(value: object) -> str:
    """torch's own version says how it was built (2.13.0+cu130), its package's may not."""
    return str(value).partition("+")[0]


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    """0 where nothing tells (only /proc is there)."""
    uuid: str = ""
    """`GPU-...`; empty where nothing tells."""
    driver: str = ""
    """Version of the driver; empty where nothing tells."""


def visible_gpus() -> int:
    """Counts the GPUs that a process started from here can use; 0 when there is no driver."""
    return len(gpu_inventory())


def gpu_inventory() -> tuple[GpuInfo, ...]:
    """The GPUs CUDA would show a process started from here, in its order."""
    return select(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def installed_gpus() -> tuple[GpuInfo, ...]:
    """All GPUs of the machine, in PCI order; empty without an NVIDIA driver. Asked once:
    it may take a second."""
    fields = ",".join(_SMI_FIELDS)
    gpus = read_smi(tool_output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", timeout_s=30))
    return read_proc(_PROC_GPUS) if gpus is None else gpus


def select(gpus: tuple[GpuInfo, ...], visible: str | None) -> tuple[GpuInfo, ...]:
    """Returns those of `gpus` that a CUDA_VISIBLE_DEVICES value leaves.

    None shows all, an empty value none. Entries are indices or the start of a UUID that fits one GPU; the
    first other entry (-1 by custom) ends the list, and a GPU named twice makes CUDA show none. MIG entries
    count as one device of the size of their GPU.
    """
    if visible is None:
        return gpus
    chosen: list[GpuInfo] = []
    seen: set[str | int] = set()
    for entry in (part.strip() for part in visible.split(",")):
        index = _index(gpus, entry)
        if index is None:
            break
        # One GPU may carry several MIG devices; the same whole GPU twice is an error to CUDA.
        key = entry if entry.startswith("MIG-") else index
        if key in seen:
            return ()
        seen.add(key)
        chosen.append(gpus[index])
    return tuple(chosen)


def _index(gpus: tuple[GpuInfo, ...], entry: str) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        owner = re.match(r"MIG-(GPU-[^/]+)/", entry)  # the newer MIG-<uuid> does not say whose it is
        return (_index(gpus, owner[1]) if owner else 0) if gpus else None
    if entry.startswith("GPU-"):
        matches = [index for index, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return None


def read_smi(listing: str | None) -> tuple[GpuInfo, ...] | None:
    """Returns what `nvidia-smi` lists, a line for each GPU; None without it."""
    if listing is None:
        return None
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    return tuple(
        GpuInfo(name=row[0], memory_bytes=int(row[1]) << 20 if row[1].isdecimal() else 0, uuid=row[2], driver=row[3])
        for row in rows
        if len(row) == len(_SMI_FIELDS)
    )


def read_proc(root: Path) -> tuple[GpuInfo, ...]:
    """One `<pci address>/information` file a GPU, with its `Model` and `GPU UUID`."""
    gpus = []
    for information in sorted(root.glob("*/information")):
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        name, uuid = fields.get("Model", "").strip(), fields.get("GPU UUID", "").strip()
        gpus.append(GpuInfo(name=name, memory_bytes=0, uuid=uuid))
    return tuple(gpus)
