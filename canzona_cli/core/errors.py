"""The errors of canzona: each class has an exit code, and each problem is written for the user."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final


class ExitCode(IntEnum):
    """The exit code of a `canzona` process."""

    OK = 0
    CONFIG = 2
    ENVIRONMENT = 3
    MEMORY = 4
    CHECKPOINT = 5
    CRASH = 70
    HANG = 71
    PREEMPTED = 75
    INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One mistake or failure, with its reason and a fix."""

    key: str
    """The setting or place, as the user would type it: `parallel.tp`, `data.path`, `gpus`."""
    reason: str
    """The reason why the value or the place is a problem, in one sentence without a final full stop."""
    fix: str = ""
    """The text to type or the thing to do instead; empty only if the reason already implies it."""
    value: object = None
    """The value at that key; `None` if there is none to show."""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the known word most similar to `word`, ignoring case; None if none is similar enough."""
    from difflib import get_close_matches

    names = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[matches[0]] if matches else None


class CanzonaError(Exception):
    """A failure that the user can act on, with every problem that was detected."""

    exit_code: ClassVar[ExitCode] = ExitCode.CRASH
    headline: ClassVar[str] = "Failed"

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.key}: {p.reason}" + (f" ({p.fix})" if p.fix else "") for p in problems))


class ConfigError(CanzonaError):
    """The error for a bad configuration or a bad command line."""

    exit_code = ExitCode.CONFIG
    headline = "Bad configuration"


class Unsupported(ConfigError):
    """The error for a setting or a request of another training loop that canzona's engine does not
    support."""

    headline = "canzona's engine does not support this"


def problem_with(setup: object, key: str, reason: str, fix: str = "") -> Problem:
    """Returns a problem with a setting, including the setting's value in this run."""
    return Problem(key, reason, fix, value=value_of(setup, key))


def value_of(setup: object, key: str) -> object:
    """Returns a run's value of the setting with this dotted key."""
    value: object = setup
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_own_values(setup: object, problems: Iterable[Problem]) -> list[Problem]:
    """Returns the problems, with the run's value of the setting filled in where a problem has no value."""
    return [
        problem_with(setup, problem.key, problem.reason, problem.fix) if problem.value is None else problem
        for problem in problems
    ]


def refuse(problems: Iterable[Problem], kind: type[CanzonaError] = ConfigError) -> None:
    """Raises one error of this kind with all problems, if there are any."""
    if raised := tuple(problems):
        raise kind(*raised)


class BadUsage(ConfigError):
    """The error for a command line that cannot be parsed: an unknown command or option, or a missing
    argument."""

    headline = "Bad usage"


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Catches a ConfigError that the block raises, and appends its problems to `problems`.

    Use it around several checks, then call `refuse` to report all problems at once.
    """
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class EnvironmentProblem(CanzonaError):
    """The error for a machine that lacks something the job needs: GPUs, a package, a free port, a writable
    folder."""

    exit_code = ExitCode.ENVIRONMENT
    headline = "Cannot run here"


def write_error(key: str, value: object, error: OSError, *, fix: str, what: str = "") -> EnvironmentProblem:
    """Returns the error for a path that cannot be written.

    Args:
        key, value: the setting or option that has the path, and the path.
        what: the subject of the message, such as `the run's files`; empty if the path itself cannot be
            written.
    """
    reason = f"{what} cannot be written: {error.strerror or error}".lstrip()
    return EnvironmentProblem(Problem(key=key, value=value, reason=reason, fix=fix))


_FIXES: Final = {
    errno.ENAMETOOLONG: "choose a shorter path: at most 255 bytes per name and 4,095 bytes in total",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files: ulimit -f unlimited",
    errno.EMFILE: "raise the limit on open files: ulimit -n 65536",
    errno.ENFILE: "close other programs: this machine has too many open files",
    errno.EAGAIN: "raise the limit on processes: ulimit -u 4096",
    errno.EACCES: "choose a path that you may access, or ask for permission",
    errno.EPERM: "choose a path that you may access, or ask for permission",
    errno.EROFS: "choose a path on a writable file system",
    errno.ELOOP: "fix the symbolic links: they form a cycle",
    errno.EIO: "check the disk or the file server",
    errno.ESTALE: "check the file server",
}


def machine_error(error: BaseException) -> EnvironmentProblem | None:
    """Converts an OSError that the user can fix, such as a full disk or a missing permission, to an error
    with that fix; returns None for any other exception."""
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        reason, fix = "it has been deleted, and paths are relative to it", "cd to a directory that exists"
        return EnvironmentProblem(Problem(key="working directory", reason=reason, fix=fix))
    if error.errno not in _FIXES:
        return None
    key = "this machine" if error.filename is None else os.fsdecode(error.filename)
    return EnvironmentProblem(Problem(key=key, reason=error.strerror or str(error), fix=_FIXES[error.errno]))


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


class DoesNotFit(CanzonaError):
    """The error for a job that needs more memory per GPU than the cluster profile has."""

    exit_code = ExitCode.MEMORY
    headline = "Does not fit in memory"


class CheckpointInvalid(CanzonaError):
    """The error for a checkpoint that is damaged or incomplete, or does not fit the run. No step was trained
    from it."""

    exit_code = ExitCode.CHECKPOINT
    headline = "Checkpoint cannot be used"


class SaveFailed(EnvironmentProblem):
    """The error for a checkpoint that could not be written. Earlier checkpoints are unchanged."""

    headline = "The checkpoint could not be saved"


class Hang(CanzonaError):
    """The error for a run whose ranks have stopped making progress."""

    exit_code = ExitCode.HANG
    headline = "The run hangs"


class Diverged(CanzonaError):
    """The error for a training run whose losses or gradients are no longer usable.

    Args:
        since: the first step of the divergence, if known; checkpoints of earlier steps are good.
    """

    exit_code = ExitCode.CRASH
    headline = "The run diverged"

    def __init__(self, *problems: Problem, since: int | None = None) -> None:
        super().__init__(*problems)
        self.since = since


class WorkerCrashed(CanzonaError):
    """The error for a worker process that crashed."""

    exit_code = ExitCode.CRASH
    headline = "A worker crashed"
