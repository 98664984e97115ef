"""What this machine is, as a calibrated profile remembers it; whether a profile was measured on another. No torch."""

import hashlib
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from canzona_cli.cluster.detect import gpu_inventory
from canzona_cli.config.schema import ClusterConfig, Device
from canzona_cli.run.machine import cores

_CPU_INFO = Path("/proc/cpuinfo")
_MACHINE_ID = Path("/etc/machine-id")


def machine_facts(device: Device) -> dict[str, str | int | float]:
    """Processor, cores, memory and torch, and the GPU for a profile of GPUs. Nothing that names the machine."""
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


def profile_warnings(cluster: ClusterConfig, *, training: bool = True) -> tuple[str, ...]:
    """What a user of a profile should know. Without `training` it may well be for another machine, as in a plan."""
    return (*profile_gaps(cluster), *(profile_mismatches(cluster) if training else ()))


def profile_mismatches(cluster: ClusterConfig) -> tuple[str, ...]:
    """How the machine a profile was measured on differs from this one; empty for a profile written by hand."""
    found = list(_differences(cluster)) if cluster.measured_on else []
    if not found:
        return ()
    return (
        f"cluster profile {cluster.name} was measured on another machine ({'; '.join(found)}): its times may not "
        "hold here; measure this one with `canzona calibrate`",
    )


def profile_gaps(cluster: ClusterConfig) -> tuple[str, ...]:
    """What a calibration that was cut off lacks; empty for a whole one."""
    if not cluster.not_measured:
        return ()
    return (
        f"cluster profile {cluster.name} is of a calibration that was cut off: {', '.join(cluster.not_measured)} "
        f"come from profile {cluster.measured_on.get('base', 'it started from')}",
    )


def processor_name() -> str:
    """As the system calls it; the bare architecture where it does not."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def gpu_name() -> str:
    """The first visible GPU's; "none" without one."""
    return next((gpu.name for gpu in gpu_inventory()), "none")


def torch_version() -> str:
    """Of the installed package, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def fingerprint() -> str:
    """Eight hexadecimal digits that tell two machines apart and name neither."""
    try:
        identity = _MACHINE_ID.read_text(encoding="utf-8").strip()
    except OSError:
        identity = platform.node()
    return hashlib.sha256(f"canzona {identity} {processor_name()}".encode()).hexdigest()[:8]


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
