"""Ranks of a calibration that measure little, and the command around them.

What CANZONA_TEST_BEHAVIOUR says: "hasty" measures everything, once, products of small matrices alone; "endless" and
"crash" measure one number and end so. The command: `python -m tests.dist.calibrate_stand_in calibrate ARGUMENTS`.
"""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from canzona_cli.bench.calibrate import worker
from canzona_cli.bench.calibrate.profile import Measurement, Record, Recorder
from canzona_cli.records.codec import record_dict
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.records import Ending, StageEvent
from canzona_cli.training.process import run_rank
from canzona_cli.training.records import RankRecord
from tests.waiting import PATIENCE_S, wait_until

MODULE = "tests.dist.calibrate_stand_in"
HASTY = os.environ.get("CANZONA_TEST_BEHAVIOUR") == "hasty"
SLOW_IMPORTS = worker.SLOW_IMPORTS if HASTY else ("canzona_cli.core.megatron.quick_import",)


def measure(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    recorder = Recorder(files, writes=rank == 0)
    recorder.add(Measurement.of("fp32_tflops", [0.1, 0.2, 0.3]))
    recorder.report(Record(done=("arithmetic",)))
    if rank == 0:
        append_json_line(files.events, record_dict(StageEvent(time=time.time(), stage="memory")))
    if os.environ["CANZONA_TEST_BEHAVIOUR"] == "endless":
        time.sleep(2 * PATIENCE_S)
    if rank == 1:
        wait_until(lambda: files.events.exists() and '"memory"' in files.events.read_text(), "rank 0's measurements")
        raise ValueError("the abacus is stuck")
    time.sleep(2 * PATIENCE_S)
    return "interrupted"


def hasty(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    from canzona_cli.bench.calibrate import compute, timing

    compute.SIZES["cpu"] = replace(compute.SIZES["cpu"], matmuls=(64, 128), exact=128, symmetric=128)
    timing.LEAST = 1
    return worker.calibrate_rank(files, record, rank)


def command() -> None:
    from canzona_cli.bench.calibrate import calibrate
    from canzona_cli.cli.app import main

    calibrate.calibrate = partial(calibrate.calibrate, worker=MODULE)
    main()


if __name__ == "__main__":
    if sys.argv[1] == "calibrate":
        command()
    elif os.environ["CANZONA_TEST_BEHAVIOUR"] == "hasty":
        run_rank(Path(sys.argv[1]), hasty)
    else:
        run_rank(Path(sys.argv[1]), measure)
