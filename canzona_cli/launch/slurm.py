"""Fills in the node rank, rendezvous endpoint and run directory of a run from its Slurm step.

This happens only inside a step (`srun canzona train ...`). The shell of a batch job or of `salloc` is not a
step: a command there runs only on the job's first machine. Settings that the user has set are not changed.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, problem_with
from canzona_cli.core.host import tool_output
from canzona_cli.launch.torchrun import node_count, port_in_use

FIRST_PORT = 20_000
"""The first of 10,000 ports for rendezvous. They are below the ports that the kernel gives to outgoing
connections."""
_PORTS = 10_000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""The first of the step IDs that Slurm reserves for the batch script, interactive shells and external
processes."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The Slurm step to which this process belongs."""

    job_id: int
    """The job ID. Each task of an array has its own; a requeue does not change it."""
    step_id: int
    nodes: int
    tasks: int
    node_rank: int
    node_list: str
    """The machines in Slurm's notation, as in `n[1-3,7]`; the first is machine 0."""
    name: str
    """The name of the job: its ID or, in an array, the array's job ID and the task index (`17_3`). In later
    steps of the job, -STEP is appended."""
    array_task: int | None = None
    """The index of this task in its array; None outside of an array."""

    @property
    def sweep(self) -> str:
        """The name that all tasks of an array share: the array's job ID. Outside of an array, `name`."""
        return self.name if self.array_task is None else self.name.partition("_")[0]


def current_step(environment: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """Returns the step that this process belongs to; None outside of a step, or if Slurm's variables are
    incomplete."""
    names = ("JOB_ID", "STEP_ID", "STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID")
    values = [environment.get(f"SLURM_{name}", "") for name in names]
    node_list = environment.get("SLURM_STEP_NODELIST")
    if not all(text.isdecimal() for text in values) or not node_list:
        return None
    job_id, step_id, nodes, tasks, node_rank = map(int, values)
    if step_id >= _FIRST_SPECIAL_STEP:
        return None
    array, task = (environment.get(f"SLURM_ARRAY_{part}", "") for part in ("JOB_ID", "TASK_ID"))
    in_array = array.isdecimal() and task.isdecimal()
    name = f"{array}_{task}" if in_array else str(job_id)
    return SlurmStep(
        job_id=job_id,
        step_id=step_id,
        nodes=nodes,
        tasks=tasks,
        node_rank=node_rank,
        node_list=node_list,
        name=name if step_id == 0 else f"{name}-{step_id}",
        array_task=int(task) if in_array else None,
    )


def fill_in_step(config: RunConfig, step: SlurmStep | None) -> tuple[RunConfig, str]:
    """Fills in the settings that follow from the Slurm step, unless the user has set them: node rank,
    rendezvous endpoint and ID, run directory.

    Args:
        config: the resolved configuration.
        step: the Slurm step; None fills in nothing.

    Returns:
        The configuration with these settings, and a note for the user that lists them, except the ID; empty
        if there are none.

    Raises:
        ConfigError: the step does not have as many machines as the run needs, or starts several launchers on
            one machine.
        EnvironmentProblem: machine 0 has no address that this machine can resolve, or no free port.
    """
    if step is None:
        return config, ""
    cluster, run = config.cluster, config.run
    if cluster.node_rank is None or node_count(config) == 1:
        _check_shape(config, step)
    filled_in = []
    if run.dir is None:
        run = replace(run, dir=str(Path(run.root) / f"{config.name}-{step.name}"))
        filled_in.append("the run directory")
    if node_count(config) > 1:
        if cluster.node_rank is None:
            cluster = replace(cluster, node_rank=step.node_rank)
            filled_in.append(f"machine {step.node_rank} of {step.nodes}")
        if cluster.rdzv_endpoint is None:
            cluster = replace(cluster, rdzv_endpoint=_endpoint(step))
            filled_in.append(f"the rendezvous endpoint {cluster.rdzv_endpoint}")
    note = f"from Slurm job {step.name}: {', '.join(filled_in)}" if filled_in else ""
    return replace(config, cluster=cluster, run=run), note


def first_host(node_list: str) -> str:
    """Returns the first host of a list in Slurm's notation: `n01` of `n[01-03,7],m2`, `r0n4` of
    `r[0-1]n[4-7]`."""
    first_of_each_range = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", node_list)
    return first_of_each_range.partition(",")[0]


def _check_shape(config: RunConfig, step: SlurmStep) -> None:
    nodes = node_count(config)
    if step.tasks > step.nodes:
        reason = (
            f"this Slurm step starts canzona train {step.tasks} times on {_machines(step.nodes)}, "
            "but a single canzona train starts all ranks of its machine"
        )
        fix = "srun --ntasks-per-node=1 canzona train ..."
        raise ConfigError(Problem("srun", reason, fix, value=f"{step.tasks} tasks"))
    if step.nodes != nodes:
        unit = "GPU" if config.cluster.device == "cuda" else "rank"
        reason = (
            f"the run needs {_machines(nodes)} of up to {config.cluster.gpus_per_node} {unit}s, "
            f"and this Slurm step has {step.nodes}"
        )
        fix = (
            f"srun --nodes={nodes} --ntasks-per-node=1 in a job of that size, "
            "or `canzona slurm --submit` with these settings"
        )
        if config.gpus % step.nodes == 0 and config.gpus // step.nodes <= config.cluster.gpus_per_node:
            fix += f"; or cluster.nodes={step.nodes}, which spreads the run over all machines of this step"
        raise ConfigError(problem_with(config, "gpus", reason, fix))


def _machines(count: int) -> str:
    return "one machine" if count == 1 else f"{count} machines"


def _endpoint(step: SlurmStep) -> str:
    """Returns the rendezvous endpoint. Machine 0 listens there, so it looks for a free port. The other
    machines return a guess, and learn machine 0's choice when they meet in the run directory."""
    host = _address(first_host(step.node_list))
    first_offset = (step.job_id * 7 + step.step_id) % _PORTS
    if step.node_rank != 0:
        return f"{host}:{FIRST_PORT + first_offset}"
    for offset in range(first_offset, first_offset + 100):
        port = FIRST_PORT + offset % _PORTS
        if not port_in_use("", port):
            return f"{host}:{port}"
    tried, fix = f"{host}:{FIRST_PORT + first_offset}", f"cluster.rdzv_endpoint={host}:PORT with a free port"
    reason = "this port and the 99 after it are in use"
    raise EnvironmentProblem(Problem("cluster.rdzv_endpoint", reason, fix, value=tried))


def _address(host: str) -> str:
    """Returns a name or address of a host that this machine can resolve: its name or, failing that, the
    address that Slurm uses.

    Raises:
        EnvironmentProblem: this machine can resolve neither.
    """
    if _resolves(host):
        return host
    output = tool_output("scontrol", "--oneliner", "show", "node", host, timeout_s=20)
    address = re.search(r"\bNodeAddr=(\S+)", output or "")
    if address is not None and _resolves(address.group(1)):
        return address.group(1)
    reason = f"Slurm calls machine 0 {host}, but this machine cannot resolve that name"
    fix = "cluster.rdzv_endpoint=HOST:PORT, an address of machine 0 that all machines can reach"
    raise EnvironmentProblem(Problem("cluster.rdzv_endpoint", reason, fix))


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
