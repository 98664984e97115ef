"""Doctor's checks of Python, packages, torch with its communication backends, GPUs and Slurm."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from canzona_cli.cluster.compiler import compiling_lacks
from canzona_cli.cluster.findings import TORCHRUN_VARIABLES, Finding, info, judged
from canzona_cli.cluster.gpu_needs import driver_problem, fused_layers_problem
from canzona_cli.cluster.machine import GpuInfo, admits, installed_version
from canzona_cli.run.machine import tool_output

_NAME = "canzona"
PROBE_TIMEOUT_S = 60.0
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
    "tensorboard": "run.trackers=[tensorboard]",
    "wandb": "run.trackers=[wandb]",
    "transformers": "canzona generate",
    "mlflow-skinny": "run.trackers=[mlflow]",
}


def python() -> Iterator[Finding]:
    """The interpreter and the packages that canzona requires, without importing any of them."""
    version = platform.python_version()
    try:
        about = metadata.metadata(_NAME)
    except metadata.PackageNotFoundError:
        fix = f"{sys.executable} -m pip install --editable FOLDER, with the folder of its pyproject.toml"
        meaning = "the versions it requires are not known here"
        yield judged("python", _NAME, False, "not installed as a package", meaning, fix)
        return
    wanted = SpecifierSet(about["Requires-Python"])
    fix = f"install Python {wanted} and set up a new virtual environment with it"
    value, meaning = f"{version}, {sys.executable}", f"megatron-core needs {wanted}"
    yield judged("python", "Python", version in wanted, value, meaning, fix, otherwise="fail")
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    order = [*_PURPOSES]
    for requirement in sorted(requirements, key=lambda r: order.index(r.name) if r.name in order else len(order)):
        if requirement.marker is None or requirement.marker.evaluate():
            yield package(requirement)
    for name, purpose in _OPTIONAL.items():
        yield info("python", name, installed_version(name) or "not installed", f"optional, for {purpose}")


def package(requirement: Requirement) -> Finding:
    """Whether a required package is installed in a version that will do."""
    name, version = requirement.name, installed_version(requirement.name)
    wanted = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the least version first
    fine = version is not None and admits(requirement, version)
    meaning = f"{_PURPOSES.get(name, 'running canzona')} ({wanted})"
    fix = f"{sys.executable} -m pip install '{name}{wanted}'"
    return judged("python", name, fine, version or "not installed", meaning, fix, otherwise="fail")


class TorchProbe:
    """A process that imports torch, in which two ranks meet over gloo; started at once, so that other checks run
    meanwhile."""

    def __init__(self) -> None:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        # What a run on one machine uses, so that this tests what a run will do; leftovers of torchrun would confuse it.
        environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "canzona_cli.training.probe"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def result(self) -> dict[str, object] | str:
        """Its findings, or why there are none."""
        try:
            out, err = self._process.communicate(timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"importing and trying it took longer than {PROBE_TIMEOUT_S:.0f} s"
        finally:
            self.close()
        code = self._process.returncode
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = [line for line in err.splitlines() if line.strip()]
            return last[-1].strip() if last else f"its process ended with code {code} and no message"
        return found if isinstance(found, dict) else "its answer cannot be read"

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def torch_backends(found: Mapping[str, object] | str) -> Iterator[Finding]:
    """Torch's build and its backends, from what the probe found."""
    if isinstance(found, str):
        fix = f"see the whole error: {sys.executable} -c 'import torch'; then reinstall torch"
        yield judged("torch", "import", False, found, "no worker can start", fix, otherwise="fail")
        return
    cuda = found.get("cuda_build")
    value = f"{found.get('torch')}, {f'CUDA {cuda}' if cuda else 'CPU only'}"
    yield judged("torch", "build", True, value, "runs on CPU too" if cuda else "cannot use GPUs")
    problem = found.get("gloo_error") if found.get("gloo_built") else "torch was built without it"
    if problem:
        fix = "allow connections on the loopback interface, or name another: GLOO_SOCKET_IFNAME=eth0"
        meaning = "ranks on CPU cannot talk to one another"
        yield judged("torch", "gloo", False, str(problem), meaning, fix, otherwise="fail")
    else:
        yield judged("torch", "gloo", True, "two ranks met and added up a tensor", "the backend of CPU ranks")
    nccl = found.get("nccl")
    value = str(nccl or "not in this build")
    yield judged("torch", "NCCL", bool(nccl), value, "the backend of GPU ranks", otherwise="info")
    bf16, fp32 = found.get("bf16_gflops"), found.get("fp32_gflops")
    if isinstance(bf16, float) and isinstance(fp32, float):
        value = f"bf16 {bf16:,.0f}, fp32 {fp32:,.0f} GFLOP/s a thread"
        if found.get("bf16_in_fp32"):
            meaning = "no instructions for bf16: CPU runs make its products in fp32 (cluster.bf16_in_fp32=true)"
            yield info("torch", "CPU matmul", value, meaning)
            return
        slow = bf16 < fp32
        meaning = "CPU runs in bf16 are slower than in fp32" if slow else "CPU runs are fastest in bf16, the default"
        yield judged("torch", "CPU matmul", not slow, value, meaning, "train.precision=fp32 for CPU runs")


