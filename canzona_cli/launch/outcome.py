"""The outcome of a run, worked out from what the ranks wrote.

torchrun's own exit code is 1 for every failure, and the failure it calls the root cause may be a rank that merely lost
its neighbour. The rank files say what each rank saw; torchrun's log adds the signals that killed ranks.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.errors import (
    CanzonaError,
    CheckpointInvalid,
    ConfigError,
    Diverged,
    DoesNotFit,
    EnvironmentProblem,
    ExitCode,
    Hang,
    Problem,
    SaveFailed,
    WorkerCrashed,
)
from canzona_cli.launch.hang import HangReport
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import FAILURES, RankError, RankResult, RunResult, read_rank

_SECONDARY = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket timeout|timed out|connectfullmesh"
    r"|remote process exited|ncclremoteerror|peer .*(gone|died|closed)|failed to (recv|send)|end of file",
    re.IGNORECASE,
)
"""The words in which a rank reports that another one is gone: true, but not the cause."""
_SECONDARY_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError", "ConnectionResetError")
_USER_MISTAKES = (ExitCode.CONFIG, ExitCode.ENVIRONMENT, ExitCode.MEMORY, ExitCode.CHECKPOINT)
_DEATH = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+)")
_TRACEBACK_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Outcome(RunResult):
    """The end of a run, with what the terminal shows of a failure beyond `result.json`."""

    traceback: tuple[str, ...] = ()
    """The last lines of the failing rank's traceback; empty for a mistake of the user, which the message explains."""
    problems: tuple[Problem, ...] = ()
    """The problems that this rank wrote for the user; empty where something else ended it."""
    error_type: str = ""
    """The class of that error, where it is one written for the user."""
    secondary: bool = False
    """A failure that only says that a rank of another machine is gone."""
    again_in_s: float | None = None
    """Seconds after which the same launch starts the run again; None: it does not."""

    def error(self) -> CanzonaError:
        """A failure as the error that the command ends with: the rank's own problems, else the message."""
        kinds: tuple[type[CanzonaError], ...] = (ConfigError, EnvironmentProblem, DoesNotFit, CheckpointInvalid, Hang)
        kind = next((k for k in kinds if k.exit_code == self.exit_code), WorkerCrashed)
        if self.error_type == SaveFailed.__name__:
            kind = SaveFailed
        if self.status == "diverged":
            kind = Diverged
        if self.problems:
            return kind(*self.problems)
        place = "launcher" if self.rank is None else f"rank {self.rank}"
        reason = self.message.removeprefix(place).removeprefix(":").strip()
        return kind(Problem(key=place, reason=reason))

    @property
    def result(self) -> RunResult:
        """The part that `result.json` keeps."""
        return RunResult(**{field.name: getattr(self, field.name) for field in fields(RunResult)})


def read_ranks(files: RunFiles, ranks: Sequence[int]) -> list[RankResult]:
    """The result of each of `ranks`, in that order."""
    return [read_rank(files, rank) for rank in ranks]


def judge(
    files: RunFiles, ranks: Sequence[int], *, node_rank: int, agent_code: int, stopping: bool, forced: bool
) -> Outcome:
    """Decide how a run ended, after all its processes.

    Args:
        ranks: This machine's ranks, in local order.
        agent_code: torchrun's exit code; negative when a signal killed it.
        stopping: Somebody asked for a clean stop.
        forced: The launcher killed the workers because of it.
    """
    results, failure = read_ranks(files, ranks), partial(_failure, files, ranks, node_rank)
    if forced:
        when = "stopped at once, inside a step" if files.metrics.exists() else "stopped before the first step was done"
        return Outcome(status="interrupted", exit_code=ExitCode.INTERRUPTED, message=when)
    # A rank without room left to write how it ended reports it by its exit code, which torchrun passes on if it is 0.
    untold = "running" if agent_code == 0 and not stopping else None
    if all(r.status in ("done", untold) for r in results):
        return Outcome(status="done", exit_code=ExitCode.OK, message=_lost(results))
    saved = next((f", saved as {r.checkpoint}" for r in results if r.checkpoint is not None), "")
    if all(r.status == "preempted" for r in results):
        return Outcome(status="preempted", exit_code=ExitCode.PREEMPTED, message=f"stopped after a whole step{saved}")
    deaths = {} if agent_code == 0 else _deaths(files.agent_log(node_rank))
    failed = sorted((r for r in results if r.status in FAILURES), key=lambda r: r.time)
    own = [r for r in failed if not _lost_a_neighbour(r)]
    # A rank that got SIGTERM was told to go by torchrun, after another one had failed.
    killed = [r for r in results if -deaths.get(r.rank, 0) not in (0, signal.SIGTERM) and deaths[r.rank] < 0]
    if stopping and not own and not killed:
        message = f"stopped after a whole step{saved}"
        return Outcome(status="interrupted", exit_code=ExitCode.INTERRUPTED, message=message)
    first = next(iter([*own, *killed, *failed]), None)
    if first is None and any(r.status == "interrupted" for r in results):
        return Outcome(status="interrupted", exit_code=ExitCode.INTERRUPTED, message="the workers were told to stop")
    if first is None and agent_code < 0:
        return failure(f"torchrun {_killed_by(-agent_code)}")
    if first is None:
        silent = next(r for r in results if r.status != "done")
        at = "before it could start" if silent.status == "missing" else "without reporting"
        code = deaths.get(silent.rank, 0)
        exit_code = code if code in _USER_MISTAKES else ExitCode.CRASH
        return failure(f"rank {silent.rank} ended {at}{_code(code)}", rank=silent.rank, exit_code=exit_code)
    if first in killed and first not in own:
        return failure(f"rank {first.rank} {_killed_by(-deaths[first.rank])}", rank=first.rank)
    error = first.error or RankError()
    if first.status == "diverged":
        return _diverged(files, error, replace(failure(error.message, rank=first.rank), problems=error.problems))
    if first.exit_code in _USER_MISTAKES:
        outcome = failure(error.message, rank=first.rank, exit_code=first.exit_code)
        return replace(outcome, problems=error.problems, error_type=error.type)
    # What was written for the user has no traceback, and says more than the name of its class.
    kind = f"{error.type}: " if error.traceback else ""
    outcome = failure(f"rank {first.rank}: {kind}{error.message.strip()}", rank=first.rank)
    lines = tuple(error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:])
    return replace(outcome, traceback=lines, problems=error.problems, secondary=_lost_a_neighbour(first))


