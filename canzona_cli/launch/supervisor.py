"""Starts torchrun, watches it, passes the user's wish to stop on to the workers, and leaves nothing behind.

- Asked to stop (`canzona_cli.launch.stop`): the file `stop` appears in the run directory, and the workers end after the
  step they are in, and save. torchrun is not signalled, and ignores what a batch system sends to everything.
- Ctrl-C again, or neither an end nor a save that goes on within the grace period, or asked before training has begun,
  when there is nothing to lose: the whole process tree is killed by process id. A save is let finish: only a third
  Ctrl-C ends it.
- The ranks hang (`canzona_cli.launch.hang`): they write their stacks to their logs and are killed.
- The launcher itself is killed: the kernel kills torchrun, and then the workers (`canzona_cli.run.orphan`).
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from canzona_cli.errors import ExitCode
from canzona_cli.launch.hang import HangReport, watched
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.monitor import Monitor
from canzona_cli.launch.outcome import Outcome, hung, judge, read_ranks
from canzona_cli.launch.stop import Requests, SaveWatch, handled, sound_checkpoint, unsaved
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.launch.view import TrainView
from canzona_cli.run import orphan
from canzona_cli.run.codec import plain, save
from canzona_cli.run.files import RunFiles, try_append_json_line
from canzona_cli.run.records import Incident, StageEvent

STOP_GRACE_S = 60.0
"""Seconds the workers get to finish their step before they are killed."""
_POLL_S = 0.2
_IN_A_HURRY = 2
"""How often a person has to ask to have everything ended at once; once more where a checkpoint is being written."""


def supervise(
    files: RunFiles,
    command: LaunchCommand,
    view: TrainView,
    *,
    ranks: range,
    node_rank: int = 0,
    machines: Machines | None = None,
    grace_s: float = STOP_GRACE_S,
    hang_timeout_s: float | None = None,
    requests: Requests | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run the command to its end, feeding the view, and say how it ended.

    Node 0 writes `result.json` whatever happens, also when this function raises. The view is closed.

    Args:
        files: The run directory, its inputs written.
        ranks: This machine's ranks, in local order.
        machines: The other launchers of the run; None: there are none.
        grace_s: Seconds between the first wish to stop and killing the workers.
        hang_timeout_s: Seconds without progress on any rank after which the run has failed; None: never.
        requests: What this process has been asked by signals so far; None: nothing.
        say: Receives what the user must know at once.
    """
    outcome = Outcome(status="failed", exit_code=ExitCode.CRASH, message="the launcher itself failed")
    monitor = Monitor(files, view)
    machines = machines or Machines(files)
    try:
        outcome = _run(
            files,
            command,
            monitor,
            machines,
            ranks=ranks,
            node_rank=node_rank,
            grace_s=grace_s,
            hang_timeout_s=hang_timeout_s,
            requests=requests or Requests(),
            say=say,
        )
        outcome = machines.conclude(outcome)
        _close(view, outcome)
    finally:
        outcome = _with_numbers(outcome, monitor, files, ranks)
        if node_rank == 0:
            _keep(files, outcome, say)
    return outcome


