"""The batch script of a run, filled in from `scripts/train.sbatch`, and submitting it.

sbatch reads directives from comments, so a value with a newline in it could smuggle in one of its own: every
value that goes into a directive matches a pattern first. Overrides never go into directives. They travel in a
file that only their owner can read, because Slurm shows a job's arguments to everybody.
"""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import EnvironmentProblem, Problem, refuse, unwritable
from canzona_cli.launch.torchrun import node_count, ranks_per_node

TEMPLATE = "train.sbatch"
_DIRECTIVE = "#SBATCH --"
_VALUES = {
    "job_name": r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*",
    "time": r"[0-9:-]+",
    "partition": r"[A-Za-z0-9_][A-Za-z0-9_.+@,-]*",
    "account": r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*",
    "qos": r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*",
    "array": r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?",
}
"""The characters of each option, which cannot begin another directive; the rest is for Slurm to judge."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job, as typed. None leaves the template's value, or lets the cluster decide."""

    job_name: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    cpus_per_task: int | None = None
    """The cores to request on each machine instead of the whole machine."""
    more: tuple[str, ...] = ()
    """Further directives, each as sbatch has it: `--constraint=h100`."""
    requeues: int = 20
    """The number of times the job may return to the queue; 0 for never."""
    signal_before: int = 180
    """The seconds before the time limit at which the job is asked to save."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that Slurm has taken."""

    job_id: str
    log: Path
    """The log of the job; of an array, with %a for the task."""
    array: bool = False


def template_text() -> str:
    """Reads the sbatch script that came with canzona: in the package of a wheel,
    beside it in an editable install."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "_scripts" / TEMPLATE, package.parent / "scripts" / TEMPLATE)
    return next(path for path in places if path.is_file()).read_text(encoding="utf-8")


def render(config: RunConfig, options: JobOptions, arguments: Sequence[str] | Path) -> str:
    """Fills in the batch script of a run.

    Args:
        config: Resolved.
        options: Checked.
        arguments: The arguments that `canzona train` is called with, or the file that holds it
            (`write_arguments`).

    Raises:
        ConfigError: the recipe's name cannot be a job's.
    """
    name = options.job_name or config.name
    refuse(option_problems(JobOptions(job_name=name)))
    directives: dict[str, str | None] = {
        "job-name": name,
        "nodes": str(node_count(config)),
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "array": options.array,
        "signal": f"USR2@{options.signal_before}",
        "output": "%x-%A_%a.out" if options.array else "%x-%j.out",
    }
    removed: set[str] = set()
    if options.requeues == 0:
        directives["no-requeue"] = ""
        removed = {"requeue"}
    if config.cluster.device == "cuda":
        directives["gpus-per-node"] = str(ranks_per_node(config))
    if options.cpus_per_task is not None:
        directives["cpus-per-task"] = str(options.cpus_per_task)
        removed |= {"exclusive", "mem"}
    for directive in options.more:
        option, _, value = directive.removeprefix("--").partition("=")
        directives[option] = shlex.quote(value) if value else ""
    text = _with_directives(template_text(), directives, removed - directives.keys())
    for line, replacement in (
        ('overrides=("$@")', _overrides(arguments)),
        ("canzona=${CANZONA:-canzona}", f"canzona={shlex.quote(_own_command())}"),
        ("requeues=${CANZONA_REQUEUES:-20}", f"requeues={options.requeues}"),
    ):
        assert text.count(f"\n{line}\n") == 1, line
        text = text.replace(f"\n{line}\n", f"\n{replacement}\n")
    return text


def write_arguments(folder: Path, name: str, arguments: Sequence[str]) -> Path:
    """Writes a job's arguments to a new file that only its owner can read;
    they are needed again at each requeue.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    path = folder.absolute() / f"{name}-{secrets.token_hex(6)}.arguments"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(b"".join(argument.encode() + b"\0" for argument in arguments))
    except OSError as error:
        fix = "run.root=DIR, a shared directory"
        raise unwritable("run.root", str(folder), error, fix=fix, what="the job's arguments") from None
    return path


def submit(script: str, *, name: str, array: bool) -> Submitted:
    """Hand a rendered script to sbatch.

    Raises:
        EnvironmentProblem: there is no sbatch here, or Slurm refuses the job.
    """
    if shutil.which("sbatch") is None:
        fix = "submit from a login node; without --submit the script is printed, and you can copy it there"
        raise EnvironmentProblem(Problem(key="sbatch", reason="is not installed here, or not in PATH", fix=fix))
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = f"Slurm refuses the job: {done.stderr.strip().removeprefix('sbatch: error: ')}"
        raise EnvironmentProblem(Problem(key="sbatch", reason=reason))
    job_id = done.stdout.strip().partition(";")[0]
    log = Path.cwd() / f"{name}-{job_id}{'_%a' if array else ''}.out"
    return Submitted(job_id=job_id, log=log, array=array)


def tasks_of(array: str) -> set[int]:
    """Returns the tasks that a checked `--array` names."""
    tasks: set[int] = set()
    for part in array.partition("%")[0].split(","):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        tasks.update(range(int(first), int(last or first) + 1, max(1, int(stride or 1))))
    return tasks


def option_problems(options: JobOptions) -> Iterator[Problem]:
    """Lists options that could become more than one directive, or that the script cannot use."""
    for directive in options.more:
        if re.fullmatch(r"--[a-z][a-z0-9-]*(=.+)?", directive, re.ASCII) is None or not directive.isprintable():
            reason, fix = "is not a long option of sbatch on one line", "for example --sbatch '--constraint=h100'"
            yield Problem(key="--sbatch", value=directive, reason=reason, fix=fix)
    for field, pattern in _VALUES.items():
        value = getattr(options, field)
        if value is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            reason, fix = "is not a value that sbatch takes here", f"man sbatch describes --{field.replace('_', '-')}"
            yield Problem(key=f"--{field.replace('_', '-')}", value=value, reason=reason, fix=fix)


def _with_directives(text: str, changes: dict[str, str | None], removed: set[str]) -> str:
    """Changes the script's `#SBATCH --NAME=VALUE` lines in place; adds new ones after the last."""
    lines = text.splitlines()
    numbers = [number for number, line in enumerate(lines) if line.startswith(_DIRECTIVE)]
    given = {lines[number].removeprefix(_DIRECTIVE).partition("=")[0]: lines[number] for number in numbers}
    for name, value in changes.items():
        if value is not None:
            given[name] = f"{_DIRECTIVE}{name}={value}" if value else f"{_DIRECTIVE}{name}"
    block = [line for name, line in given.items() if name not in removed]
    return "\n".join([*lines[: numbers[0]], *block, *lines[numbers[-1] + 1 :]]) + "\n"


def _overrides(arguments: Sequence[str] | Path) -> str:
    if isinstance(arguments, Path):
        return f"mapfile -d '' -t overrides < {shlex.quote(str(arguments))} || exit"
    return "\n".join(["overrides=(", *(f"    {shlex.quote(argument)}" for argument in arguments), ")"])


def _own_command() -> str:
    """Returns the path of this very canzona: the job's PATH may have another one or none."""
    beside = Path(sys.executable).with_name("canzona")
    return str(beside) if beside.is_file() else "canzona"
