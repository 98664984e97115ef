"""Starts torchrun, watches it, passes requests to stop on to the workers, and kills the processes that remain
at the end.

- On a request to stop (`canzona_cli.launch.stop`), the launcher writes the file `stop` into the run
  directory. The workers finish their current step, save, and end. torchrun gets no signal, and ignores the
  signals that a batch system sends to every process.
- The process tree is killed at once if training has not begun (there is nothing to save), on a second Ctrl-C
  (a third one during a save), or if the workers neither end nor write a checkpoint within the grace period.
- Ranks that hang write their stacks to their logs and exit (`canzona_cli.records.protection`).
- If the launcher itself is killed, the kernel kills torchrun and then the workers (`canzona_cli.records.protection`).
"""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace

import psutil

from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.setup import Layout
from canzona_cli.launch import torchrun
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.outcome import (
    Outcome,
    Workers,
    failed_outcome,
    judge,
    killed_outcome,
    read_ranks,
    unsaved_outcome,
)
from canzona_cli.launch.processes import kill, kill_tree, start_child
from canzona_cli.launch.restarts import Restarts
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.launch.stop import Requests, SaveWatch, checkpoint_to_resume, handle_signals
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.launch.view import Monitor, TrainView
from canzona_cli.records.codec import record_dict, save
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.files import RunFiles, StopReason, try_append_json_line
from canzona_cli.records.protection import HANG_VARIABLE
from canzona_cli.records.records import FIRST_STAGE, Incident, StageEvent
from canzona_cli.records.words import plural

STOP_GRACE_S = 60.0
"""The seconds that the workers get to finish their step before they are killed."""
_POLL_S = 0.2
_INTERRUPTS_TO_KILL = 2
"""The number of times that Ctrl-C must be pressed to kill the workers at once; one more during a save."""


@dataclass
class Supervision:
    """One run of torchrun on this machine, from its start until all its processes have ended."""

    files: RunFiles
    """The files of the run directory. The workers' inputs are already written."""
    command: LaunchCommand
    view: InitVar[TrainView]
    """The view that receives the run's records, and is closed when the run ends."""
    _: KW_ONLY
    ranks: range
    """This machine's ranks, in local order."""
    machines: InitVar[Machines | None] = None
    """The link to the launchers of the other machines; None for a run on one machine."""
    grace_s: float = STOP_GRACE_S
    """The seconds from the first request to stop, or from the last progress of a save, until the workers are
    killed."""
    hang_timeout_s: float | None = None
    """The seconds without progress after which a rank exits; None for no limit."""
    requests: Requests = field(default_factory=Requests)
    """The requests to stop that this process has received by signals."""
    say: Callable[[str], None] = lambda _: None
    """A function that prints a message for the user at once."""
    restarts: Restarts = field(default_factory=Restarts)
    """The restarts of this launch so far."""
    resume_command: str | None = None
    """The command that resumes the run, if it ends early."""

    def __post_init__(self, view: TrainView, machines: Machines | None) -> None:
        self._machines = machines or Machines(self.files)
        self._monitor = Monitor(self.files, view)
        self._stop_requested = False
        """True once the workers have been asked to stop."""
        self._forced = False
        """True if the workers must be killed because somebody asked to stop."""

    def run(self) -> Outcome:
        """Runs the command to its end, passes its records to the view, and returns the outcome of the run.

        Machine 0 writes `result.json` before the outcome is shown, even if this method raises.
        """
        outcome = failed_outcome("the launcher itself failed")
        try:
            outcome = self._run_here()
            outcome = self._machines.conclude(outcome, settle=self._settle)
        finally:
            outcome = self._complete(outcome)
            if self._machines.node_rank == 0:
                _save_result(self.files, outcome, self.say)
            shown_later = outcome.problems and outcome.again_in_s is None  # as the error of the command
            self._monitor.close(outcome.status, "" if shown_later else outcome.message)
        return outcome

    def _run_here(self) -> Outcome:
        saves, node_rank = SaveWatch(self.files), self._machines.node_rank
        with handle_signals(self.requests.add):
            if node_rank == 0:
                self._announce(FIRST_STAGE, plural(len(self.ranks), "rank"), shown=False)
            limit = {} if self.hang_timeout_s is None else {HANG_VARIABLE: str(self.hang_timeout_s)}
            environment = {**self.command.environment, **limit}
            log = self.files.agent_log(node_rank)
            agent = start_child(self.command.argv, environment=environment, log=log)
            try:
                while agent.poll() is None:
                    self._monitor.poll()
                    if self._must_kill(saves):
                        break
                    if self._machines.others_failed():  # `conclude` finds the cause
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

    def _must_kill(self, saves: SaveWatch) -> bool:
        """Passes a request to stop on to the workers; returns True if they must be killed now."""
        if self.requests.reason is not None and not self._stop_requested:
            self._stop_requested = True
            if not self._request_stop(self.requests.reason):
                return True
        is_saving = self._stop_requested and saves.is_saving()
        begun_s = max(self.requests.first_signal_s, saves.last_progress)
        is_late = self._stop_requested and time.monotonic() - begun_s > self.grace_s
        if self.requests.interrupts >= _INTERRUPTS_TO_KILL + is_saving or is_late:
            self._forced = True
            reason = f"the workers did not end within {self.grace_s:.0f} s: killing them"
            self._announce("stop", reason if is_late else "killing the workers")
        return self._forced

    def _request_stop(self, reason: StopReason) -> bool:
        """Asks the workers to stop after their step; returns False if they must be killed instead, because
        they cannot be asked or training has not begun."""
        try:
            self.files.request_stop(reason)
        except OSError as error:  # a full disk has no room for a checkpoint either
            self._forced = True
            self._announce("stop", f"the workers cannot be asked to stop ({error.strerror}): stopping them at once")
            return False
        self._monitor.poll()  # the first step may have been logged since the last poll
        if not self._monitor.training:
            self._forced = True
            self._announce("stop", "stopping: training has not begun")
            return False
        at_most = f"{self.grace_s:.0f} s at most (press Ctrl-C again to stop at once)"
        self._announce("stop", f"stopping after this step, {at_most}")
        return True

    def _judge(self, agent_code: int) -> Outcome:
        node_rank = self._machines.node_rank
        workers = Workers(
            files=self.files,
            ranks=self.ranks,
            node_rank=node_rank,
            agent_code=agent_code,
            hung_elsewhere=self._machines.others_hung(),
        )
        if self._forced:
            outcome = killed_outcome(self.files, training=self._monitor.training)
        else:
            outcome = judge(workers, stopping=self._stop_requested)
        if outcome.status == "interrupted" and self.requests.reason == "preempted":
            return unsaved_outcome(outcome.message, checkpoint_to_resume(self.files, thorough=node_rank == 0))
        return outcome

    def _settle(self, outcome: Outcome) -> Outcome:
        """Completes the outcome, and decides on a restart. A run that was asked to stop is not restarted."""
        outcome = self._complete(outcome)
        return outcome if self.files.stop_requested() else self.restarts.decide(outcome)

    def _complete(self, outcome: Outcome) -> Outcome:
        """Adds the newest step and losses, the number of restarts, and the command that resumes the run. The
        step is the newest in the metrics and the ranks' results; the loss comes from the metrics if they have
        one, otherwise from the ranks' results."""
        results = read_ranks(self.files, self.ranks)
        last_step, validation = self._monitor.last_step, self._monitor.last_validation
        losses = [None if last_step is None else last_step.loss, *(result.loss for result in results)]
        return replace(
            outcome,
            step=max([0 if last_step is None else last_step.step, *(result.step for result in results)]),
            loss=next((loss for loss in losses if loss is not None), None),
            validation_loss=None if validation is None else validation.loss,
            restarts=self.restarts.done,
            go_on=self.resume_command if outcome.resumable else None,
        )

    def _announce(self, stage: str, detail: str, *, shown: bool = True) -> None:
        """Records the start of a stage in events.jsonl and, if `shown`, prints its details."""
        event = StageEvent(time=time.time(), stage=stage, detail=detail)
        try_append_json_line(self.files.events, record_dict(event))
        if shown:
            self.say(detail)


