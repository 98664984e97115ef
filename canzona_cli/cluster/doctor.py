"""Everything `canzona doctor` looks at: versions, torch, GPUs, memory, disks, network,
Slurm and variables."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from canzona_cli.cluster.gpus import GpuInfo, gpu_inventory, installed_gpus
from canzona_cli.cluster.machine import (
    LOOPBACK,
    LOOPBACK_FIX,
    admits,
    compiling_lacks,
    driver_problem,
    fused_layers_problem,
    install_fused_layers,
    installed_version,
    interface_problem,
    loopback_problem,
    processor_name,
    torch_lacks,
)
from canzona_cli.errors import ExitCode, Problem
from canzona_cli.run.machine import cores, existing_folder, tool_output

Status = Literal["ok", "info", "warn", "fail"]
Group = Literal["python", "torch", "gpu", "machine", "storage", "network", "slurm", "environment"]

VERSION = 1
_GIB = 2**30
_RANKS = 8
"""The number of ranks that try to meet: those of a machine with eight GPUs."""
_PROBE_TIMEOUT_S = 60.0
_RESOLVE_TIMEOUT_S = 3.0
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets for its workers; left over in a shell,
they confuse whatever starts there."""
_WATCHED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "NVTE_", "OMP_", "MKL_", "CUBLAS_", "PYTORCH_", "CANZONA_CACHE")
"""Beginnings of the names of variables that change how workers run."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    group: Group
    name: str
    status: Status
    """ok; info: worth knowing; warn: something will be slow or unavailable; fail: no run is possible."""
    value: str
    """The value that was found."""
    meaning: str
    """The meaning for training, in one line."""
    fix: str = ""
    """The fix; every warning and failure has one."""


def _judged(
    group: Group, name: str, fine: bool, value: str, meaning: str, fix: str = "", *, otherwise: Status = "warn"
) -> Finding:
    """A finding that is ok where it is fine; else as bad as `otherwise`, with its fix."""
    status: Status = "ok" if fine else otherwise
    return Finding(group=group, name=name, status=status, value=value, meaning=meaning, fix="" if fine else fix)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings about this machine."""

    findings: tuple[Finding, ...]
    gpus: int
    """GPUs that torch can really use."""
    slurm: bool
    """True if jobs can be submitted from here."""

    @property
    def ok(self) -> bool:
        """True if some run, if only on CPU, is possible."""
        return not self.count("fail")

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.ok else ExitCode.ENVIRONMENT

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> Mapping[str, object]:
        """The stable form of `canzona doctor --json`; additions keep `version`, anything else raises it."""
        return {
            "version": VERSION,
            "ok": self.ok,
            "exit_code": int(self.exit_code),
            "can": {"cpu": self.ok, "cuda": self.ok and self.gpus > 0, "slurm": self.slurm},
            "gpus": self.gpus,
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose(*, run_root: Path = Path("runs")) -> Diagnosis:
    """Look at this machine as a run would find it, in a few seconds; changes nothing on it.

    Args:
        run_root: where run directories would go.
    """
    visible, installed, probed = gpu_inventory(), len(installed_gpus()), _probe()
    usable = not isinstance(probed, str) and probed.get("cuda_available") is True
    here = (*_machine(), *_storage(run_root, bool(visible)), *network())
    slurm = _slurm()
    return Diagnosis(
        findings=(*packages(), *_torch(probed), *gpus(usable, visible, installed), *here, slurm, *_environment()),
        gpus=len(visible) if usable else 0,
        slurm=slurm.status == "ok",
    )


def packages() -> Iterator[Finding]:
    """The interpreter and the packages that canzona asks for, by its own metadata,
    without importing any of them."""
    try:
        about = metadata.metadata("canzona")
    except metadata.PackageNotFoundError:
        fix = f"{sys.executable} -m pip install --editable FOLDER, with the folder of its pyproject.toml"
        meaning = "the versions it requires are not known here"
        yield _judged("python", "canzona", False, "not installed as a package", meaning, fix)
        return
    asked = SpecifierSet(about["Requires-Python"])
    version, fix = platform.python_version(), f"install Python {asked} and set up a new virtual environment with it"
    meaning = f"required ({asked})"
    yield _judged("python", "Python", version in asked, f"{version}, {sys.executable}", meaning, fix, otherwise="fail")
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    yield from (package(one) for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""}))
    for extra in about.get_all("Provides-Extra") or ():
        install = install_fused_layers() if extra == "te" else f"pip install 'canzona[{extra}]'"
        meaning = f"optional: {install}"
        for one in requirements:
            if extra != "dev" and one.marker is not None and one.marker.evaluate({"extra": extra}):
                value = installed_version(one.name) or "not installed"
                yield _judged("python", one.name, False, value, meaning, otherwise="info")


