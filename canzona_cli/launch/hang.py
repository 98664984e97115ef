"""Tells a run that hangs from one that is slow, and which of its ranks holds the others up.

A run hangs when none of this machine's ranks makes progress for `run.hang_timeout_s`. Progress is every
change of phase and both ends of every wait for other ranks, many times per step. Where a single operation may
take long (start-up, reading data, saving, the first step, which may compile), the limit is `PATIENCE` times
as long.

The culprit is, in this order: a process that no longer runs (stopped, swapped out, or waiting for a disk),
whose beat has ceased; a rank that is stuck in its own work while others wait for it; the rank that has waited
longest.
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

_LONGEST_LOOK_S: Final = 5.0
"""The most seconds that count between two looks, so that a machine that was suspended does not count as hanging."""
_NO_BEAT_S: Final = 10 * BEAT_S
_WRITE_STACKS_S: Final = 1.0
_MOST_OTHERS: Final = 8
_STATES: Final = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP; SIGCONT resumes it)",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a file server that does not answer",
    psutil.STATUS_ZOMBIE: "has died, and torchrun has not noticed",
}
"""Kernel states of a process that explain its silence."""


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """The rank that holds the run up."""

    rank: int | None
    """None: all ranks have ended, and torchrun has not."""
    step: int
    where: str
    reason: str
    """The reason without the rank's name: its activity, for how long, and the activity of the others."""
    elsewhere: bool = False
    """True if all ranks of this machine wait: for the network, or for a rank of another machine."""

    @property
    def name(self) -> str:
        return "torchrun" if self.rank is None else f"rank {self.rank}"

    @property
    def incident(self) -> Incident:
        """The line of events.jsonl."""
        facts = {"rank": self.rank, "step": self.step, "where": self.where}
        return Incident(time=time.time(), event="hang", detail=self.reason, facts=facts)

    @property
    def problem(self) -> Problem:
        """Returns the problem of the error that the command ends with."""
        fix = "the logs hold the Python stacks of all ranks that still run; run.hang_timeout_s sets the limit"
        return Problem(key=self.name, reason=self.reason, fix=fix)


@contextmanager
def watched(ranks: range, *, timeout_s: float | None) -> Iterator["HangWatch | None"]:
    """Watches the ranks started inside the block; yields None without a timeout."""
    if timeout_s is None:
        yield None
        return
    beats = Heartbeats(ranks)
    try:
        yield HangWatch(beats, timeout_s=timeout_s)
    finally:
        beats.close()


class HangWatch:
    """A watch that looks at the ranks of this machine repeatedly, until they hang."""

    def __init__(
        self,
        beats: Heartbeats,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beats, self._timeout_s, self._clock = beats, timeout_s, clock
        self._began = self._looked = clock()
        self._newest = 0.0
        self._silent_s = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks need to show signs of life."""
        return {VARIABLE: str(self._beats.folder)}

    def look(self) -> HangReport | None:
        """Returns a report if the ranks hang now; call it several times a second."""
        now = self._clock()
        everyone = self._beats.signs()
        newest = max(sign.progress for sign in everyone)
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        self._silent_s = 0.0 if newest != self._newest else self._silent_s + passed
        self._newest = newest
        signs = [sign for sign in everyone if not sign.ended]
        if not signs:
            reason = f"has not exited, though all ranks ended {self._silent_s:.0f} s ago"
            late = self._silent_s > self._timeout_s
            return HangReport(rank=None, step=everyone[0].step, where="finish", reason=reason) if late else None
        patient = any(sign.steps <= 1 or not sign.where.startswith(("train", "validate")) for sign in signs)
        limit_s = self._timeout_s * (PATIENCE if patient else 1)
        if self._silent_s <= limit_s:
            return None
        return blame(signs, now=now, began=self._began, state=_state)

    def write_stacks(self) -> None:
        """Makes every rank write its Python stacks to its log, and gives it time to do so."""
        # Those whose beat goes on: the others could not, and their numbers may be somebody else's by now.
        alive = time.monotonic() - _NO_BEAT_S
        pids = [sign.pid for sign in self._beats.signs() if sign.beat > alive and not sign.ended]
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
        if pids:
            time.sleep(_WRITE_STACKS_S)


def blame(signs: Sequence[Sign], *, now: float, began: float, state: Callable[[int], str]) -> HangReport:
    """Finds the rank that holds the others up.

    Args:
        signs: the signs of life of at least one rank, none of which makes progress.
        now, began: seconds of the monotonic clock; when the launcher began stands in for a rank that never
            started.
        state: the function that tells the state of a process, in psutil's words; empty when it is gone.
    """

    def silent_since(sign: Sign) -> float:
        return sign.progress or began

    absent = [sign for sign in signs if not sign.pid]
    frozen = [sign for sign in signs if sign.pid and now - sign.beat > _NO_BEAT_S]
    busy = [sign for sign in signs if sign.pid and not sign.waiting]
    culprit = min(frozen or absent or busy or signs, key=silent_since)
    lasted = f"for {now - silent_since(culprit):.0f} s"
    if culprit in frozen:
        known = _STATES.get(state(culprit.pid), "does not respond: swapped out, or stuck in native code")
        reason = f"{known}, {lasted}, in {_place(culprit)}"
    elif culprit in absent:
        reason = f"has not started, {lasted}: no sign of life from its process"
    elif culprit in busy:
        reason = f"is stuck in {_place(culprit)} {lasted}"
    else:
        cause = "look at the network, or at ranks of other machines"
        reason = f"waits for other ranks in {_place(culprit)} {lasted}, as all ranks here do: {cause}"
    others = _others([sign for sign in signs if sign is not culprit])
    return HangReport(
        rank=culprit.rank,
        step=culprit.step,
        where=culprit.where,
        reason=reason + (f"; {others}" if others else ""),
        elsewhere=not (frozen or absent or busy),
    )


def _place(sign: Sign) -> str:
    return f"{sign.where} of step {sign.step}" if sign.where.startswith("train") else sign.where


def _others(signs: Sequence[Sign]) -> str:
    """Lists ranks by place: `ranks 0 2 3 waiting in train/grad_reduce of step 7`."""
    by_place: dict[str, list[str]] = {}
    for sign in signs:
        doing = "waiting in" if sign.waiting else "at work in"
        by_place.setdefault(f"{doing} {_place(sign)}" if sign.pid else "not started", []).append(str(sign.rank))
    places = []
    for place, ranks in by_place.items():
        more = [f"and {len(ranks) - _MOST_OTHERS} more"] if len(ranks) > _MOST_OTHERS else []
        places.append(" ".join(["rank" if len(ranks) == 1 else "ranks", *ranks[:_MOST_OTHERS], *more, place]))
    return ", ".join(places)


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