def _run(
    files: RunFiles,
    command: LaunchCommand,
    monitor: Monitor,
    machines: Machines,
    *,
    ranks: range,
    node_rank: int,
    grace_s: float,
    hang_timeout_s: float | None,
    requests: Requests,
    say: Callable[[str], None],
) -> Outcome:
    saves = SaveWatch(files)
    forced = announced = False
    hang: HangReport | None = None

    def tell(stage: str, detail: str, *, aloud: bool = True) -> None:
        try_append_json_line(files.events, plain(StageEvent(time=time.time(), stage=stage, detail=detail)))
        if aloud:
            say(detail)

    with handled(requests.add), watched(ranks, timeout_s=hang_timeout_s) as watch:
        if node_rank == 0:
            tell("start workers", f"{len(ranks)} ranks", aloud=False)
        with files.agent_log(node_rank).open("ab") as log:
            agent = subprocess.Popen(
                [sys.executable, str(Path(orphan.__file__)), str(os.getpid()), *command.argv],
                env={**os.environ, **command.environment, **({} if watch is None else watch.environment)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
            )
        try:
            while agent.poll() is None:
                monitor.poll()
                hang = None if watch is None else watch.look()
                if hang is not None and hang.elsewhere and machines.may_know_better():
                    hang = None
                if watch is not None and hang is not None:
                    try_append_json_line(files.events, hang.incident.line())
                    watch.write_stacks()
                    break
                if requests.reason is not None and not announced:
                    announced = True
                    try:
                        files.request_stop(requests.reason)
                    except OSError as error:  # a disk that takes nothing would take no checkpoint either
                        forced = True
                        tell("stop", f"the workers cannot be asked to stop ({error.strerror}): stopping them at once")
                        break
                    monitor.poll()  # what was written since the last look may be the first step
                    if not monitor.training:
                        forced = True
                        tell("stop", "stopping: training has not begun")
                        break
                    tell("stop", f"stopping after this step, {grace_s:.0f} s at most (Ctrl-C again: at once)")
                saving = announced and saves.look()
                late = announced and time.monotonic() - max(requests.first, saves.moved) > grace_s
                if requests.interrupts >= _IN_A_HURRY + saving or late:
                    forced = True
                    tell("stop", f"no end after {grace_s:.0f} s: stopping the workers at once" if late else "at once")
                    break
                if machines.others_failed():  # why will come out when the launchers compare what they saw
                    break
                time.sleep(_POLL_S)
        finally:
            _kill_tree(agent)
            _kill_ranks(files, ranks)
        monitor.poll()
    outcome = (
        judge(files, ranks, node_rank=node_rank, agent_code=agent.returncode, stopping=announced, forced=forced)
        if hang is None
        else hung(files, hang, ranks, node_rank=node_rank)
    )
    if forced and not monitor.training:  # the curve of an earlier launch may lie there
        outcome = replace(outcome, message="stopped before training began")
    if outcome.status == "interrupted" and requests.reason == "preempted":
        outcome = unsaved(outcome, sound_checkpoint(files, thorough=node_rank == 0))
    if node_rank == 0:
        try_append_json_line(files.events, Incident(time=time.time(), event="end", detail=outcome.status).line())
    return outcome


def _kill_tree(agent: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and all below it. Workers have sessions of their own, so a process group is not enough."""
    if agent.poll() is None:
        family = psutil.Process(agent.pid)
        family.suspend()  # it must not start another worker between the listing and the killing
        processes = [*family.children(recursive=True), family]
        for process in processes:
            _kill(process)
        agent.wait()
        psutil.wait_procs(processes[:-1], timeout=10)


def _kill_ranks(files: RunFiles, ranks: range) -> None:
    """Kill what is left of the ranks after torchrun has gone, whatever became of it."""
    for result in read_ranks(files, ranks):
        if result.pid is None:
            continue
        try:
            process = psutil.Process(result.pid)
            if str(files.root) in process.cmdline():  # else the number belongs to somebody else by now
                _kill(process)
                process.wait(timeout=10)
        except psutil.Error:
            continue


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _keep(files: RunFiles, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Write result.json; where there is no room for it, the exit code and these words are all there is."""
    try:
        save(files.result, outcome.result)
    except OSError as error:
        say(f"{files.result} cannot be written ({error.strerror}): {outcome.status}, exit code {outcome.exit_code}")


def _close(view: TrainView, outcome: Outcome) -> None:
    with suppress(OSError, SystemExit):  # the terminal or pipe has gone; the run directory has everything
        view.close(outcome.status, outcome.message)


def _with_numbers(outcome: Outcome, monitor: Monitor, files: RunFiles, ranks: range) -> Outcome:
    """Add the newest step, loss and validation loss: from the metrics, else from the ranks."""
    results = read_ranks(files, ranks)
    last, validation = monitor.last_step, monitor.last_validation
    losses = [None if last is None else last.loss, *(result.loss for result in results)]
    return replace(
        outcome,
        step=max([0 if last is None else last.step, *(result.step for result in results)]),
        loss=next((loss for loss in losses if loss is not None), None),
        validation_loss=None if validation is None else validation.loss,
    )
