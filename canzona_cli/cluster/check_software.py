"""Doctor's checks of Python, packages, torch with its communication backends, GPUs and Slurm."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from canzona_cli.cluster.detect import GpuInfo
from canzona_cli.cluster.findings import Finding

MINIMUM_PYTHON = (3, 12)
PROBE_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A package we need: at least `minimum`, below `below` if given; the same as in pyproject.toml."""

    minimum: str
    below: str | None = None
    purpose: str

    @property
    def specifier(self) -> str:
        return f">={self.minimum}" + (f",<{self.below}" if self.below else "")

    def admits(self, version: str) -> bool:
        release = _release(version)
        return release >= _release(self.minimum) and (self.below is None or release < _release(self.below))


PINS: Mapping[str, Pin] = {
    "torch": Pin(minimum="2.10", purpose="tensors, torchrun, collectives"),
    "megatron-core": Pin(minimum="0.19.2", below="0.20", purpose="the model, parallelism, baseline optimizers"),
    "emerging-optimizers": Pin(minimum="0.3", below="0.4", purpose="Megatron's Muon"),
    "hydra-core": Pin(minimum="1.3.8", below="1.4", purpose="recipes and overrides"),
    "omegaconf": Pin(minimum="2.3", below="2.4", purpose="recipes and overrides"),
    "pydantic": Pin(minimum="2.11", below="3", purpose="checking a whole recipe at once"),
    "numpy": Pin(minimum="2", purpose="prepared data"),
    "tokenizers": Pin(minimum="0.22", purpose="byte-pair encodings"),
}
_OPTIONAL = {
    "transformer-engine": "fused layers and sequence parallelism on GPUs; without it the local layers train the same",
    "tensorboard": "run.tensorboard=true",
}


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without local part and pre-release: `2.10.0a0+cu130` is (2, 10)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def python() -> Iterator[Finding]:
    """The interpreter and the packages it finds, without importing any of them."""
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info[:2] >= MINIMUM_PYTHON
    yield Finding(
        group="python",
        name="Python",
        status="ok" if fine else "fail",
        value=f"{version}, {sys.executable}",
        meaning="megatron-core needs 3.12 or newer",
        fix="" if fine else "install Python 3.12 or newer and set up a new virtual environment with it",
    )
    for name, pin in PINS.items():
        yield _package(name, pin)
    for name, purpose in _OPTIONAL.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        yield Finding(group="python", name=name, status="info", value=found, meaning=f"optional, for {purpose}")


def _package(name: str, pin: Pin) -> Finding:
    fix = f"{sys.executable} -m pip install '{name}{pin.specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(
            group="python",
            name=name,
            status="fail",
            value="not installed",
            meaning=f"needed for {pin.purpose}",
            fix=fix,
        )
    fine = pin.admits(version)
    return Finding(
        group="python",
        name=name,
        status="ok" if fine else "fail",
        value=version,
        meaning=f"{pin.purpose} ({pin.specifier})",
        fix="" if fine else fix,
    )


class TorchProbe:
    """Two processes that import torch and meet over gloo, started at once so that other checks run meanwhile."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="canzona-doctor-")
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        # What a run on one machine uses, so that this tests what a run will do; leftovers of torchrun would confuse it.
        environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN_VARIABLES}
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "canzona_cli.training.probe", str(Path(self._folder.name) / "store"), str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in (0, 1)
        ]

    def result(self) -> dict[str, object] | str:
        """Rank 0's findings, or why there are none."""
        try:
            out, err = self._processes[0].communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"importing and trying it took longer than {PROBE_TIMEOUT_S:.0f} s"
        finally:
            self.close()
        code = self._processes[0].returncode
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = [line for line in err.splitlines() if line.strip()]
            return last[-1].strip() if last else f"its process ended with code {code} and said nothing"
        return found if isinstance(found, dict) else "it answered with something else than findings"

    def close(self) -> None:
        """End both processes and remove their folder."""
        for process in self._processes:
            if process.poll() is None:
                try:
                    # Rank 1 ends by itself once both have met.
                    process.communicate(timeout=5 if self._processes[0].poll() == 0 else 0.1)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
        self._folder.cleanup()


_TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})


