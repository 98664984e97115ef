"""Starts torchrun, watches it, passes the user's wish to stop on to the workers, and leaves nothing behind.

- Asked to stop (`canzona_cli.launch.stop`): the file `stop` appears in the run directory, and the workers end after the
  step they are in, and save. torchrun gets no signal, and ignores those that a batch system sends to every process.
- The whole process tree is killed by process id on a second Ctrl-C, when the grace period passes without an end or
  progress of a save, and when training has not begun, as there is nothing to lose. A save may finish: only a third
  Ctrl-C ends it.
- The ranks hang (`canzona_cli.launch.hang`): they write their stacks to their logs and are killed.
- The launcher itself is killed: the kernel kills torchrun, and then the workers (`canzona_cli.run.orphan`).
"""

import subprocess
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path

import psutil

from canzona_cli.errors import ExitCode
from canzona_cli.launch.child import kill, kill_tree, start_child
from canzona_cli.launch.going_on import with_command
from canzona_cli.launch.hang import HangReport, HangWatch, watched
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.monitor import Monitor
from canzona_cli.launch.outcome import Outcome, hung, judge, read_ranks
from canzona_cli.launch.restarts import Restarts
from canzona_cli.launch.stop import Requests, SaveWatch, handled, sound_checkpoint, unsaved
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.launch.view import TrainView
from canzona_cli.run.codec import plain, save
from canzona_cli.run.files import RunFiles, StopReason, try_append_json_line
from canzona_cli.run.records import FIRST_STAGE, Incident, StageEvent
from canzona_cli.run.words import plural

STOP_GRACE_S = 60.0
"""Seconds the workers get to finish their step before they are killed."""
_POLL_S = 0.2
_IN_A_HURRY = 2
"""The number of requests that end everything at once; one more while a checkpoint is being written."""


