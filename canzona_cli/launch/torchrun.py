"""Builds the torchrun command of a run, and the environment of its workers.

A run on one machine uses the `canzona-loopback` backend (`canzona_cli.training.rendezvous`), and restricts
gloo and NCCL to the loopback interface, so that nothing can be reached from outside. The same holds if
several launchers meet at a loopback address.

Runs on several machines use the `static` backend. With both backends, ranks are ordered by node rank, so that
tensor-parallel groups stay within a node.
"""

import errno
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.version import Version

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.gpus import gpu_inventory
from canzona_cli.core.costs.machine import LOOPBACK, installed_version
from canzona_cli.core.host import cores
from canzona_cli.records.files import RunFiles

WORKER_MODULE = "canzona_cli.training.worker"
_AGENT_MODULE = "canzona_cli.training.agent"
_TORCHRUN_MODULE = "torch.distributed.run"
LOOPBACK_BACKEND = "canzona-loopback"
NODE_RANK_PLACEHOLDER = "NODE_RANK"
ENDPOINT_PLACEHOLDER = "HOST:PORT"

_LOCAL_INTERFACES = ("lo", "docker", "veth", "virbr", "br-", "cni", "podman", "tun")
"""The name prefixes of interfaces that do not connect machines: loopback, containers, tunnels."""
_NUMA_NODES = Path("/sys/devices/system/node")
_PINS_EXACT_SIZES = Version("2.13")
"""The first torch version that can pin memory in sizes other than powers of two. Older versions reject the
option, so ranks with a GPU would not start."""
_BLACKWELL = 10.0
"""The compute capability from which the order of launches no longer depends on hardware queues, so that Megatron
requires no single queue."""
_MAX_THREADS_BESIDE_GPU = 8
"""The most CPU threads of a rank with a GPU. They only have to keep the GPU busy."""


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """The command that starts one machine's workers, and the variables to add to its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """Formats the command for a shell, one option per line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        prefix = ["env", *variables] if variables else []
        words = [shlex.quote(word) for word in self.argv]
        lines = [" ".join([*prefix, *words[:3]])]
        for word in words[3:]:
            # Each option starts a line and is followed by its value.
            if word.startswith("-") or not lines[-1].startswith("-"):
                lines.append(word)
            else:
                lines[-1] += f" {word}"
        return " \\\n    ".join(lines)


def node_count(config: RunConfig) -> int:
    """Returns the number of machines of a resolved run."""
    return config.cluster.nodes or 1


def ranks_per_node(config: RunConfig) -> int:
    """Returns the number of ranks on each machine of this run."""
    return config.gpus // node_count(config)


