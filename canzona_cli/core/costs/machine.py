"""Facts about this machine, collected without torch: its processor, the requirements of GPU ranks, and
differences from the machine on which a profile was measured."""

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

from canzona_cli.core.costs.gpus import gpu_inventory
from canzona_cli.core.errors import Problem
from canzona_cli.core.host import cores
from canzona_cli.core.setup import ClusterConfig, Device

_CPU_INFO = Path("/proc/cpuinfo")
LOOPBACK = "127.0.0.1"
"""The address on which the ranks of one machine connect."""
LOOPBACK_FIX = (
    "bring the interface up (ip link set lo up), allow this user to listen on it (sandbox, "
    "firewall, container network), or free ports in the range net.ipv4.ip_local_port_range"
)
_CONNECT_TIMEOUT_S = 5.0


def machine_facts(device: Device) -> dict[str, str | int | float]:
    """Returns facts about this machine that do not identify it: processor, cores, memory, torch's version
    and, for "cuda", the GPU."""
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
    """Returns a warning if a profile was measured on a different machine; empty if it was measured here, or
    not measured at all."""
    here: dict[str, str | int] = {"processor": processor_name(), "cores": cores(), "torch": torch_version()}
    if cluster.device == "cuda":
        # Times depend on the GPU, so a different host processor is not a mismatch.
        here = {"gpu": gpu_name(), "torch": torch_version()}
    measured = cluster.measured_on if cluster.calibrated else {}
    mismatches = [
        f"{name} {measured[name]} there, {value} here"
        for name, value in here.items()
        # torch.__version__ includes the build (2.13.0+cu130); the package's version may not.
        if name in measured and str(measured[name]).partition("+")[0] != str(value).partition("+")[0]
    ]
    if not mismatches:
        return ()
    return (
        f"cluster profile {cluster.name} was measured on another machine ({'; '.join(mismatches)}): "
        "its times may be wrong here; measure this machine with `canzona calibrate`",
    )


def processor_name() -> str:
    """Returns the name of the processor, or its architecture if the system does not report a name."""
    lines = _CPU_INFO.read_text("utf-8", errors="replace").splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def gpu_name() -> str:
    """Returns the name of the first visible GPU; "none" without a GPU."""
    return next((gpu.name for gpu in gpu_inventory()), "none")


def torch_version() -> str:
    """Returns the version of the installed torch without importing it; "none" if torch is not installed."""
    return installed_version("torch") or "none"


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirement(package: str) -> Requirement | None:
    """Returns the requirement, possibly optional, for a package in canzona's metadata; None if there is none,
    or if canzona is not installed as a package."""
    try:
        requirements = map(Requirement, metadata.requires("canzona") or ())
    except metadata.PackageNotFoundError:
        return None
    return next((requirement for requirement in requirements if requirement.name == package), None)


def admits(requirement: Requirement, version: str) -> bool:
    """Returns True if a version satisfies a requirement. A pre-release is treated as its release (2.10.0a0 as
    2.10.0)."""
    return requirement.specifier.contains(Version(version).base_version)


def loopback_problem(ranks: int) -> str | None:
    """Tries to open a port and connect on the loopback interface for each of `ranks` ranks; returns the
    error, or None if all succeed."""
    try:
        with ExitStack() as sockets:
            for _ in range(ranks + 1):  # one more for torchrun's store
                server = sockets.enter_context(socket.create_server((LOOPBACK, 0)))
                sockets.enter_context(socket.create_connection(server.getsockname(), timeout=_CONNECT_TIMEOUT_S))
    except OSError as error:
        return error.strerror or str(error)
    return None


_DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""The first driver that supports all minor releases of each major release of CUDA.
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_GET_TORCH = "install a torch that is built for it (pytorch.org/get-started)"

_NCCL2_WAITS = Version("2.15")
"""The first torch whose nccl2 backend waits for all collectives of a coalesced group (its
`ProcessGroupNCCL.hpp`)."""

Release = tuple[int, int]
"""A release of CUDA, such as (13, 2)."""


def driver_problem() -> Problem | None:
    """Returns a problem if the driver cannot run torch's CUDA release, or if torch was built without CUDA.

    Returns None if the driver can run it, or if either version is unknown.
    """
    needed, supported = torch_cuda(), driver_cuda()
    if supported is None or needed is None:
        return None
    if needed == (0, 0):
        reason = "this torch is built without CUDA and cannot use the GPUs here"
        return Problem("torch", reason, _GET_TORCH, value=torch_version())
    if supported[0] >= needed[0]:
        return None
    newer = f" to {_DRIVERS[needed[0]]} or later" if needed[0] in _DRIVERS else ""
    reason = f"is too old for torch {torch_version()} here, which is built for CUDA {_release_text(needed)}"
    fix = f"update the driver{newer}, or {_GET_TORCH}"
    return Problem("NVIDIA driver", reason, fix, value=f"for CUDA {_release_text(supported)}")


