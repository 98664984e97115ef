"""The checks of `canzona doctor`: versions, torch, GPUs, memory, disks, network, Slurm and environment
variables."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from canzona_cli.core.costs import machine
from canzona_cli.core.costs.gpus import GpuInfo, gpu_inventory, installed_gpus
from canzona_cli.core.errors import ExitCode, Problem
from canzona_cli.core.host import cores, existing_folder, tool_output
from canzona_cli.core.reading import expanded
from canzona_cli.records.files import cache_root

Status = Literal["ok", "info", "warn", "fail"]
Group = Literal["python", "torch", "gpu", "machine", "storage", "network", "slurm", "environment"]

VERSION = 1
_GIB = 2**30
_RANKS = 8
"""The number of ranks in the loopback check: as many as on a machine with eight GPUs."""
_PROBE = "canzona_cli.training.probe"
_PROBE_TIMEOUT_S = 60.0
_RESOLVE_TIMEOUT_S = 3.0
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets for its workers. Left over in a shell, they mislead the programs
that it starts."""
_WATCHED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "NVTE_", "OMP_", "MKL_", "CUBLAS_", "PYTORCH_", "CANZONA_CACHE")
"""The prefixes of environment variables that change how workers run."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    group: Group
    name: str
    status: Status
    """The severity: ok; info for something worth knowing; warn if something will be slow or unavailable; fail
    if no run is possible."""
    value: str
    """The value on this machine."""
    meaning: str
    """The meaning of the value for training, in one line."""
    fix: str = ""
    """The thing to do; not empty for warnings and failures."""


def _finding(
    group: Group, name: str, ok: bool, value: str, meaning: str, fix: str = "", *, otherwise: Status = "warn"
) -> Finding:
    """Makes a finding: with the status ok if `ok` is True, otherwise with the status `otherwise` and the
    fix."""
    status: Status = "ok" if ok else otherwise
    return Finding(group=group, name=name, status=status, value=value, meaning=meaning, fix="" if ok else fix)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings about this machine."""

    findings: tuple[Finding, ...]
    gpus: int
    """The number of visible GPUs that torch can use."""
    slurm: bool
    """True if jobs can be submitted from here."""
    torch_checked: bool
    """True if the check of torch finished; False if it took too long, so that nothing is known about
    torch."""

    @property
    def ok(self) -> bool:
        """True if runs are possible, at least on CPU."""
        return not self.count("fail")

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.ok else ExitCode.ENVIRONMENT

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> Mapping[str, object]:
        """Returns the output of `canzona doctor --json`. Adding a key keeps `version`; any other change
        increments it."""
        return {
            "version": VERSION,
            "ok": self.ok,
            "exit_code": int(self.exit_code),
            "can": {"cpu": self.ok and self.torch_checked, "cuda": self.ok and self.gpus > 0, "slurm": self.slurm},
            "gpus": self.gpus,
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose() -> Diagnosis:
    """Examines this machine as a run would use it. Usually takes a few seconds; changes nothing."""
    visible, installed, probed = gpu_inventory(), len(installed_gpus()), _probe()
    usable = None
    if probed is not None:
        usable = not isinstance(probed, str) and probed.get("cuda_available") is True
    hardware = (*gpus(usable, visible, installed), *_machine(), *_storage(bool(visible)), *network())
    slurm = _slurm()
    return Diagnosis(
        findings=(*packages(), *_torch(probed), *hardware, slurm, *_environment()),
        gpus=len(visible) if usable else 0,
        slurm=slurm.status == "ok",
        torch_checked=probed is not None,
    )


def packages() -> Iterator[Finding]:
    """Checks Python and the packages that canzona's metadata requires, without importing them."""
    try:
        canzona = metadata.metadata("canzona")
    except metadata.PackageNotFoundError:
        fix = f"{sys.executable} -m pip install --editable FOLDER, with the folder of its pyproject.toml"
        meaning = "the required versions are unknown"
        yield _finding("python", "canzona", False, "not installed as a package", meaning, fix)
        return
    required = SpecifierSet(canzona["Requires-Python"])
    version, meaning = platform.python_version(), f"required ({required})"
    value, fix = f"{version}, {sys.executable}", f"set up a new virtual environment with Python {required}"
    yield _finding("python", "Python", version in required, value, meaning, fix, otherwise="fail")
    requirements = [Requirement(text) for text in canzona.get_all("Requires-Dist") or ()]
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield package(requirement)
    for extra in canzona.get_all("Provides-Extra") or ():
        install = machine.install_fused_layers() if extra == "te" else f"pip install 'canzona[{extra}]'"
        meaning = f"optional: {install}"
        for requirement in requirements:
            marker = requirement.marker
            if extra != "dev" and marker is not None and marker.evaluate({"extra": extra}):
                value = machine.installed_version(requirement.name) or "not installed"
                yield _finding("python", requirement.name, False, value, meaning, otherwise="info")
    value = machine.installed_version("deep_ep") or "not installed"
    yield _finding("python", "deep_ep", False, value, "optional: parallel.dispatcher=flex", otherwise="info")


def package(requirement: Requirement) -> Finding:
    """Checks that a required package is installed in a version that satisfies the requirement."""
    name, version = requirement.name, machine.installed_version(requirement.name)
    bounds = machine.bounds_text(requirement)
    ok = version is not None and machine.admits(requirement, version)
    fix = f"{sys.executable} -m pip install '{name}{bounds}'"
    return _finding("python", name, ok, version or "not installed", f"required ({bounds})", fix, otherwise="fail")


def _probe() -> dict[str, object] | str | None:
    """Imports torch in a subprocess and lets two ranks connect over gloo.

    Returns:
        The results; the error message if torch is broken; None if the subprocess did not end in time, which
        may only mean that the machine is busy.
    """
    # Use the same interface as a run on one machine.
    environment = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    folders = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = (sys.executable, "-m", _PROBE)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"the process importing torch exited with code {done.returncode} and no message"


def _torch(probed: Mapping[str, object] | str | None) -> Iterator[Finding]:
    """Checks torch's build and backends from the results of `_probe`."""
    if probed is None:
        value = f"importing and trying torch took longer than {_PROBE_TIMEOUT_S:.0f} s"
        value += f", with a load average of {os.getloadavg()[0]:.0f} on {cores()} cores"
        meaning = "torch may be fine: a busy machine, a slow disk or a hanging driver can delay it"
        fix = f"try again when the machine is less busy; see where it waits: {sys.executable} -X importtime -m {_PROBE}"
        yield _finding("torch", "import", False, value, meaning, fix)
        return
    if isinstance(probed, str):
        fix = f"see the full error: {sys.executable} -c 'import torch'; then reinstall torch"
        yield _finding("torch", "import", False, probed, "no worker can start", fix, otherwise="fail")
        return
    cuda = probed.get("cuda_build")
    value = f"{probed.get('torch')}, {f'CUDA {cuda}' if cuda else 'CPU only'}"
    yield _finding("torch", "build", True, value, "runs on CPU too" if cuda else "cannot use GPUs")
    problem = probed.get("gloo_error") if probed.get("gloo_built") else "torch was built without gloo"
    fix = "allow connections on the loopback interface, or select another: GLOO_SOCKET_IFNAME=eth0"
    value = str(problem or "two ranks connected and summed a tensor")
    yield _finding("torch", "gloo", not problem, value, "the backend of CPU ranks", fix, otherwise="fail")
    nccl = probed.get("nccl")
    value = str(nccl or "not in this build")
    yield _finding("torch", "NCCL", bool(nccl), value, "the backend of GPU ranks", otherwise="info")
    missing = machine.missing_torch_features()
    meaning = "training is correct without them" if missing else "all features that canzona uses on GPUs"
    value = f"without {', '.join(missing)}" if missing else "all that canzona uses are present"
    yield _finding("torch", "features", not missing, value, meaning, otherwise="info")


def gpus(usable: bool | None, visible: Sequence[GpuInfo], installed: int) -> Iterator[Finding]:
    """Checks the GPUs and the software that ranks on GPUs need.

    Args:
        usable: True if torch can use the GPUs; None if this is unknown.
        visible: the GPUs that this shell may use.
        installed: the number of GPUs in the machine.
    """
    if not visible:
        meaning = "CPU recipes run here: recipe=qwen3-tiny, qwen3-mini; for larger models, see train --dry-run"
        hidden = f"{installed} hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
        otherwise: Status = "warn" if installed else "info"
        value, fix = hidden if installed else "none", "unset CUDA_VISIBLE_DEVICES"
        yield _finding("gpu", "GPUs", False, value, meaning, fix if installed else "", otherwise=otherwise)
        return
    kinds = Counter(replace(gpu, uuid="") for gpu in visible).items()
    value = ", ".join(
        f"{count} x {gpu.name}" + (f" {gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else "")
        for gpu, count in kinds
    )
    value += f" of {installed} in the machine" if installed > len(visible) else ""
    meaning = f"a run on this machine can use up to gpus={len(visible)}" if usable else "torch cannot use these GPUs"
    fix = "install the torch build for this driver (pytorch.org/get-started), or update the driver"
    if usable is None:
        meaning, fix = "torch took too long to say whether it can use these GPUs", "see torch above"
    yield _finding("gpu", "GPUs", usable is True, value, meaning, fix)
    lack = machine.missing_for_compiling()
    driver = visible[0].driver or "installed, version unknown"
    yield _requirement_finding("driver", driver, machine.driver_problem(), "runs torch's CUDA")
    version = machine.installed_version("transformer-engine") or "not installed"
    meaning = "fused layers, used if installed"
    yield _requirement_finding("Transformer Engine", version, machine.fused_layers_problem(), meaning)
    value = f"{lack} is missing" if lack else "a C compiler, Python's header files and Triton"
    meaning = "SwiGLU and the loss run unfused on every machine of a run" if lack else "torch.compile can fuse kernels"
    fix = "install gcc and your Python's development package (python3-dev), or set CC"
    yield _finding("gpu", "compiler", lack is None, value, meaning, fix)


def _requirement_finding(name: str, value: str, problem: Problem | None, meaning: str) -> Finding:
    """Makes the finding for a requirement of GPU ranks, with the problem that a run would report."""
    reason, fix = (problem.reason, problem.fix) if problem else (meaning, "")
    return _finding("gpu", name, problem is None, value, reason, fix)


def _machine() -> Iterator[Finding]:
    """Checks the cores and the memory that this process may use. Containers and Slurm may limit both."""
    meaning = "shared by CPU ranks; more ranks than cores run, but slowly"
    yield _finding("machine", "CPU cores", True, f"{cores()} of {os.cpu_count()}, {machine.processor_name()}", meaning)
    memory = psutil.virtual_memory()
    try:
        limit = int(_CONTAINER_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        limit = memory.total
    total = min(memory.total, limit)
    available = min(memory.available, total)
    value = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    meaning, fix = "a CPU rank needs about 0.75 GiB plus its model", "close other programs, or use fewer ranks"
    yield _finding("machine", "memory", available >= 3 * _GIB, value, meaning, fix)


def _storage(on_gpus: bool) -> Iterator[Finding]:
    """Checks space and permissions for runs, prepared data and temporary files, and the size of shared
    memory."""
    yield _folder_finding("runs", Path("runs"), "run directories go here", "run.root")
    yield _folder_finding("cache", cache_root(), "prepared corpora go here", "CANZONA_CACHE")
    temporary = Path(tempfile.gettempdir())
    yield _folder_finding("temporary", temporary, "workers start from here", "TMPDIR", unwritable="fail")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        meaning = "NCCL passes data between GPUs of one machine through /dev/shm"
        fix = "start the container with --shm-size=8g or --ipc=host"
        otherwise: Status = "warn" if on_gpus else "info"
        value = f"{total / _GIB:.1f} GiB"
        yield _finding("storage", "/dev/shm", total >= _GIB, value, meaning, fix, otherwise=otherwise)


def _folder_finding(name: str, path: Path, meaning: str, setting: str, *, unwritable: Status = "warn") -> Finding:
    """Checks that a directory, or its nearest existing parent, is writable and has 2 GiB free."""
    existing = existing_folder(expanded(path).absolute())
    fix = f"use {setting}=DIR with a directory you may write to"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        value = f"{path}: {existing} is not writable"
        return _finding("storage", name, False, value, meaning, fix, otherwise=unwritable)
    free = shutil.disk_usage(existing).free
    value = f"{expanded(path).absolute()}, {free / _GIB:.1f} GiB free"
    return _finding("storage", name, free >= 2 * _GIB, value, meaning, f"free some space, or {fix}")


def network() -> Iterator[Finding]:
    """Checks the loopback interface and the resolution of this machine's host name."""
    problem = machine.loopback_problem(_RANKS)
    value = problem or f"{_RANKS} ranks can connect on {machine.LOOPBACK}"
    meaning = "the ranks of one machine connect on this interface"
    yield _finding("network", "loopback", problem is None, value, meaning, machine.LOOPBACK_FIX, otherwise="fail")
    name = socket.gethostname()
    address = _address(name)
    value = f"{name} resolves to {address}" if address else f"{name} does not resolve"
    if address.startswith(("127.", "::1")):
        meaning = "fine on one machine; on several, gloo needs GLOO_SOCKET_IFNAME=INTERFACE"
        yield _finding("network", "host name", False, value, meaning, otherwise="info")
        return
    fix = f"add it to /etc/hosts (ADDRESS {name}), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    yield _finding("network", "host name", bool(address), value, "ranks on several machines connect by host name", fix)


def _address(name: str) -> str:
    """Returns the address of a host name; empty if it has none or the resolver does not answer in time."""
    addresses: list[str] = []

    def look_up() -> None:
        with suppress(OSError):
            addresses.append(str(socket.getaddrinfo(name, None)[0][4][0]))

    # A lookup without an answer blocks for many seconds and has no timeout, so it runs in a thread. On a busy
    # machine, starting a process could take longer than the lookup.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    return addresses[0] if addresses else ""


def _slurm() -> Finding:
    """Checks whether Slurm's sbatch is installed."""
    version = tool_output("sbatch", "--version")
    meaning = "jobs can be submitted" if version else "runs start on this machine only"
    value = version.strip() if version else "sbatch is not installed"
    return _finding("slurm", "Slurm", bool(version), value, meaning, otherwise="info")


def _environment() -> Iterator[Finding]:
    """Lists environment variables that change how torch, NCCL or gloo behave."""
    left_over = [name for name in _TORCHRUN if name in os.environ]
    if left_over:
        value = ", ".join(f"{name}={os.environ[name]}" for name in left_over)
        meaning = "torchrun sets these for its workers; elsewhere they mislead programs"
        yield _finding("environment", "left over", False, value, meaning, f"unset {' '.join(left_over)}")
    for name in sorted(name for name in os.environ if name.startswith(_WATCHED)):
        value = os.environ[name]
        problem = machine.interface_problem(value, alone=True) if name == "NCCL_SOCKET_IFNAME" else None
        reason, fix = (problem.reason, problem.fix) if problem else ("changes how workers run; left unchanged", "")
        yield _finding("environment", name, False, value or "(empty)", reason, fix, otherwise="warn" if fix else "info")