def _kill_ranks(files: RunFiles, ranks: range) -> None:
    """Kills the ranks that are still running after torchrun has ended."""
    for result in read_ranks(files, ranks):
        if result.pid is None:
            continue
        try:
            process = psutil.Process(result.pid)
            if str(files.root) in process.cmdline():  # otherwise the process id has been reused
                kill(process)
                process.wait(timeout=10)
        except psutil.Error:
            continue


def _save_result(files: RunFiles, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Writes result.json; if that fails, prints how the run ended."""
    try:
        save(files.result, outcome.result)
    except OSError as error:
        say(f"{files.result} cannot be written ({error.strerror}): {outcome.status}, exit code {outcome.exit_code}")


def run_ranks(
    config: RunConfig,
    layout: Layout,
    corpus: PreparedCorpus,
    *,
    module: str,
    view: TrainView,
    say: Callable[[str], None],
    write_more: Callable[[RunFiles], None] = lambda files: None,
    grace_s: float = STOP_GRACE_S,
    hang_timeout_s: float | None = None,
) -> RunFiles:
    """Runs ranks for a purpose other than training until they end, on this machine and in their own run
    directory.

    Args:
        config: the resolved configuration; the ranks use `run.dir`, or a new directory under `run.root`.
        write_more: a function that writes further files for the ranks, besides configuration, layout and
            corpus.
        grace_s, hang_timeout_s: as in `Supervision`.

    Raises:
        KeyboardInterrupt: somebody stopped the ranks.
        CanzonaError: the directory is in use or cannot be written; or a rank failed, with the rank's own
            error.
    """
    run = RunDirectory.create(config)
    command = torchrun.build(config, run.path, module=module)
    with run.record_failure():
        run.write_inputs(config_yaml=dump_resolved(config), layout=layout, corpus=corpus, command=command)
        write_more(run.files)
        outcome = Supervision(
            run.files,
            command,
            view,
            ranks=range(config.gpus),
            say=say,
            grace_s=grace_s,
            hang_timeout_s=hang_timeout_s,
        ).run()
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    if outcome.failed:
        raise _rank_error(outcome)
    return run.files


def _rank_error(outcome: Outcome) -> CanzonaError:
    """Returns the error of the rank that failed, with its traceback and the path of its log."""
    error = outcome.error()
    first, *others = error.problems
    log = "" if outcome.log is None else f"its full output: {outcome.log}"
    detailed = replace(first, reason="\n".join([first.reason, *outcome.traceback]), fix=first.fix or log)
    return type(error)(detailed, *others)
