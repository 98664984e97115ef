"""Fills in the batch script of a run from `scripts/train.sbatch`, and submits it.

sbatch reads directives from comments, so a value with a newline in it could add another directive. Every
value in a directive therefore has to match a pattern. Overrides never go into directives. A submitted job
reads them from a file that only its owner can read, because Slurm shows a job's arguments to everybody.
"""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.recipes import installed_file
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import EnvironmentProblem, Problem, refuse, write_error
from canzona_cli.launch.torchrun import node_count, ranks_per_node

TEMPLATE = "train.sbatch"
_DIRECTIVE = "#SBATCH --"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,63}"
_PATTERNS = {
    "job_name": (
        _NAME,
        "up to 64 letters, digits and any of _ . + @ -, beginning with a letter, digit or _",
        "--job-name qwen3-8b",
    ),
    "time": (
        r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}",
        "a number of minutes, H:MM:SS or D-HH:MM:SS",
        "--time 12:00:00",
    ),
    "partition": (rf"{_NAME}(,{_NAME})*", "names of partitions, separated by commas", "--partition large"),
    "account": (_NAME, "the name of an account", "--account physics"),
    "qos": (_NAME, "the name of a quality of service", "--qos long"),
    "array": (
        r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?",
        "a list of task indices",
        "--array 0-3 or --array 1,5%2",
    ),
}

_CANZONA_OPTIONS = ("job-name", "time", "partition", "account", "qos", "array", "nodes", "cpus-per-task")
_OF_RECIPES = ("time", "partition", "account", "qos")
"""The options of `canzona slurm` that `cluster.sbatch` may have too."""
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_GPUS = ("gpus-per-node", "gpus-per-task", "gpus", "gres")
"""The ways to ask for GPUs. One of them may replace canzona's own `--gpus-per-node`, for example to name a type."""
_GPU_COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)", re.ASCII)
_REPLACEABLE = (*_GPUS, *_MEMORY, "output", "signal")
"""The options that canzona sets, but that may have another value."""
_SIGNAL = re.compile(r"(?:SIG)?(?:TERM|USR1|USR2)(?:@(\d+))?", re.ASCII)
"""The signals that a run takes as a request to save and stop. With `B:`, only the batch script would get it."""
_SLURMS_SIGNAL_S = 60
"""The seconds before the time limit at which Slurm sends a signal without a time."""
_SET_BY_CANZONA = (
    *(*_CANZONA_OPTIONS, "time-min", "requeue", "no-requeue", "exclusive", "oversubscribe"),
    *("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-gpu"),
    *("gpus-per-socket", "open-mode", "chdir", "input"),
    *("parsable", "wrap", "wait", "test-only", "help", "usage", "version"),
)
_LEAVE_OUT = "leave it out: the run's settings and the options of canzona slurm (--help) set it"


def _name_and_value(directive: str) -> tuple[str, str]:
    """Returns `gres` and `gpu:8` for `--gres=gpu:8`."""
    name, _, value = directive.removeprefix("--").partition("=")
    return name, value


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job, as typed. None keeps the template's value; if the template has none, the
    cluster's default applies."""

    job_name: str | None = None
    """The name of the job; None for the recipe's name."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    cpus_per_task: int | None = None
    """The number of cores to request on each machine; None requests all of each machine."""
    more: tuple[str, ...] = ()
    """Further directives in sbatch's notation, such as `--constraint=h100` or `--gres=gpu:h100:8`."""
    requeues: int = 20
    """The number of times that the job may return to the queue; 0 for never."""
    signal_before: int = 180
    """The seconds before the time limit at which the job is asked to save, unless `more` has a signal."""

    @property
    def directives(self) -> dict[str, str]:
        """The values of `more` by option; empty for an option without a value."""
        return dict(map(_name_and_value, self.more))

    @property
    def gpus(self) -> dict[str, int]:
        """The numbers of GPUs that `more` asks for, by option."""
        return {name: count for name, value in self.directives.items() if (count := _gpus(name, value))}

    def beside(self, recipes: Sequence[str]) -> "JobOptions":
        """Returns the options of a job whose recipe has the directives `recipes` (`cluster.sbatch`). Where both
        have an option, the recipe's is replaced; one way to ask for GPUs replaces all others."""
        mine, theirs, more = self.directives, dict(map(_name_and_value, recipes)), [*self.more]
        for directive in recipes:
            name, value = _name_and_value(directive)
            if name not in (*_OF_RECIPES, *mine) and not (self.gpus and _gpus(name, value)):
                more.append(directive)
        return replace(
            self,
            time=self.time or theirs.get("time"),
            partition=self.partition or theirs.get("partition"),
            account=self.account or theirs.get("account"),
            qos=self.qos or theirs.get("qos"),
            more=tuple(more),
        )


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