def package(requirement: Requirement) -> Finding:
    """Checks that a required package is installed in a version that will do."""
    name, version = requirement.name, installed_version(requirement.name)
    asked = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the least version first
    fine = version is not None and admits(requirement, version)
    fix = f"{sys.executable} -m pip install '{name}{asked}'"
    return _judged("python", name, fine, version or "not installed", f"required ({asked})", fix, otherwise="fail")


def _probe() -> dict[str, object] | str:
    """Imports torch in a process of its own, in which two ranks meet over gloo; its findings, or why there are none."""
    # What a run on one machine uses, so that this tests what a run will do.
    environment = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    folders = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = (sys.executable, "-m", "canzona_cli.training.probe")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing and trying it took longer than {_PROBE_TIMEOUT_S:.0f} s"
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"its process ended with code {done.returncode} and no message"


def _torch(probed: Mapping[str, object] | str) -> Iterator[Finding]:
    """Torch's build and its backends, from what the probe found."""
    if isinstance(probed, str):
        fix = f"see the whole error: {sys.executable} -c 'import torch'; then reinstall torch"
        yield _judged("torch", "import", False, probed, "no worker can start", fix, otherwise="fail")
        return
    cuda = probed.get("cuda_build")
    value = f"{probed.get('torch')}, {f'CUDA {cuda}' if cuda else 'CPU only'}"
    yield _judged("torch", "build", True, value, "runs on CPU too" if cuda else "cannot use GPUs")
    problem = probed.get("gloo_error") if probed.get("gloo_built") else "torch was built without it"
    fix = "allow connections on the loopback interface, or name another: GLOO_SOCKET_IFNAME=eth0"
    value = str(problem or "two ranks met and added up a tensor")
    yield _judged("torch", "gloo", not problem, value, "the backend of CPU ranks", fix, otherwise="fail")
    nccl = probed.get("nccl")
    value = str(nccl or "not in this build")
    yield _judged("torch", "NCCL", bool(nccl), value, "the backend of GPU ranks", otherwise="info")
    lacking = torch_lacks()
    meaning = "training is right without" if lacking else "all that canzona uses on GPUs"
    value = f"without {', '.join(lacking)}" if lacking else "complete"
    yield _judged("torch", "features", not lacking, value, meaning, otherwise="info")


