"""The activation formulas of the memory estimate against what autograd really saves."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from canzona_cli.cluster import fit
from canzona_cli.planner.memory import estimate
from tests.dist.activation_probe import CASES, MICRO_BATCH
from tests.sizes import run


def test_estimated_activations_are_what_autograd_saves() -> None:
    """Within 2%: rotary tables, log-sum-exps and masks are left out of the formulas."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.activation_probe"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = {tuple(entry["case"]): entry["bytes"] for entry in json.loads(done.stdout.splitlines()[-1])}
    assert set(measured) == set(CASES)
    for precision, recompute in CASES:
        config, layout = fit.resolve(
            run("tiny", 1, micro_batch_size=MICRO_BATCH, precision=precision, recompute=recompute)
        )
        # Of the logits, autograd saves the fp32 softmax; the estimate adds the logits themselves and their gradient.
        softmax = 4 * MICRO_BATCH * config.train.seq_length * config.model.vocab_size
        expected = estimate(config, layout).parts["activations"] + softmax
        assert abs(measured[precision, recompute] - expected) <= 0.02 * expected, (precision, recompute)
