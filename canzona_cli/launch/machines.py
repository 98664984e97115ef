"""The launchers of a run's machines: they meet before the workers start, and agree on how the run ended.

They share nothing but the run directory. Its folder `nodes` holds a file per machine for the meeting, one per
machine that has ended, and one with the verdict of machine 0, so every launcher exits with the same code and
names the same culprit, whichever of them saw it.
"""

import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from canzona_cli.errors import EnvironmentProblem, ExitCode, Problem
from canzona_cli.launch.outcome import Outcome
from canzona_cli.run.codec import load_if_sound, save
from canzona_cli.run.files import RunFiles, read_json, write_json_atomic

MEETING_PATIENCE_S = 300.0
"""Seconds in which all machines have to arrive: Slurm starts a step's tasks together, people take longer."""
END_PATIENCE_S = 30.0
"""Seconds the other machines get to say how they ended once one's workers have gone: a rank that has lost its
neighbour notices at once, torchrun gives it 15 seconds to go."""
VERDICT_PATIENCE_S = 900.0
"""Seconds in which machine 0 has to end as well where nothing has failed:
it may be reading a checkpoint again."""
FAILURE_GRACE_S = 20.0
"""Seconds the workers here get to notice by themselves that another machine's have failed;
NCCL may wait forever."""
HANG_GRACE_S = 15.0
"""Seconds for which a machine whose ranks only wait lets the others name the rank that hangs."""
_LOOK_S = 2.0
_POLL_S = 0.2


