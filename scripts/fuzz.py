#!/usr/bin/env python3
"""Trains random runs on real CPU ranks and compares each with one process (`tests/dist/fuzz.py`); one line per seed.

    make fuzz                                 # 300 seeds: about 15 minutes on two cores
    python scripts/fuzz.py 17                 # one seed, with details
    python scripts/fuzz.py 100 400            # seeds 100 to 399

Exits 1 if a run was refused, a rank failed, or masters differ by more than rounding explains.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.dist.fuzz import Case, Judged, draw, judge

BATCH = 20
"""The number of cases that run on the same ranks."""


def judge_together(cases: Sequence[Case]) -> list[Judged | str]:
    """Runs cases on the same ranks; returns the judgement of each case, or the error that ended its ranks.

    If a case ends the ranks, all cases are run again, each on new ranks.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            return [*judge(cases, Path(folder))]
        except AssertionError as error:
            if len(cases) == 1:
                return [str(error)]
    return [result for case in cases for result in judge_together([case])]


def main(first: int, end: int) -> int:
    """Runs the seeds from `first` up to, but not including, `end`; returns the exit code."""
    failed = 0
    for start in range(first, end, BATCH):
        cases = [draw(seed) for seed in range(start, min(start + BATCH, end))]
        for case, result in zip(cases, judge_together(cases), strict=True):
            if isinstance(result, str):
                print(f"{case}\n  FAILED: {result}", flush=True)
            elif result.wrong or end - first == 1:
                print("\n  ".join((str(case), *result.wrong)), flush=True)
            if isinstance(result, Judged):
                verdict = "FAILED" if result.wrong else "ok"
                print(
                    f"{case.seed}: {verdict}, error {result.apart:.2g} of the limit (control {result.control:.1e})",
                    flush=True,
                )
            failed += isinstance(result, str) or bool(result.wrong)
    print(f"{end - first} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.exit(main(arguments.first, arguments.end or arguments.first + 1))
