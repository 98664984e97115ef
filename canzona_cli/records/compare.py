"""Compares runs: reads them, finds the settings that differ, and compares two runs by their losses at the same steps
and phase times. `groups` ranks more runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.config.settings import leaves
from canzona_cli.core.errors import Problem, collect_problems, refuse
from canzona_cli.core.phases import LABELS
from canzona_cli.records.breakdown import NOTHING_S, Breakdown
from canzona_cli.records.codec import load_if_valid
from canzona_cli.records.files import RunFiles, read_json, sweep_file
from canzona_cli.records.records import FAILURES, SweepPlan
from canzona_cli.records.summary import RunSummary, holds_run, load_summary
from canzona_cli.records.words import finite_or_none, plural

VERSION = 3
_PLACES = ("run.dir", "run.root")
"""The settings that say where a run is stored; comparisons do not list them."""

FIGURES = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "load_balance", "peak_memory_bytes")
"""The numbers of a breakdown that are compared in addition to its phases. `load_balance` is the load balance
of the matrix updates."""

Pair = tuple[float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The training losses of two runs at the same step."""

    step: int
    a: float
    b: float

    @property
    def change(self) -> float | None:
        """The relative change from run A to run B; None if run A's loss is 0."""
        return self.b / self.a - 1 if self.a else None


