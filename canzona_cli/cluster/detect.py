"""The GPUs of this machine, without torch: NVML through ctypes, else nvidia-smi, else /proc.

CUDA_VISIBLE_DEVICES is honoured as CUDA reads it: the first entry that names no device hides all that follow it.
"""

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NVML_LIBRARY = "libnvidia-ml.so.1"
_NVML_NAME_BYTES = 96
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_SMI_FIELDS = "uuid,name,memory.total"


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    """0 where nothing tells (only /proc is there)."""
    uuid: str = ""
    """`GPU-...`; empty where nothing tells."""


def visible_gpus() -> int:
    """How many GPUs a process started from here can use; 0 when there is no driver."""
    return len(gpu_inventory())


def gpu_inventory() -> tuple[GpuInfo, ...]:
    """The GPUs CUDA would show a process started from here, in its order."""
    return select(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def installed_gpus() -> tuple[GpuInfo, ...]:
    """All GPUs of the machine, in PCI order; empty without an NVIDIA driver."""
    for probe in (_nvml, _nvidia_smi, _proc):
        found = probe()
        if found is not None:
            return found
    return ()


def select(gpus: tuple[GpuInfo, ...], visible: str | None) -> tuple[GpuInfo, ...]:
    """What a CUDA_VISIBLE_DEVICES value leaves of `gpus`.

    None shows all, an empty value none. Entries are indices or the start of a UUID that fits one GPU; the first other
    entry (-1 by custom) ends the list, and a GPU named twice makes CUDA show none. MIG entries count as one device of
    the size of their GPU.
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


def _nvml() -> tuple[GpuInfo, ...] | None:
    """By the driver's own library; None when it is absent or does not answer."""
    try:
        nvml = ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        return None
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            return tuple(_nvml_devices(nvml))
        finally:
            nvml.nvmlShutdown()
    except (AttributeError, OSError):  # a library too old for these entry points, or a driver that refuses them
        return None


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvml_devices(nvml: ctypes.CDLL) -> Iterator[GpuInfo]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        raise OSError("nvmlDeviceGetCount failed")
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            raise OSError("nvmlDeviceGetHandleByIndex failed")
        name, uuid = ctypes.create_string_buffer(_NVML_NAME_BYTES), ctypes.create_string_buffer(_NVML_NAME_BYTES)
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NVML_NAME_BYTES))
        nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_NVML_NAME_BYTES))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        yield GpuInfo(name=name.value.decode(), memory_bytes=memory.total, uuid=uuid.value.decode())


def _nvidia_smi() -> tuple[GpuInfo, ...] | None:
    command = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(output: str) -> tuple[GpuInfo, ...]:
    """Lines of `uuid, name, MiB`; a size that is not a number (`[N/A]`) counts as unknown."""
    gpus = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3:
            mib = int(fields[2]) if fields[2].isdecimal() else 0
            gpus.append(GpuInfo(uuid=fields[0], name=fields[1], memory_bytes=mib << 20))
    return tuple(gpus)


def _proc() -> tuple[GpuInfo, ...] | None:
    return read_proc(_PROC_GPUS) if _PROC_GPUS.is_dir() else None


def read_proc(root: Path) -> tuple[GpuInfo, ...]:
    """One `<pci address>/information` file a GPU, with its `Model` and `GPU UUID`."""
    gpus = []
    for information in sorted(root.glob("*/information")):
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        name, uuid = fields.get("Model", "").strip(), fields.get("GPU UUID", "").strip()
        gpus.append(GpuInfo(name=name, memory_bytes=0, uuid=uuid))
    return tuple(gpus)