def check_options(options: JobOptions) -> None:
    """Checks the options of a job before Slurm sees them.

    Raises:
        ConfigError: lists every option that Slurm would reject or misread.
    """
    refuse(option_problems(options))


def gpu_problems(config: RunConfig, options: JobOptions) -> Iterator[Problem]:
    """Yields a problem for each directive that asks for another number of GPUs than the run has ranks."""
    nodes, per_node = node_count(config), ranks_per_node(config)
    asked = options.gpus
    if len(asked) > 1:
        reason = f"{' and '.join(f'--{name}' for name in asked)} both ask for GPUs"
        yield Problem("--sbatch", reason, "keep one of them", value=", ".join(asked))
    for name, count in asked.items():
        expected = nodes * per_node if name == "gpus" else per_node
        given = f"--{name}={options.directives[name]}"
        if config.cluster.device != "cuda":
            yield Problem(
                "--sbatch", f"the run has CPU ranks (cluster={config.cluster.name})", "leave it out", value=given
            )
        elif count != expected:
            where = "in all" if name == "gpus" else "a node"
            reason = f"asks for {count} GPUs {where}, but the run needs {expected}"
            yield Problem(
                "--sbatch", reason, f"--{name}={_with_count(options.directives[name], expected)}", value=given
            )


def _gpus(option: str, value: str) -> int:
    """Returns the number of GPUs that an option asks for: 8 for `--gres=gpu:h100:8,nvme:1`; 0 if it asks for none."""
    if option not in _GPUS:
        return 0
    if option != "gres":
        match = _GPU_COUNT.fullmatch(value)
        return int(match[1]) if match else 0
    resources = (resource.partition(":") for resource in value.split(","))
    counts = (_GPU_COUNT.fullmatch(count or "1") for name, _, count in resources if name == "gpu")
    return sum(int(match[1]) if match else 1 for match in counts)


def _with_count(value: str, count: int) -> str:
    """Returns the value of an option for GPUs with another number: `h100:8` for `h100:4`."""
    return re.sub(r"\d+(?=$|,)", str(count), value, count=1)


def render(config: RunConfig, options: JobOptions, arguments: Sequence[str] | Path) -> str:
    """Fills in the batch script of a run.

    Args:
        config: the resolved configuration.
        options: the options of the job, which `check_options` has accepted.
        arguments: the arguments of `canzona train`, or the file that contains them (`write_arguments`).

    Raises:
        ConfigError: the recipe's name is not a valid job name, or `cluster.setup` leaves something open.
    """
    refuse(_setup_problems(config.cluster.setup))
    name = options.job_name or config.name
    if options.job_name is None:
        check_options(JobOptions(job_name=name))
    directives: dict[str, str | None] = {
        "job-name": name,
        "nodes": str(node_count(config)),
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "array": options.array,
        "signal": f"USR2@{options.signal_before}",
        "output": _log(array=options.array is not None),
    }
    removed = {"requeue"} if options.requeues == 0 else set()
    if options.requeues == 0:
        directives["no-requeue"] = ""
    if config.cluster.device == "cuda" and not options.gpus:
        directives["gpus-per-node"] = str(ranks_per_node(config))
    if options.directives.keys() & {*_MEMORY}:
        removed.add("mem")
    if options.cpus_per_task is not None:
        directives["cpus-per-task"] = str(options.cpus_per_task)
        removed |= {"exclusive", "mem"}
    for directive in options.more:
        option, value = _name_and_value(directive)
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