def driver_cuda() -> Release | None:
    """Returns the newest CUDA release that the driver supports; None without a driver.

    If NVIDIA's compatibility package is on the library path, its release is returned instead.
    """
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def torch_cuda() -> Release | None:
    """Returns the CUDA release for which the installed torch was built; (0, 0) for a build without CUDA, None
    if it is unknown."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=]*=\s*(?:None|'(\d+)\.(\d+))", text, re.MULTILINE)
    return version and (int(version[1] or 0), int(version[2] or 0))


def missing_torch_features() -> list[str]:
    """Lists the optional features that the installed torch does not have, without importing it. Training is
    correct without them."""
    version = installed_version("torch")
    if version is None or Version(version) >= _NCCL2_WAITS:
        return []
    return ["an NCCL backend nccl2 that waits for reductions (since torch 2.15; nccl is used instead)"]


def backend_problem(chosen: str | None) -> Problem | None:
    """Returns a problem if TORCH_DIST_USE_NCCL2 selects a backend that may use gradients before they arrive.

    Before torch 2.15, the end of a coalesced group in the nccl2 backend waits for sends and receives, but is
    not documented to wait for reductions.

    Args:
        chosen: the value of TORCH_DIST_USE_NCCL2; None if it is not set.
    """
    version = installed_version("torch")
    if chosen in (None, "0") or version is None or Version(version) >= _NCCL2_WAITS:
        return None
    reason = f"selects an NCCL backend that may not wait for all reductions of a bucket in torch {version}"
    return Problem("TORCH_DIST_USE_NCCL2", reason, "unset it, or install torch 2.15", value=chosen)


def fused_layers_problem() -> Problem | None:
    """Returns a problem if Transformer Engine is missing or its version is untested with megatron-core;
    otherwise None."""
    version, needed = installed_version("transformer-engine"), requirement("transformer-engine")
    key = "cluster.transformer_engine"
    fix = f"{install_fused_layers()}, or {key}=false, which builds the same model without it"
    if importlib.util.find_spec("transformer_engine") is None:
        return Problem(key, "Transformer Engine is not installed here", fix, value=True)
    if version is None or needed is None or admits(needed, version):
        return None
    reason = f"megatron-core was not tested with Transformer Engine {version}, only with {bounds_text(needed)}"
    return Problem(key, reason, fix, value=True)


def install_fused_layers() -> str:
    """Returns the command that installs Transformer Engine, with its requirements in parentheses.

    The PyTorch extension is a source package, and an isolated build would not find torch (NVIDIA's
    installation guide).
    """
    needed = requirement("transformer-engine")
    name = f"transformer-engine[core_cu13,pytorch]{'' if needed is None else bounds_text(needed)}"
    return f"pip install --no-build-isolation '{name}' (takes minutes to compile; needs nvcc and cuDNN's headers)"


def bounds_text(requirement: Requirement) -> str:
    """Returns the version bounds of a requirement as text, the lower bound first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def interface_problem(chosen: str | None, *, alone: bool) -> Problem | None:
    """Returns a problem if NCCL_SOCKET_IFNAME is set but matches no usable network interface; otherwise None.

    Args:
        chosen: the value of NCCL_SOCKET_IFNAME: prefixes of names, or full names after a leading `=`,
            separated by commas. A leading `^` excludes the matches instead. None or empty if it is not set.
        alone: True if the run uses only this machine, so that the loopback interface is usable.
    """
    if not chosen:
        return None
    up = _interfaces()
    usable = up if alone else {name for name in up if not name.startswith("lo")}
    if matching_interfaces(chosen, usable):
        return None
    names = ", ".join(sorted(usable)) or "none"
    where = "" if alone else " and leads to other machines"
    reason = f"matches no network interface that is up{where}"
    fix = f"unset it, or use an interface that is up here: {names}"
    return Problem("NCCL_SOCKET_IFNAME", reason, fix, value=chosen)


def matching_interfaces(chosen: str, interfaces: Set[str]) -> set[str]:
    """Returns the interfaces that match a value of NCCL_SOCKET_IFNAME, as in NCCL's src/misc/socket.cc."""
    patterns = chosen.removeprefix("^")
    exact = patterns.startswith("=")
    names = [name.partition(":")[0] for name in patterns.removeprefix("=").split(",") if name]
    prefixes = tuple(names)
    matches = {name for name in interfaces if (name in names if exact else name.startswith(prefixes))}
    return set(interfaces - matches) if chosen.startswith("^") else matches


def _interfaces() -> set[str]:
    """Returns the network interfaces that are up and have an IP address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = psutil.net_if_addrs().items()
    return {
        name
        for name, entries in addresses
        if name in up and any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
    }


def _release_text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def missing_for_compiling() -> str | None:
    """Returns the first requirement of torch.compile that this machine does not meet; None if it meets all.

    torch.compile generates Triton kernels. On each machine Triton compiles the C code that launches them,
    with $CC, gcc or clang and Python's headers (`triton.runtime.build`).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang"))):
        return "a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files"
    return None