class Machines:
    """The link between this launcher and those of the other machines; on a single machine it does nothing."""

    def __init__(self, files: RunFiles, *, node_rank: int = 0, nodes: int = 1, restarts: int = 0) -> None:
        """`restarts`: how often this launch has started the run again; each time the machines meet in a new
        folder, so that one which is slow to hear how it ended still can."""
        self._files = files
        self.node_rank = node_rank
        self._nodes = nodes
        self._folder = files.root / "nodes" / (f"restart-{restarts}" if restarts else "")
        self._next_look = 0.0
        self._failed_since: float | None = None
        self._waiting_since: float | None = None

    def gather(self, endpoint: str, *, patience_s: float = MEETING_PATIENCE_S, say: Callable[[str], None]) -> None:
        """Waits on machine 0, its run directory filled, for the others, and tells them where the ranks meet.

        Raises:
            EnvironmentProblem: names the machines that never joined.
        """
        if self._nodes == 1:
            return
        # Of an earlier launch in this directory. One who arrives at this moment may keep the folder from
        # going.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        others = range(1, self._nodes)
        start, announced = time.monotonic(), False
        while absent := [number for number in others if not self._arrival(number).exists()]:
            waited, numbers = time.monotonic() - start, ", ".join(map(str, absent))
            if waited > patience_s:
                within = f"{self._files.root} within {patience_s:.0f} s"
                reason = f"these of the run's {self._nodes} machines did not arrive in {within}"
                fix = "start `canzona train` on each, with a directory that every machine shares"
                raise EnvironmentProblem(Problem(key="cluster.node_rank", value=numbers, reason=reason, fix=fix))
            if waited > 2 and not announced:
                announced = True
                say(f"waiting for machine {numbers} of {self._nodes}")
            time.sleep(_POLL_S)
        tokens = {str(number): (read_json(self._arrival(number)) or {}).get("token") for number in others}
        write_json_atomic(self._folder / "meeting.json", {"endpoint": endpoint, "tokens": tokens})

    def arrive(self, *, patience_s: float = MEETING_PATIENCE_S) -> str:
        """Waits on other machines until machine 0 has filled the run directory; returns where the ranks meet.

        Files of an earlier launch do not count: machine 0 must have seen this very process.

        Raises:
            EnvironmentProblem: machine 0 never joined, or another launcher uses this one's number.
        """
        token = secrets.token_hex(8)
        arrival = self._arrival(self.node_rank)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._folder.is_dir() and not arrival.exists():
                with suppress(OSError):  # machine 0 may be clearing the folder
                    write_json_atomic(arrival, {"token": token, "host": socket.gethostname()})
            meeting = read_json(self._folder / "meeting.json") or {}
            tokens = meeting.get("tokens")
            if isinstance(tokens, dict) and tokens.get(str(self.node_rank)) == token:
                return str(meeting["endpoint"])
            time.sleep(_POLL_S)
        reason = f"machine 0 did not start this run here within {patience_s:.0f} s"
        fix = (
            "start machine 0 too, with a directory that every machine shares, "
            f"and only one launcher with cluster.node_rank={self.node_rank}"
        )
        raise EnvironmentProblem(Problem(key="run.dir", value=str(self._files.root), reason=reason, fix=fix))

    def others_failed(self) -> bool:
        """Returns True if another machine failed so long ago that waiting for the workers here is useless."""
        now = time.monotonic()
        if self._nodes == 1 or now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        if self._failed_since is None and any(outcome.failed for outcome in self._ended().values()):
            self._failed_since = now
        return self._failed_since is not None and now - self._failed_since > FAILURE_GRACE_S

    def may_know_better(self) -> bool:
        """Returns True if another machine may name the rank that hangs, because those here merely wait."""
        if self._nodes == 1:
            return False
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < HANG_GRACE_S

    def conclude(
        self,
        outcome: Outcome,
        *,
        settle: Callable[[Outcome], Outcome] = lambda outcome: outcome,
        patience_s: float = END_PATIENCE_S,
    ) -> Outcome:
        """Returns how the whole run ended, the same on every machine. This machine's workers have gone.

        Args:
            settle: on machine 0, what follows from it where all machines are still there; the others do
                likewise.
        """
        if self._nodes == 1:
            return settle(outcome)
        with suppress(OSError):  # a full disk: the others take this machine for gone
            save(self._end(self.node_rank), outcome)
        if self.node_rank == 0:
            return self._judge(outcome, settle, patience_s)
        return self._hear(outcome, 2 * patience_s if outcome.failed else max(patience_s, VERDICT_PATIENCE_S))

    def _judge(self, here: Outcome, settle: Callable[[Outcome], Outcome], patience_s: float) -> Outcome:
        deadline = time.monotonic() + patience_s
        while len(ended := {**self._ended(), 0: here}) < self._nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone = [self._gone(number) for number in range(self._nodes) if number not in ended]
        verdict = verdict_of(ended, gone)
        settled = verdict if gone else settle(verdict)
        try:
            save(self._folder / "verdict.json", settled)
        except OSError:  # the others will not hear of it, and end
            return verdict
        return settled

    def _hear(self, here: Outcome, patience_s: float) -> Outcome:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            verdict = load_if_sound(self._folder / "verdict.json", Outcome)
            if verdict is not None:
                return verdict
            time.sleep(_POLL_S)
        return verdict_of({self.node_rank: here}, [self._gone(0)])

    def _gone(self, number: int) -> Outcome:
        host = (read_json(self._arrival(number)) or {}).get("host")
        name = f"machine {number}" + (f" ({host})" if host else "")
        return Outcome(
            status="failed",
            exit_code=ExitCode.CRASH,
            message=f"{name} is gone: its launcher exited without reporting",
            log=self._files.agent_log(number),
        )

    def _ended(self) -> dict[int, Outcome]:
        """Reads how the machines have ended so far, by number, in the order in which they did: the clock is that of
        the file system they share."""
        outcomes = {
            number: (self._end(number).stat().st_mtime_ns, outcome)
            for number in range(self._nodes)
            if (outcome := load_if_sound(self._end(number), Outcome)) is not None
        }
        return {number: outcomes[number][1] for number in sorted(outcomes, key=lambda number: outcomes[number][0])}

    def _end(self, number: int) -> Path:
        return self._folder / f"ended-{number}.json"

    def _arrival(self, number: int) -> Path:
        return self._folder / f"arrived-{number}.json"


def verdict_of(ended: dict[int, Outcome], gone: list[Outcome]) -> Outcome:
    """Combines how the machines ended into how the run ended.

    A rank or a torchrun that failed by itself is why the others lost it; a missing machine explains what
    nobody else does. Of several failures the first counts: a rank may die of losing another in ways that do
    not look like it.

    Args:
        ended: by machine, in the order in which they ended.
        gone: a failure for each machine that did not report how it ended.
    """
    failed = [
        _at(number, outcome) if len(ended) > 1 else outcome for number, outcome in ended.items() if outcome.failed
    ]
    first = next(iter([*(o for o in failed if not o.secondary), *gone, *failed]), None)
    if first is not None:
        return first
    # A machine that was told to stop knows more than one whose ranks had just come to their end; machine 0
    # has the rank that completes checkpoints.
    in_order = [outcome for _, outcome in sorted(ended.items())]
    return next((outcome for outcome in in_order if outcome.status != "done"), in_order[0])


def _at(number: int, outcome: Outcome) -> Outcome:
    """Names the machine in a failure whose message does not name a rank."""
    if outcome.rank is not None or outcome.message.startswith("machine "):
        return outcome
    return replace(outcome, message=f"machine {number}: {outcome.message}")