def torch_backends(found: Mapping[str, object] | str) -> Iterator[Finding]:
    """Torch's build and its backends, from what the probe found."""
    if isinstance(found, str):
        yield Finding(
            group="torch",
            name="import",
            status="fail",
            value=found,
            meaning="no worker can start",
            fix=f"see the whole error: {sys.executable} -c 'import torch'; then install torch anew",
        )
        return
    build = f"CUDA {found['cuda_build']}" if found.get("cuda_build") else "CPU only"
    yield Finding(
        group="torch",
        name="build",
        status="ok",
        value=f"{found.get('torch')}, {build}",
        meaning="runs on CPU too" if found.get("cuda_build") else "cannot use GPUs, should there be any",
    )
    problem = found.get("gloo_error") if found.get("gloo_built") else "torch was built without it"
    yield Finding(
        group="torch",
        name="gloo",
        status="fail" if problem else "ok",
        value=str(problem) if problem else "two processes met and added up a tensor",
        meaning="the backend of CPU ranks" if not problem else "ranks on CPU cannot talk to one another",
        fix="allow connections on the loopback interface, or name another: GLOO_SOCKET_IFNAME=eth0" if problem else "",
    )
    nccl = found.get("nccl")
    yield Finding(
        group="torch",
        name="NCCL",
        status="ok" if nccl else "info",
        value=str(nccl) if nccl else "not in this build",
        meaning="the backend of GPU ranks",
    )
    bf16, fp32 = found.get("bf16_gflops"), found.get("fp32_gflops")
    if isinstance(bf16, float) and isinstance(fp32, float):
        slow = bf16 < fp32
        yield Finding(
            group="torch",
            name="CPU matmul",
            status="warn" if slow else "ok",
            value=f"bf16 {bf16:,.0f}, fp32 {fp32:,.0f} GFLOP/s a thread",
            meaning="CPU runs in bf16 are slower than in fp32" if slow else "CPU runs are fastest in bf16, the default",
            fix="train.precision=fp32 for CPU runs" if slow else "",
        )


def gpus(found: Mapping[str, object] | str, visible: Sequence[GpuInfo], installed: int) -> Iterator[Finding]:
    """GPUs of the machine (`installed`), those this shell may use (`visible`), and whether torch can use them."""
    usable = not isinstance(found, str) and bool(found.get("cuda_available"))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        masked = installed > 0
        yield Finding(
            group="gpu",
            name="GPUs",
            status="warn" if masked else "info",
            value=f"{installed} hidden by CUDA_VISIBLE_DEVICES={mask}" if masked else "none",
            meaning="CPU recipes run here: recipe=qwen3-tiny, qwen3-mini; for larger ones, see train --dry-run",
            fix="unset CUDA_VISIBLE_DEVICES" if masked else "",
        )
        return
    kinds = ", ".join(
        f"{count} x {gpu.name}" + (f" {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else "")
        for gpu, count in Counter(dataclasses.replace(gpu, uuid="") for gpu in visible).items()
    )
    yield Finding(
        group="gpu",
        name="GPUs",
        status="ok" if usable else "warn",
        value=kinds + (f" of {installed} in the machine" if installed > len(visible) else ""),
        meaning=f"a run on this machine takes up to gpus={len(visible)}" if usable else "torch cannot use them",
        fix="" if usable else "install the torch build for this driver (pytorch.org/get-started), or update the driver",
    )
    driver = run_tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver and driver.strip():
        version = driver.split()[0]
        yield Finding(
            group="gpu", name="driver", status="ok", value=version, meaning="must be new enough for torch's CUDA build"
        )


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted, and whether this is already inside one."""
    version = run_tool("sbatch", "--version")
    yield Finding(
        group="slurm",
        name="Slurm",
        status="ok" if version else "info",
        value=version.strip() if version else "no sbatch here",
        meaning="jobs can be submitted" if version else "runs start on this machine only",
    )
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "?")
        yield Finding(
            group="slurm",
            name="allocation",
            status="info",
            value=f"job {job} on {nodes}",
            meaning="this shell is inside an allocation: what it may use is the allocation's share",
        )


def run_tool(tool: str, *arguments: str) -> str | None:
    """Standard output of a command-line tool; None when it is missing, fails or hangs."""
    path = shutil.which(tool)
    if path is None:
        return None
    command: Sequence[str] = (path, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
