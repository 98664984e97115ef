"""`canzona train --trace --profile` with real workers: what was asked for is there, the plan beside the measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.support import canzona, importable
from tests.trace_events import read_trace

SMALL = ("recipe=tiny", "gpus=2", "parallel.tp=2", "model.num_layers=2", "train.seq_length=32",
         "train.global_batch_size=2", "train.eval_interval=0")  # fmt: skip


def test_a_run_leaves_the_trace_and_the_profiles_it_was_asked_for(tmp_path: Path) -> None:
    arguments = (*SMALL, "train.steps=6", "run.dir=run", "--trace", "5-6", "--profile", "4")
    done = subprocess.run(
        [sys.executable, "-m", "canzona_cli.app", "train", *arguments],
        cwd=tmp_path, env={**os.environ, **importable(), "COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    for part in ("planned error", "why ", "was not measured on this machine", "3 steps measured", "1 profiled"):
        assert part in text
    run = tmp_path / "run"
    assert f"{run}/trace.json" in done.stdout
    assert f"{run}/profile/" in done.stdout
    trace = read_trace(run / "trace.json")
    assert [name.split(" (")[0] for name in trace.processes.values()][:3] == ["rank 0", "rank 1", "planned: rank 0"]
    assert [step["name"] for step in trace.tracks("rank 1", "step")[0]] == ["step 5", "step 6"]
    assert json.loads((run / "profile" / "rank-1.json").read_text())["traceEvents"]

    report = json.loads(canzona("report", "run", "--json", cwd=tmp_path).stdout)["breakdown"]
    assert report["planned"]["strategy"] == "canzona"
    assert report["planned"]["phases"]["matrix_update"] > 0
    assert report["why"]["text"]
    written = canzona("report", "run", "--trace", "again.json", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "again.json").read_text() == (run / "trace.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("--trace", "5-", "--profile", "x"), ("--trace = 5-", "--profile = x")),
        (("--trace", "3-2", "train.steps=4"), ("run.trace_steps = [3,2]",)),
        (("--profile", "0", "run.trace_steps=[1,9]", "train.steps=4"), ("run.profile_steps", "run.trace_steps")),
        (("run.trace_steps=4",), ("run.trace_steps",)),
        (("run.trace_steps=[1,2,3]",), ("run.trace_steps",)),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused_together(
    tmp_path: Path, arguments: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    done = canzona("train", *SMALL, *arguments, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    for key in keys:
        assert key in done.stderr
    assert "Traceback" not in done.stderr
