"""A worker that keeps the launcher's side of the contract without a model: real torchrun, real gloo, steps of an
all-reduce. The run directory's file `behaviour` says how it ends."""

import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from canzona_cli.records.codec import record_dict, save
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.protection import Watchdog, die_with_parent
from canzona_cli.records.records import RankError, RankResult, StepMetrics

BEHAVIOURS = ("done", "raise", "endless", "deaf", "stuck", "absent")
STEPS = 4
SLOW_IMPORTS = ("torch.distributed",)


def main(files: RunFiles) -> int:
    die_with_parent()
    rank = int(os.environ["RANK"])
    behaviour = (files.root / "behaviour").read_text()
    assert behaviour in BEHAVIOURS
    if behaviour == "absent" and rank == 1:
        time.sleep(3600)
    print(f"rank {rank} starts", file=sys.stderr)
    watchdog = Watchdog()
    state = RankResult(rank=rank, pid=os.getpid(), status="running")
    save(files.rank(rank), state)
    try:
        ending = train(files, rank, behaviour, watchdog)
    except Exception as error:
        described = RankError(type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        save(files.rank(rank), replace(state, status="failed", exit_code=70, error=described, time=time.time()))
        return 70
    save(files.rank(rank), replace(ending, pid=os.getpid(), time=time.time()))
    return ending.exit_code or 0


def stuck_in_a_file_server() -> None:
    time.sleep(3600)


def train(files: RunFiles, rank: int, behaviour: str, watchdog: Watchdog) -> RankResult:
    import torch
    import torch.distributed as dist

    watchdog.progress()
    dist.init_process_group("gloo")
    watchdog.stage("train")
    step = 0
    while behaviour in ("endless", "deaf") or step < STEPS:
        step += 1
        watchdog.step()
        if behaviour == "stuck" and rank == 1 and step == 3:
            stuck_in_a_file_server()
        value = torch.ones(1)
        dist.all_reduce(value)
        if rank == 0:
            append_json_line(files.metrics, record_dict(StepMetrics(step=step, loss=1.0 / step, time=time.time())))
        if behaviour == "raise" and rank == 1 and step == 3:
            raise ValueError("the loss is not finite")
        if behaviour in ("endless", "deaf"):
            time.sleep(0.1)
        stop = torch.tensor([float(behaviour != "deaf" and files.stop_requested())])
        dist.broadcast(stop, src=0)
        if stop.item():
            return RankResult(rank=rank, status="interrupted", exit_code=130, step=step, loss=1.0 / step)
    dist.barrier()
    dist.destroy_process_group()
    return RankResult(rank=rank, status="done", exit_code=0, step=step, loss=1.0 / step)


if __name__ == "__main__":
    sys.exit(main(RunFiles(Path(sys.argv[1]))))
