"""Works out the outcome of a run from the files that its ranks wrote.

torchrun's own exit code is 1 for every failure, and the root cause that it names may be a rank that only lost
another rank. The rank files say what each rank saw; torchrun's log adds the signals that killed ranks.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.core.errors import (
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
from canzona_cli.core.host import machine_name
from canzona_cli.records.files import RunFiles
from canzona_cli.records.protection import HANG_MARK
from canzona_cli.records.records import FAILURES, RankError, RankResult, RunResult, read_rank

_SECONDARY = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket timeout|timed out|connectfullmesh"
    r"|remote process exited|ncclremoteerror|peer .*(gone|died|closed)|failed to (recv|send)|end of file",
    re.IGNORECASE,
)
"""The error messages of a rank that has lost another rank. They are consequences of a failure, not its
cause."""
_SECONDARY_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError", "ConnectionResetError")
_FAILS_AGAIN = (ExitCode.CONFIG, ExitCode.MEMORY, ExitCode.CHECKPOINT)
"""The exit codes of runs that would fail again if they were started unchanged."""
_USER_MISTAKES = (ExitCode.CONFIG, ExitCode.ENVIRONMENT, ExitCode.MEMORY, ExitCode.CHECKPOINT)
_DEATH = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+)")
_TRACEBACK_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Outcome(RunResult):
    """The outcome of a run: the fields of `result.json`, and details of a failure for the terminal."""

    traceback: tuple[str, ...] = ()
    """The last lines of the failing rank's traceback; empty for a user's mistake, which the message
    explains."""
    problems: tuple[Problem, ...] = ()
    """The problems that explain the failure to the user; empty if there are none, as for a crash."""
    error_type: str = ""
    """The class name of the rank's error if it is a user's mistake; otherwise empty."""
    secondary: bool = False
    """True for a failure whose cause may be on another machine: a rank lost its connection to another rank,
    or all ranks wait."""
    again_in_s: float | None = None
    """The seconds after which the same launch restarts the run; None if there is no restart."""

    @property
    def resumable(self) -> bool:
        """True if the run may get further when it is started again in its directory."""
        return self.status != "done" and self.exit_code not in _FAILS_AGAIN

    def error(self) -> CanzonaError:
        """Returns the error that the command reports when it exits. The error has the rank's problems or,
        if there are none, the message."""
        kinds: tuple[type[CanzonaError], ...] = (ConfigError, EnvironmentProblem, DoesNotFit, CheckpointInvalid, Hang)
        kind = next((kind for kind in kinds if kind.exit_code == self.exit_code), WorkerCrashed)
        if self.error_type == SaveFailed.__name__:
            kind = SaveFailed
        if self.status == "diverged":
            kind = Diverged
        if self.problems:
            return kind(*self.problems)
        subject = "launcher" if self.rank is None else f"rank {self.rank}"
        return kind(Problem(subject, self.message.removeprefix(subject).removeprefix(":").strip()))

    @property
    def result(self) -> RunResult:
        """The fields that are written to `result.json`."""
        return RunResult(**{field.name: getattr(self, field.name) for field in fields(RunResult)})


def read_ranks(files: RunFiles, ranks: Sequence[int]) -> list[RankResult]:
    """Reads the results of `ranks`, in the same order."""
    return [read_rank(files, rank) for rank in ranks]


def interrupted_outcome(message: str) -> Outcome:
    """Returns the outcome of a run that somebody stopped."""
    return Outcome(status="interrupted", exit_code=ExitCode.INTERRUPTED, message=message)


def failed_outcome(message: str, exit_code: int = ExitCode.CRASH) -> Outcome:
    """Returns the outcome of a run that failed."""
    return Outcome(status="failed", exit_code=int(exit_code), message=message)


def unsaved_outcome(message: str, checkpoint: str | None) -> Outcome:
    """Returns the outcome of a run that was preempted before it could save: preempted if there is an older
    checkpoint to resume from, else interrupted."""
    if checkpoint is None:
        return interrupted_outcome(f"{message}; there is no checkpoint to continue from")
    message = f"{message}; the checkpoint to continue from is {checkpoint}, and it is intact"
    return Outcome(status="preempted", exit_code=ExitCode.PREEMPTED, message=message)


def killed_outcome(files: RunFiles, *, training: bool) -> Outcome:
    """Returns the outcome of a run whose workers were killed because somebody asked it to stop.

    Args:
        training: True if training had begun in this launch; otherwise the metrics in `files` may come from an
            earlier launch.
    """
    if not training:
        return interrupted_outcome("stopped before training began")
    return interrupted_outcome(
        "stopped at once, in the middle of a step"
        if files.metrics.exists()
        else "stopped before the first step was done"
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of this machine, after all their processes have ended."""

    files: RunFiles
    ranks: Sequence[int]
    """This machine's ranks, in local order."""
    node_rank: int
    agent_code: int
    """torchrun's exit code; negative when a signal killed it."""
    hung_elsewhere: bool = False
    """True if ranks of another machine have exited because they made no progress."""

    def log(self, rank: int | None) -> Path:
        """Returns the error log of a rank; torchrun's log if the rank has no log or `rank` is None."""
        worker = None if rank is None else self.files.worker_log(self.node_rank, self.ranks.index(rank))
        return worker or self.files.agent_log(self.node_rank)

    def failure(self, message: str, *, rank: int | None = None, exit_code: int = ExitCode.CRASH) -> Outcome:
        """Returns the outcome for a failed rank or, if `rank` is None, for a failure of torchrun."""
        outcome = failed_outcome(message.strip(), exit_code)
        return replace(outcome, rank=rank, machine=machine_name(), log=self.log(rank))


