"""This machine without torch: its processor, what ranks on GPUs need besides GPUs, and whether a calibrated profile was
measured on another one."""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import socket
import sysconfig
from collections.abc import Mapping, Set
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from canzona_cli.cluster.gpus import gpu_inventory
from canzona_cli.config.schema import ClusterConfig, Device
from canzona_cli.errors import Problem
from canzona_cli.run.machine import cores

_CPU_INFO = Path("/proc/cpuinfo")
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
    facts: dict[str, str | int | float] = {
        "device": device,
        "processor": processor_name(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "torch": torch_version(),
    }
    if device == "cuda":
        facts["gpu"] = gpu_name()
    return facts


def profile_mismatches(cluster: ClusterConfig) -> tuple[str, ...]:
    """Says how the machine a profile was measured on differs from this one; empty for a profile written by hand."""
    here: dict[str, str | int] = {"processor": processor_name(), "cores": cores(), "torch": torch_version()}
    if cluster.device == "cuda":
        # The GPU does the work; the processor that feeds it does not make a profile another machine's.
        here = {"gpu": gpu_name(), "torch": torch_version()}
    measured = cluster.measured_on if cluster.calibrated else {}
    mismatches = [
        f"{name} {measured[name]} there, {value} here"
        for name, value in here.items()
        # torch's version says how it was built (2.13.0+cu130), its package's may not.
        if name in measured and str(measured[name]).partition("+")[0] != str(value).partition("+")[0]
    ]
    if not mismatches:
        return ()
    return (
        f"cluster profile {cluster.name} was measured on another machine ({'; '.join(mismatches)}): its times may not "
        "hold here; measure this one with `canzona calibrate`",
    )


def processor_name() -> str:
    """Returns the processor's name as the system gives it; the bare architecture if it does not."""
    lines = _CPU_INFO.read_text("utf-8", errors="replace").splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


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


def requirement(package: str) -> Requirement | None:
    """Returns canzona's requirement of a package, optional ones too; None without one,
    or if not installed itself."""
    try:
        asked = map(Requirement, metadata.requires("canzona") or ())
    except metadata.PackageNotFoundError:
        return None
    return next((needed for needed in asked if needed.name == package), None)


def admits(requirement: Requirement, version: str) -> bool:
    """Returns True if a version satisfies a requirement;
    a pre-release counts as its release (2.10.0a0 is a 2.10)."""
    return requirement.specifier.contains(Version(version).base_version)


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


_DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""The first driver for each major release of CUDA; it runs all its minor ones.
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_GET_TORCH = "install a torch that is built for it (pytorch.org/get-started)"

_COVERS_COALESCED = Version("2.15")
"""The first torch whose nccl2 backend waits for all collectives of a coalesced group (`ProcessGroupNCCL.hpp` there)."""

Release = tuple[int, int]
"""A release of CUDA: (13, 2)."""


def driver_problem() -> Problem | None:
    """A driver that cannot run torch's CUDA, or a torch without CUDA; None where it can,
    or where nothing tells."""
    needed, here = torch_cuda(), driver_cuda()
    if here is None or needed is None:
        return None
    if needed == (0, 0):
        reason = "it is built without CUDA and cannot use the GPUs here"
        return Problem(key="torch", value=torch_version(), reason=reason, fix=_GET_TORCH)
    if here[0] >= needed[0]:
        return None
    newer = f" to {_DRIVERS[needed[0]]} or later" if needed[0] in _DRIVERS else ""
    return Problem(
        key="NVIDIA driver",
        value=f"for CUDA {_dotted(here)}",
        reason=f"it is too old for torch {torch_version()} here, which is built for CUDA {_dotted(needed)}",
        fix=f"update the driver{newer}, or {_GET_TORCH}",
    )


def driver_cuda() -> Release | None:
    """The newest CUDA that the driver runs, with NVIDIA's compatibility package if that is on the library path."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def torch_cuda() -> Release | None:
    """Returns the CUDA release that the installed torch is built for, (0, 0) for none;
    None if it does not say."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=]*=\s*(?:None|'(\d+)\.(\d+))", text, re.MULTILINE)
    return version and (int(version[1] or 0), int(version[2] or 0))


