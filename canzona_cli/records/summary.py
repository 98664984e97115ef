"""Reads a run directory: how the run ended, its errors, losses, breakdown and goodput."""

import math
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Final

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CanzonaError, ConfigError, Problem
from canzona_cli.core.reading import read_plain
from canzona_cli.core.setup import Layout
from canzona_cli.records.breakdown import Breakdown, load_breakdown, load_prediction
from canzona_cli.records.codec import JsonLines, load_if_valid, read_lines
from canzona_cli.records.corpus import PreparedCorpus, Supply, supply
from canzona_cli.records.files import RunFiles, sweep_root
from canzona_cli.records.records import (
    FIRST_STAGE,
    Event,
    RankError,
    RankResult,
    RunResult,
    StageEvent,
    StepMetrics,
    ValidationLoss,
    describe,
    event_of,
    read_layout,
)
from canzona_cli.records.words import plural

Record = StepMetrics | ValidationLoss | Event
_LOCKS: Final = Path("/proc/locks")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The time from the first record of a run's first launch to the last record of its newest launch, split
    by use, in seconds."""

    wall_s: float
    kept_s: float
    """The time in steps whose result the run still has."""
    redone_s: float
    """The time in steps that were lost because a later launch resumed from an earlier checkpoint."""
    between_s: float
    """The time between launches, while the run waited in a queue or for a restart."""

    @property
    def share(self) -> float:
        """The share of the time that went into kept steps, 0 to 1."""
        return self.kept_s / self.wall_s

    @property
    def other_s(self) -> float:
        """The remaining time: starting, loading, validating, waiting for saves."""
        return max(0.0, self.wall_s - self.kept_s - self.redone_s - self.between_s)

    def as_json(self) -> dict[str, float]:
        return {"share": self.share, **vars(self), "other_s": self.other_s}


def goodput_of(files: RunFiles, events: Sequence[Event]) -> Goodput | None:
    """Computes the goodput from the records of all launches; None before a step is logged.

    Args:
        events: the events of every launch in the directory.
    """
    launches = [files, *_earlier_launches(files)]
    lasting, *lost = [read_lines(folder.metrics, StepMetrics)[0] for folder in launches]
    records: list[Record] = [*lasting, *chain(*lost), *events]
    for folder in launches:
        records += read_lines(folder.validation, ValidationLoss)[0]
    moments = [record.time for record in records if record.time is not None]
    launched_s = time_in_launches(records)
    wall_s = max(moments, default=0.0) - min(moments, default=0.0)
    if not lasting or launched_s is None or wall_s <= 0:
        return None
    kept_s, redone_s = _step_seconds(lasting), math.fsum(map(_step_seconds, lost))
    # Times overlap if the clock was set back.
    wall_s = max(wall_s, kept_s + redone_s)
    return Goodput(wall_s=wall_s, kept_s=kept_s, redone_s=redone_s, between_s=max(0.0, wall_s - launched_s))


def time_in_launches(records: Sequence[Record]) -> float | None:
    """Adds up the seconds from the first to the last record of each launch; None if no record has a time.

    Args:
        records: the records of all launches, in any order.
    """
    moments = sorted(
        (
            record.time,
            isinstance(record, StageEvent) and record.stage == FIRST_STAGE,
        )
        for record in records
        if record.time is not None
    )
    if not moments:
        return None
    # A gap that ends with a launch's first event is time between launches and is not added, unless workers are
    # already starting: both the launcher and its first rank announce the start.
    gaps_s = []
    for (time, is_start), (next_time, next_is_start) in pairwise(moments):
        if is_start or not next_is_start:
            gaps_s.append(next_time - time)
    return math.fsum(gaps_s)


def earlier_events(files: RunFiles) -> list[Event]:
    """Reads the events that later launches have moved away, oldest launch first."""
    return [event for folder in _earlier_launches(files) for event in events_of(folder)]


def events_of(files: RunFiles) -> list[Event]:
    """Reads events.jsonl: the events of the newest launch, and earlier ones up to the checkpoint it resumed
    from."""
    return [event for line in JsonLines(files.events).read() if (event := event_of(line)) is not None]


def _earlier_launches(files: RunFiles) -> list[RunFiles]:
    """Lists the folders of the earlier launches, oldest first."""
    try:
        folders = [path for path in files.attempts.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    return [RunFiles(path) for path in sorted(folders, key=lambda path: int(path.name))]


def _step_seconds(lines: Sequence[StepMetrics]) -> float:
    """Adds up the seconds of the steps that these lines cover. The step time in a line counts for all steps
    since the previous line."""
    gaps = [line.step - previous.step for previous, line in pairwise(lines)]
    steps = [min(gaps, default=1), *gaps][: len(lines)]
    return math.fsum(count * (line.step_s or 0.0) for count, line in zip(steps, lines, strict=True))


VERSION = 3


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything that `canzona report` shows. `as_json` returns the stable form for programs."""

    run_dir: Path
    status: str
    """The status of the run, as in result.json; without it `running`, `stopped` (killed before it could write
    result.json) or, where the launcher is on another machine, `running or stopped`."""
    exit_code: int | None
    message: str
    losses: tuple[tuple[int, float], ...]
    """The (step, loss) pairs of the logged steps whose loss is finite."""
    metrics: tuple[StepMetrics, ...] = ()
    """The metrics of every logged step."""
    events: tuple[Event, ...] = ()
    """The events of all launches."""
    step: int
    """The last known step."""
    validations: tuple[tuple[int, float | None], ...]
    """The (step, loss) of every validation; the loss is None if it was not finite."""
    set_validations: Mapping[str, tuple[tuple[int, float | None], ...]]
    """The validations of each set of a blend, by its name."""
    skipped: int
    """The number of steps that were skipped because their gradients were not finite."""
    fallbacks: int
    """The number of matrix updates that were not finite or needed their optimizer's fallback."""
    elapsed_s: float | None
    """The seconds from the first to the last record of each launch, added up; the time between launches is
    excluded."""
    errors: tuple[RankResult, ...]
    """The results of the ranks that failed, the first error first."""
    breakdown: Breakdown | None
    config: RunConfig | None
    """The configuration; None if it cannot be read."""
    unknown: Mapping[str, object] = field(default_factory=dict)
    """The settings of the run that this version of canzona does not have."""
    layout: Layout | None
    go_on: str | None = None
    """The command that resumes the run."""
    restarts: int = 0
    """The number of restarts in the last launch."""
    goodput: Goodput | None = None
    """The goodput over all launches in the directory; None before the first step."""
    supply: Supply | None = None
    """The number of tokens that the run needs, and the number that is available; None if unknown."""
    warnings: tuple[str, ...] = field(default=())
    """The warnings in events.jsonl: slow ranks, loss spikes, failed saves."""
    notes: tuple[str, ...] = field(default=())
    """The notes on files that are missing or damaged."""

    @property
    def name(self) -> str | None:
        return None if self.config is None else self.config.name

    @property
    def steps_planned(self) -> int | None:
        return None if self.config is None else self.config.train.steps

    @property
    def best_validation(self) -> float | None:
        """The lowest finite validation loss; None if there is none."""
        return min((loss for _, loss in self.validations if loss is not None), default=None)

    def tokens_at(self, step: float) -> float | None:
        """Returns the number of tokens trained on up to a step, which may lie between two logged ones; None if it is
        beyond the last one."""
        return _value_at(step, [(line.step, line.tokens) for line in self.metrics if line.tokens is not None])

    def seconds_at(self, step: float) -> float | None:
        """Returns the seconds of the steps up to a step, which may lie between two logged ones; None if it is beyond
        the last one."""
        timed = [(line.step, line.step_s) for line in self.metrics if line.step_s is not None]
        seconds = accumulate((end - begin) * each for (begin, _), (end, each) in pairwise([(0, 0.0), *timed]))
        return _value_at(step, [*zip((end for end, _ in timed), seconds, strict=True)])

    def as_json(self) -> dict[str, object]:
        """Returns the stable output of `canzona report --json`. New keys do not change `version`; any other
        change raises it."""
        sets = {} if self.supply is None else self.supply.sets
        ending = ("name", "status", "exit_code", "message")
        amounts = ("step", "steps_planned", "elapsed_s", "skipped", "fallbacks", "restarts", "go_on")
        return {
            "version": VERSION,
            "run_dir": str(self.run_dir),
            **{field: getattr(self, field) for field in (*ending, *amounts)},
            "goodput": None if self.goodput is None else self.goodput.as_json(),
            "epochs": None if self.supply is None else self.supply.epochs,
            "epochs_by_set": {name: part.epochs for name, part in sets.items()},
            "loss": _first_and_last(self.losses),
            "validation": _first_and_last(self.validations),
            "validation_by_set": {name: _first_and_last(losses) for name, losses in self.set_validations.items()},
            "errors": [_error_json(result) for result in self.errors],
            "breakdown": None if self.breakdown is None else self.breakdown.as_json(),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def _value_at(step: float, totals: Sequence[tuple[int, float]]) -> float | None:
    """Returns the total up to a step, interpolated between the totals of logged steps; None beyond the last one."""
    for (before, had), (after, has) in pairwise([(0, 0.0), *totals]):
        if step <= after:
            return had + (has - had) * (step - before) / (after - before)
    return None


_NO_RESULT: Final = {
    "running": "the run is still running",
    "stopped": "the run was killed before writing one",
    "running or stopped": "the run is still running, or was killed before writing one",
}
"""The status of a run without result.json, and what it means."""


def _without_result(files: RunFiles) -> str:
    """Returns the status of a run without result.json, by the kernel's list of locked files: the launcher locks
    run.lock, which names its machine, until it ends."""
    try:
        inode, claim = files.claim.stat().st_ino, read_plain(files.claim).decode()
        locks = [line.split() for line in read_plain(_LOCKS).decode().splitlines()]
    except (ValueError, OSError):
        return "running or stopped"
    if any(lock[1] == "FLOCK" and lock[5].endswith(f":{inode}") for lock in locks if len(lock) > 5):
        return "running"
    return "stopped" if claim.startswith(f"{socket.gethostname()} ") else "running or stopped"


def holds_run(run_dir: Path) -> bool:
    """Returns True if a path is a directory with files of a run."""
    files = RunFiles(run_dir)
    run_files = (files.config, files.result, files.metrics, files.events, files.breakdown, files.claim)
    return run_dir.is_dir() and any(path.exists() for path in run_files)


def load_summary(run_dir: Path) -> RunSummary:
    """Reads everything that a run has left so far.

    Raises:
        ConfigError: there is no such directory, or it has no files of a run; the problem's key is `RUN_DIR`.
    """
    files = RunFiles(run_dir)
    if not holds_run(run_dir):
        reason = "is not the directory of a run" if run_dir.is_dir() else "there is no such directory"
        raise ConfigError(Problem(key="RUN_DIR", value=run_dir, reason=reason, fix=suggest_run_dir(run_dir)))
    notes: list[str] = []
    config, unknown = _config(files, notes)
    metrics = _read_noting_damage(files.metrics, StepMetrics, notes)
    validation = _read_noting_damage(files.validation, ValidationLoss, notes)
    result = load_if_valid(files.result, RunResult)
    status = _without_result(files) if result is None else result.status
    if result is None:
        note = f"there is no result.json: {_NO_RESULT[status]}"
        if status != "running" and any(files.checkpoints.glob("step-*")):
            note += f"; if it was killed: canzona resume {shlex.quote(str(run_dir))}"
        notes.append(note)
    breakdown = _load_noting_damage(partial(load_breakdown, run_dir), "breakdown of the step", notes)
    _load_noting_damage(partial(load_prediction, run_dir), "prediction", notes)
    layout = _load_noting_damage(partial(read_layout, files.layout), "layout", notes)
    events = events_of(files)
    all_events = [*earlier_events(files), *events]
    return RunSummary(
        run_dir=run_dir,
        status=status,
        exit_code=None if result is None else result.exit_code,
        message="" if result is None else result.message,
        metrics=tuple(metrics),
        events=tuple(all_events),
        losses=tuple((line.step, line.loss) for line in metrics if line.loss is not None),
        step=max([0 if result is None else result.step, *(line.step for line in metrics)]),
        validations=tuple((line.step, line.loss) for line in validation),
        set_validations={
            name: tuple((line.step, line.sets[name]) for line in validation if name in line.sets)
            for name in dict.fromkeys(name for line in validation for name in line.sets)
        },
        skipped=max((line.skipped for line in metrics), default=0),
        fallbacks=max((line.fallbacks for line in metrics), default=0),
        elapsed_s=time_in_launches((*metrics, *validation, *events)),
        errors=_failed_ranks(files),
        breakdown=breakdown,
        config=config,
        unknown=unknown,
        layout=layout,
        go_on=None if result is None else result.go_on,
        restarts=0 if result is None else result.restarts,
        goodput=goodput_of(files, all_events),
        supply=_supply(files, config, layout),
        warnings=tuple(shown.text for event in events if (shown := describe(event)) is not None and shown.warning),
        notes=tuple(notes),
    )


def _supply(files: RunFiles, config: RunConfig | None, layout: Layout | None) -> Supply | None:
    corpus = load_if_valid(files.corpus, PreparedCorpus)
    return None if config is None or corpus is None or layout is None else supply(config, layout, corpus)


def _config(files: RunFiles, notes: list[str]) -> tuple[RunConfig | None, Mapping[str, object]]:
    """Returns the configuration, None if it cannot be read, and the settings that this version does not have."""
    from canzona_cli.config.compose import OTHER_VERSION, load_known

    try:
        config, unknown = load_known(files.config)
    except (CanzonaError, OSError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return None, {}
    if unknown:
        notes.append(f"config.yaml {OTHER_VERSION} {', '.join(unknown)}; settings that it lacks have their defaults")
    return config, unknown


def _load_noting_damage[T](load: Callable[[], T], what: str, notes: list[str]) -> T | None:
    """Loads a record. Returns None if there is no such file; if it cannot be used, adds a note and returns
    None."""
    try:
        return load()
    except FileNotFoundError:
        return None
    except ConfigError as error:
        notes += [f"no {what}: {problem.reason}" for problem in error.problems]
        return None


def _read_noting_damage[T](path: Path, kind: type[T], notes: list[str]) -> list[T]:
    """Reads the records of a .jsonl file. Damaged lines, such as the last line of a killed run, are skipped
    and noted."""
    records, damaged = read_lines(path, kind)
    if damaged:
        notes.append(f"{path.name}: {plural(damaged, 'damaged line')} skipped")
    return records


def _failed_ranks(files: RunFiles) -> tuple[RankResult, ...]:
    """Returns the results of ranks that failed, in the order of their errors: the first most likely caused
    the others."""
    results = [load_if_valid(path, RankResult) for path in sorted(files.ranks.glob("rank-*.json"))]
    failed = [result for result in results if result is not None and result.error is not None]
    return tuple(sorted(failed, key=lambda result: (result.time or math.inf, result.rank)))


def newest_run(root: Path) -> Path | None:
    """Returns the newest run directory below `root`, including runs of sweeps; None if there is none."""
    try:
        below = [*root.iterdir(), *root.glob(f"{sweep_root('', '*')}/*")]
        runs = [path for path in below if RunFiles(path).config.exists()]
    except OSError:
        return None
    return max(runs, key=lambda path: RunFiles(path).config.stat().st_mtime, default=None)


def _error_json(result: RankResult) -> dict[str, object]:
    error = result.error or RankError()
    fields = {field: getattr(error, field) for field in ("type", "message", "traceback")}
    return {"rank": result.rank, "time": result.time, **fields}


def _first_and_last(losses: Sequence[tuple[int, float | None]]) -> dict[str, object] | None:
    """Returns the first and the last loss with their steps; None if there are none."""
    if not losses:
        return None
    (first_step, first), (last_step, last) = losses[0], losses[-1]
    return {"first": {"step": first_step, "loss": first}, "last": {"step": last_step, "loss": last}}


def suggest_run_dir(run_dir: Path) -> str:
    """Returns a fix that names the newest run in `run_dir`, its parent or `runs/`, in this order. If there is
    none, the fix says where to find the run directory."""
    if (newest := newest_run(run_dir)) is not None:
        return f"it has runs, of which {newest} is the newest; canzona report --compare {run_dir} compares them"
    for root in (run_dir.parent, Path("runs")):
        if (newest := newest_run(root)) is not None:
            return f"the newest run in {root} is {newest}"
    return "give the run directory that `canzona train` printed"
