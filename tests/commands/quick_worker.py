"""Stands in for torchrun and a rank, and imports no torch: RUN_DIR. It ends as its seed, in the directory's name, says:
3 fails, 4 is stopped by Ctrl-C in the launcher."""

import os
import signal
import sys
import time
from pathlib import Path

from canzona_cli.run.codec import plain, save
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.orphan import LAUNCHER_VARIABLE
from canzona_cli.run.records import RankError, RankResult, StepMetrics


def main(files: RunFiles) -> int:
    seed = files.root.name.partition("seed=")[2]
    append_json_line(files.metrics, plain(StepMetrics(step=1, loss=float(seed), time=time.time())))
    state = RankResult(rank=0, pid=os.getpid(), status="done", exit_code=0, step=1, time=time.time())
    if seed == "4":
        os.kill(int(os.environ[LAUNCHER_VARIABLE]), signal.SIGINT)
        while not files.stop.exists():
            time.sleep(0.02)
        state = RankResult(rank=0, pid=os.getpid(), status="interrupted", exit_code=130, time=time.time())
    if seed == "3":
        error = RankError(type="ValueError", message="bad luck", traceback="Traceback ...")
        state = RankResult(rank=0, pid=os.getpid(), status="failed", exit_code=70, error=error, time=time.time())
    save(files.rank(0), state)
    return state.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(RunFiles(Path(sys.argv[1]))))
