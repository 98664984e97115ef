#!/usr/bin/env python3
"""Random runs on real CPU ranks against one process (`tests/dist/fuzz.py`): a line for each seed.

    make fuzz                                 # 300 of them: about 15 minutes on two cores
    python scripts/fuzz.py 17                 # one, in full
    python scripts/fuzz.py 100 400            # seeds 100 to 399

Exit 1: a run was refused, a rank failed, or masters ended further from one process' than rounding explains.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.dist.fuzz import Case, Judged, draw, judge

BATCH = 20
"""Cases that share ranks; where one ends the ranks, each of them runs alone."""


def together(cases: Sequence[Case]) -> list[Judged | str]:
    """Of each case how it went, or what ended its ranks."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            return [*judge(cases, Path(folder))]
        except AssertionError as error:
            if len(cases) == 1:
                return [str(error)]
    return [found for case in cases for found in together([case])]


def main(first: int, end: int) -> int:
    """Exit code."""
    failed = 0
    for start in range(first, end, BATCH):
        cases = [draw(seed) for seed in range(start, min(start + BATCH, end))]
        for case, found in zip(cases, together(cases), strict=True):
            if isinstance(found, str):
                print(f"{case}\n  FAILED: {found}", flush=True)
            elif found.wrong or end - first == 1:
                print("\n  ".join((str(case), *found.wrong)), flush=True)
            if isinstance(found, Judged):
                verdict = "FAILED" if found.wrong else "ok"
                print(
                    f"{case.seed}: {verdict}, at {found.apart:.2g} of what is allowed (control {found.control:.1e})",
                    flush=True,
                )
            failed += isinstance(found, str) or bool(found.wrong)
    print(f"{end - first} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.exit(main(arguments.first, arguments.end or arguments.first + 1))
