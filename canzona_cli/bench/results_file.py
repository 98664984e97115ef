"""A bench's result as JSON: what `--json` prints and what stays in the bench directory. No torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from canzona_cli.bench.losses import disagreements
from canzona_cli.bench.results import VERSION, BenchResult
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.statistics import Spread
from canzona_cli.run.words import json_text

_FIX = "make it anew with `canzona bench ... --out FILE.json`"
_DISAGREE = "strategies disagree in their losses"
_OVERLAP = "the interquartile ranges of the two times overlap"


def as_json(result: BenchResult) -> dict[str, object]:
    """The figures to read, and under `result` everything they come from.

    A speed-up is null where it may not be told; `withheld` says why.
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
        "version": VERSION,
        "recipe": result.recipe,
        "optimizer": result.optimizer,
        "layout": asdict(result.layout),
        "machine": dict(result.machine),
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
    """Write `as_json`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json_text(as_json(result)) + "\n")


def load(path: Path) -> BenchResult:
    """Read back what `save` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of another version.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict) or "result" not in content or "version" not in content:
        raise _unreadable(path, "is not a result of canzona bench")
    if content["version"] != VERSION:
        raise _unreadable(path, f"has version {content['version']}, this canzona reads version {VERSION}")
    try:
        return TypeAdapter(BenchResult).validate_python(content["result"])
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc'])) or 'top level'}: {e['msg'].lower()}" for e in error.errors()]
        shown = "; ".join(places[:5]) + (f"; and {len(places) - 5} more" if len(places) > 5 else "")
        raise _unreadable(path, f"is damaged: {shown}") from None


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(Problem(key="bench result", value=path, reason=reason, fix=_FIX))


def _speedups(result: BenchResult) -> tuple[dict[str, object], dict[str, str]]:
    """Optimizer step and iteration of every other strategy over the reference's; why some are not told."""
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
    iteration, optimizer = Spread.of(measured.iteration_s), Spread.of(measured.optimizer_s)
    return {
        "phases": {phase: seconds.mean_s for phase, seconds in measured.phases.items()},
        "iteration_s": iteration.median,
        "optimizer_s": optimizer.median,
        "processor_s": Spread.of(measured.processor_s).median,
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