def gpus(usable: bool, visible: Sequence[GpuInfo], installed: int) -> Iterator[Finding]:
    """GPUs of the machine (`installed`), those this shell may use (`visible`),
    and what running on them needs.

    Args:
        usable: True if torch can use them.
    """
    if not visible:
        meaning = "CPU recipes run here: recipe=qwen3-tiny, qwen3-mini; for larger ones, see train --dry-run"
        hidden = f"{installed} hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
        otherwise: Status = "warn" if installed else "info"
        value, fix = hidden if installed else "none", "unset CUDA_VISIBLE_DEVICES"
        yield _judged("gpu", "GPUs", False, value, meaning, fix * bool(installed), otherwise=otherwise)
        return
    kinds = Counter(replace(gpu, uuid="") for gpu in visible).items()
    value = ", ".join(
        f"{count} x {gpu.name}" + (f" {gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else "")
        for gpu, count in kinds
    )
    value += f" of {installed} in the machine" if installed > len(visible) else ""
    meaning = f"a run on this machine takes up to gpus={len(visible)}" if usable else "torch cannot use them"
    fix = "install the torch build for this driver (pytorch.org/get-started), or update the driver"
    yield _judged("gpu", "GPUs", usable, value, meaning, fix)
    lacks = compiling_lacks()
    yield _needed("driver", visible[0].driver or "there is one", driver_problem(), "it runs torch's CUDA")
    version, meaning = (
        installed_version("transformer-engine"),
        "fused layers, used where it is installed",
    )
    yield _needed("Transformer Engine", version or "not installed", fused_layers_problem(), meaning)
    value = f"{lacks} is missing" if lacks else "a C compiler, Python's header files and Triton"
    meaning = "SwiGLU and the loss run unfused, on all machines of a run" if lacks else "torch.compile can fuse kernels"
    fix = "install gcc and your Python's development package (python3-dev), or set CC"
    yield _judged("gpu", "compiler", lacks is None, value, meaning, fix)


def _needed(name: str, value: str, problem: Problem | None, meaning: str) -> Finding:
    """Judges a need of GPU ranks as a run would."""
    reason, fix = (problem.reason, problem.fix) if problem else (meaning, "")
    return _judged("gpu", name, problem is None, value, reason, fix)


def _machine() -> Iterator[Finding]:
    """Cores and memory this process may use; containers and Slurm may grant less than there is."""
    meaning = "CPU ranks share them; more ranks than cores works, slowly"
    yield _judged("machine", "CPU cores", True, f"{cores()} of {os.cpu_count()}, {processor_name()}", meaning)
    memory = psutil.virtual_memory()
    try:
        limit = int(_CONTAINER_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        limit = memory.total
    total = min(memory.total, limit)
    available = min(memory.available, total)
    value = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    meaning, fix = "a CPU rank takes about 0.75 GiB before its model", "close other programs, or use fewer ranks"
    yield _judged("machine", "memory", available >= 3 * _GIB, value, meaning, fix)


def _storage(run_root: Path, on_gpus: bool) -> Iterator[Finding]:
    """Room and permission where runs, prepared data and temporary files go; shared memory."""
    cache = Path(os.environ.get("CANZONA_CACHE") or "~/.cache/canzona").expanduser()
    yield _place("runs", run_root, "run directories go here", "run.root")
    yield _place("cache", cache, "prepared corpora go here", "CANZONA_CACHE")
    yield _place("temporary", Path(tempfile.gettempdir()), "workers start from here", "TMPDIR", unwritable="fail")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        meaning = "NCCL passes data between GPUs of one machine through it"
        fix = "start the container with --shm-size=8g or --ipc=host"
        otherwise: Status = "warn" if on_gpus else "info"
        value = f"{total / _GIB:.1f} GiB"
        yield _judged("storage", "/dev/shm", total >= _GIB, value, meaning, fix, otherwise=otherwise)


def _place(name: str, path: Path, meaning: str, setting: str, *, unwritable: Status = "warn") -> Finding:
    existing, fix = existing_folder(path.expanduser().absolute()), f"{setting}=DIR with a directory you may write to"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        value = f"{path}: {existing} cannot be written"
        return _judged("storage", name, False, value, meaning, fix, otherwise=unwritable)
    free = shutil.disk_usage(existing).free
    value = f"{path}, {free / _GIB:.1f} GiB free"
    return _judged("storage", name, free >= 2 * _GIB, value, meaning, f"free some space, or {fix}")


def network() -> Iterator[Finding]:
    """The loopback interface, and the resolution of this machine's name."""
    problem = loopback_problem(_RANKS)
    value = problem or f"{_RANKS} ranks can meet on {LOOPBACK}"
    meaning = "the ranks of one machine meet there"
    yield _judged("network", "loopback", problem is None, value, meaning, LOOPBACK_FIX, otherwise="fail")
    name = socket.gethostname()
    # In a process, because a resolver without an answer blocks for many seconds and has no timeout of its own.
    look_up = f"import socket; print(socket.getaddrinfo({name!r}, None)[0][4][0])"
    address = (tool_output(sys.executable, "-c", look_up, timeout_s=_RESOLVE_TIMEOUT_S) or "").strip()
    value = f"{name} is {address or 'not resolved'}"
    if address.startswith(("127.", "::1")):
        meaning = "fine on one machine; for several, gloo needs GLOO_SOCKET_IFNAME with the interface between them"
        yield _judged("network", "host name", False, value, meaning, otherwise="info")
        return
    fix = f"add it to /etc/hosts (ADDRESS {name}), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    yield _judged("network", "host name", bool(address), value, "ranks on several machines find each other by it", fix)


def _slurm() -> Finding:
    version = tool_output("sbatch", "--version")
    meaning = "jobs can be submitted" if version else "runs start on this machine only"
    value = version.strip() if version else "no sbatch here"
    return _judged("slurm", "Slurm", bool(version), value, meaning, otherwise="info")


def _environment() -> Iterator[Finding]:
    """Variables that change what torch, NCCL or gloo do."""
    left_over = [name for name in _TORCHRUN if name in os.environ]
    if left_over:
        value = ", ".join(f"{name}={os.environ[name]}" for name in left_over)
        meaning = "torchrun sets these for its workers; outside of one they mislead tools"
        yield _judged("environment", "left over", False, value, meaning, f"unset {' '.join(left_over)}")
    for name in sorted(name for name in os.environ if name.startswith(_WATCHED)):
        value = os.environ[name]
        problem = interface_problem(value, alone=True) if name == "NCCL_SOCKET_IFNAME" else None
        reason, fix = (problem.reason, problem.fix) if problem else ("changes how workers run; kept as it is", "")
        yield _judged("environment", name, False, value or "(empty)", reason, fix, otherwise="warn" if fix else "info")
