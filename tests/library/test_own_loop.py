"""The example of the manual, a file, trains under torchrun."""

import contextlib
import io
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import canzona_cli
from tests.cli.commands.support import ran
from tests.dist.ranks import run_ranks

ROOT = Path(canzona_cli.__file__).parents[1]
VOCABULARY = 256


def _torchrun(arguments: list[str]) -> str:
    """Returns the output under torchrun, whose ranks each import torch and Megatron."""
    return ran(sys.executable, "-m", "torch.distributed.run", *arguments, cwd=ROOT).stdout


def _forked(arguments: list[str]) -> str:
    """Returns the output of ranks with torchrun's environment that have imported both."""
    *_, option, count, file = arguments
    assert option == "--nproc-per-node"

    def rank() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(ROOT / file), run_name="__main__")
        return printed.getvalue()

    return "".join(run_ranks(int(count), rank))


@pytest.mark.parametrize("start", [_forked, pytest.param(_torchrun, marks=pytest.mark.sweep)])
def test_the_example_that_the_manual_names_trains_on_two_ranks(start: Callable[[list[str]], str]) -> None:
    manual = (ROOT / "canzona_cli" / "LIBRARY.md").read_text(encoding="utf-8")
    (typed,) = re.findall(r"^torchrun (.*)$", manual, re.MULTILINE)
    steps = re.findall(r"^step +(\d+) loss ([\d.]+)", start(typed.split()), re.MULTILINE)
    losses = [float(loss) for _, loss in steps]
    assert [int(step) for step, _ in steps] == [*range(1, 21)], "rank 0 prints every step once"
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.3, "nothing is learned before the first step"
    assert losses[-1] < 0.6 * losses[0]
