"""Checks that this machine, and the container of a run's jobs, have what a run needs, before anything is written or
started. This module does not import torch.

A path has to lead to the same files inside and outside of a container, because the machine that submits a job reads
and writes some of them as well. What a container sees is known as far as the options that start it say.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs import machine
from canzona_cli.core.costs.gpus import visible_gpus
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.errors import EnvironmentProblem, Problem, problem_with, refuse
from canzona_cli.core.reading import expanded
from canzona_cli.core.setup import ClusterConfig, Layout
from canzona_cli.launch.torchrun import node_count, on_one_machine, port_in_use, ranks_per_node, worker_environment
from canzona_cli.records.files import cache_root

_MOUNTS: Final = ("--bind", "-B", "--mount", "--volume", "-v", "--container-mounts")
"""The options that mount folders, in Apptainer, Docker, Podman and pyxis."""
_APPTAINER: Final = ("apptainer", "singularity")
"""The programs that mount the home directory and the current directory, and start in the latter, unless told not to."""
_OTHERS: Final = ("docker", "podman", "enroot")
_CONTAINED: Final = (
    "--contain",
    "-c",
    "--containall",
    "-C",
    "--no-home",
    "--no-mount",
    "--pwd",
    "--cwd",
    "--home",
    "-H",
)
_BY_VARIABLE: Final = re.compile(r"(APPTAINER|SINGULARITY)_BIND(PATH)?\b")


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


def container_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each path of the run that the container of its jobs does not see. Yields nothing if the run
    has no container, or if it is started by a program that this module does not know."""
    words = (*config.cluster.command, *config.cluster.srun_args)
    if (mounted := _mounted(config.cluster, words)) is None:
        return
    starts_here = _is_apptainer(words) and not any(word.partition("=")[0] in _CONTAINED for word in words)
    for key, text in _paths(config):
        path = expanded(text)
        if not path.is_absolute() and not starts_here:
            reason = "is relative, and the container of cluster.command or cluster.srun_args starts in another folder"
            yield Problem(key, reason, f"{key}={path.absolute()}", value=text)
        elif not any(path.absolute().is_relative_to(folder) for folder in mounted):
            known = ", ".join(map(str, mounted)) or "nothing"
            reason = f"is not in the container, which mounts {known} at the same place as outside"
            fix = f"mount {_top(path)} in cluster.command or cluster.srun_args, or choose a folder that is mounted"
            yield Problem(key, reason, fix, value=text)


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the settings that are paths, with their values."""
    data, run = config.data, config.run
    if data.source == "prepared":
        named = (("data.path", data.path), ("data.validation", data.validation))
        yield from ((key, path) for key, path in named if path)
        yield from (("data.blend", path) for path in data.blend or {})
    elif "/" in data.tokenizer:
        yield "data.tokenizer", data.tokenizer
    yield ("run.dir", run.dir) if run.dir is not None else ("run.root", run.root)
    if config.checkpoint.weights_from is not None:
        yield "checkpoint.weights_from", config.checkpoint.weights_from
    if not any("CANZONA_CACHE" in line for line in config.cluster.setup):
        yield "CANZONA_CACHE", str(cache_root())


def _is_apptainer(words: Sequence[str]) -> bool:
    return any(Path(word).name in _APPTAINER for word in words)


def _mounted(cluster: ClusterConfig, words: Sequence[str]) -> list[Path] | None:
    """Returns the folders that the container has at the same place as the machine; None if that is unknown."""
    values = [*_values(words)]
    apptainer, names = _is_apptainer(words), [word.partition("=")[0] for word in words]
    known = apptainer or "--container-image" in names or any(Path(word).name in _OTHERS for word in cluster.command)
    by_variable = any(_BY_VARIABLE.search(text) for text in (*cluster.setup, *os.environ))
    if not (known or values) or (apptainer and by_variable):
        return None
    folders = [folder for value in values if (folder := _same_place(value)) is not None]
    if apptainer and not set(names) & {*_CONTAINED}:
        folders += [Path.home(), Path.cwd(), Path("/tmp")]
    elif "--container-mount-home" in names:
        folders.append(Path.home())
    return folders


def _values(words: Sequence[str]) -> Iterator[str]:
    """Yields the mounts that a command line names, one by one: `/a:/b:ro`, or `type=bind,src=/a,dst=/b`."""
    for option, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = option.partition("=")
        if name in _MOUNTS:
            value = value if equals else following
            yield from [value] if "src=" in value or "source=" in value else value.split(",")


def _same_place(mount: str) -> Path | None:
    """Returns the folder of a mount that has the same path inside and outside; None for another mount."""
    if "=" in mount:
        fields = dict(field.partition("=")[::2] for field in mount.split(","))
        source = fields.get("source") or fields.get("src")
        target = fields.get("destination") or fields.get("dst") or fields.get("target") or source
    else:
        source, target = (*mount.split(":"), "")[:2]
        target = target if target.startswith("/") else source
    if not source or not source.startswith("/") or target is None or Path(source) != Path(target):
        return None
    return Path(source)


def _top(path: Path) -> Path:
    """Returns the first folder of a path below the root, which is what clusters mount."""
    return Path(*path.absolute().parts[:2])