@dataclass(frozen=True, kw_only=True)
class RunPair:
    """The comparison of two runs. The first value of each pair belongs to run A."""

    a: RunSummary
    b: RunSummary
    plans: tuple[str | None, str | None]
    """The hashes of the executed plans; None for a strategy that executes no plan."""
    settings: Mapping[str, tuple[object, object]]
    """The resolved settings that differ, by key; None if a run has no such setting."""
    first: Loss | None
    """The losses at the first step that both runs logged; None if there is no such step."""
    last: Loss | None
    """The losses at the last step that both runs logged; None if there is no such step."""

    @property
    def best_validation(self) -> Pair:
        return self.a.best_validation, self.b.best_validation

    @property
    def phases(self) -> Mapping[str, Pair]:
        """The mean seconds over ranks of each phase in both runs, for phases that at least one run has; None
        for a run that lacks the phase. The key `step` has the whole step."""
        a, b = _means(self.a.breakdown), _means(self.b.breakdown)
        names = [*(name for name in LABELS if name in a | b), *sorted(set(a | b) - set(LABELS))]
        return {name: (a.get(name), b.get(name)) for name in names}

    @property
    def figures(self) -> Mapping[str, Pair]:
        """The values of `FIGURES` in both runs."""
        a, b = _figures(self.a.breakdown), _figures(self.b.breakdown)
        return {name: (a.get(name), b.get(name)) for name in FIGURES}

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json`. New keys do not change `version`; any other change raises it."""
        runs = zip("ab", (self.a, self.b), self.plans, strict=True)
        return {
            "version": VERSION,
            "runs": {
                name: {
                    "run_dir": str(run.run_dir),
                    **{field: getattr(run, field) for field in ("name", "status", "step")},
                    "plan_hash": plan,
                    "notes": list(run.notes),
                }
                for name, run, plan in runs
            },
            "settings": {key: {"a": a, "b": b} for key, (a, b) in self.settings.items()},
            "loss": {
                name: None if loss is None else asdict(loss) | {"change": loss.change}
                for name, loss in (("first", self.first), ("last", self.last))
            },
            "best_validation": _pair_json(self.best_validation),
            "phases": {name: _pair_json(pair) for name, pair in self.phases.items()},
            **{name: _pair_json(pair) for name, pair in self.figures.items()},
        }


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of any number of runs."""

    runs: tuple[RunSummary, ...]
    settings: Mapping[str, tuple[object, ...]]
    """The resolved settings that differ, by key, with a value for each run; None if a run has no such
    setting."""
    skipped: tuple[Path, ...] = ()
    """The given paths that hold no run."""
    not_begun: tuple[Path, ...] = ()
    """The directories of the runs that sweeps have planned but not begun."""

    @property
    def progress(self) -> str | None:
        """The number of runs by status, `30 runs so far: 12 done, 1 running, 17 not begun`; None if all are done or
        failed."""
        by_status = Counter([*(run.status for run in self.runs), *(["not begun"] * len(self.not_begun))])
        if not by_status.keys() - {"done", *FAILURES}:
            return None
        statuses = sorted(by_status, key=lambda status: (status == "not begun", status != "done"))
        counts = ", ".join(f"{by_status[status]} {status}" for status in statuses)
        return f"{plural(by_status.total(), 'run')} so far: {counts}"


def load_runs(run_dirs: Sequence[Path]) -> RunComparison:
    """Reads the runs in `run_dirs`. A path that is no run itself, such as the directory of a sweep, stands for the runs
    in it. If there are at least two runs, existing paths that hold none are skipped, because `runs/*` may match other
    files.

    Raises:
        ConfigError: lists the paths that do not exist and, if fewer than two paths hold runs, also the paths
            that hold none.
    """
    runs: list[RunSummary] = []
    problems: list[Problem] = []
    skipped: list[Path] = []
    for path in (run_dir for given in run_dirs for run_dir in _runs_in(given)):
        with collect_problems(problems):
            if path.exists() and not holds_run(path):
                skipped.append(path)
            else:
                runs.append(load_summary(path))
    if len(runs) < 2:
        for path in skipped:
            with collect_problems(problems):
                load_summary(path)
    refuse(problems)
    settings = _differences(runs)
    plans = [(root, load_if_valid(sweep_file(root), SweepPlan)) for root in run_dirs]
    planned = [root / name for root, plan in plans if plan is not None for name in plan.runs]
    not_begun = tuple(path for path in planned if not holds_run(path))
    return RunComparison(runs=tuple(runs), settings=settings, skipped=tuple(skipped), not_begun=not_begun)


def _runs_in(path: Path) -> list[Path]:
    """Returns the runs in a directory that is no run itself; otherwise, or if there are none, the path itself."""
    return ([] if holds_run(path) else sorted(filter(holds_run, path.glob("*")))) or [path]


def compare_two(comparison: RunComparison) -> RunPair:
    """Compares the two runs of a comparison in detail."""
    a, b = comparison.runs
    losses_a, losses_b = dict(a.losses), dict(b.losses)
    common_steps = sorted(losses_a.keys() & losses_b.keys())
    losses = [Loss(step=step, a=losses_a[step], b=losses_b[step]) for step in common_steps]
    return RunPair(
        a=a,
        b=b,
        plans=(_plan_hash(a.run_dir), _plan_hash(b.run_dir)),
        settings={key: (values[0], values[1]) for key, values in comparison.settings.items()},
        first=losses[0] if losses else None,
        last=losses[-1] if losses else None,
    )


def run_figures(run: RunSummary) -> Mapping[str, float | None]:
    """Returns a run's last training loss, best validation loss, mean step time in seconds, and the values of
    `FIGURES`."""
    return {
        "loss": run.losses[-1][1] if run.losses else None,
        "best_validation": run.best_validation,
        "step_s": _means(run.breakdown).get("step"),
        **{name: _figures(run.breakdown).get(name) for name in FIGURES},
    }


def runs_json(comparison: RunComparison) -> list[dict[str, object]]:
    """Returns the settings that differ and the results of every run, for `--json`."""
    return [
        {
            "run_dir": str(run.run_dir),
            **{field: getattr(run, field) for field in ("name", "status", "exit_code", "step")},
            "settings": {key: values[index] for key, values in comparison.settings.items()},
            **run_figures(run),
            "notes": list(run.notes),
        }
        for index, run in enumerate(comparison.runs)
    ]


def _plan_hash(run_dir: Path) -> str | None:
    plan_hash = (read_json(RunFiles(run_dir).plan) or {}).get("hash")
    return plan_hash if isinstance(plan_hash, str) else None


def _differences(runs: Sequence[RunSummary]) -> dict[str, tuple[object, ...]]:
    """Returns the settings that differ between the runs, also those that only another version of canzona has; an empty
    dict if a configuration could not be read."""
    flat = [{**dict(leaves(asdict(run.config))), **run.unknown} for run in runs if run.config is not None]
    if len(flat) < len(runs):
        return {}
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in _PLACES)
    values = {key: tuple(settings.get(key) for settings in flat) for key in keys}
    return {key: by_run for key, by_run in values.items() if any(value != by_run[0] for value in by_run)}


def _means(breakdown: Breakdown | None) -> dict[str, float]:
    return {} if breakdown is None else {**breakdown.means, "step": breakdown.step.mean_s}


def _figures(breakdown: Breakdown | None) -> dict[str, float | None]:
    if breakdown is None:
        return {}
    memory = breakdown.peak_memory_bytes
    has_peak = breakdown.planned is None or breakdown.shown_plan is not None
    return {
        "tokens_per_s": finite_or_none(breakdown.tokens_per_s),
        "tokens_per_s_per_gpu": finite_or_none(breakdown.tokens_per_s_per_gpu),
        "mfu": finite_or_none(breakdown.mfu) if has_peak else None,
        "load_balance": (breakdown.load_balance or {}).get("matrix_update"),
        "peak_memory_bytes": None if memory is None else memory.max,
    }


def ratio(pair: Pair) -> float | None:
    """Returns run B's value over run A's value; None if a value is missing or run A's value is negligible."""
    a, b = pair
    return b / a if a is not None and b is not None and abs(a) >= NOTHING_S else None


def _pair_json(pair: Pair) -> dict[str, float | None]:
    return {"a": pair[0], "b": pair[1], "ratio": ratio(pair)}
