"""Detects that a run hangs, and which rank the other ranks wait for.

A run hangs if none of this machine's ranks makes progress for `run.hang_timeout_s`. Every change of phase
counts as progress, and so do the start and the end of every wait for other ranks. Where a single operation
may take long (start-up, reading data, saving, the first step, which may compile), the limit is `PATIENCE`
times as long.

The culprit is, in this order: a process whose heartbeat has stopped (stopped, swapped out, or waiting for a
disk); a rank that never started; a rank that is stuck in its own work while others wait for it; the rank that
has waited longest.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psutil

from canzona_cli.errors import Problem
from canzona_cli.run.heartbeat import BEAT_S, PATIENCE, STACKS_SIGNAL, VARIABLE, Heartbeats, Sign
from canzona_cli.run.records import Incident

_LONGEST_GAP_S: Final = 5.0
"""The most seconds of silence that one call of `check` adds. Without this limit, a machine that was suspended
would look like a hang."""
_AFTER_OTHERS_S: Final = 5.0
_NO_BEAT_S: Final = 10 * BEAT_S
_WRITE_STACKS_S: Final = 1.0
_REPORT_AFTER_S: Final = 30.0
_MOST_OTHERS: Final = 8
_STATES: Final = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP; SIGCONT resumes it)",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a file server that does not answer",
    psutil.STATUS_ZOMBIE: "has died, and torchrun has not noticed",
}
"""The kernel states of a process that explain its silence."""


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """The report of a hang: the rank that the other ranks wait for, and what it is doing."""

    rank: int | None
    """The rank that the other ranks wait for; None if all ranks have ended but torchrun has not."""
    step: int
    where: str
    reason: str
    """A sentence without its subject, the rank: what it is doing and for how long, then what the other ranks
    are doing."""
    elsewhere: bool = False
    """True if all ranks of this machine only wait, for the network or for a rank of another machine."""

    @property
    def name(self) -> str:
        return "torchrun" if self.rank is None else f"rank {self.rank}"

    @property
    def incident(self) -> Incident:
        """The incident to append to events.jsonl."""
        facts = {"rank": self.rank, "step": self.step, "where": self.where}
        return Incident(time=time.time(), event="hang", detail=self.reason, facts=facts)

    @property
    def problem(self) -> Problem:
        """The problem that the command reports for the hang when it exits."""
        fix = "the logs have the Python stacks of all ranks that are still running; run.hang_timeout_s sets the limit"
        return Problem(self.name, self.reason, fix)


@contextmanager
def hang_watch(ranks: range, *, timeout_s: float | None) -> Iterator["HangWatch | None"]:
    """Creates the heartbeats of the ranks that the block starts, and yields a watch over them; yields None
    without a timeout."""
    if timeout_s is None:
        yield None
        return
    beats = Heartbeats(ranks)
    try:
        yield HangWatch(beats, timeout_s=timeout_s)
    finally:
        beats.close()


class HangWatch:
    """A watch over the heartbeats of this machine's ranks, which the launcher polls."""

    def __init__(
        self,
        beats: Heartbeats,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beats, self._timeout_s, self._clock = beats, timeout_s, clock
        self._began = self._checked = clock()
        self._newest = 0.0
        self._silent_s = 0.0
        self._reported = False

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable that tells the ranks where to write their heartbeats."""
        return {VARIABLE: str(self._beats.folder)}

    def check(self) -> HangReport | None:
        """Returns a report if the ranks hang; None if they do not. Call this several times a second."""
        now = self._clock()
        all_signs = self._beats.signs()
        newest = max(sign.progress for sign in all_signs)
        passed_s = min(now - self._checked, _LONGEST_GAP_S)
        self._checked = now
        self._silent_s = 0.0 if newest != self._newest else self._silent_s + passed_s
        self._newest = newest
        live_signs = [sign for sign in all_signs if not sign.ended]
        if not live_signs:
            reason = f"has not exited, though all ranks ended {self._silent_s:.0f} s ago"
            is_late = self._silent_s > self._timeout_s
            return HangReport(rank=None, step=all_signs[0].step, where="finish", reason=reason) if is_late else None
        is_patient = any(sign.steps <= 1 or not sign.where.startswith(("train", "validate")) for sign in live_signs)
        limit_s = self._timeout_s * (PATIENCE if is_patient else 1)
        if self._silent_s <= limit_s:
            return None
        report = blame(live_signs, now=now, began=self._began, state=_process_status)
        # If all ranks here wait, the machine with the culprit gets time to report first.
        return None if report.elsewhere and self._silent_s <= limit_s + _AFTER_OTHERS_S else report

    def describe_slow_start(self) -> str | None:
        """Describes what the ranks are doing if their start-up has made no progress for 30 seconds, once for
        each such wait; otherwise returns None."""
        signs = self._beats.signs()
        if self._silent_s < _REPORT_AFTER_S or any(sign.steps for sign in signs):
            self._reported = False
            return None
        if self._reported:
            return None
        self._reported = True
        return f"no progress for {self._silent_s:.0f} s: {_describe_ranks(signs)}"

    def write_stacks(self) -> None:
        """Makes every rank with a heartbeat write its Python stacks to its log, and waits a second for
        that."""
        # Ranks without a heartbeat could not write anything, and their process ids may have been reused.
        oldest_beat = time.monotonic() - _NO_BEAT_S
        pids = [sign.pid for sign in self._beats.signs() if sign.beat > oldest_beat and not sign.ended]
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
        if pids:
            time.sleep(_WRITE_STACKS_S)


def blame(signs: Sequence[Sign], *, now: float, began: float, state: Callable[[int], str]) -> HangReport:
    """Reports the rank that the other ranks wait for.

    Args:
        signs: the signs of life of at least one rank; none of the ranks makes progress.
        now, began: seconds of the monotonic clock. A rank that never started has been silent since `began`,
            the start of the watch.
        state: a function that returns psutil's status of a process, or an empty text if the process is gone.
    """

    def silent_since(sign: Sign) -> float:
        return sign.progress or began

    absent = [sign for sign in signs if not sign.pid]
    frozen = [sign for sign in signs if sign.pid and now - sign.beat > _NO_BEAT_S]
    busy = [sign for sign in signs if sign.pid and not sign.waiting]
    culprit = min(frozen or absent or busy or signs, key=silent_since)
    duration = f"{now - silent_since(culprit):.0f} s"
    if culprit in frozen:
        explanation = _STATES.get(state(culprit.pid), "does not respond: swapped out, or stuck in native code")
        reason = f"{explanation}; last progress {duration} ago, in {_place(culprit)}"
    elif culprit in absent:
        reason = f"has not started after {duration}: its process has sent no heartbeat"
    elif culprit in busy:
        reason = f"has been stuck in {_place(culprit)} for {duration}"
    else:
        cause = "check the network and the ranks of other machines"
        wait = f"has waited for other ranks in {_place(culprit)} for {duration}"
        reason = f"{wait}, as have all ranks of this machine: {cause}"
    others = _describe_ranks([sign for sign in signs if sign is not culprit])
    return HangReport(
        rank=culprit.rank,
        step=culprit.step,
        where=culprit.where,
        reason=reason + (f"; {others}" if others else ""),
        elsewhere=not (frozen or absent or busy),
    )


def _place(sign: Sign) -> str:
    return f"{sign.where} of step {sign.step}" if sign.where.startswith("train") else sign.where


def _describe_ranks(signs: Sequence[Sign]) -> str:
    """Describes what ranks are doing, grouped by stage and step: `ranks 0 2 3 waiting in train/grad_reduce of
    step 7`."""
    by_activity: dict[str, list[str]] = {}
    for sign in signs:
        doing = "waiting in" if sign.waiting else "at work in"
        by_activity.setdefault(f"{doing} {_place(sign)}" if sign.pid else "not started", []).append(str(sign.rank))
    groups = []
    for activity, ranks in by_activity.items():
        more = [f"and {len(ranks) - _MOST_OTHERS} more"] if len(ranks) > _MOST_OTHERS else []
        groups.append(" ".join(["rank" if len(ranks) == 1 else "ranks", *ranks[:_MOST_OTHERS], *more, activity]))
    return ", ".join(groups)


def _process_status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