def judge(workers: Workers, *, stopping: bool) -> Outcome:
    """Returns the outcome of a run from its rank files and torchrun's log.

    Args:
        stopping: True if the workers were asked to stop after their step.
    """
    agent_code, results = workers.agent_code, read_ranks(workers.files, workers.ranks)
    # A rank on a full disk cannot write that it is done, so its file still says `running`. torchrun's exit
    # code of 0 then says that all ranks are done.
    counts_as_done = "running" if agent_code == 0 and not stopping else None
    if all(result.status in ("done", counts_as_done) for result in results):
        return Outcome(status="done", exit_code=ExitCode.OK, message=_unwritten_text(results))
    saved = next((f", saved as {result.checkpoint}" for result in results if result.checkpoint is not None), "")
    stopped = f"stopped after a complete step{saved}"
    if all(result.status == "preempted" for result in results):
        return Outcome(status="preempted", exit_code=ExitCode.PREEMPTED, message=stopped)
    exit_codes = {} if agent_code == 0 else _exit_codes(workers.files.agent_log(workers.node_rank))
    if (hang := _hang_outcome(workers, results, exit_codes)) is not None:
        return hang
    failed = sorted((result for result in results if result.status in FAILURES), key=lambda result: result.time)
    causes = [result for result in failed if not _lost_another_rank(result)]
    # torchrun sends SIGTERM to the other ranks after one has failed.
    signals = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    killed = [result.rank for result in results if result.rank in signals]
    if stopping and not causes and not killed:
        return interrupted_outcome(stopped)
    if causes or (failed and not killed):
        return _failure_outcome(workers, (causes or failed)[0])
    if killed:
        return workers.failure(f"rank {killed[0]} {_signal_text(signals[killed[0]])}", rank=killed[0])
    if any(result.status == "interrupted" for result in results):
        return interrupted_outcome("the workers were asked to stop")
    if agent_code < 0:
        return workers.failure(f"torchrun {_signal_text(-agent_code)}")
    silent = next(result for result in results if result.status != "done")
    return _silent_outcome(workers, silent, exit_codes.get(silent.rank, 0))


def _silent_outcome(workers: Workers, silent: RankResult, exit_code: int) -> Outcome:
    """Returns the outcome of a run in which a rank ended without recording how; `exit_code` is the rank's, 0
    if it is unknown."""
    how = "before it could start" if silent.status == "missing" else "without reporting"
    with_code = f", with exit code {exit_code}" if exit_code > 0 else ""
    outcome_code = exit_code if exit_code in _USER_MISTAKES else ExitCode.CRASH
    return workers.failure(f"rank {silent.rank} ended {how}{with_code}", rank=silent.rank, exit_code=outcome_code)


def _failure_outcome(workers: Workers, failed: RankResult) -> Outcome:
    """Returns the outcome of a run that ended because rank `failed.rank` failed."""
    error = failed.error or RankError()
    if failed.status == "diverged":
        return _divergence_outcome(workers, failed.rank, error)
    exit_code = ExitCode.CRASH if failed.exit_code not in _USER_MISTAKES else ExitCode(failed.exit_code)
    mistake = exit_code is not ExitCode.CRASH
    # An error written for the user has no traceback, and its message needs no class name.
    kind = f"{error.type}: " if error.traceback else ""
    message = error.message if mistake else f"rank {failed.rank}: {kind}{error.message.strip()}"
    return replace(
        workers.failure(message, rank=failed.rank, exit_code=exit_code),
        traceback=() if mistake else tuple(error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]),
        problems=error.problems,
        error_type=error.type if mistake else "",
        secondary=not mistake and _lost_another_rank(failed),
    )


