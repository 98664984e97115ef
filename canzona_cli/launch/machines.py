"""Coordinates the launchers of a run's machines: they meet before the workers start, and agree on how the run
ended.

The launchers share nothing but the run directory. Its folder `nodes` has a file for each machine that has
arrived, the reply of machine 0, a file for each machine whose workers have ended, and the verdict of machine
0. Every launcher therefore exits with the same code and reports the same failure, whichever machine saw it.
"""

import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from canzona_cli.core.errors import EnvironmentProblem, ExitCode, Problem
from canzona_cli.core.host import machine_name
from canzona_cli.launch.outcome import Outcome, failed_outcome
from canzona_cli.records.codec import load_if_valid, save
from canzona_cli.records.files import RunFiles, read_json, write_json_atomic

MEETING_PATIENCE_S = 300.0
"""The seconds within which all machines must arrive. Slurm starts a step's tasks together; starting them by
hand takes longer."""
END_PATIENCE_S = 30.0
"""The seconds that machine 0 waits, after its own workers have ended, for the outcomes of the other machines.
A rank that has lost a peer notices at once, and torchrun then gives the other ranks 15 seconds to exit."""
VERDICT_PATIENCE_S = 900.0
"""The seconds that a machine without a failure waits for the verdict: machine 0 may still be verifying a
checkpoint."""
FAILURE_GRACE_S = 20.0
"""The seconds that this machine's workers get to end after a failure on another machine. Then the launcher
stops them, because NCCL may wait forever."""
_READ_INTERVAL_S = 2.0
_POLL_S = 0.2