def build(config: RunConfig, run_dir: Path, *, module: str = WORKER_MODULE) -> LaunchCommand:
    """Builds the command that starts this machine's workers.

    Args:
        config: the resolved run. In a run on several machines, an endpoint or node rank that is not set yet
            becomes a placeholder.
        run_dir: the run directory, which is the workers' only argument.
        module: the module that each worker runs with `python -m`.
    """
    nodes = node_count(config)
    node_rank = 0 if nodes == 1 else config.cluster.node_rank
    rendezvous = ["--rdzv-backend", LOOPBACK_BACKEND, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", run_dir.name]
    if nodes > 1:
        rendezvous = _rendezvous_options(config, run_dir)
    logs = RunFiles(run_dir).node_logs(NODE_RANK_PLACEHOLDER if node_rank is None else node_rank)
    argv = [
        *(sys.executable, "-m", _AGENT_MODULE if forks_ranks(config) else _TORCHRUN_MODULE),
        *("--nnodes", str(nodes)),
        *("--nproc-per-node", str(ranks_per_node(config))),
        *rendezvous,
        *("--max-restarts", "0"),
        *("--redirects", "3"),
        *("--log-dir", str(logs)),
        *(("--numa-binding", "node") if config.cluster.device == "cuda" and _can_bind() else ()),
        *("-m", module),
        str(run_dir),
    ]
    return LaunchCommand(argv=tuple(argv), environment=worker_environment(config))


def forks_ranks(config: RunConfig) -> bool:
    """Returns True if the agent imports Megatron once and forks the ranks, instead of starting programs that
    each import it."""
    return config.cluster.device == "cpu" and sys.platform == "linux"


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Returns the environment variables that the workers need. Values that the user has set take precedence,
    except that CPU ranks never see a GPU."""
    on_gpu = config.cluster.device == "cuda"
    threads = max(1, cores() // ranks_per_node(config))
    if on_gpu:
        threads = min(threads, _MAX_THREADS_BESIDE_GPU)
    variables = {
        "OMP_NUM_THREADS": str(threads),  # torchrun's default is 1, with a warning
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # so that the last output of a killed rank reaches its log
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes in native code leaves its Python stack in its log
        # Without this, `python -m` would import modules from the working directory first.
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads deadlock with forked data workers
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise each rank of a failing group prints pages of warnings
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "15",  # seconds that ranks get to exit after one has failed; default: 30
    }
    if on_gpu:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_hardware_queues(config))
        variables["TORCH_NCCL_HIGH_PRIORITY"] = "1"
        # torch 2.15's new NCCL backend runs the collectives of a coalesced group one by one, with a launch
        # each.
        variables["TORCH_DIST_USE_NCCL2"] = "0"
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name takes precedence in torch
            # Expandable segments: optimizers first allocate when activations have just been freed, in blocks
            # of other sizes. Several threads pin the host copy of a checkpoint, in exact sizes instead of
            # powers of two.
            variables["PYTORCH_ALLOC_CONF"] = (
                "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:4"
            )
            if Version(installed_version("torch") or "0") >= _PINS_EXACT_SIZES:
                variables["PYTORCH_ALLOC_CONF"] += ",pinned_max_round_threshold_mb:64"
    else:
        # By default, glibc returns the memory of most activations to the kernel as each is freed, and the
        # kernel clears every page of the next: 0.35 s of CPU time instead of 0.25 s for qwen3-tiny's GEMMs,
        # norms and SwiGLU. 32 MiB is the largest MALLOC_MMAP_THRESHOLD_ that glibc accepts.
        variables["MALLOC_MMAP_THRESHOLD_"], variables["MALLOC_TRIM_THRESHOLD_"] = str(32 << 20), str(256 << 20)
    variables |= _interfaces(config)
    chosen = {name: os.environ.get(name, value) for name, value in variables.items()}
    if not on_gpu:
        chosen["CUDA_VISIBLE_DEVICES"] = ""  # in CPU ranks, Megatron's CUDA calls have CPU replacements
    return chosen


def _hardware_queues(config: RunConfig) -> int:
    """Returns the number of hardware queues for the streams of a rank with a GPU, as Megatron-LM 0.19 requires it
    (`megatron/training/arguments.py`).

    With tensor or context parallelism, GPUs before Blackwell need a single queue: kernels then start in the order of
    their launches, so that a collective is not held up by the matmul that should hide it. Everywhere else, streams
    get queues of their own, the most that CUDA has, because streams that share a queue wait for each other. A GPU
    that is not visible here counts as one before Blackwell.
    """
    parallel, here = config.parallel, gpu_inventory()
    is_cut = (parallel.tp or 1) > 1 or (parallel.cp or 1) > 1
    return 1 if is_cut and not (here and here[0].compute_capability >= _BLACKWELL) else 32


def _can_bind() -> bool:
    """Returns True if torchrun can bind each rank to the CPUs of its GPU's NUMA node.

    torchrun does this with numactl, and fails if this process may use none of the CPUs of a node.
    """
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    cpus_of_nodes = [{int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")} for node in _NUMA_NODES.glob("node[0-9]*")]
    with_cpus = [cpus for cpus in cpus_of_nodes if cpus]
    return shutil.which("numactl") is not None and len(with_cpus) > 1 and all(cpus & allowed for cpus in with_cpus)


def _rendezvous_options(config: RunConfig, run_dir: Path) -> list[str]:
    cluster = config.cluster
    node_rank = NODE_RANK_PLACEHOLDER if cluster.node_rank is None else str(cluster.node_rank)
    endpoint, backend = cluster.rdzv_endpoint or ENDPOINT_PLACEHOLDER, ["static"]
    if on_one_machine(config):
        # torchrun passes --node-rank only to the `static` backend, so the loopback backend gets it through
        # --rdzv-conf.
        backend = [LOOPBACK_BACKEND, "--rdzv-conf", f"rank={node_rank}"]
        endpoint = endpoint.replace("[::1]", LOOPBACK)  # the loopback backend has no other address
    return [
        *("--node-rank", node_rank),
        *("--rdzv-backend", *backend),
        *("--rdzv-endpoint", endpoint),
        *("--rdzv-id", run_dir.name),
    ]


def port_in_use(host: str, port: int) -> bool:
    """Returns True if another program on this machine uses the port. An empty host stands for every
    interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))  # the socket never listens, so nothing becomes reachable
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def on_one_machine(config: RunConfig) -> bool:
    """Returns True if every launcher of the run is on this machine: the run has only one machine, or its
    launchers meet at a loopback address.

    Names other than `localhost` are not resolved. Many systems resolve a machine's own name to a loopback
    address, which other machines cannot reach.
    """
    host = (config.cluster.rdzv_endpoint or "").rpartition(":")[0]
    return node_count(config) == 1 or re.fullmatch(r"localhost|\[::1\]|127(\.\d{1,3}){3}", host) is not None


def _interfaces(config: RunConfig) -> dict[str, str]:
    """Returns the variables that choose the network interfaces of gloo and NCCL.

    By default, gloo takes the interface to which the host name resolves, often loopback. NCCL takes the first
    interface that looks usable, which may be a container bridge.
    """
    on_gpu = config.cluster.device == "cuda"
    if on_one_machine(config):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"GLOO_SOCKET_IFNAME": loopback} | ({"NCCL_SOCKET_IFNAME": loopback} if on_gpu else {})
    chosen = {}
    if config.cluster.rdzv_endpoint is not None:
        interface = _interface_to(config.cluster.rdzv_endpoint.rpartition(":")[0])
        chosen = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    return chosen | ({"NCCL_SOCKET_IFNAME": "^" + ",".join(_LOCAL_INTERFACES)} if on_gpu else {})


def _interface_to(host: str) -> str | None:
    """Returns the name of the network interface that leads to `host`. If none does, because `host` is this
    machine or unknown, returns the only interface that connects machines; None unless there is exactly
    one."""
    addresses = psutil.net_if_addrs()
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses_of = {
        name: {entry.address for entry in entries if entry.family == socket.AF_INET}
        for name, entries in addresses.items()
        if name in up and not name.startswith(_LOCAL_INTERFACES)
    }
    candidates = [name for name, ipv4 in addresses_of.items() if ipv4]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # connecting a UDP socket only looks up the route; nothing is sent
            source = probe.getsockname()[0]
    except OSError:
        source = None
    interfaces = [name for name in candidates if source in addresses_of[name]]
    choice = interfaces or candidates
    return choice[0] if len(choice) == 1 else None