def _divergence_outcome(workers: Workers, rank: int, error: RankError) -> Outcome:
    """Returns the outcome of a run that diverged, with the last good checkpoint from before the
    divergence."""
    last_good, hint, resume = None, "", ""
    if error.since is not None:
        checkpoints = CheckpointStore(workers.files.checkpoints).checkpoints()
        good = [checkpoint.name for checkpoint in checkpoints if checkpoint.usable and checkpoint.step < error.since]
        last_good = good[-1] if good else None
        hint = "; there is no good checkpoint"
    if last_good is not None:
        hint = f"; the last good checkpoint is {last_good}"
        resume = f"checkpoint.resume={last_good} with "
    problems = tuple(replace(p, reason=f"{p.reason}{hint}", fix=f"{resume}{p.fix}") for p in error.problems)
    failure = workers.failure(f"{error.message.strip()}{hint}", rank=rank)
    return replace(failure, status="diverged", problems=problems, last_good=last_good)


def _lost_another_rank(result: RankResult) -> bool:
    """Returns True if the rank's error only says that it lost its connection to another rank."""
    error = result.error or RankError()
    return error.type in _SECONDARY_TYPES or _SECONDARY.search(error.message) is not None


def _unwritten_text(results: Sequence[RankResult]) -> str:
    """Describes the records that the ranks could not write; empty if there are none."""
    missing = [f"{count} lines of {name}" for result in results for name, count in result.lost.items()]
    missing += [f"the end of rank {result.rank}'s record" for result in results if result.status != "done"]
    return f"could not write {', '.join(missing)}" if missing else ""


_WAITS: Final = re.compile(r"torch/distributed/|canzona_cli/core/megatron/timers\.py|in timed_wait$")
"""The innermost Python frames of a rank that waits for other ranks."""


def _hang_outcome(workers: Workers, results: Sequence[RankResult], exit_codes: Mapping[int, int]) -> Outcome | None:
    """Returns the outcome of a run in which ranks made no progress and exited; None if none did.

    The rank to blame is, in this order: one that had to be killed, because it neither wrote its stacks nor reacted
    to torchrun's signal; one that never started; one that was stuck in its own work.
    """
    places = {result.rank: place for result in results if (place := _stuck_place(workers.log(result.rank)))}
    frozen = [rank for rank, code in exit_codes.items() if code == -signal.SIGKILL]
    if workers.hung_elsewhere:
        frozen += [result.rank for result in results if result.status == "running" and result.rank not in places]
    if not places and not (workers.hung_elsewhere and frozen):
        return None
    absent = [result.rank for result in results if result.status == "missing"]
    busy = [rank for rank, place in places.items() if _WAITS.search(place) is None]
    rank = [*frozen, *absent, *busy, *places][0]
    reason = "does not respond: stopped, swapped out, or stuck in native code"
    if rank in places:
        reason = f"made no progress in {places[rank]}"
        reason += "" if busy else ", as all ranks of this machine: check the network and the ranks of other machines"
    elif rank in absent:
        reason = "has not started"
    fix = "the logs have the Python stacks of the ranks; run.hang_timeout_s sets the limit"
    failure = workers.failure(f"rank {rank} {reason}", rank=rank, exit_code=ExitCode.HANG)
    problems = (Problem(f"rank {rank}", reason, fix),)
    return replace(failure, problems=problems, secondary=not (frozen or absent or busy))


def _stuck_place(log: Path) -> str:
    """Returns the innermost Python frame of the main thread of a rank that hung; empty if the rank did not."""
    try:
        _, mark, stacks = log.read_text(encoding="utf-8", errors="replace").rpartition(HANG_MARK)
    except OSError:
        return ""
    main_thread = stacks.rpartition("(most recent call first):\n")[2]
    return main_thread.partition("\n")[0].strip() if mark else ""


def _signal_text(number: int) -> str:
    reasons = {int(signal.SIGKILL): "the kernel kills processes when memory runs out"}
    names = {int(known_signal): known_signal.name for known_signal in signal.Signals}
    return f"was killed by signal {number} ({reasons.get(number) or names.get(number, 'unknown')})"


def _exit_codes(agent_log: Path) -> dict[int, int]:
    """Reads the ranks' exit codes from the failure report in torchrun's log; empty without a report. Negative
    codes are signals."""
    try:
        text = agent_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {int(rank): int(code) for rank, code in _DEATH.findall(text)}
