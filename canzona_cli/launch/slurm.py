"""Submits a run to Slurm, and fills in its settings inside a job.

Inside a step (`srun canzona train ...`), node rank, rendezvous endpoint and run directory come from Slurm unless the
user has set them. The shell of a batch job or of `salloc` is not a step: a command there runs only on the job's first
machine.

The batch script of a run is `scripts/train.sbatch`, filled in. sbatch reads directives from comments, so a value with
a newline in it could add another directive. Every value in a directive is therefore a single line, and quoted.
Overrides never go into directives. A submitted job reads them from a file that only its owner can read, because Slurm
shows a job's arguments to everybody.
"""

import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from canzona_cli.config.recipes import installed_file
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, problem_with, refuse, write_error
from canzona_cli.core.host import tool_output
from canzona_cli.launch.torchrun import node_count, port_in_use, ranks_per_node

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


TEMPLATE = "train.sbatch"
_DIRECTIVE = "#SBATCH --"
_GPUS = ("gpus-per-node", "gpus-per-task", "gpus", "gres")
"""The ways to ask for GPUs. One of them may replace canzona's own `--gpus-per-node`, for example to name a type."""
_GPU_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)", re.ASCII)
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_SET_BY_CANZONA = (
    *("nodes", "time-min", "requeue", "no-requeue", "exclusive", "oversubscribe", "signal"),
    *("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-gpu"),
    *("gpus-per-socket", "open-mode", "chdir", "input"),
    *("parsable", "wrap", "wait", "test-only", "help", "usage", "version"),
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job. What they leave open is as in the template; if that leaves it open too, the cluster's
    default applies."""

    directives: Mapping[str, str] = field(default_factory=dict)
    """sbatch's options by name, such as `gres` with `gpu:h100:8`; empty for an option without a value."""
    requeues: int = 20
    """The number of times that the job may return to the queue; 0 for never."""
    signal_before: int = 180
    """The seconds before the time limit at which the job is asked to save."""

    @property
    def is_array(self) -> bool:
        return "array" in self.directives

    @property
    def asks_for_gpus(self) -> bool:
        return any(_gpus(name, value) for name, value in self.directives.items())

    def beside(self, recipes: Mapping[str, str]) -> "JobOptions":
        """Returns the options of a job whose recipe has the directives `recipes` (`cluster.sbatch`). Where both have an
        option, the recipe's is replaced; one way to ask for GPUs replaces all others."""
        left = {name: text for name, text in recipes.items() if not (self.asks_for_gpus and _gpus(name, text))}
        return replace(self, directives={**left, **self.directives})


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that Slurm has accepted."""

    job_id: str
    log: Path
    """The path of the job's log. For an array, `%a` stands for the task; sbatch's other patterns stay."""
    array: bool = False


def needed(config: RunConfig) -> str:
    """Returns what the job script reads: the number of nodes, of GPUs on each node (0 for CPU ranks), and the folder
    for notes of failures (`canzona_cli.launch.restarts`), which every machine and container of the run sees."""
    gpus = ranks_per_node(config) if config.cluster.device == "cuda" else 0
    folder = Path(config.run.dir or f"{config.run.root}/slurm").absolute()
    return f"{node_count(config)} {gpus} {folder}"


def template_text() -> str:
    """Reads the sbatch template that is installed with canzona."""
    return installed_file("scripts", TEMPLATE).read_text(encoding="utf-8")


def directives_of(options: Sequence[str], key: str) -> dict[str, str]:
    """Reads options of sbatch, such as `--constraint=h100`.

    Args:
        key: the option or setting that has them, for messages.

    Raises:
        ConfigError: lists every option that is malformed, given twice, or set by canzona itself. sbatch would
            silently use the last of two equal options.
    """
    directives: dict[str, str] = {}
    problems = []
    for text in options:
        option = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.+))?", text, re.ASCII)
        if option is None or not text.isprintable():
            reason, fix = "is not a single-line long option of sbatch", "for example --constraint=h100"
        elif option[1] in _SET_BY_CANZONA:
            fix = "leave it out: the run's settings and the options of canzona slurm (--help) set it"
            reason = "contradicts what canzona sets"
        elif option[1] in directives:
            reason, fix = "is given twice", "keep one of them"
        else:
            directives[option[1]] = option[2] or ""
            continue
        problems.append(Problem(key, reason, fix, value=text))
    refuse(problems)
    return directives


def job_problems(config: RunConfig, options: JobOptions) -> Iterator[Problem]:
    """Yields a problem if the time limit leaves no time to train, and one for each directive that asks for another
    number of GPUs than the run has ranks."""
    time = options.directives.get("time", "")
    limit = _limit_seconds(time)
    if limit is not None and limit <= options.signal_before:
        reason = f"leaves no time to train: the job is asked to save {options.signal_before} s before the limit"
        yield Problem("--time", reason, "use a longer --time, or a shorter --signal-before", value=time)
    for name, value in options.directives.items():
        count, expected = _gpus(name, value), ranks_per_node(config) * (node_count(config) if name == "gpus" else 1)
        if config.cluster.device == "cuda" and count not in (0, expected):
            where = "in all" if name == "gpus" else "a node"
            reason = f"asks for {count} GPUs {where}, but the run needs {expected}"
            yield Problem("--sbatch", reason, f"ask for {expected}, or leave it out", value=f"--{name}={value}")


def _gpus(option: str, value: str) -> int:
    """Returns the number of GPUs that an option asks for: 8 for `--gres=gpu:h100:8,nvme:1`; 0 if it asks for none."""
    if option not in _GPUS:
        return 0
    resources = value.split(",") if option == "gres" else [f"gpu:{value}"]
    counts = [resource.partition(":")[2] or "1" for resource in resources if resource.partition(":")[0] == "gpu"]
    return sum(int(match[1]) if (match := _GPU_COUNT.fullmatch(count)) else 1 for count in counts)


def render(config: RunConfig, options: JobOptions, arguments: Sequence[str] | Path) -> str:
    """Fills in the batch script of a run.

    Args:
        config: the resolved configuration.
        options: the options of the job.
        arguments: the arguments of `canzona train`, or the file that contains them (`write_arguments`).

    Raises:
        ConfigError: `cluster.setup` leaves something open.
    """
    refuse(_setup_problems(config.cluster.setup))
    directives = {
        "job-name": config.name,
        "nodes": str(node_count(config)),
        "signal": f"USR2@{options.signal_before}",
        "output": _log(array=options.is_array),
    }
    removed = {"requeue"} if options.requeues == 0 else set()
    if options.requeues == 0:
        directives["no-requeue"] = ""
    if config.cluster.device == "cuda" and not options.asks_for_gpus:
        directives["gpus-per-node"] = str(ranks_per_node(config))
    if options.directives.keys() & {*_MEMORY}:
        removed.add("mem")
    if "cpus-per-task" in options.directives:  # cores of shared nodes
        removed |= {"exclusive", "mem"}
    for option, value in options.directives.items():
        directives[option] = shlex.quote(value) if value else ""
        removed.discard(option)
    text = _with_directives(template_text(), directives, removed)
    cluster = config.cluster
    begin, end = text.index("#     sbatch "), text.index("#\n#SBATCH ")
    text = f"{text[:begin]}{_FILLED_IN}{text[end:]}"
    for line, replacement in (
        ('overrides=("$@")', f"{_NO_ARGUMENTS}\n{_overrides_lines(arguments)}"),
        ('canzona=("${CANZONA:-canzona}")', f"canzona=({_quoted(cluster.command or (_this_command(),))})"),
        ("requeues=${CANZONA_REQUEUES:-20}", f"requeues={options.requeues}"),
        ("srun_args=()", f"srun_args=({_quoted(cluster.srun_args)})"),
        (_EXAMPLE, _setup_lines(cluster.setup)),
        ('needed=$("${canzona[@]}" slurm --needs "${overrides[@]}") || exit', f"needed={quote(needed(config))}"),
    ):
        assert text.count(f"\n{line}\n") == 1, line
        text = text.replace(f"\n{line}\n", f"\n{replacement}\n")
    return text


def _log(*, array: bool) -> str:
    """Returns the pattern of the log's name for sbatch."""
    return "%x-%A_%a.out" if array else "%x-%j.out"


_FILLED_IN = """\
# Generated by `canzona slurm`. Submit this script without arguments. You may edit it; nothing else reads it.
"""
_EXAMPLE = '#     module load cuda && source "$HOME/venv/bin/activate"'
"""The line of the template that `cluster.setup` replaces."""
_NO_ARGUMENTS = '(($# == 0)) || { echo "this script contains its settings and takes no arguments: $*" >&2; exit 2; }'
_FAILED = 'echo "cluster.setup: this line failed with code $?: $BASH_COMMAND" >&2; exit 3'


def _setup_lines(lines: Sequence[str]) -> str:
    """Returns the lines of `cluster.setup` as a block that ends the job if a line fails; without any lines,
    the template's example."""
    if not lines:
        return _EXAMPLE
    return "\n".join([f"trap '{_FAILED}' ERR", *lines, "trap - ERR"])


def _setup_problems(lines: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem if lines leave a quote, a block or a here-document open, which would swallow the rest of the
    script: the job would train nothing and succeed. bash reads the lines (`-n`) and executes nothing.

    extglob is on, because lines may switch it on. A here-document that is not closed is only a warning of bash.
    """
    bash, block = shutil.which("bash"), "\n".join(lines)
    if not lines or bash is None:
        return
    checked = subprocess.run(
        [bash, "--norc", "--noprofile", "-O", "extglob", "-n"],
        input=block + "\n",
        env={"PATH": os.defpath, "LC_ALL": "C"},  # without BASH_ENV, which bash would execute
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = [line.partition(": ")[2] for line in checked.stderr.splitlines()]
    if re.search(r"(?<!\\)(\\\\)*\\$", block):
        said.append("the last line continues in the next")
    if checked.returncode != 0 or said:
        reason = f"is not complete: {said[0] if said else f'bash -n fails with {checked.returncode}'}"
        fix = "close each quote, bracket, block and here-document within cluster.setup"
        yield Problem("cluster.setup", reason, fix, value=block.splitlines()[-1])


def _quoted(words: Sequence[str]) -> str:
    return " ".join(quote(word) for word in words)


def write_arguments(folder: Path, name: str, arguments: Sequence[str]) -> Path:
    """Writes a job's arguments to a new file that only its owner can read. The job reads the file again after
    each requeue.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    path = folder.absolute() / f"{name}-{secrets.token_hex(6)}.arguments"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(b"".join(argument.encode() + b"\0" for argument in arguments))
    except OSError as error:
        fix = "run.root=DIR, a shared directory"
        raise write_error("run.root", str(folder), error, fix=fix, what="the job's arguments") from None
    return path


def last_task(array: str) -> int:
    """Returns the largest task index of an `--array` option; -1 for one that sbatch cannot read either."""
    spans = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", array.partition("%")[0])
    ranges = (range(int(first), int(last or first) + 1, max(1, int(step or 1))) for first, last, step in spans)
    return max((tasks[-1] for tasks in ranges if tasks), default=-1)


def submit(script: str, *, name: str, array: bool, output: str | None = None) -> SubmittedJob:
    """Submits a rendered script with sbatch.

    Args:
        output: the pattern of the log's name that the user has set; None for canzona's.

    Raises:
        EnvironmentProblem: sbatch is not installed here or does not answer, or Slurm refuses the job.
    """
    if shutil.which("sbatch") is None:
        fix = "submit from a login node; without --submit the script is printed, and you can copy it there"
        raise EnvironmentProblem(Problem("sbatch", "is not installed here, or not in PATH", fix))
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(Problem("sbatch", "Slurm did not answer within two minutes")) from None
    if done.returncode != 0:
        reasons = done.stderr.strip().replace("sbatch: error: ", "").splitlines() or ["no reason given"]
        raise EnvironmentProblem(Problem("sbatch", f"Slurm refused the job: {'; '.join(reasons)}"))
    job_id = done.stdout.strip().partition(";")[0]
    log = output or _log(array=array)
    for pattern, value in (("%x", name), ("%j", job_id), ("%A", job_id)):
        log = log.replace(pattern, value)
    return SubmittedJob(job_id=job_id, log=Path.cwd() / log, array=array)


def _limit_seconds(time: str) -> int | None:
    """Parses a time limit in Slurm's notation (minutes, MM:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS) into seconds;
    returns None for any other text."""
    if (match := _TIME.fullmatch(time)) is None:
        return None
    days, *parts = match.groups()
    units = (3600, 60, 1) if days or parts[2] else (60, 1)
    return 86_400 * int(days or 0) + sum(int(part or 0) * unit for part, unit in zip(parts, units, strict=False))


def _with_directives(text: str, changes: Mapping[str, str], removed: set[str]) -> str:
    """Changes, adds and removes `#SBATCH --NAME=VALUE` lines of the script. New lines follow the last
    existing one."""
    lines = text.splitlines()
    indices = [index for index, line in enumerate(lines) if line.startswith(_DIRECTIVE)]
    directives = {lines[index].removeprefix(_DIRECTIVE).partition("=")[0]: lines[index] for index in indices}
    for name, value in changes.items():
        directives[name] = f"{_DIRECTIVE}{name}={value}" if value else f"{_DIRECTIVE}{name}"
    block = [line for name, line in directives.items() if name not in removed]
    return "\n".join([*lines[: indices[0]], *block, *lines[indices[-1] + 1 :]]) + "\n"


def _overrides_lines(arguments: Sequence[str] | Path) -> str:
    if isinstance(arguments, Path):
        return f"mapfile -d '' -t overrides < {quote(str(arguments))} || exit"
    return "\n".join(["overrides=(", *(f"    {quote(argument)}" for argument in arguments), ")"])


def quote(word: str) -> str:
    """Quotes a word for bash. The result is always a single line."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(
        c if c.isprintable() and c not in "\\'" else "".join(f"\\x{b:02x}" for b in os.fsencode(c)) for c in word
    )
    return f"$'{escaped}'"


def _this_command() -> str:
    """Returns the path of this installation's canzona command, because the PATH of the job may lead to
    another installation or to none."""
    command = Path(sys.executable).with_name("canzona")
    return str(command) if command.is_file() else "canzona"