def _diverged(files: RunFiles, error: RankError, outcome: Outcome) -> Outcome:
    """Name the checkpoint to go back to. All processes have gone, so the store is as it will be."""
    outcome = replace(outcome, status="diverged")
    if error.since is None:
        return outcome
    sound = [found for found in CheckpointStore(files.checkpoints).found() if found.sound]
    name = next((found.name for found in reversed(sound) if found.step < error.since), None)
    if name is None:
        said, again = "there is no checkpoint from before it", ""
    else:
        said, again = f"the last checkpoint from before it is {name}", f"checkpoint.resume={name} with "
    problems = tuple(
        replace(problem, reason=f"{problem.reason}; {said}", fix=f"{again}{problem.fix}")
        for problem in outcome.problems
    )
    message = f"{outcome.message}; {said}"
    return replace(outcome, message=message, problems=problems, last_good=name)


def _lost_a_neighbour(result: RankResult) -> bool:
    """Returns True if its error only says that another rank is gone."""
    error = result.error or RankError()
    return error.type in _SECONDARY_TYPES or _SECONDARY.search(error.message) is not None


def _lost(results: Sequence[RankResult]) -> str:
    """Lists the run's files that could not be written in full; empty in a healthy run."""
    missing = [f"{count} lines of {name}" for r in results for name, count in r.lost.items()]
    missing += [f"the end of rank {r.rank}'s record" for r in results if r.status != "done"]
    return f"could not write {', '.join(missing)}" if missing else ""


def hung(files: RunFiles, found: HangReport, ranks: Sequence[int], *, node_rank: int) -> Outcome:
    """The end of a run whose ranks have been killed because they no longer went on."""
    message = f"{found.name} {found.reason}"
    outcome = _failure(files, ranks, node_rank, message, rank=found.rank, exit_code=ExitCode.HANG)
    return replace(outcome, problems=(found.problem,), secondary=found.elsewhere)


def _failure(
    files: RunFiles,
    ranks: Sequence[int],
    node_rank: int,
    message: str,
    *,
    rank: int | None = None,
    exit_code: int = ExitCode.CRASH,
) -> Outcome:
    """The failure of a rank, or of torchrun, and the log that tells most of it."""
    log = None if rank is None else files.worker_log(node_rank, ranks.index(rank))
    return Outcome(
        status="failed",
        exit_code=int(exit_code),
        message=message.strip(),
        rank=rank,
        log=log or files.agent_log(node_rank),
    )


def _killed_by(number: int) -> str:
    if number == signal.SIGKILL:
        return "was killed by signal 9 (the kernel kills processes when memory runs out)"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {number} ({name})"


def _code(code: int) -> str:
    if code < 0:
        return f", by signal {-code}"
    return f", with exit code {code}" if code > 0 else ""


def _deaths(agent_log: Path) -> dict[int, int]:
    """Exit codes by rank from torchrun's failure report; negative for a signal. Empty when it wrote none."""
    try:
        text = agent_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {int(rank): int(code) for rank, code in _DEATH.findall(text)}
