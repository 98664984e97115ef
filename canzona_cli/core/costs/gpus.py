"""The GPUs of this machine. Imports nothing slow, because every plan loads this module.

The list comes from nvidia-smi, which is part of the driver, or from /proc if that fails.
CUDA_VISIBLE_DEVICES is applied as by CUDA: the first entry that names no device hides all entries after it.
"""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.core.host import tool_output
from canzona_cli.core.setup import ClusterConfig

_SMI_FIELDS = ("name", "memory.total", "uuid", "driver_version", "compute_cap")
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def with_layers_here(cluster: ClusterConfig) -> ClusterConfig:
    """Fills in `transformer_engine` if it is null. The value is True if the profile has fused layers and
    Transformer Engine is installed here.

    A machine without GPUs can only plan for other machines. These are assumed to have Transformer Engine.
    """
    if cluster.transformer_engine is not None:
        return cluster
    missing = cluster.fused_layers and bool(visible_gpus()) and importlib.util.find_spec("transformer_engine") is None
    return replace(cluster, transformer_engine=cluster.fused_layers and not missing)


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """A GPU as the driver reports it."""

    name: str
    memory_bytes: int
    """The GPU's memory; 0 if it is unknown, as in /proc."""
    uuid: str = ""
    """The GPU's UUID, `GPU-...`; empty if unknown."""
    driver: str = ""
    """The driver's version; empty if unknown."""
    compute_capability: float = 0.0
    """The version of the GPU's architecture: 9.0 for Hopper, 10.0 for Blackwell; 0 if unknown."""


def visible_gpus() -> int:
    """Counts the GPUs that a process started from here can use; 0 without a driver."""
    return len(gpu_inventory())


def gpu_inventory() -> tuple[GpuInfo, ...]:
    """Lists the GPUs that CUDA would show to a process started from here, in PCI order or in the order of
    CUDA_VISIBLE_DEVICES."""
    return select(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def installed_gpus() -> tuple[GpuInfo, ...]:
    """Lists all GPUs of the machine in PCI order; empty without an NVIDIA driver. Cached, because the query
    may take a second."""
    fields = ",".join(_SMI_FIELDS)
    gpus = read_smi(tool_output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", timeout_s=30))
    return read_proc(_PROC_GPUS) if gpus is None else gpus


def select(gpus: tuple[GpuInfo, ...], visible: str | None) -> tuple[GpuInfo, ...]:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES makes visible. The value None shows all GPUs, an
    empty value shows none.

    An entry is an index, or the start of a UUID that matches exactly one GPU. Any other entry, such as -1,
    ends the list. If a GPU is named twice, CUDA shows none. A MIG entry selects the whole GPU that it names,
    or the first GPU if it does not name a GPU.
    """
    if visible is None:
        return gpus
    chosen: list[GpuInfo] = []
    seen: set[str | int] = set()
    for entry in (part.strip() for part in visible.split(",")):
        index = _index(gpus, entry)
        if index is None:
            break
        # A GPU may have several MIG devices, but CUDA does not accept the same GPU twice.
        key = entry if entry.startswith("MIG-") else index
        if key in seen:
            return ()
        seen.add(key)
        chosen.append(gpus[index])
    return tuple(chosen)


def _index(gpus: tuple[GpuInfo, ...], entry: str) -> int | None:
    """Returns the index of the GPU that an entry of CUDA_VISIBLE_DEVICES names; None if it names none."""
    if entry.isdecimal():
        return int(entry) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        if parent := re.match(r"MIG-(GPU-[^/]+)/", entry):
            return _index(gpus, parent[1])
        return 0 if gpus else None  # the newer MIG-<uuid> does not name its GPU
    if entry.startswith("GPU-"):
        matches = [index for index, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return None


def read_smi(listing: str | None) -> tuple[GpuInfo, ...] | None:
    """Parses the output of nvidia-smi, which has one line for each GPU; returns None if there is no
    output."""
    if listing is None:
        return None
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    return tuple(
        GpuInfo(
            name=row[0],
            memory_bytes=int(row[1]) << 20 if row[1].isdecimal() else 0,
            uuid=row[2],
            driver=row[3],
            compute_capability=float(row[4]) if re.fullmatch(r"\d+\.\d+", row[4]) else 0.0,
        )
        for row in rows
        if len(row) == len(_SMI_FIELDS)
    )


def read_proc(root: Path) -> tuple[GpuInfo, ...]:
    """Reads names and UUIDs from the files `<pci address>/information`, one per GPU."""
    gpus = []
    for information in sorted(root.glob("*/information")):
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        name, uuid = fields.get("Model", "").strip(), fields.get("GPU UUID", "").strip()
        gpus.append(GpuInfo(name=name, memory_bytes=0, uuid=uuid))
    return tuple(gpus)
