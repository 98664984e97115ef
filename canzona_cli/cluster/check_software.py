"""Doctor's checks of Python, packages, torch with its communication backends, GPUs and Slurm."""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from canzona_cli.cluster.findings import Finding
from canzona_cli.cluster.machine import GpuInfo

_NAME = "canzona"
PROBE_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 5.0
_PURPOSES = {
    "torch": "tensors, torchrun, collectives",
    "megatron-core": "the model, parallelism, baseline optimizers",
    "emerging-optimizers": "Megatron's Muon",
    "hydra-core": "recipes and overrides",
    "omegaconf": "recipes and overrides",
    "pydantic": "checking a whole recipe at once",
    "rich": "tables and the live view",
    "typer": "the command line",
    "numpy": "prepared data",
    "blake3": "hashing checkpoints",
    "safetensors": "reading checkpoints",
    "tokenizers": "byte-pair encodings",
    "psutil": "process trees, memory and ports",
    "packaging": "comparing versions",
}
_OPTIONAL = {
    "transformer-engine": "fused layers and sequence parallelism on GPUs; without it the local layers train the same",
    "tensorboard": "run.tensorboard=true",
}


def python() -> Iterator[Finding]:
    """The interpreter and the packages that canzona requires, without importing any of them."""
    version = platform.python_version()
    try:
        about = metadata.metadata(_NAME)
    except metadata.PackageNotFoundError:
        yield Finding(
            group="python",
            name=_NAME,
            status="warn",
            value="not installed as a package",
            meaning="the versions it requires are not known here",
            fix=f"{sys.executable} -m pip install --editable FOLDER, with the folder of its pyproject.toml",
        )
        return
    wanted = SpecifierSet(about["Requires-Python"])
    fine = version in wanted
    yield Finding(
        group="python",
        name="Python",
        status="ok" if fine else "fail",
        value=f"{version}, {sys.executable}",
        meaning=f"megatron-core needs {wanted}",
        fix="" if fine else f"install Python {wanted} and set up a new virtual environment with it",
    )
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    order = [*_PURPOSES]
    for requirement in sorted(requirements, key=lambda r: order.index(r.name) if r.name in order else len(order)):
        if requirement.marker is None or requirement.marker.evaluate():
            yield package(requirement)
    for name, purpose in _OPTIONAL.items():
        value = _installed(name) or "not installed"
        yield Finding(group="python", name=name, status="info", value=value, meaning=f"optional, for {purpose}")


def admits(requirement: Requirement, version: str) -> bool:
    """Whether a version satisfies a requirement; a pre-release counts as its release: 2.10.0a0+cu130 is a 2.10."""
    return requirement.specifier.contains(Version(version).base_version)


def package(requirement: Requirement) -> Finding:
    """Whether a required package is installed in a version that will do."""
    version, purpose = _installed(requirement.name), _PURPOSES.get(requirement.name, "running canzona")
    wanted = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the least version first
    fine = version is not None and admits(requirement, version)
    return Finding(
        group="python",
        name=requirement.name,
        status="ok" if fine else "fail",
        value=version or "not installed",
        meaning=f"{purpose} ({wanted})",
        fix="" if fine else f"{sys.executable} -m pip install '{requirement.name}{wanted}'",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
            return last[-1].strip() if last else f"its process ended with code {code} and no message"
        return found if isinstance(found, dict) else "its answer cannot be read"

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
            fix=f"see the whole error: {sys.executable} -c 'import torch'; then reinstall torch",
        )
        return
    build = f"CUDA {found['cuda_build']}" if found.get("cuda_build") else "CPU only"
    yield Finding(
        group="torch",
        name="build",
        status="ok",
        value=f"{found.get('torch')}, {build}",
        meaning="runs on CPU too" if found.get("cuda_build") else "cannot use GPUs",
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
