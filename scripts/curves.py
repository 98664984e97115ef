#!/usr/bin/env python3
"""Loss curves of several runs in one picture: training and validation loss, and the difference to the first run.

    python scripts/curves.py OUT.png RUN [RUN...] [--smooth 0.9]

RUN is a run directory. Thin lines are losses as they were recorded, thick ones their moving average, dots validations.
The lower panel subtracts the first run's loss at the same step, smoothed and raw.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from canzona_cli.run.files import RunFiles

Curve = Mapping[int, float]
"""Loss by step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    label: str
    training: Curve
    validation: Curve


def read(root: Path) -> Run:
    """A run directory's curves, finished or not.

    Raises:
        FileNotFoundError: it has no metrics.
    """
    files = RunFiles(root)
    return Run(label=_label(files), training=_curve(files.metrics), validation=_curve(files.validation))


def _label(files: RunFiles) -> str:
    """strategy/optimizer, with the layout: tp2 dp2."""
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    optimizer = config["optimizer"]["name"]
    # AdamW's strategy is ignored, so it is not named.
    label = optimizer if optimizer == "adamw" else f"{config['engine']['strategy']}/{optimizer}"
    if not files.layout.exists():
        return label
    layout = json.loads(files.layout.read_text(encoding="utf-8"))
    sizes = [f"{name}{layout[name]}" for name in ("tp", "pp", "cp", "dp") if layout.get(name, 1) > 1]
    return f"{label} {' '.join(sizes)}".strip()


def _curve(path: Path) -> Curve:
    """Steps whose loss is a number; a last line that is still being written is left out."""
    found: dict[int, float] = {}
    if not path.exists() and path.name == "validation.jsonl":
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["loss"] is not None:
            found[entry["step"]] = entry["loss"]
    return found


def smoothed(curve: Curve, decay: float) -> Curve:
    """Exponential moving average, corrected for its start."""
    found: dict[int, float] = {}
    average = weight = 0.0
    for step, loss in sorted(curve.items()):
        average = decay * average + (1 - decay) * loss
        weight = decay * weight + (1 - decay)
        found[step] = average / weight
    return found


def minus(curve: Curve, base: Curve) -> Curve:
    """Where both have a loss."""
    return {step: loss - base[step] for step, loss in curve.items() if step in base}


def draw(runs: list[Run], out: Path, decay: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    first = runs[0]
    for number, run in enumerate(runs):
        colour, front = f"C{number}", 3 + len(runs) - number
        line = {"color": colour, "zorder": front}
        final = f", validation {list(run.validation.values())[-1]:.3f}" if run.validation else ""
        losses.plot(*_points(run.training), linewidth=0.6, alpha=0.35, **line)
        losses.plot(*_points(smoothed(run.training, decay)), linewidth=1.8, label=f"{run.label}{final}", **line)
        losses.plot(*_points(run.validation), "o", markersize=5, markeredgecolor="white", **line)
        if run is first:
            continue
        raw = minus(run.training, first.training)
        differences.plot(*_points(raw), linewidth=0.6, alpha=0.35, **line)
        differences.plot(*_points(smoothed(raw, decay)), linewidth=1.8, label=run.label, **line)
        differences.plot(
            *_points(minus(run.validation, first.validation)), "o", markersize=5, markeredgecolor="white", **line
        )
    losses.set_ylabel("loss (nats per token)")
    losses.legend(title=f"average of the last {1 / (1 - decay):.0f} steps; dots: validation")
    differences.axhline(0, color="C0", linewidth=1)
    differences.set_ylabel(f"loss - {first.label}")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--smooth", type=float, default=0.9, help="decay of the moving average, 0 to below 1")
    arguments = parser.parse_args()
    if not 0 <= arguments.smooth < 1:
        parser.error(f"--smooth is {arguments.smooth}; it is at least 0 and below 1")
    try:
        runs = [read(root) for root in arguments.runs]
    except FileNotFoundError as error:
        sys.exit(f"{error.filename}: no such file; is its folder a run directory?")
    if empty := [str(root) for root, run in zip(arguments.runs, runs, strict=True) if not run.training]:
        sys.exit(f"{', '.join(empty)}: no step has been recorded yet")
    draw(runs, arguments.out, arguments.smooth)
    for run in runs[1:]:
        apart = minus(run.training, runs[0].training)
        if apart:
            worst = max(apart, key=lambda step: abs(apart[step]))
            print(f"{run.label} and {runs[0].label}: apart by {abs(apart[worst]):.4f} at most, at step {worst}")


if __name__ == "__main__":
    main()
