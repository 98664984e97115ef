"""Stands in for torchrun and a run's one rank, without torch: RUN_DIR. Quick steps until somebody asks it to stop, and
then a checkpoint (of `slow`, after a while); or the end that the variable ENDING names."""

import os
import sys
import time
from pathlib import Path

from canzona_cli.errors import ExitCode
from canzona_cli.run.codec import plain, save
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.records import FAILURES, Failure, RankError, RankResult, StageEvent, StepMetrics
from tests.checkpoint.checkpoints import save as save_checkpoint

STEP_S = 0.01
WHILE_S = 0.6
"""Longer than the launcher takes to look again."""
STEPS = 3
"""Of a run that nobody stops."""


def main(files: RunFiles) -> int:
    ending = os.environ.get("ENDING", "stopped")
    append_json_line(files.events, plain(StageEvent(time=time.time(), stage="train")))
    print("the rank's own output")
    step = 0
    while (step < STEPS or ending in ("stopped", "slow")) and not files.stop_requested():
        step += 1
        append_json_line(files.metrics, plain(StepMetrics(step=step, loss=1 / step, step_s=STEP_S, time=time.time())))
        time.sleep(STEP_S)
    state = RankResult(rank=0, pid=os.getpid(), status="done", exit_code=0, step=step, loss=1 / step, time=time.time())
    if files.stop_requested():
        time.sleep(WHILE_S if ending == "slow" else 0)
        save_checkpoint(files.checkpoints, step)
        reason, code = files.stop_reason(), ExitCode.INTERRUPTED
        code = ExitCode.PREEMPTED if reason == "preempted" else code
        state = RankResult(rank=0, pid=os.getpid(), status=reason, exit_code=code, step=step, time=time.time())
    if ending == "hang":
        time.sleep(3600)
    if ending in ("crash", "diverged"):
        error = RankError(type="OSError", message="the cable is loose", traceback="Traceback ...\n  in train")
        status: Failure = "failed" if ending == "crash" else "diverged"
        state = RankResult(rank=0, pid=os.getpid(), status=status, exit_code=70, step=step, error=error)
    save(files.rank(0), state)
    return int(state.status in FAILURES)


if __name__ == "__main__":
    sys.exit(main(RunFiles(Path(sys.argv[1]))))