@dataclass
class Supervision:
    """One run of torchrun on this machine, from its start until all its processes have gone."""

    files: RunFiles
    """The run directory, its inputs written."""
    command: LaunchCommand
    view: InitVar[TrainView]
    """Is fed, and closed."""
    _: KW_ONLY
    ranks: range
    """This machine's ranks, in local order."""
    machines: InitVar[Machines | None] = None
    """This launcher among those of the run; None: it is the only one."""
    grace_s: float = STOP_GRACE_S
    """Seconds between the first wish to stop and killing the workers."""
    hang_timeout_s: float | None = None
    """Seconds without progress on any rank after which the run has failed; None: never."""
    requests: Requests = field(default_factory=Requests)
    """The requests that this process got by signals so far."""
    say: Callable[[str], None] = lambda _: None
    """Receives what the user must know at once."""
    restarts: Restarts = field(default_factory=Restarts)
    """Those of this launch so far."""
    go_on: str | None = None
    """The command that continues the run, if it ends early."""

    def __post_init__(self, view: TrainView, machines: Machines | None) -> None:
        self._machines = machines or Machines(self.files)
        self._monitor = Monitor(self.files, view)
        self._asked = False
        """The workers have been asked to stop."""
        self._forced = False
        """The workers are killed because somebody asked to stop."""
        self._hang: HangReport | None = None

    def run(self) -> Outcome:
        """Run the command to its end, feeding the view, and say how it ended.

        Machine 0 writes `result.json` whatever happens, also when this method raises, and before it is shown.
        """
        outcome = Outcome(status="failed", exit_code=ExitCode.CRASH, message="the launcher itself failed")
        try:
            outcome = self._run_here()
            outcome = self._machines.conclude(outcome, settle=self._settle)
        finally:
            outcome = with_command(self._with_numbers(outcome), self.go_on)
            if self._machines.node_rank == 0:
                _keep(self.files, outcome, self.say)
            self._monitor.close(outcome.status, outcome.message)
        return outcome

    def _run_here(self) -> Outcome:
        saves, node_rank = SaveWatch(self.files), self._machines.node_rank
        with handled(self.requests.add), watched(self.ranks, timeout_s=self.hang_timeout_s) as watch:
            if node_rank == 0:
                self._tell(FIRST_STAGE, plural(len(self.ranks), "rank"), aloud=False)
            agent = _start(self.command, watch, log=self.files.agent_log(node_rank))
            try:
                while agent.poll() is None:
                    self._monitor.poll()
                    if self._hangs(watch) or self._stops(saves):
                        break
                    if self._machines.others_failed():  # the launchers compare what they saw later, and find out why
                        break
                    time.sleep(_POLL_S)
            finally:
                kill_tree(agent)
                _kill_ranks(self.files, self.ranks)
            self._monitor.poll()
        outcome = self._judge(agent.returncode)
        if node_rank == 0:
            end = Incident(time=time.time(), event="end", detail=outcome.status)
            try_append_json_line(self.files.events, end.line())
        return outcome

    def _hangs(self, watch: HangWatch | None) -> bool:
        """Returns True if the ranks hang; then they have written their stacks."""
        hang = None if watch is None else watch.look()
        if watch is not None and (waiting := watch.waits_for()) is not None:
            detail = f"{waiting}; torchrun's output: {self.files.agent_log(self._machines.node_rank)}"
            slow = Incident(time=time.time(), event="waiting", detail=detail, level="info")
            try_append_json_line(self.files.events, slow.line())
        if watch is None or hang is None or (hang.elsewhere and self._machines.may_know_better()):
            return False
        self._hang = hang
        try_append_json_line(self.files.events, hang.incident.line())
        watch.write_stacks()
        return True

    def _stops(self, saves: SaveWatch) -> bool:
        """Pass on a wish to stop; whether the workers are to be killed now."""
        if self.requests.reason is not None and not self._asked:
            self._asked = True
            if not self._ask(self.requests.reason):
                return True
        saving = self._asked and saves.look()
        late = self._asked and time.monotonic() - max(self.requests.first, saves.moved) > self.grace_s
        if self.requests.interrupts >= _IN_A_HURRY + saving or late:
            self._forced = True
            after = f"no end after {self.grace_s:.0f} s: stopping the workers at once"
            self._tell("stop", after if late else "at once")
        return self._forced

    def _ask(self, reason: StopReason) -> bool:
        """Ask the workers to stop after their step; False where there is no use in waiting for it."""
        try:
            self.files.request_stop(reason)
        except OSError as error:  # a disk that takes nothing would take no checkpoint either
            self._forced = True
            self._tell("stop", f"the workers cannot be asked to stop ({error.strerror}): stopping them at once")
            return False
        self._monitor.poll()  # the lines since the last look may hold the first step
        if not self._monitor.training:
            self._forced = True
            self._tell("stop", "stopping: training has not begun")
            return False
        self._tell("stop", f"stopping after this step, {self.grace_s:.0f} s at most (Ctrl-C again: at once)")
        return True

    def _judge(self, agent_code: int) -> Outcome:
        node_rank = self._machines.node_rank
        if self._hang is not None:
            outcome = hung(self.files, self._hang, self.ranks, node_rank=node_rank)
        else:
            outcome = judge(
                self.files,
                self.ranks,
                node_rank=node_rank,
                agent_code=agent_code,
                stopping=self._asked,
                forced=self._forced,
            )
        if self._forced and not self._monitor.training:  # the files may hold the curve of an earlier launch
            outcome = replace(outcome, message="stopped before training began")
        if outcome.status == "interrupted" and self.requests.reason == "preempted":
            outcome = unsaved(outcome, sound_checkpoint(self.files, thorough=node_rank == 0))
        return outcome

    def _settle(self, outcome: Outcome) -> Outcome:
        """Returns True if the run is started again; not if somebody wanted it to stop when it failed."""
        outcome = self._with_numbers(outcome)
        return outcome if self.files.stop_requested() else self.restarts.decide(outcome)

    def _with_numbers(self, outcome: Outcome) -> Outcome:
        """Add the newest step, loss and validation loss: from the metrics, else from the ranks."""
        results = read_ranks(self.files, self.ranks)
        last, validation = self._monitor.last_step, self._monitor.last_validation
        losses = [None if last is None else last.loss, *(result.loss for result in results)]
        return replace(
            outcome,
            step=max([0 if last is None else last.step, *(result.step for result in results)]),
            loss=next((loss for loss in losses if loss is not None), None),
            validation_loss=None if validation is None else validation.loss,
            restarts=self.restarts.done,
        )

    def _tell(self, stage: str, detail: str, *, aloud: bool = True) -> None:
        event = StageEvent(time=time.time(), stage=stage, detail=detail)
        try_append_json_line(self.files.events, plain(event))
        if aloud:
            self.say(detail)


def _start(command: LaunchCommand, watch: HangWatch | None, *, log: Path) -> subprocess.Popen[bytes]:
    environment = {**command.environment, **({} if watch is None else watch.environment)}
    return start_child(command.argv, environment=environment, log=log)


def _kill_ranks(files: RunFiles, ranks: range) -> None:
    """Kill what is left of the ranks after torchrun has gone, whatever became of it."""
    for result in read_ranks(files, ranks):
        if result.pid is None:
            continue
        try:
            process = psutil.Process(result.pid)
            if str(files.root) in process.cmdline():  # else the number belongs to somebody else by now
                kill(process)
                process.wait(timeout=10)
        except psutil.Error:
            continue


def _keep(files: RunFiles, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Write result.json; where there is no room for it, the exit code and these words are all there is."""
    try:
        save(files.result, outcome.result)
    except OSError as error:
        say(f"{files.result} cannot be written ({error.strerror}): {outcome.status}, exit code {outcome.exit_code}")
