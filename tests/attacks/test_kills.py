"""Killed at any moment, as often as it likes, a run ends with the very bits of one that never was."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from canzona_cli.records.codec import load_if_valid
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.records import ResumePoint
from tests.faults.support import TrainingRun, alive

LAUNCHES_KILLED = 6
SHARED = ("optimizer.form=gram", "engine.mode=shared", "train.precision=fp32")
LONG = (
    *("train.steps=100", "train.eval_interval=25", "train.eval_sequences=8", "schedule.warmup_steps=2"),
    *("checkpoint.every_steps=4", "checkpoint.every_minutes=null"),
    *("gpus=2", "train.global_batch_size=2", "model.num_layers=1"),
)
WAYS = (("parallel.tp=1",), ("parallel.tp=2", *SHARED))
"""Runs of whole launches take turns at them."""
Ending = tuple[dict[str, str], list[tuple[object, ...]], list[tuple[object, ...]]]


def ending(root: Path) -> Ending:
    """Hashes of the last checkpoint's tensors, every step, every validation."""
    files = RunFiles(root)
    newest = CheckpointStore(files.checkpoints).latest()
    assert newest is not None
    manifest, problems = verify(newest.path)
    assert not problems
    shards = {name: file.blake3 for name, file in manifest.files.items() if name.startswith("rank-")}
    assert shards
    steps = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    assert manifest.progress.step == len(steps)
    validations = files.validation.read_text().splitlines() if files.validation.exists() else []
    return (
        shards,
        [tuple(line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")) for line in steps],
        [(line["step"], line["loss"]) for line in map(json.loads, validations)],
    )


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("CANZONA_SEED", "0")) or time.time_ns() % 1_000_000
    print(f"CANZONA_SEED={seed}")
    return random.Random(seed)


@pytest.mark.sweep
@pytest.mark.timeout(2400)
def test_launches_killed_at_random_times_cost_no_bit(tmp_path: Path, corpus_cache: Path, chance: random.Random) -> None:
    """The launcher, torchrun or a rank: a quarter of them at any moment of a launch, most of which is its start, the
    others while they train or save; a new run whenever one has come to its end."""

    def begin(name: str, way: int) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        return TrainingRun(tmp_path / name, corpus_cache, *LONG, *WAYS[way])

    endings = []
    for way in range(len(WAYS)):
        begun, whole = time.monotonic(), begin(f"whole-{way}", way)
        code, output = whole.finish()
        assert code == 0, output
        longest_s = time.monotonic() - begun
        endings.append(ending(whole.files.root))
    kills: list[str] = []
    runs = reached = 0
    while len(kills) < LAUNCHES_KILLED or code != 0:
        run = begin(f"broken-{runs}", runs % len(WAYS))
        if len(kills) < LAUNCHES_KILLED:
            begun, moment, target = time.monotonic(), chance.uniform(0.0, longest_s), reached + chance.randint(1, 25)
            anywhen = chance.random() < 0.25
            while run.process.poll() is None and (time.monotonic() - begun < moment if anywhen else run.steps < target):
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.2))
        if len(kills) < LAUNCHES_KILLED and run.process.poll() is None:
            family = run.family()
            doomed = chance.randrange(len(family) + 1)
            with suppress(psutil.NoSuchProcess):  # it has just ended
                [psutil.Process(run.process.pid), *family][doomed].send_signal(signal.SIGKILL)
            reached = run.steps
            came_from = 0 if (point := load_if_valid(run.files.resume, ResumePoint)) is None else point.step
            whom = "launcher" if doomed == 0 else f"process {doomed} of {len(family)} below it"
            after_s = time.monotonic() - begun
            kills.append(f"| {runs} | {after_s:.2f} s | {whom} | {came_from} | {reached} |")
            code, _ = run.finish()
            assert not alive(family)
        else:
            code, output = run.finish()
        # The launcher may be killed when it has said that all is done: such a run is not taken up again.
        if code == 0 or (read_json(run.files.result) or {}).get("status") == "done":
            assert ending(run.files.root) == endings[runs % len(WAYS)]
            code, runs, reached = 0, runs + 1, 0
    print("| run | launched for | killed | began at step | reached step |", "|---|---|---|---|---|", *kills, sep="\n")
    print(f"{runs} runs, each bit for bit as the unbroken one")
