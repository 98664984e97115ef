"""The torchrun command of a run, and the environment its workers need.

What listens where. torchrun's own backends put their TCPStore on every interface, also when given 127.0.0.1
and `--local-addr` (`c10d` and `--standalone` open two such ports, `static` one). So a run on one machine uses
the `canzona-loopback` backend of `canzona_cli.training.rendezvous`, on 127.0.0.1 and a port the kernel
chooses; gloo and NCCL are sent to the loopback interface below; nothing can be reached from outside. The same
holds for a run of several launchers that meet at a loopback address. Runs over several machines use `static`;
in both, ranks follow the node ranks, so that tensor-parallel groups stay inside a machine.
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

from canzona_cli.cluster.machine import installed_version
from canzona_cli.config.schema import RunConfig
from canzona_cli.run.files import RunFiles
from canzona_cli.run.machine import cores

WORKER_MODULE = "canzona_cli.training.worker"
_AGENT_MODULE = "canzona_cli.training.agent"
_TORCHRUN_MODULE = "torch.distributed.run"
LOOPBACK_BACKEND = "canzona-loopback"
NODE_RANK_PLACEHOLDER = "NODE_RANK"
ENDPOINT_PLACEHOLDER = "HOST:PORT"

_NOT_BETWEEN_MACHINES = ("lo", "docker", "veth", "virbr", "br-", "cni", "podman", "tun")
"""The prefixes of interfaces that only lead to this machine's own processes and containers."""
_NUMA_NODES = Path("/sys/devices/system/node")
_PINS_EXACT_SIZES = Version("2.13")
"""The first torch whose pinned memory need not be a power of two; older ones refuse the option,
and no GPU starts."""
_MAX_THREADS_BESIDE_GPU = 8
"""The most threads that a rank with a GPU gets: they only feed the GPU."""


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """One machine's share of a run: what to execute, and the variables to add to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """Formats the command for a shell, one option per line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        prefix = ["env", *variables] if variables else []
        words = [shlex.quote(word) for word in self.argv]
        lines = [" ".join([*prefix, *words[:3]])]
        for word in words[3:]:
            # an option starts a line, its value stays beside it; what follows the module is the module's
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
        config: Resolved. Where several machines have no endpoint or node rank yet, placeholders stand in for
            them.
        run_dir: Given to the workers as their only argument.
        module: The module that each worker runs as `python -m`.
    """
    nodes = node_count(config)
    node_rank = 0 if nodes == 1 else config.cluster.node_rank
    rendezvous = ["--rdzv-backend", LOOPBACK_BACKEND, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", run_dir.name]
    if nodes > 1:
        rendezvous = _several_nodes(config, run_dir)
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
    """Returns True if torchrun imports Megatron and ranks are forks of it,
    rather than programs that each import it."""
    return config.cluster.device == "cpu" and sys.platform == "linux"


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Returns the workers' environment variables. Those the user has set stay,
    but CPU ranks never see a GPU."""
    on_gpu = config.cluster.device == "cuda"
    threads = max(1, cores() // ranks_per_node(config))
    if on_gpu:
        threads = min(threads, _MAX_THREADS_BESIDE_GPU)
    variables = {
        "OMP_NUM_THREADS": str(threads),  # torchrun would say 1 whatever the machine, with a warning
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # a killed rank's last words reach its log
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes in native code leaves its Python stack in its log
        # `python -m` would look for modules in the working directory first, be it somebody else's recipes.
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads and forked data workers deadlock
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # each rank of a group that breaks down would print pages of warnings
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "15",  # seconds the other ranks get after one has failed; torch 2.11: 30
    }
    if on_gpu:
        # A hardware queue for each stream: those that share one wait for what the others wait for. Megatron
        # recommends 1, so that what tensor-parallel ranks exchange starts before the product launched behind
        # it; but then nothing runs beside reductions and gatherings. That NCCL's streams come first on the
        # device does the same.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        variables["TORCH_NCCL_HIGH_PRIORITY"] = "1"
        # torch 2.15's new NCCL backend runs the collectives of a coalesced group one after another, each a
        # launch.
        variables["TORCH_DIST_USE_NCCL2"] = "0"
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, and torch listens to it first
            # Optimizers first need memory when activations have just left theirs, in pieces of other sizes.
            # What a checkpoint is copied to is pinned by several threads, in exact sizes rather than powers
            # of two.
            variables["PYTORCH_ALLOC_CONF"] = (
                "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:4"
            )
            if Version(installed_version("torch") or "0") >= _PINS_EXACT_SIZES:
                variables["PYTORCH_ALLOC_CONF"] += ",pinned_max_round_threshold_mb:64"
    else:
        # glibc would give the memory of most activations back as each is freed, and the kernel clear every
        # page of the next one: 0.35 s of processor time rather than 0.25 for qwen3-tiny's products, norms and
        # SwiGLU. The first is at its maximum.
        variables["MALLOC_MMAP_THRESHOLD_"], variables["MALLOC_TRIM_THRESHOLD_"] = str(32 << 20), str(256 << 20)
    variables |= _interfaces(config)
    chosen = {name: os.environ.get(name, value) for name, value in variables.items()}
    if not on_gpu:
        chosen["CUDA_VISIBLE_DEVICES"] = ""  # Megatron is given CPU meanings for its CUDA calls, in these ranks alone
    return chosen


def _can_bind() -> bool:
    """Returns True if torchrun can keep each rank on the processors beside its GPU.

    It does so by numactl, and starts no rank of a GPU beside which there is no processor for us.
    """
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    beside = [{int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")} for node in _NUMA_NODES.glob("node[0-9]*")]
    nodes = [cpus for cpus in beside if cpus]
    return shutil.which("numactl") is not None and len(nodes) > 1 and all(cpus & allowed for cpus in nodes)


def _several_nodes(config: RunConfig, run_dir: Path) -> list[str]:
    cluster = config.cluster
    node_rank = NODE_RANK_PLACEHOLDER if cluster.node_rank is None else str(cluster.node_rank)
    # torchrun passes the node rank on to `static` alone
    backend = [LOOPBACK_BACKEND, "--rdzv-conf", f"rank={node_rank}"] if on_one_machine(config) else ["static"]
    return [
        *("--node-rank", node_rank),
        *("--rdzv-backend", *backend),
        *("--rdzv-endpoint", cluster.rdzv_endpoint or ENDPOINT_PLACEHOLDER),
        *("--rdzv-id", cluster.rdzv_id or run_dir.name),
    ]


def taken(host: str, port: int) -> bool:
    """Returns True if another program on this machine uses this port; an empty host is every interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))  # bound and never listening: nothing is reachable for a moment either
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def on_one_machine(config: RunConfig) -> bool:
    """Returns True if every launcher of the run is on this machine: the only one,
    or all meet at a loopback address.

    A name is not looked up: many systems give a machine's own name a loopback address, which the others do
    not see.
    """
    host = (config.cluster.rdzv_endpoint or "").rpartition(":")[0]
    return node_count(config) == 1 or host == "localhost" or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _interfaces(config: RunConfig) -> dict[str, str]:
    """Returns the network interfaces that gloo and NCCL may use.

    Left to themselves, gloo takes the one its host name resolves to, often loopback, and NCCL the first that
    looks right, at times one of a container bridge.
    """
    on_gpu = config.cluster.device == "cuda"
    if on_one_machine(config):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"GLOO_SOCKET_IFNAME": loopback} | ({"NCCL_SOCKET_IFNAME": loopback} if on_gpu else {})
    chosen = {}
    if config.cluster.rdzv_endpoint is not None:
        facing = _interface_facing(config.cluster.rdzv_endpoint.rpartition(":")[0])
        chosen = {} if facing is None else {"GLOO_SOCKET_IFNAME": facing}
    return chosen | ({"NCCL_SOCKET_IFNAME": "^" + ",".join(_NOT_BETWEEN_MACHINES)} if on_gpu else {})


def _interface_facing(host: str) -> str | None:
    """Finds the interface that leads to `host`, or the only real one if `host` is this machine; else None."""
    addresses = psutil.net_if_addrs()
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    real = {
        name: {entry.address for entry in entries if entry.family == socket.AF_INET}
        for name, entries in addresses.items()
        if name in up and not name.startswith(_NOT_BETWEEN_MACHINES)
    }
    candidates = [name for name, ipv4 in real.items() if ipv4]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # of UDP: asks the routing table, sends nothing
            source = probe.getsockname()[0]
    except OSError:
        source = None
    facing = [name for name in candidates if source in real[name]]
    choice = facing or candidates
    return choice[0] if len(choice) == 1 else None