class Machines:
    """The link between this launcher and the launchers of the run's other machines."""

    def __init__(self, files: RunFiles, *, node_rank: int = 0, nodes: int = 1, restarts: int = 0) -> None:
        """Chooses the folder in which the machines meet.

        Args:
            restarts: the number of restarts of this launch so far. After each, the machines meet in a new
                folder, so that a slow machine can still read the verdict in the previous folder.
        """
        self._files = files
        self.node_rank = node_rank
        self._nodes = nodes
        self._folder = files.root / "nodes" / (f"restart-{restarts}" if restarts else "")
        self._next_read = 0.0
        self._failed_since: float | None = None

    def gather(self, endpoint: str, *, patience_s: float = MEETING_PATIENCE_S, say: Callable[[str], None]) -> None:
        """Waits for the other machines, then writes the rendezvous endpoint for them. Machine 0 calls this
        once it has filled the run directory.

        Raises:
            EnvironmentProblem: lists the machines that did not arrive in time.
        """
        if self._nodes == 1:
            return
        # Removes the files of an earlier launch. This may fail if another machine writes its arrival at this
        # moment.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        others = range(1, self._nodes)
        start_s = time.monotonic()
        announced = False
        while absent := [rank for rank in others if not self._arrival_file(rank).exists()]:
            waited_s = time.monotonic() - start_s
            missing = ", ".join(map(str, absent))
            if waited_s > patience_s:
                where_and_when = f"{self._files.root} within {patience_s:.0f} s"
                reason = f"of the run's {self._nodes} machines, these did not arrive in {where_and_when}"
                fix = "start `canzona train` on each of them, with a run.dir that every machine shares"
                raise EnvironmentProblem(Problem("cluster.node_rank", reason, fix, value=missing))
            if waited_s > 2 and not announced:
                announced = True
                say(f"waiting for machine {missing} of {self._nodes}")
            time.sleep(_POLL_S)
        tokens = {str(rank): (read_json(self._arrival_file(rank)) or {}).get("token") for rank in others}
        write_json_atomic(self._arrival_file(0), {"endpoint": endpoint, "tokens": tokens, "host": machine_name()})

    def arrive(self, *, patience_s: float = MEETING_PATIENCE_S) -> str:
        """Announces this machine and waits until machine 0 has seen it; returns the rendezvous endpoint.
        Every machine except machine 0 calls this. On return, machine 0 has filled the run directory.

        Machine 0 must answer with the token of this process, so files of an earlier launch are not mistaken
        for its answer.

        Raises:
            EnvironmentProblem: machine 0 did not answer in time, or another launcher has the same node rank.
        """
        token = secrets.token_hex(8)
        arrival = self._arrival_file(self.node_rank)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._folder.is_dir() and not arrival.exists():
                with suppress(OSError):  # machine 0 may be clearing the folder
                    write_json_atomic(arrival, {"token": token, "host": machine_name()})
            meeting = read_json(self._arrival_file(0)) or {}
            tokens = meeting.get("tokens")
            if isinstance(tokens, dict) and tokens.get(str(self.node_rank)) == token:
                return str(meeting["endpoint"])
            time.sleep(_POLL_S)
        reason = f"machine 0 did not start this run here within {patience_s:.0f} s"
        fix = (
            "start machine 0 too, with a run.dir that every machine shares, "
            f"and only one launcher with cluster.node_rank={self.node_rank}"
        )
        raise EnvironmentProblem(Problem("run.dir", reason, fix, value=str(self._files.root)))

    def others_failed(self) -> bool:
        """Returns True if another machine's failure was seen more than `FAILURE_GRACE_S` ago, so that the
        workers here must be stopped. Reads the folder every two seconds, and returns False between two
        reads."""
        now = time.monotonic()
        if self._nodes == 1 or now < self._next_read:
            return False
        self._next_read = now + _READ_INTERVAL_S
        if self._failed_since is None and any(outcome.failed for outcome in self._outcomes().values()):
            self._failed_since = now
        return self._failed_since is not None and now - self._failed_since > FAILURE_GRACE_S

    def others_hung(self) -> bool:
        """Returns True if ranks of another machine have exited because they made no progress."""
        return any(outcome.exit_code == ExitCode.HANG for outcome in self._outcomes().values())

    def conclude(
        self,
        outcome: Outcome,
        *,
        settle: Callable[[Outcome], Outcome] = lambda outcome: outcome,
        patience_s: float = END_PATIENCE_S,
    ) -> Outcome:
        """Returns the outcome of the run, the same on every machine. Call this once this machine's workers
        have ended.

        Args:
            outcome: this machine's outcome.
            settle: a function with which machine 0 completes the verdict, for example by deciding on a
                restart. It is not called if a machine is gone.
        """
        if self._nodes == 1:
            return settle(outcome)
        with suppress(OSError):  # the disk may be full; the other machines then report this one as gone
            save(self._outcome_file(self.node_rank), outcome)
        if self.node_rank == 0:
            return self._make_verdict(outcome, settle, patience_s)
        return self._await_verdict(outcome, 2 * patience_s if outcome.failed else max(patience_s, VERDICT_PATIENCE_S))

    def _make_verdict(self, outcome: Outcome, settle: Callable[[Outcome], Outcome], patience_s: float) -> Outcome:
        deadline = time.monotonic() + patience_s
        while len(ended := {**self._outcomes(), 0: outcome}) < self._nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        gone = [self._gone_outcome(rank) for rank in range(self._nodes) if rank not in ended]
        verdict = verdict_of(ended, gone)
        settled = verdict if gone else settle(verdict)
        try:
            save(self._folder / "verdict.json", settled)
        except OSError:  # without a verdict the other machines end, so this one must not restart either
            return verdict
        return settled

    def _await_verdict(self, outcome: Outcome, patience_s: float) -> Outcome:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            verdict = load_if_valid(self._folder / "verdict.json", Outcome)
            if verdict is not None:
                return verdict
            time.sleep(_POLL_S)
        return verdict_of({self.node_rank: outcome}, [self._gone_outcome(0)])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all machines, by node rank, once they have met."""
        if self._nodes == 1:
            return (machine_name(),)
        return tuple(self._name(rank) or f"machine {rank}" for rank in range(self._nodes))

    def _name(self, node_rank: int) -> str | None:
        name = (read_json(self._arrival_file(node_rank)) or {}).get("host")
        return None if name is None else str(name)

    def _gone_outcome(self, node_rank: int) -> Outcome:
        host = self._name(node_rank)
        name = f"machine {node_rank}" + (f" ({host})" if host else "")
        gone = failed_outcome(f"{name} is gone: its launcher exited without reporting")
        return replace(gone, machine=host, log=self._files.agent_log(node_rank))

    def _outcomes(self) -> dict[int, Outcome]:
        """Reads the outcomes of the machines that have ended, by node rank. The machine that ended first, by
        the shared file system's clock, comes first."""
        outcomes: dict[int, Outcome] = {}
        ended_at: dict[int, int] = {}
        for rank in range(self._nodes):
            outcome = load_if_valid(self._outcome_file(rank), Outcome)
            if outcome is not None:
                outcomes[rank], ended_at[rank] = outcome, self._outcome_file(rank).stat().st_mtime_ns
        return {rank: outcomes[rank] for rank in sorted(outcomes, key=ended_at.__getitem__)}

    def _outcome_file(self, node_rank: int) -> Path:
        return self._folder / f"ended-{node_rank}.json"

    def _arrival_file(self, node_rank: int) -> Path:
        return self._folder / (f"arrived-{node_rank}.json" if node_rank else "meeting.json")


def verdict_of(ended: dict[int, Outcome], gone: list[Outcome]) -> Outcome:
    """Combines the outcomes of the machines into the outcome of the run.

    If machines failed, this is the first failure that is not the loss of another rank, because later failures
    may be its consequences. If every reported failure is such a loss, it is the failure of a machine that did
    not report or, if all reported, the first loss.

    Args:
        ended: outcomes by node rank, in the order in which the machines ended.
        gone: a failure for each machine that did not report an outcome.
    """
    failed = [
        _with_machine(rank, outcome) if len(ended) > 1 else outcome for rank, outcome in ended.items() if outcome.failed
    ]
    causes = [outcome for outcome in failed if not outcome.secondary]
    if causes or gone or failed:
        return (causes or gone or failed)[0]
    # Without a failure, any other outcome overrides `done`: the ranks of one machine may just have finished
    # when the run was asked to stop. Machine 0 takes precedence because its rank 0 completes checkpoints.
    in_order = [outcome for _, outcome in sorted(ended.items())]
    return next((outcome for outcome in in_order if outcome.status != "done"), in_order[0])


def _with_machine(node_rank: int, outcome: Outcome) -> Outcome:
    """Adds the machine's name to a failure whose message names neither a rank nor a machine."""
    if outcome.rank is not None or outcome.message.startswith("machine "):
        return outcome
    return replace(outcome, message=f"machine {node_rank}: {outcome.message}")
