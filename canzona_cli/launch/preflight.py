"""Checks that this machine has what a run needs, before anything is written or started. This module does not
import torch."""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress

import psutil

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs import machine
from canzona_cli.core.costs.gpus import visible_gpus
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.errors import EnvironmentProblem, Problem, refuse
from canzona_cli.core.setup import Layout
from canzona_cli.core.setup.problems import problem_with
from canzona_cli.launch.torchrun import node_count, on_one_machine, port_in_use, ranks_per_node, worker_environment


def check_machine(config: RunConfig, layout: Layout, *, training: bool = True) -> None:
    """Checks that this machine can run its part of a run.

    Args:
        training: False if the ranks only run forward passes.

    Raises:
        EnvironmentProblem: lists everything that is missing: GPUs, memory, network, packages.
    """
    refuse(machine_problems(config, layout, training=training), EnvironmentProblem)


def needs_gpu_machine(config: RunConfig) -> bool:
    """Returns True if the run needs GPUs and this machine has no visible GPU, so that it can only plan the
    run."""
    return config.cluster.device == "cuda" and not visible_gpus()


def check_nodes(config: RunConfig) -> None:
    """Checks that the settings of a run on several machines say how the machines find each other.

    Raises:
        ConfigError: lists every missing or impossible setting.
        EnvironmentProblem: this is machine 0, and the port of the rendezvous endpoint is in use.
    """
    nodes, cluster = node_count(config), config.cluster
    if nodes == 1:
        return
    problems = []
    if cluster.rdzv_endpoint is None:
        reason = f"the run spans {nodes} machines, and the address where they meet is not set"
        fix = "give each machine cluster.rdzv_endpoint=HOST:PORT, an address of machine 0 that all can reach"
        problems.append(Problem("cluster.rdzv_endpoint", reason, fix))
    if cluster.node_rank is None or not 0 <= cluster.node_rank < nodes:
        reason = f"must be the rank of this machine, from 0 to {nodes - 1}"
        fix = "in a Slurm job, srun --ntasks-per-node=1 sets it; otherwise give each machine a different rank"
        problems.append(problem_with(config, "cluster.node_rank", reason, fix))
    if config.run.dir is None:
        reason = f"the {nodes} machines of the run would each create their own directory"
        problems.append(Problem("run.dir", reason, "run.dir=DIR, a directory that every machine shares"))
    refuse(problems)
    if cluster.node_rank == 0 and cluster.rdzv_endpoint is not None:
        host, _, port = cluster.rdzv_endpoint.rpartition(":")
        # Launchers that meet at a loopback address are all on this machine; otherwise torchrun listens on
        # every interface.
        local = machine.LOOPBACK if on_one_machine(config) else ""
        # torchrun refuses an invalid address itself. For a port in use it would print a traceback while the
        # other machines wait.
        if port.isdecimal() and int(port) <= 65535 and port_in_use(local, int(port)):
            reason = "another program on this machine uses this port" + _holder(int(port))
            fix = f"choose another port, the same on every machine: cluster.rdzv_endpoint={host}:PORT"
            raise EnvironmentProblem(problem_with(config, "cluster.rdzv_endpoint", reason, fix))


def _holder(port: int) -> str:
    """Names the program that listens on a port, if the system reports it."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listening = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", None) == port
            if listening and connection.pid:
                return f": {psutil.Process(connection.pid).name()}, process {connection.pid}"
    return ""


def machine_problems(config: RunConfig, layout: Layout, *, training: bool = True) -> Iterator[Problem]:
    """Yields a problem for everything that this machine lacks for its part of the run. GPUs are tried only if
    there are enough of them."""
    if config.cluster.device == "cuda":
        yield from list(_gpu_count_problems(config)) or _gpu_access_problems(config)
    else:
        memory = estimate(config.setup, layout)
        yield from _host_memory_problems(config, memory.total if training else memory.forward)
    if on_one_machine(config) and (obstacle := machine.loopback_problem(ranks_per_node(config))) is not None:
        reason = f"its ranks cannot meet there: {obstacle[:1].lower()}{obstacle[1:]}"
        yield Problem("network", reason, machine.LOOPBACK_FIX, value=machine.LOOPBACK)
    if config.cluster.fused_layers and (problem := machine.fused_layers_problem()) is not None:
        yield problem
    if config.parallel.dispatcher == "flex" and layout.ep > 1 and importlib.util.find_spec("deep_ep") is None:
        fix = "install DeepEP (github.com/deepseek-ai/DeepEP), or leave it null"
        yield problem_with(config, "parallel.dispatcher", "DeepEP is not installed here", fix)
    for tracker in config.run.trackers:
        if importlib.util.find_spec(tracker) is None:
            fix = f"pip install 'canzona[{tracker}]', or leave it out: metrics.jsonl holds the same numbers"
            yield problem_with(config, "run.trackers", f"{tracker} is not installed here", fix)


def _gpu_count_problems(config: RunConfig) -> Iterator[Problem]:
    needed, present = ranks_per_node(config), visible_gpus()
    if present >= needed:
        return
    per_machine = "" if node_count(config) == 1 else f" on each of {node_count(config)} machines"
    visible = {0: "no GPU is", 1: "one GPU is"}.get(present, f"{present} GPUs are")
    dry_run = "the same command with --dry-run checks all but the machine, and shows layout and memory"
    ways = (
        f"gpus={present} uses all GPUs of this machine" if present else dry_run,
        "`canzona slurm --submit` with the same arguments submits the run to Slurm",
        "`canzona train recipe=qwen3-tiny` trains on this machine's CPU",
    )
    reason = f"{config.name} needs {needed} GPUs{per_machine}, and {visible} visible here"
    yield problem_with(config, "gpus", reason, ";\n".join(ways))


def _gpu_access_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields the problems with the driver, the network interface and the NCCL backend that would keep ranks
    from using this machine's GPUs."""
    environment, alone = worker_environment(config), on_one_machine(config)
    problems = (
        machine.driver_problem(),
        machine.interface_problem(environment.get("NCCL_SOCKET_IFNAME"), alone=alone),
        machine.backend_problem(environment.get("TORCH_DIST_USE_NCCL2")),
    )
    yield from filter(None, problems)


def _host_memory_problems(config: RunConfig, rank_bytes: int) -> Iterator[Problem]:
    ranks = ranks_per_node(config)
    needed = int((rank_bytes + config.cluster.reserved_gib * GIB) * ranks)
    available = psutil.virtual_memory().available
    if needed > available:
        reason = (
            f"{ranks} CPU ranks need about {needed / GIB:.1f} GiB in total, "
            f"but only {available / GIB:.1f} GiB of this machine's memory is free"
        )
        fix = "fewer ranks, a smaller model, a smaller train.micro_batch_size, or train.recompute=full"
        yield problem_with(config, "gpus", reason, fix)
