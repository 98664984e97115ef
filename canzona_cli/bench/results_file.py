"""A bench's result as JSON, for `--json` and for the bench directory. No torch."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from canzona_cli.bench.losses import disagreements
from canzona_cli.bench.results import BenchResult
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run import codec
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import json_text

_FIX = "write it again with `canzona bench ... --out FILE.json`"
_DISAGREE = "strategies disagree in their losses"
_OVERLAP = "the interquartile ranges of the two times overlap"


def content_of(result: BenchResult) -> dict[str, object]:
    """The figures to read, and under `result` everything they are computed from.

    A speed-up that must not be claimed is null; `withheld` gives the reason.
    """
    speedups, withheld = _speedups(result)
    overhead: object = None
    over_adamw = result.overhead(result.reference)
    if over_adamw is None:
        withheld["overhead_over_adamw"] = "adamw did not take part"
    elif disagreements(result):
        withheld["overhead_over_adamw"] = _DISAGREE
    elif not over_adamw.distinct:
        withheld["overhead_over_adamw"] = _OVERLAP
    else:
        ratio = over_adamw.ratio
        overhead = {"median": ratio.median - 1, "low": ratio.low - 1, "high": ratio.high - 1}
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "optimizer": result.optimizer,
        "layout": asdict(result.layout),
        "machine": dict(result.machine),
        "arithmetic": result.arithmetic,
        "notes": list(result.notes),
        "reference": result.reference,
        "speedup": speedups,
        "overhead_over_adamw": overhead,
        "withheld": withheld,
        "disagreements": [f"{problem.key}: {problem.value}; {problem.reason}" for problem in disagreements(result)],
        "strategies": {name: _measured(result, name) for name in result.strategies},
        "predicted": {name: _predicted(result, name) for name in result.strategies},
        "result": asdict(result),
    }


def save(result: BenchResult, path: Path) -> None:
    """Write `content_of`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json_text(content_of(result)) + "\n")


def load(path: Path) -> BenchResult:
    """Read back what `save` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of another version.
    """
    try:
        return codec.load(path, BenchResult, key="bench result", fix=_FIX, inside="result")
    except FileNotFoundError:
        raise ConfigError(Problem(key="bench result", value=path, reason="there is no such file", fix=_FIX)) from None


def _speedups(result: BenchResult) -> tuple[dict[str, object], dict[str, str]]:
    """Optimizer step and iteration of every other strategy over the reference's; the reasons why some are missing."""
    found: dict[str, object] = {}
    withheld: dict[str, str] = {}
    disagree = bool(disagreements(result))
    for name in STRATEGIES:
        if name in ("adamw", result.reference):
            continue
        for what in ("optimizer", "iteration"):
            key = f"{what}_vs_{name}"
            found[key] = None
            if name not in result.strategies:
                withheld[key] = next(
                    (note for note in result.notes if note.startswith(f"without {name}:")), f"{name} did not take part"
                )
                continue
            speedup = result.optimizer_speedup(name) if what == "optimizer" else result.iteration_speedup(name)
            if disagree:
                withheld[key] = _DISAGREE
            elif not speedup.distinct:
                withheld[key] = _OVERLAP
            else:
                found[key] = asdict(speedup.ratio)
    return found, withheld


def _measured(result: BenchResult, name: str) -> Mapping[str, object]:
    found = result.strategies[name]
    measured = found.measured
    iteration, optimizer = Quartiles.of(measured.iteration_s), Quartiles.of(measured.optimizer_s)
    return {
        "phases": {phase: seconds.mean_s for phase, seconds in measured.phases.items()},
        "iteration_s": iteration.median,
        "optimizer_s": optimizer.median,
        "processor_s": Quartiles.of(measured.processor_s).median,
        "loss": measured.losses[-1],
        "spread": {
            "iteration_s": {**asdict(iteration), "relative": iteration.relative},
            "optimizer_s": {**asdict(optimizer), "relative": optimizer.relative},
        },
        "load_balance": measured.load_balance,
        "tensor_bytes": max(measured.tensor_bytes),
        "sitting": found.sitting,
        "alone": found.alone,
    }


def _predicted(result: BenchResult, name: str) -> Mapping[str, object]:
    return {
        **asdict(result.strategies[name].predicted),
        "optimizer_error": result.error(name),
        "iteration_error": result.iteration_error(name),
    }