def task_indices(array: str) -> set[int]:
    """Returns the task indices of a valid `--array` option."""
    tasks: set[int] = set()
    for part in array.partition("%")[0].split(","):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        tasks.update(range(int(first), int(last or first) + 1, max(1, int(stride or 1))))
    return tasks


def option_problems(options: JobOptions) -> Iterator[Problem]:
    """Yields a problem for each option that Slurm would reject or misread."""
    yield from _directive_problems(options.more)
    for field, (pattern, form, example) in _PATTERNS.items():
        value = getattr(options, field)
        if value is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            flag = f"--{field.replace('_', '-')}"
            yield Problem(flag, f"must be {form}", f"for example {example}", value=value)
    bounds = {
        "cpus_per_task": (1, 100_000),
        "requeues": (0, 100_000),
        "signal_before": (1, 65_535),  # Slurm's own limit
    }
    for field, (least, most) in bounds.items():
        value = getattr(options, field)
        if value is not None and not least <= value <= most:
            flag = f"--{field.replace('_', '-')}"
            yield Problem(flag, f"is not between {least} and {most}", value=value)
    limit, before_s = None if options.time is None else _limit_seconds(options.time), options.signal_before
    if (signal := options.directives.get("signal")) is not None and (match := _SIGNAL.fullmatch(signal)) is not None:
        before_s = int(match[1] or _SLURMS_SIGNAL_S)
    if limit is not None and limit <= before_s:
        reason = f"leaves no time to train: the job is asked to save {before_s} s before the limit"
        fix = "use a longer --time, or a shorter --signal-before"
        yield Problem("--time", reason, fix, value=options.time)


def _directive_problems(directives: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each option that is malformed, given twice, or set by canzona itself. sbatch would
    silently use the last of two equal options.

    Args:
        directives: `--constraint=h100`, ...
    """
    seen: set[str] = set()
    for directive in directives:
        option = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", directive, re.ASCII)
        name, value = ("", "") if option is None else (_full_name(option[1]), option[2] or "")
        if not name or not directive.isprintable():
            reason, fix = "is not a single-line long option of sbatch", "for example --sbatch '--constraint=h100'"
        elif name in _SET_BY_CANZONA:
            fix_text = f"give it to canzona slurm itself: --{name}{value}" if name in _CANZONA_OPTIONS else _LEAVE_OUT
            reason, fix = "contradicts what canzona sets", fix_text
        elif name in _REPLACEABLE and not directive.startswith(f"--{name}="):
            reason, fix = "is abbreviated, or has no value", f"write --{name}{value or '=VALUE'}"
        elif name == "signal" and not _SIGNAL.fullmatch(value.removeprefix("=")):
            reason, fix = "is not a signal that makes a run save and stop", "use --signal=USR2@180 (or USR1, TERM)"
        elif name in _GPUS and name != "gres" and not _GPU_COUNT.fullmatch(value.removeprefix("=")):
            reason, fix = "is not a number of GPUs", f"use --{name}=8, or with a type --{name}=h100:8"
        elif name in seen:
            reason, fix = "is given twice", "keep one of them"
        else:
            seen.add(name)
            continue
        yield Problem("--sbatch", reason, fix, value=directive)


def _full_name(name: str) -> str:
    """Completes an abbreviated option as sbatch does: `--nod=4` is `--nodes=4`."""
    known = (*_SET_BY_CANZONA, *_REPLACEABLE)
    return name if name in known else next((option for option in known if option.startswith(name)), name)


def _limit_seconds(time: str) -> int | None:
    """Parses a time limit in Slurm's notation (minutes, MM:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS) into seconds;
    returns None if the limit is not valid."""
    if re.fullmatch(_PATTERNS["time"][0], time, re.ASCII) is None:
        return None
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _with_directives(text: str, changes: dict[str, str | None], removed: set[str]) -> str:
    """Changes, adds and removes `#SBATCH --NAME=VALUE` lines of the script. New lines follow the last
    existing one."""
    lines = text.splitlines()
    indices = [index for index, line in enumerate(lines) if line.startswith(_DIRECTIVE)]
    directives = {lines[index].removeprefix(_DIRECTIVE).partition("=")[0]: lines[index] for index in indices}
    for name, value in changes.items():
        if value is not None:
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
