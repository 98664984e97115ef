"""Stands in for torchrun and a run's one rank: `python -m tests.launch.stand_in RUN_DIR`, without torch.

Steps take a hundredth of a second, with a checkpoint after every second one. The variable STAND_IN says how each launch
in the directory ends, and after how many steps: `crash@3,done`. Further launches end as the last.
"""

import os
import signal
import sys
import time
from pathlib import Path

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import Header, Progress, Shard
from canzona_cli.core.errors import ExitCode
from canzona_cli.records.codec import load_if_valid, record_dict, save
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.protection import LAUNCHER_VARIABLE, Watchdog
from canzona_cli.records.records import RankError, RankResult, ResumePoint, StageEvent, StepMetrics, read_layout

STEPS = 6
STEP_S = 0.01
WHILE_S = 0.6
"""Longer than the launcher takes to look again."""


def main(files: RunFiles) -> int:
    before = [path for path in files.attempts.glob("*") if path.is_dir()]
    endings = os.environ["STAND_IN"].split(",")
    ending, _, at = endings[min(len(before), len(endings) - 1)].partition("@")
    most = float("inf") if ending in ("stopped", "slow") else int(at or STEPS)
    append_json_line(files.events, record_dict(StageEvent(time=time.time(), stage="train")))
    print(f"launch {len(before) + 1}")
    begun = load_if_valid(files.resume, ResumePoint)
    step = 0 if begun is None else begun.step
    while step < most and not files.stop_requested():
        step += 1
        loss = float(os.environ.get("STAND_IN_LOSS", "1")) / step
        append_json_line(files.metrics, record_dict(StepMetrics(step=step, loss=loss, step_s=STEP_S, time=time.time())))
        if step % 2 == 0:
            _save(files, step)
        time.sleep(STEP_S)
    state = _ended(files, ending, step)
    save(files.rank(0), state)
    return int(state.status in ("failed", "diverged"))


def _ended(files: RunFiles, ending: str, step: int) -> RankResult:
    """Does what the ending says.

    Args:
        ending: `done`, `crash`, `hang`, `ctrl-c` in the launcher, `stopped` once somebody asks for it, or `slow`, the
            same after a while.
    """
    if ending == "ctrl-c":
        os.kill(int(os.environ[LAUNCHER_VARIABLE]), signal.SIGINT)
        while not files.stop_requested():
            time.sleep(STEP_S)
    if files.stop_requested():
        time.sleep(WHILE_S if ending == "slow" else 0)
        if step % 2:
            _save(files, step)
        reason = files.stop_reason()
        code = ExitCode.PREEMPTED if reason == "preempted" else ExitCode.INTERRUPTED
        return RankResult(rank=0, pid=os.getpid(), status=reason, exit_code=code, step=step, time=time.time())
    if ending == "hang":
        Watchdog()
        time.sleep(3600)
    if ending == "crash":
        error = RankError(type="OSError", message=f"pid {os.getpid()}: the cable is loose", traceback="Traceback")
        return RankResult(rank=0, status="failed", exit_code=70, step=step, error=error, time=time.time())
    return RankResult(rank=0, status="done", exit_code=0, step=step, loss=1 / step, time=time.time())


def _save(files: RunFiles, step: int) -> None:
    batch = read_layout(files.layout).global_batch_size
    header = Header(
        progress=Progress(step=step, samples=step * batch, tokens=step * batch),
        optimizer="adamw",
        strategy="canzona",
        splitting="split",
        world_size=1,
        created=time.time(),
        canzona="0",
    )
    partial = begin(files.checkpoints, step)
    write_part(partial, 0, Shard(tensors={}, scalars={}))
    finish(partial, 1, header, {path.name: path.read_text() for path in (files.config, files.layout)}, 5.0)


if __name__ == "__main__":
    sys.exit(main(RunFiles(Path(sys.argv[1]))))
