"""Restarts a failed run within the same launch, asks a Slurm job to requeue, and builds the command that resumes
a run.

A launch restarts a run after a wait, at most `run.restarts` times. On one machine, `canzona resume` only
needs the run's directory; in a Slurm job and on several machines, the command repeats what was typed.

The script of a Slurm job (`scripts/train.sbatch`) gives each start of the job a file, named by `NOTES`. The
launchers write the name of the machine that may have caused a failure into it, and the script requeues the job
without this machine. The script counts the files, because Slurm's own count of restarts includes preemptions.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.manifest import step_of
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.overrides import text_value
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ExitCode
from canzona_cli.core.host import tool_output
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.slurm import current_step
from canzona_cli.launch.stop import Requests, stop_outcome
from canzona_cli.launch.torchrun import node_count
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles, StopReason
from canzona_cli.records.words import duration, plural

FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0
"""The longest wait before a restart, in seconds: long enough for a machine or a file server to come back. A
longer wait would only keep the GPUs from other jobs."""
_POLL_S = 0.2
NOTES: Final = "CANZONA_FAILURE"
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def may_be_the_machine(outcome: Outcome) -> bool:
    """Returns True for crashes and hangs, which a machine may have caused. A user's mistake or a divergence would
    happen again."""
    return outcome.status == "failed" and outcome.exit_code in (ExitCode.CRASH, ExitCode.HANG)


def signature(outcome: Outcome) -> tuple[int, int, str]:
    """Returns the step, the exit code and the message of a failure, without the message's numbers, such as times and
    addresses. Failures with the same signature probably have the same cause."""
    return outcome.step, outcome.exit_code, _NUMBER.sub("#", outcome.message)


@dataclass
class Restarts:
    """The restarts of one launch. Machine 0 decides on them; the other machines follow."""

    most: int = 0
    """The number of restarts that are allowed."""
    first_wait_s: float = field(default_factory=lambda: FIRST_WAIT_S)
    """The seconds of the first wait. The wait doubles whenever the run fails again without having reached a
    later step."""
    done: int = field(default=0, init=False)
    """The number of restarts so far."""
    _stuck: int = field(default=0, init=False)
    """The number of consecutive failures that did not get beyond step `_furthest`."""
    _furthest: int = field(default=-1, init=False)
    """The latest step at which the run has failed so far."""
    _failures: set[tuple[int, int, str]] = field(default_factory=set, init=False)

    def decide(self, outcome: Outcome) -> Outcome:
        """Returns the outcome with the wait before a restart, or with the reason why the run is not
        restarted.

        A failure that has happened twice in the same way (`signature`) would probably happen again. Outcomes that
        no machine can have caused are returned unchanged.
        """
        if self.most == 0 or not may_be_the_machine(outcome):
            return outcome
        failure = signature(outcome)
        self._stuck = 0 if outcome.step > self._furthest else self._stuck + 1
        self._furthest = max(self._furthest, outcome.step)
        if failure in self._failures:
            reason = f"it already failed this way at step {outcome.step:,}, and is not restarted"
            return replace(outcome, message=f"{outcome.message}; {reason}")
        self._failures.add(failure)
        if self.done == self.most:
            reason = f"it has been restarted {plural(self.most, 'time')}, as often as run.restarts allows"
            return replace(outcome, message=f"{outcome.message}; {reason}")
        return replace(outcome, again_in_s=min(LONGEST_WAIT_S, self.first_wait_s * 2**self._stuck))


def run_with_restarts(
    attempt: Callable[[], Outcome],
    restarts: Restarts,
    files: RunFiles,
    requests: Requests,
    *,
    node_rank: int,
    say: Callable[[str], None],
) -> Outcome:
    """Runs `attempt` until its outcome asks for no restart, or until somebody stops the run while it waits
    for one.

    Args:
        attempt: a function that starts the run, watches it to its end, and writes `result.json`.
    """
    while True:
        outcome = attempt()
        wait_s = outcome.again_in_s
        if wait_s is None:
            return outcome
        attempt_name = f"restart {restarts.done + 1} of {restarts.most}"
        say(f"restarting in {duration(wait_s)} ({attempt_name}; press Ctrl-C to cancel)")
        reason = _wait_unless_stopped(files, requests, wait_s)
        if reason is None:
            restarts.done += 1
            continue
        message = f"stopped before the restart, after a failure at step {outcome.step:,}: {outcome.message}"
        stop = stop_outcome(message, reason, files)
        stopped = replace(
            outcome,
            status=stop.status,
            exit_code=stop.exit_code,
            message=stop.message,
            again_in_s=None,
            problems=(),
            traceback=(),
        )
        if node_rank == 0:
            with suppress(OSError):  # the disk may be full; the exit code says the same
                save(files.result, stopped.result)
        return stopped


def _wait_unless_stopped(files: RunFiles, requests: Requests, wait_s: float) -> StopReason | None:
    """Waits for `wait_s` seconds, then returns None. If somebody asks to stop meanwhile, on any of the run's
    machines, passes the request on to the other machines and returns the reason at once."""
    deadline_s = time.monotonic() + wait_s
    while requests.reason is None and not files.stop_requested():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
    if requests.reason is not None and not files.stop_requested():
        with suppress(OSError):  # on a full disk, the other machines stop only if they get the signal themselves
            files.request_stop(requests.reason)
    return requests.reason or files.stop_reason()


def resume_command(
    overrides: Sequence[str],
    recipes_dirs: Sequence[Path],
    config: RunConfig,
    run_dir: Path,
    *,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Returns a shell command that resumes this run in its directory.

    In a Slurm batch job, the command submits another job with the same limits; in an allocation, it starts a
    step. On several machines, it repeats the overrides, because some settings differ between machines.

    Args:
        overrides: the overrides as they were typed.
        config: the resolved configuration.
    """
    if current_step(environment) is None and node_count(config) == 1:
        return shlex.join(("canzona", "resume", str(run_dir)))
    repeated = [text for text in overrides if not _is_replaced(text)]
    folders = [word for folder in recipes_dirs for word in ("--recipes-dir", str(folder.absolute()))]
    words = [*_program_and_options(config, environment), *repeated, f"run.dir={text_value(str(run_dir))}", *folders]
    return shlex.join(words)