def gpus(found: Mapping[str, object] | str, visible: Sequence[GpuInfo], installed: int) -> Iterator[Finding]:
    """GPUs of the machine (`installed`), those this shell may use (`visible`), and whether torch can use them."""
    if not visible:
        meaning = "CPU recipes run here: recipe=qwen3-tiny, qwen3-mini; for larger ones, see train --dry-run"
        if installed:
            value = f"{installed} hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
            yield judged("gpu", "GPUs", False, value, meaning, "unset CUDA_VISIBLE_DEVICES")
        else:
            yield info("gpu", "GPUs", "none", meaning)
        return
    usable = not isinstance(found, str) and bool(found.get("cuda_available"))
    kinds = ", ".join(
        f"{count} x {gpu.name}" + (f" {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else "")
        for gpu, count in Counter(dataclasses.replace(gpu, uuid="") for gpu in visible).items()
    )
    value = kinds + (f" of {installed} in the machine" if installed > len(visible) else "")
    meaning = f"a run on this machine takes up to gpus={len(visible)}" if usable else "torch cannot use them"
    fix = "install the torch build for this driver (pytorch.org/get-started), or update the driver"
    yield judged("gpu", "GPUs", usable, value, meaning, fix)
    problem = driver_problem()
    reason, fix = (problem.reason, problem.fix) if problem else ("it runs torch's CUDA", "")
    yield judged("gpu", "driver", problem is None, visible[0].driver or "there is one", reason, fix)
    problem = fused_layers_problem()
    reason, fix = (problem.reason, problem.fix) if problem else ("fused layers, which the profiles of GPUs ask for", "")
    value = installed_version("transformer-engine") or "not installed"
    yield judged("gpu", "Transformer Engine", problem is None, value, reason, fix)
    lacks = compiling_lacks()
    value = f"{lacks} is missing" if lacks else "a C compiler, Python's header files and Triton"
    meaning = "SwiGLU and the loss run unfused, on all machines of a run" if lacks else "torch.compile can fuse kernels"
    fix = "install gcc and your Python's development package (python3-dev), or set CC"
    yield judged("gpu", "compiler", lacks is None, value, meaning, fix)


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted, and whether this is already inside one."""
    version = tool_output("sbatch", "--version")
    value = version.strip() if version else "no sbatch here"
    meaning = "jobs can be submitted" if version else "runs start on this machine only"
    yield judged("slurm", "Slurm", bool(version), value, meaning, otherwise="info")
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        meaning = "this shell is inside an allocation: what it may use is the allocation's share"
        yield info("slurm", "allocation", f"job {job} on {os.environ.get('SLURM_JOB_NODELIST', '?')}", meaning)
