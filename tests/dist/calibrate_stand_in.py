"""Ranks of a calibration that measure everything, once, products of small matrices alone."""

import sys
from dataclasses import replace
from pathlib import Path

from canzona_cli.bench.calibrate import worker
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import Ending
from canzona_cli.training.process import run_rank
from canzona_cli.training.records import RankRecord

MODULE = "tests.dist.calibrate_stand_in"
SLOW_IMPORTS = worker.SLOW_IMPORTS


def hasty(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    from canzona_cli.bench.calibrate import collectives, compute

    compute.SIZES["cpu"] = replace(compute.SIZES["cpu"], matmuls=(64, 128), exact=128, symmetric=128)
    collectives.LEAST_SAMPLES = 1
    return worker.calibrate_rank(files, record, rank)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), hasty)
