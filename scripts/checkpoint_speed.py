"""Measures the cost of checkpoints: the rate of a save, the slowdown of steps during a save, and the time of a resumed
start.

    python scripts/checkpoint_speed.py [KEY=VALUE ...] [--out FILE.json]

Steps during a save are compared with the other steps of the same run. Each save is compared with a sequential write and
fsync of as many bytes into the same folder, right after the run. Cold and resumed starts are interleaved. Raw numbers
are written to FILE.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from canzona_cli.run.statistics import Quartiles

STEPS, EVERY, TURNS = 24, 6, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="the file for raw numbers")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="the folder for runs, on the disk to measure")
    given = parser.parse_args()
    overrides = given.overrides or ["recipe=qwen3-mini", "gpus=2", "parallel.tp=2"]
    given.folder.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-speed-", dir=given.folder))
    try:
        raw = {
            "overrides": overrides,
            "asynchronous": _steps(folder / "background", overrides, asynchronous=True),
            "synchronous": _steps(folder / "waiting", overrides, asynchronous=False),
            "starts": _starts(folder, overrides),
        }
    finally:
        shutil.rmtree(folder)
    _show(raw)
    if given.out:
        given.out.write_text(json.dumps(raw, indent=2) + "\n")


def _train(run: Path, *overrides: str) -> float:
    """Runs `canzona train` to its end; returns the time when it was started."""
    started = time.time()
    command = [sys.executable, "-m", "canzona_cli.app", "train", *overrides, "train.eval_interval=0", f"run.dir={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return started


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _steps(run: Path, overrides: list[str], *, asynchronous: bool) -> dict[str, object]:
    """Trains; returns the seconds of steps during a save and without one, and the rate of every save.

    The first two steps are not counted.
    """
    saving = (f"checkpoint.every_steps={EVERY}", f"checkpoint.asynchronous={str(asynchronous).lower()}")
    _train(run, *overrides, f"train.steps={STEPS + 2}", "checkpoint.at_end=false", *saving)
    ends = [line["time"] for line in _lines(run / "metrics.jsonl")]
    saves = [event for event in _lines(run / "events.jsonl") if event["event"] == "checkpoint"]
    # A save starts when training is blocked for the copy.
    spans = [(s["time"] - s["seconds"] - s["stall_s"], s["time"]) for s in saves]
    during_save: list[float] = []
    without_save: list[float] = []
    for begin, end in list(pairwise(ends))[1:]:
        overlaps = any(start < end and begin < stop for start, stop in spans)
        (during_save if overlaps else without_save).append(end - begin)
    size = int(saves[0]["bytes"])
    return {
        "bytes": size,
        "beside_s": during_save,
        "alone_s": without_save,
        "stall_s": [save["stall_s"] for save in saves],
        "save_gb_per_s": [save["bytes"] / save["seconds"] / 1e9 for save in saves],
        "disk_gb_per_s": [_disk(run, size) for _ in saves],
    }


def _disk(folder: Path, size: int) -> float:
    """Returns the rate of a sequential write and fsync, in GB/s."""
    block = os.urandom(1 << 24)
    path = folder / "plain"
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())
    rate = size / (time.monotonic() - started) / 1e9
    path.unlink()
    return rate


def _starts(folder: Path, overrides: list[str]) -> dict[str, list[float]]:
    """Trains; returns the seconds from the start of the command to the end of its first step, for cold and resumed
    starts."""
    cold: list[float] = []
    resumed: list[float] = []
    for turn in range(TURNS):
        run = folder / f"start-{turn}"
        started = _train(run, *overrides, "train.steps=2", "schedule.decay_steps=4")
        cold.append(_lines(run / "metrics.jsonl")[0]["time"] - started)
        started = _train(run, *overrides, "train.steps=4", "schedule.decay_steps=4")
        resumed.append(_lines(run / "metrics.jsonl")[2]["time"] - started)
    return {"cold_s": cold, "resumed_s": resumed}


def _show(raw: dict[str, object]) -> None:
    for name in ("asynchronous", "synchronous"):
        steps = raw[name]
        assert isinstance(steps, dict)
        during_s, without_s = statistics.mean(steps["beside_s"]), statistics.mean(steps["alone_s"])
        # The extra time of all steps during a save.
        extra = (during_s - without_s) * len(steps["beside_s"]) / len(steps["save_gb_per_s"])
        save, disk = statistics.median(steps["save_gb_per_s"]), statistics.median(steps["disk_gb_per_s"])
        print(
            f"{name}: {steps['bytes'] / 2**20:,.0f} MiB; save {save:.2f} GB/s, disk {disk:.2f} GB/s: {save / disk:.0%}"
        )
        print(
            f"  steps {without_s:.3f} s (quartiles {_quartiles(steps['alone_s'])}), during a save {during_s:.3f} s "
            f"({_quartiles(steps['beside_s'])}): {during_s / without_s - 1:+.1%}; a save costs {extra:.3f} s in total, "
            f"including {statistics.median(steps['stall_s']):.3f} s in which training is blocked"
        )
    starts = raw["starts"]
    assert isinstance(starts, dict)
    cold, resumed = statistics.median(starts["cold_s"]), statistics.median(starts["resumed_s"])
    print(f"first step after {cold:.2f} s cold, {resumed:.2f} s resumed: {resumed / cold:.2f}x")


def _quartiles(values: list[float]) -> str:
    spread = Quartiles.of(values)
    return f"{spread.low:.3f} to {spread.high:.3f}"


if __name__ == "__main__":
    main()
