"""The facts a run takes from its Slurm step: its place among the machines, the meeting point, its directory.

Only inside a step (`srun canzona train ...`). The shell of a batch job or of `salloc` is not one: what is
started there would run on its first machine alone. Nothing that the user has set is changed.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import problem_with
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.launch.torchrun import node_count, taken

FIRST_PORT = 20_000
"""Meeting ports lie in the 10,000 from here, below those that the kernel gives to outgoing connections."""
_PORTS = 10_000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are Slurm's own: the batch script, an interactive shell, external processes."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The step this process is a task of."""

    job_id: int
    """Unique, also for each task of an array; the same after a requeue."""
    step_id: int
    nodes: int
    tasks: int
    node_rank: int
    node_list: str
    """Slurm's own notation, as in `n[1-3,7]`; the first is machine 0."""
    name: str
    """JOB, or ARRAY_TASK, with the step's number where it is not the job's first."""
    array_task: int | None = None
    """The number of this task in an array; None outside of one."""

    @property
    def sweep(self) -> str:
        """The same as `name`, but equal in all tasks of an array."""
        return self.name if self.array_task is None else self.name.partition("_")[0]


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A configuration completed with facts from Slurm, and the notes that tell the user so."""

    config: RunConfig
    notes: tuple[str, ...] = ()


def current_step(environment: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """Returns the step that this process belongs to; None outside of one,
    or if Slurm's variables are incomplete."""
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


def adopt(config: RunConfig, step: SlurmStep | None) -> Adopted:
    """Fill in what the step knows and the user has not set: node rank, meeting point,
    rendezvous id, run directory.

    Args:
        config: Resolved.
        step: None: nothing is filled in.

    Raises:
        ConfigError: the step does not have the machines that the run needs, or starts it several times on
            one.
        EnvironmentProblem: no address of the head node is found.
    """
    if step is None:
        return Adopted(config=config)
    cluster, run = config.cluster, config.run
    if cluster.node_rank is None or node_count(config) == 1:
        _check_shape(config, step)
    taken = []
    if run.dir is None:
        run = replace(run, dir=str(Path(run.root) / f"{config.name}-{step.name}"))
        taken.append("the run directory")
    if node_count(config) > 1:
        if cluster.node_rank is None:
            cluster = replace(cluster, node_rank=step.node_rank)
            taken.append(f"machine {step.node_rank} of {step.nodes}")
        if cluster.rdzv_endpoint is None:
            cluster = replace(cluster, rdzv_endpoint=_endpoint(step))
            taken.append(f"the meeting point {cluster.rdzv_endpoint}")
        if cluster.rdzv_id is None:
            cluster = replace(cluster, rdzv_id=f"slurm-{step.name}")
    notes = (f"from Slurm job {step.name}: {', '.join(taken)}",) if taken else ()
    return Adopted(config=replace(config, cluster=cluster, run=run), notes=notes)


def first_host(node_list: str) -> str:
    """Returns the first host of a list in Slurm's notation: `n01` of `n[01-03,7],m2`,
    `r0n4` of `r[0-1]n[4-7]`."""
    host, rest = "", node_list
    while rest and not rest.startswith(","):
        if rest.startswith("["):
            inside, _, rest = rest[1:].partition("]")
            host += re.split("[-,]", inside, maxsplit=1)[0]
        else:
            plain = re.match(r"[^\[,]+", rest)
            assert plain is not None
            host += plain.group()
            rest = rest[plain.end() :]
    return host


def _check_shape(config: RunConfig, step: SlurmStep) -> None:
    nodes = node_count(config)
    if step.tasks > step.nodes:
        reason = (
            f"this Slurm step starts canzona train {step.tasks} times on {_machines(step.nodes)}, "
            "but one canzona train starts all ranks of its machine"
        )
        fix = "srun --ntasks-per-node=1 canzona train ..."
        raise ConfigError(Problem(key="srun", value=f"{step.tasks} tasks", reason=reason, fix=fix))
    if step.nodes != nodes:
        unit = "GPU" if config.cluster.device == "cuda" else "rank"
        reason = (
            f"the run needs {_machines(nodes)} of up to {config.cluster.gpus_per_node} {unit}s, "
            f"and this Slurm step has {step.nodes}"
        )
        fix = (
            f"srun --nodes={nodes} --ntasks-per-node=1 in a job of that size, "
            f"or `canzona slurm --submit` with these settings; cluster.nodes={step.nodes} spreads it over all"
        )
        raise ConfigError(problem_with(config, "gpus", reason, fix))


def _machines(count: int) -> str:
    return "one machine" if count == 1 else f"{count} machines"


def _endpoint(step: SlurmStep) -> str:
    """Returns where the machines meet. Machine 0 listens there, so it looks for a free port; the others learn
    which one it took when they meet in the run directory."""
    host = first_host(step.node_list)
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        reason = f"Slurm calls machine 0 {host}, and this machine cannot resolve that name"
        fix = "cluster.rdzv_endpoint=HOST:PORT, an address of machine 0 that all machines can reach"
        raise EnvironmentProblem(Problem(key="cluster.rdzv_endpoint", reason=reason, fix=fix)) from None
    first = (step.job_id * 7 + step.step_id) % _PORTS
    if step.node_rank != 0:
        return f"{host}:{FIRST_PORT + first}"
    for number in range(first, first + 100):
        port = FIRST_PORT + number % _PORTS
        if not taken("", port):
            return f"{host}:{port}"
    tried, fix = f"{host}:{FIRST_PORT + first}", f"cluster.rdzv_endpoint={host}:PORT with a free port"
    reason = "this port and the hundred after it are taken"
    raise EnvironmentProblem(Problem(key="cluster.rdzv_endpoint", value=tried, reason=reason, fix=fix))
