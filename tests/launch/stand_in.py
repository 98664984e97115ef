"""Stands in for torchrun and a run's one rank: `python -m tests.launch.stand_in RUN_DIR`, without torch.

Steps of a hundredth of a second by the clock that it writes, a checkpoint at each even one; the variable STAND_IN says
how each launch in the directory ends: `crash@3,done`.
"""

import os
import sys
import time
from pathlib import Path

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import Header, Progress, Shard
from canzona_cli.run.codec import load_if_sound, plain, save
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.records import RankError, RankResult, ResumePoint, StageEvent, StepMetrics, read_layout

STEPS = 6
STEP_S = 0.01


def main(files: RunFiles) -> int:
    before = [path for path in files.attempts.glob("*") if path.is_dir()]
    ending, _, at = os.environ["STAND_IN"].split(",")[len(before)].partition("@")
    append_json_line(files.events, plain(StageEvent(time=time.time(), stage="train")))
    print(f"launch {len(before) + 1}")
    begun = load_if_sound(files.resume, ResumePoint)
    for step in range((0 if begun is None else begun.step) + 1, (int(at) if at else STEPS) + 1):
        append_json_line(files.metrics, plain(StepMetrics(step=step, loss=1 / step, step_s=STEP_S, time=time.time())))
        if step % 2 == 0:
            _save(files, step)
    state = RankResult(rank=0, status="done", exit_code=0, step=step, loss=1 / step, time=time.time())
    if ending == "crash":
        error = RankError(type="OSError", message=f"pid {os.getpid()}: the cable is loose", traceback="Traceback")
        state = RankResult(rank=0, status="failed", exit_code=70, step=step, error=error, time=time.time())
    save(files.rank(0), state)
    return int(state.status != "done")


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
