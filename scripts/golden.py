#!/usr/bin/env python3
"""Records behaviour that a refactoring must not change, and compares two records.

    python scripts/golden.py OUT                  # writes plans, a loss curve, checkpoint hashes and help texts to OUT
    python scripts/golden.py --compare OLD NEW    # prints every difference; exits 1 if there are any

The script uses only canzona's command line, so it works with any version: run it with the Python of each version. Plans
include their simulated step times. Takes about ten minutes on two cores. `make exactness` checks exactness.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
GPUS = (8, 64, 256, 1024)
OTHERS = ("soap", "shampoo", "normuon", "adamw")
STRATEGIES = ("paper", "asc", "layerwise", "sc")
KINDS = ("muon", "normuon", "shampoo", "soap", "adamw")
COMMANDS = (
    *("", "plan", "train", "bench", "slurm", "validate", "recipes", "clusters", "data", "data prepare"),
    *(
        "checkpoint",
        "checkpoint list",
        "checkpoint verify",
        "checkpoint show",
        "checkpoint import",
        "checkpoint export",
    ),
    *("generate", "eval", "report", "calibrate", "doctor"),
)
SMALL = ("recipe=qwen3-tiny", "gpus=4", "parallel.tp=2", "parallel.pp=1", "train.precision=fp32")
VOLATILE = {"plan_hash", "plan_version", "version", "planning_s", "simulation_s"}
"""The keys of `plan --json` that may differ between versions or runs: versions, hashes and timings."""


def canzona(*words: str, check: bool = True) -> str:
    """Runs a command of the canzona that this Python imports; returns its standard output."""
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "canzona_cli", *words], capture_output=True, text=True, env=environment, check=False
    )
    if check and process.returncode:
        raise SystemExit(f"canzona {' '.join(words)}: exit code {process.returncode}\n{process.stderr}")
    return process.stdout


def runs() -> Iterator[tuple[str, ...]]:
    """Yields the overrides of the 40 runs to plan."""
    for size in SIZES:
        yield from ((f"recipe={size}", f"gpus={gpus}") for gpus in GPUS)
    for optimizer in OTHERS:
        yield from ((f"recipe={size}", "gpus=64", f"optimizer={optimizer}") for size in ("1.7b", "8b"))
    for strategy in STRATEGIES:
        yield ("recipe=8b", "gpus=64", f"engine={strategy}")
        yield ("recipe=14b", "gpus=256", "parallel.tp=4", "parallel.pp=1", f"engine={strategy}")


def record(out: Path) -> None:
    """Writes a record to a new folder."""
    out.mkdir(parents=True)
    plans = {
        " ".join(run): json.loads(canzona("plan", "--dry-run", "--json", *run, check=False) or "null") for run in runs()
    }
    _write(out / "plans.json", plans)
    _write(out / "help.json", {command: canzona(*command.split(), "--help") for command in COMMANDS})
    with tempfile.TemporaryDirectory() as folder:
        canzona("train", *SMALL, "train.steps=300", f"run.dir={folder}/curve")
        _write(out / "curve.json", _curve(Path(folder) / "curve"))
        _write(out / "checkpoints.json", {kind: _checkpoint(kind, Path(folder) / kind) for kind in KINDS})


def _curve(run: Path) -> list[list[float]]:
    """Returns [step, loss, gradient norm] of every step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line["step"], line["loss"], line["grad_norm"]] for line in lines if "grad_norm" in line]


def _checkpoint(kind: str, run: Path) -> dict[str, str]:
    """Trains for ten steps; returns the hash of every file of tensors, by path."""
    canzona("train", *SMALL, f"optimizer={kind}", "train.steps=10", f"run.dir={run}")
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(run.rglob("*.safetensors"))
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    print(path)


def differences(old: object, new: object, place: str) -> Iterator[str]:
    """Yields a line for every place where two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key in VOLATILE:
                continue
            if key not in old or key not in new:
                yield f"{place}.{key}: only in the {'new' if key in new else 'old'}"
            else:
                yield from differences(old[key], new[key], f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{place}[{index}]")
    elif old != new:
        yield f"{place}: {str(old)[:100]} -> {str(new)[:100]}"


def main() -> None:
    """Writes a record or compares two, and exits 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    if not arguments.compare:
        record(arguments.folders[0])
        return
    old, new = arguments.folders
    lines: list[str] = []
    for name in ("plans", "help", "curve", "checkpoints"):
        before, after = (json.loads((folder / f"{name}.json").read_text()) for folder in (old, new))
        lines += differences(before, after, name)
    print("\n".join(lines) or "identical")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