def resume_hint(
    outcome: Outcome, files: RunFiles, config: RunConfig, environment: Mapping[str, str] = os.environ
) -> str:
    """Returns the resume command and the conditions under which it applies; empty if there is no command."""
    if outcome.go_on is None:
        return ""
    saved = CheckpointStore(files.checkpoints).latest() is not None
    words = "to continue" if saved else "nothing was saved; to start again in this directory"
    if outcome.status == "diverged":
        words += ", with the change suggested above"
    if current_step(environment) is not None:
        requeued = outcome.status == "preempted" or may_be_the_machine(outcome)
        words += ", unless Slurm queues this job again" if requeued else ""
    elif node_count(config) > 1:
        words += ", on every machine with its own cluster.node_rank"
    return f"{words}: {outcome.go_on}"


def _is_replaced(text: str) -> bool:
    """Returns True for an override that a resumed run must not repeat: the run directory, or a checkpoint
    named by its step."""
    key, _, value = (part.strip() for part in text.partition("="))
    return key == "run.dir" or (key == "checkpoint.resume" and step_of(value.strip("'\"")) is not None)


def _program_and_options(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    if current_step(environment) is None:
        yield from ("canzona", "train")
    elif environment.get("ENVIRONMENT") == "BATCH":
        # Slurm sets ENVIRONMENT=BATCH in batch scripts only, which no manual documents; the job's processes
        # inherit it.
        yield from ("canzona", "slurm", "--submit")
        limit = tool_output("squeue", "--noheader", "--format=%l", f"--jobs={environment['SLURM_JOB_ID']}") or ""
        if limit[:1].isdigit():  # it may be UNLIMITED
            yield f"--time={limit.strip()}"
        for name in ("partition", "account", "qos"):
            if value := environment.get(f"SLURM_JOB_{name.upper()}"):
                yield f"--{name}={value}"
    else:
        yield from ("srun", f"--nodes={node_count(config)}", "--ntasks-per-node=1", "canzona", "train")


def note_failure(outcome: Outcome, environment: Mapping[str, str] = os.environ) -> str:
    """Asks the job's script to requeue the job. Does nothing outside of such a job, or if no machine can have caused
    the outcome. Every machine of the run calls this, because any of them may be the one that is gone.

    Returns:
        The reason why the job is not requeued, if an earlier start failed in the same way; otherwise empty.
    """
    if NOTES not in environment or not may_be_the_machine(outcome):
        return ""
    file, failure = Path(environment[NOTES]), json.dumps(signature(outcome))
    with suppress(OSError):  # a full disk: the job ends, as it would without the file
        earlier = [path for path in file.parent.glob(f"{file.name.rpartition('-')[0]}-*") if path != file]
        if any(failure in path.read_text(encoding="utf-8").splitlines() for path in earlier):
            return f"this job already failed this way at step {outcome.step:,}, and is not requeued"
        file.parent.mkdir(parents=True, exist_ok=True)
        # The cause of a lost connection may be on another machine.
        machine = None if outcome.secondary else outcome.machine
        write_text_atomic(file, f"{machine or ''}\n{failure}\n")
    return ""
