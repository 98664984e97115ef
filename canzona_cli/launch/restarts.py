"""Starting a run again that failed, by the launch that it failed in: how often, after what wait, and when not."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from canzona_cli.errors import ExitCode
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.stop import Requests, sound_checkpoint, unsaved
from canzona_cli.run.codec import save
from canzona_cli.run.files import RunFiles, StopReason
from canzona_cli.run.words import duration, plural

FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0
"""Seconds that a machine or a file server takes to come back; longer only keeps the GPUs from somebody else."""
_POLL_S = 0.2
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass
class Restarts:
    """The restarts of one launch so far. Machine 0 decides; the others follow."""

    most: int = 0
    first_wait_s: float = field(default_factory=lambda: FIRST_WAIT_S)
    """Each wait is twice the one before, as long as the run gets no further than it was."""
    done: int = field(default=0, init=False)
    _in_vain: int = field(default=0, init=False)
    """Failures in a row that came no later than the one before them."""
    _furthest: int = field(default=-1, init=False)
    """Step of the latest failure."""
    _failures: set[tuple[int, int, str]] = field(default_factory=set, init=False)

    def decide(self, outcome: Outcome) -> Outcome:
        """The same end, with the wait after which the run is started again; where it is not, with the reason.

        A crash or a hang may be a machine's; a mistake of the user's and a run that diverged come again. So does, most
        likely, what has happened twice at the same step in the same words, their numbers (times, addresses) apart.
        """
        if self.most == 0 or outcome.status != "failed" or outcome.exit_code not in (ExitCode.CRASH, ExitCode.HANG):
            return outcome
        failure = (outcome.step, outcome.exit_code, _NUMBER.sub("#", outcome.message))
        self._in_vain = 0 if outcome.step > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, outcome.step)
        again = failure in self._failures
        self._failures.add(failure)
        if again:
            why = f"it failed so at step {outcome.step:,} before, and is not started again"
            return replace(outcome, message=f"{outcome.message}; {why}")
        if self.done == self.most:
            why = f"it has been started again {plural(self.most, 'time')}, as often as run.restarts allows"
            return replace(outcome, message=f"{outcome.message}; {why}")
        return replace(outcome, again_in_s=min(LONGEST_WAIT_S, self.first_wait_s * 2**self._in_vain))


def until_it_ends(
    attempt: Callable[[], Outcome],
    restarts: Restarts,
    files: RunFiles,
    requests: Requests,
    *,
    node_rank: int,
    say: Callable[[str], None],
) -> Outcome:
    """Attempt the run until an end of it is not to be followed by another attempt, or somebody stops it between two.

    Args:
        attempt: starts it and watches it to its end, which is in `result.json` then; `restarts` says how often it has.
    """
    while (wait_s := (outcome := attempt()).again_in_s) is not None:
        number = f"restart {restarts.done + 1} of at most {restarts.most}"
        say(f"starting again in {duration(wait_s)} ({number}; Ctrl-C: not)")
        if (reason := _asked_to_stop(files, requests, wait_s)) is not None:
            message = f"stopped before it was started again, having failed at step {outcome.step:,}: {outcome.message}"
            stopped = replace(outcome, status="interrupted", exit_code=ExitCode.INTERRUPTED, message=message)
            stopped = replace(stopped, again_in_s=None, problems=(), traceback=())
            if reason == "preempted":
                stopped = unsaved(stopped, sound_checkpoint(files))
            if node_rank == 0:
                with suppress(OSError):  # a full disk: the exit code says it too
                    save(files.result, stopped.result)
            return stopped
        restarts.done += 1
    return outcome


def _asked_to_stop(files: RunFiles, requests: Requests, wait_s: float) -> StopReason | None:
    """Wait; why the run shall not be started again, if somebody asks so here or on another of its machines."""
    until = time.monotonic() + wait_s
    while requests.reason is None and not files.stop_requested():
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_S)
    if requests.reason is not None and not files.stop_requested():
        with suppress(OSError):  # a full disk: the other machines get the signal themselves, or wait in vain
            files.request_stop(requests.reason)
    return requests.reason or files.stop_reason()