def torch_lacks() -> list[str]:
    """Lists the features that canzona uses where torch has them, and that the torch installed here lacks.

    Training is right with every torch that canzona admits. Imports no torch.
    """
    spec, version = importlib.util.find_spec("torch"), installed_version("torch")
    if version is None or spec is None or spec.origin is None:
        return []
    lacking = []
    if not Path(spec.origin).with_name("_vendor").joinpath("quack").is_dir():
        lacking.append("a copy of QuACK's symmetric products (from 2.15; cuBLAS multiplies instead)")
    if Version(version) < _COVERS_COALESCED:
        lacking.append("an NCCL backend nccl2 that waits for all reductions of a bucket (from 2.15; the other is used)")
    return lacking


def backend_problem(chosen: str | None) -> Problem | None:
    """A TORCH_DIST_USE_NCCL2 that asks for an NCCL backend which would let gradients be used before they arrive.

    Before 2.15 what ends a coalesced group there waits for its sends and receives, and none of its reductions
    is said to be waited for.
    """
    version = installed_version("torch")
    if chosen in (None, "0") or version is None or Version(version) >= _COVERS_COALESCED:
        return None
    reason = f"torch {version} may not wait for all reductions of a bucket in the NCCL backend that this asks for"
    return Problem(key="TORCH_DIST_USE_NCCL2", value=chosen, reason=reason, fix="unset it, or install torch 2.15")


def fused_layers_problem() -> Problem | None:
    """A Transformer Engine that is missing, or that megatron-core was not written for;
    None where it will do."""
    version, asked = installed_version("transformer-engine"), requirement("transformer-engine")
    key, without = "cluster.transformer_engine", "cluster.transformer_engine=false, which trains the same without"
    fix = f"{install_fused_layers()}, or {without}"
    if importlib.util.find_spec("transformer_engine") is None:
        return Problem(key=key, value=True, reason="Transformer Engine is not installed here", fix=fix)
    if version is None or asked is None or admits(asked, version):
        return None
    reason = f"Transformer Engine {version} is not one that megatron-core was checked with ({_sorted(asked)})"
    return Problem(key=key, value=True, reason=reason, fix=fix)


def install_fused_layers() -> str:
    """Returns the command that installs Transformer Engine, and what it needs.

    Its extension for PyTorch comes as source: isolated, the build finds no torch (NVIDIA's installation guide).
    """
    asked = requirement("transformer-engine")
    name = f"transformer-engine[core_cu13,pytorch]{'' if asked is None else _sorted(asked)}"
    return f"pip install --no-build-isolation '{name}' (compiles for minutes; needs nvcc and cuDNN's headers)"


def _sorted(requirement: Requirement) -> str:
    """The bounds of a requirement, the least version first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def interface_problem(chosen: str | None, *, alone: bool) -> Problem | None:
    """An NCCL_SOCKET_IFNAME by which NCCL finds no network interface, or none that leads to another machine.

    Args:
        chosen: beginnings of names, `=` before them: whole names, `^` before that: all but those.
        alone: the run is on this machine.
    """
    if not chosen:
        return None
    up = _interfaces()
    usable = up if alone else {name for name in up if not name.startswith("lo")}
    if named(chosen, usable):
        return None
    others = ", ".join(sorted(usable)) or "none"
    where = "" if alone else " that leads to other machines"
    return Problem(
        key="NCCL_SOCKET_IFNAME",
        value=chosen,
        reason=f"NCCL finds no network interface by it{where}",
        fix=f"unset it, or name one that is up here: {others}",
    )


def named(chosen: str, interfaces: Set[str]) -> set[str]:
    """Returns the interfaces that NCCL takes (its src/misc/socket.cc)."""
    without = chosen.removeprefix("^")
    whole = without.startswith("=")
    names = [name.partition(":")[0] for name in without.removeprefix("=").split(",") if name]
    fits = {
        interface
        for interface in interfaces
        if any(interface == name if whole else interface.startswith(name) for name in names)
    }
    return set(interfaces - fits) if chosen.startswith("^") else fits


def _interfaces() -> set[str]:
    """Those that are up and have an address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = psutil.net_if_addrs().items()
    return {
        name
        for name, entries in addresses
        if name in up and any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
    }


def _dotted(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def compiling_lacks() -> str | None:
    """Says what is missing for it; None if nothing is.

    torch.compile writes Triton, which builds what launches its kernels in C on every machine, once: with $CC,
    gcc or clang, against Python's headers (`triton.runtime.build`).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang"))):
        return "a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files"
    return None
