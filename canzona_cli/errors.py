"""The error family of canzona: each class is one exit code,
each problem is written for the person at the terminal."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, with what to do about it."""

    key: str
    """The setting or place, as the user would type it: `parallel.tp`, `data.path`, `gpus`."""
    value: object = None
    """The value at that key; `None` when there is nothing to show."""
    reason: str
    """The reason why it cannot work, in one sentence without a final full stop."""
    fix: str = ""
    """The fix, to type or do instead; empty only when the reason already says it."""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None when nothing is near."""
    from difflib import get_close_matches

    names = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[matches[0]] if matches else None


class CanzonaError(Exception):
    """A failure the user can act on. Carries every problem found, never only the first."""

    exit_code: ClassVar[ExitCode] = ExitCode.CRASH
    headline: ClassVar[str] = "Failed"

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.key}: {p.reason}" + (f" ({p.fix})" if p.fix else "") for p in problems))


class ConfigError(CanzonaError):
    """Bad configuration or usage."""

    exit_code = ExitCode.CONFIG
    headline = "Bad configuration"


@dataclass(frozen=True, kw_only=True)
class Clash:
    """An option that makes no sense beside another one, or without it."""

    option: str
    beside: str = ""
    without: str = ""
    reason: str
    fix: str
    """May have the option's value: `{}`."""


def clashes(given: Mapping[str, object], rules: Iterable[Clash]) -> Iterator[Problem]:
    """Yields a problem for every rule that a command's options break.

    Args:
        given: by option, its value; None, False or empty where it was not typed.
    """
    for rule in rules:
        value = given[rule.option]
        if value and (given[rule.beside] if rule.beside else not given[rule.without]):
            shown = None if value is True else value
            yield Problem(key=rule.option, value=shown, reason=rule.reason, fix=rule.fix.format(shown))


def refuse(problems: Iterable[Problem], kind: type[CanzonaError] = ConfigError) -> None:
    """Raise one error with all of them, if there are any."""
    if raised := tuple(problems):
        raise kind(*raised)


@contextmanager
def gathered(problems: list[Problem]) -> Iterator[None]:
    """Adds what a ConfigError of the block says to `problems`, and goes on behind the block:
    `refuse` them then."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class EnvironmentProblem(CanzonaError):
    """This machine lacks something the job needs: GPUs, a package, a free port, a writable place."""

    exit_code = ExitCode.ENVIRONMENT
    headline = "This machine cannot run it"


def unwritable(key: str, value: object, error: OSError, *, fix: str, what: str = "") -> EnvironmentProblem:
    """Returns the error that the user's `key` cannot be written, or that `what` cannot be written there."""
    reason = f"{what} cannot be written: {error.strerror or error}".lstrip()
    return EnvironmentProblem(Problem(key=key, value=value, reason=reason, fix=fix))


_FIXES: Final = {
    errno.ENAMETOOLONG: "choose a shorter path: names of at most 255 bytes, 4,095 in all",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files: ulimit -f unlimited",
    errno.EMFILE: "raise the limit on open files: ulimit -n 65536",
    errno.ENFILE: "close other programs: the whole machine has too many files open",
    errno.EAGAIN: "raise the limit on processes: ulimit -u 4096",
    errno.EACCES: "choose a place that you may use, or ask for permission",
    errno.EPERM: "choose a place that you may use, or ask for permission",
    errno.EROFS: "choose a place that can be written",
    errno.ELOOP: "mend the links: they lead in a circle",
    errno.EIO: "look at the disk or the file server",
    errno.ESTALE: "look at the file server",
}


def of_the_machine(error: BaseException) -> EnvironmentProblem | None:
    """Turns an unexpected OSError into an error for the user; None for anything else."""
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        reason, fix = "it has been deleted, and paths are relative to it", "change to a directory that exists: cd"
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
    """The job needs more memory per GPU than the cluster profile has."""

    exit_code = ExitCode.MEMORY
    headline = "Does not fit in memory"


class CheckpointInvalid(CanzonaError):
    """A checkpoint is damaged, incomplete, or of another run; nothing of it has been loaded."""

    exit_code = ExitCode.CHECKPOINT
    headline = "Checkpoint cannot be used"


class SaveFailed(EnvironmentProblem):
    """A checkpoint could not be written; those before it are as they were."""

    headline = "The checkpoint could not be saved"


class Hang(CanzonaError):
    """Ranks have stopped making progress."""

    exit_code = ExitCode.HANG
    headline = "The run hangs"


class Diverged(CanzonaError):
    """Training itself went wrong: losses or gradients are not what weights can be learnt from.

    Args:
        since: the first step of it, where that is known: checkpoints from before are sound.
    """

    exit_code = ExitCode.CRASH
    headline = "The run diverged"

    def __init__(self, *problems: Problem, since: int | None = None) -> None:
        super().__init__(*problems)
        self.since = since


class WorkerCrashed(CanzonaError):
    """A worker process ended with an error of its own."""

    exit_code = ExitCode.CRASH
    headline = "A worker crashed"
