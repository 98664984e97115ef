"""The GPUs of this machine, and what a plan asks about them. Imports nothing that takes long: plans do.

GPUs are read by nvidia-smi, which comes with the driver, else from /proc. CUDA_VISIBLE_DEVICES is honoured as
CUDA reads it: the first entry that names no device hides all that follow it.
"""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from canzona_cli.config.schema import ClusterConfig
from canzona_cli.run.machine import tool_output

_SMI_FIELDS = ("name", "memory.total", "uuid", "driver_version")
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def with_layers_here(cluster: ClusterConfig) -> ClusterConfig:
    """Decides whether layers come from Transformer Engine, where that is left open.

    They do if it is installed. A machine without GPUs can only plan for others, which are assumed to have it.
    """
    if cluster.transformer_engine is not None:
        return cluster
    missing = cluster.fused_layers and bool(visible_gpus()) and importlib.util.find_spec("transformer_engine") is None
    return replace(cluster, transformer_engine=cluster.fused_layers and not missing)


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
