"""The example of the manual, a file, trains under torchrun."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import canzona_cli

ROOT = Path(canzona_cli.__file__).parents[1]
VOCABULARY = 256


def test_the_example_that_the_manual_names_trains_on_two_ranks() -> None:
    manual = (ROOT / "canzona_cli" / "LIBRARY.md").read_text(encoding="utf-8")
    (typed,) = re.findall(r"^torchrun (.*)$", manual, re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", *typed.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step +(\d+) loss ([\d.]+)", done.stdout, re.MULTILINE)
    losses = [float(loss) for _, loss in steps]
    assert [int(step) for step, _ in steps] == [*range(1, 21)], "rank 0 prints every step once"
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.3, "nothing is learned before the first step"
    assert losses[-1] < 0.6 * losses[0]
