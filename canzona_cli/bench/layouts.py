"""`canzona tune` from its command line to its result: the layouts to measure, their turns, how wrong predictions
were, and the recipe of the fastest. No torch.

Errors are relative to what was measured: predicted / measured - 1. MAPE is the mean of their absolute values.
Times are seconds of a step of the slowest rank; layouts are compared per sequence, for their batches may
differ.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from canzona_cli.bench.lineup import Entrant, entrant
from canzona_cli.bench.results import Measured, Predicted, TurnsResult
from canzona_cli.bench.session import Say, busy, corpus_of, create, in_folder, machine_now, sit, unready
from canzona_cli.bench.sitting import BenchFiles, Turns, last_steps, read_samples
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.profiles import profile_warnings
from canzona_cli.cluster.search import candidates, fill, search
from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import recipe_text
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit, Problem, WorkerCrashed, gathered, refuse
from canzona_cli.launch import preflight
from canzona_cli.launch.run_dir import check_free
from canzona_cli.run.files import write_json_atomic
from canzona_cli.run.phases import IN_STEP
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import clean, duration, layout_code, plural
from canzona_cli.simulate.predict import with_cores

APART = 0.10
"""Layouts whose measured times differ by more must be predicted in that order."""
LEAST_SHARE = 0.01
"""The share of a step below which a phase's error is noise."""


def layout_name(layout: Layout) -> str:
    """Names a layout for files, each of a run's differently: `tp2-pp1-cp1-dp2-mb4-none`, `tp1-pp2-vpp2-...`."""
    chunks = f"vpp{layout.vpp}-" if layout.vpp > 1 else ""
    mesh = f"tp{layout.tp}-pp{layout.pp}-{chunks}cp{layout.cp}-dp{layout.dp}"
    return f"{mesh}-mb{layout.micro_batch_size}-{layout.recompute}"


@dataclass(frozen=True, kw_only=True)
class LayoutBench:
    """One layout, measured and predicted."""

    layout: Layout
    measured: tuple[Measured, ...]
    """One entry for each round, with one value of everything it has by round."""
    predicted: Predicted
    fitted: bool
    """True where the profile was fitted to steps of these very axes."""

    @property
    def iteration_s(self) -> tuple[float, ...]:
        """The seconds of a step in each round."""
        return tuple(seconds for turn in self.measured for seconds in turn.iteration_s)

    @property
    def median_s(self) -> float:
        return Quartiles.of(self.iteration_s).median

    @property
    def per_sequence_s(self) -> float:
        return self.median_s / self.layout.global_batch_size

    @property
    def predicted_per_sequence_s(self) -> float:
        return self.predicted.iteration_s / self.layout.global_batch_size

    @property
    def error(self) -> float:
        return self.predicted.iteration_s / self.median_s - 1

    @cached_property
    def phases(self) -> dict[str, float]:
        """Measured seconds of each phase of the step: mean over ranks, median over rounds."""
        return {
            phase: statistics.median(turn.means.get(phase, 0.0) for turn in self.measured)
            for phase in IN_STEP
            if any(phase in turn.phases for turn in self.measured)
        }

    def phase_error(self, phase: str) -> float | None:
        """None where too little of the step is spent there."""
        seconds = self.phases.get(phase, 0.0)
        if seconds < LEAST_SHARE * self.median_s:
            return None
        return self.predicted.phases.get(phase, 0.0) / seconds - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of the step, or of one phase, over several layouts."""

    layouts: int
    """The number of layouts that have it."""
    mape: float
    mean: float
    """The mean of the errors with their signs: above 0 where predictions are too long."""
    worst: float
    """The largest, with its sign."""
    worst_layout: str
    share: float
    """Its share of the measured steps, mean over these layouts."""

    @classmethod
    def of(cls, predictions: Sequence[tuple[LayoutBench, float, float]]) -> "Errors":
        """Collects each layout's error and its share of the step; at least one layout."""
        worst, error, _ = max(predictions, key=lambda one: abs(one[1]))
        return cls(
            layouts=len(predictions),
            mape=statistics.fmean(abs(error) for _, error, _ in predictions),
            mean=statistics.fmean(error for _, error, _ in predictions),
            worst=error,
            worst_layout=layout_name(worst.layout),
            share=statistics.fmean(share for *_, share in predictions),
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The accuracy of predictions on layouts that no number of the profile was fitted to."""

    step: Errors
    phases: Mapping[str, Errors]
    pairs: int
    """The number of pairs of layouts whose times are more than `APART` apart."""
    in_order: int
    """The number of these pairs that were predicted in the measured order."""


@dataclass(frozen=True, kw_only=True)
class TuneResult(TurnsResult):
    """Layouts of one run that took turns."""

    gpus: int
    fitted_on: str
    """The axes whose steps the profile was fitted to; empty where it was not."""
    steps: int
    """Measured in each turn, after `warm_up_steps`."""
    warm_up_steps: int
    legal: int
    """The number of layouts that are possible and fit."""
    everything: bool
    """All of them were measured."""
    chosen: str
    """The layout that a run gets without tuning: the fastest by the simulator."""
    layouts: Mapping[str, LayoutBench]
    """The layouts by `layout_name`, the fastest by prediction first; at least one."""
    failed: Mapping[str, str]
    """The reason why a turn of a layout ended early, by its name; it is not among `layouts`."""

    @cached_property
    def best(self) -> str:
        """The fastest as measured."""
        return min(self.layouts, key=lambda name: self.layouts[name].per_sequence_s)

    def slower(self, name: str) -> float:
        """Returns by how much a layout is slower than the fastest, as measured; 0.03 is three per cent."""
        return self.layouts[name].per_sequence_s / self.layouts[self.best].per_sequence_s - 1

    @property
    def certain(self) -> bool:
        """True where the fastest is clearly apart from the simulator's choice, or is that choice."""
        if self.best == self.chosen or self.chosen not in self.layouts:
            return self.best == self.chosen
        best, chosen = (
            Quartiles.of([seconds / layout.layout.global_batch_size for seconds in layout.iteration_s])
            for layout in (self.layouts[self.best], self.layouts[self.chosen])
        )
        return not best.overlaps(chosen)

    @cached_property
    def accuracy(self) -> Accuracy | None:
        """None where all layouts were fitted on."""
        unseen = [one for one in self.layouts.values() if not one.fitted]
        if not unseen:
            return None
        phases = {phase: list(_phase_errors(unseen, phase)) for phase in IN_STEP}
        orders = [
            (slower.predicted_per_sequence_s > faster.predicted_per_sequence_s)
            for faster, slower in (sorted(two, key=_per_sequence_s) for two in itertools.combinations(unseen, 2))
            if slower.per_sequence_s / faster.per_sequence_s - 1 > APART
        ]
        return Accuracy(
            step=Errors.of([(one, one.error, 1.0) for one in unseen]),
            phases={phase: Errors.of(errors) for phase, errors in phases.items() if errors},
            pairs=len(orders),
            in_order=sum(orders),
        )


def content_of(result: TuneResult, recipe: str | None) -> dict[str, object]:
    """Returns what `--json` prints and tune.json holds: the figures, and under `result` all they come from.

    Args:
        recipe: the file that was written.
    """
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "recipe_file": recipe,
        "best": result.best,
        "chosen": result.chosen,
        "chosen_slower": result.slower(result.chosen) if result.chosen in result.layouts else None,
        "certain": result.certain,
        "legal": result.legal,
        "failed": dict(result.failed),
        "notes": list(result.notes),
        "layouts": {
            name: {
                "layout": asdict(one.layout),
                "measured_s": one.median_s,
                "predicted_s": one.predicted.iteration_s,
                "error": one.error,
                "slower": result.slower(name),
                "fitted": one.fitted,
                "phases": {
                    phase: {"measured_s": seconds, "predicted_s": one.predicted.phases.get(phase, 0.0)}
                    for phase, seconds in one.phases.items()
                },
            }
            for name, one in result.layouts.items()
        },
        "accuracy": None if result.accuracy is None else asdict(result.accuracy),
        "result": asdict(result),
    }


def _phase_errors(layouts: Sequence[LayoutBench], phase: str) -> Iterator[tuple[LayoutBench, float, float]]:
    for one in layouts:
        error = one.phase_error(phase)
        if error is not None:
            yield one, error, one.phases[phase] / one.median_s


def _per_sequence_s(one: LayoutBench) -> float:
    return one.per_sequence_s


ROOT = "tune"
"""The folder for the directories of tunings, unless run.root names another."""
WARM_UP_STEPS = 2
"""First steps of a process, which make buffers and optimizer state,
and gather nothing under their forward."""
SETTLING_STEPS = 4
"""And as many more at most while Muon's Gram form is not trusted yet: momentum of few gradients has hardly
any small singular values. Of qwen3-mini with a batch of two sequences 36 of 84 updates took twice as long in
the first three steps, ten in the fourth."""
_START_S = {"cpu": 4.0, "cuda": 40.0}
"""About what a turn takes before its first step."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Layouts that are ready to take turns: nothing has been written or started."""

    overrides: tuple[str, ...]
    config: RunConfig
    """The composed configuration: settings that a layout fills in are null where the recipe leaves them open."""
    entrants: dict[str, Entrant]
    """The entrants by name, the fastest by prediction first."""
    chosen: str
    legal: int
    everything: bool
    rounds: int
    steps: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """About how long it will take."""
        start_s = _START_S[self.config.cluster.device]
        steps = WARM_UP_STEPS + self.steps
        return self.rounds * sum(start_s + steps * one.predicted.iteration_s for one in self.entrants.values())


def prepare(
    overrides: Sequence[str],
    *,
    count: int | None,
    rounds: int,
    steps: int,
    recipes_dirs: Sequence[Path] = (),
) -> Tuning:
    """Choose the layouts and check everything that can be known before anything is written.

    Args:
        count: the number of layouts, the fastest by the simulator; None for every layout that is possible and
            fits.
        rounds, steps: turns of each layout, and measured steps of a turn.

    Raises:
        ConfigError: settings, options or data are wrong; every problem at once.
        DoesNotFit: no layout fits.
        EnvironmentProblem: this machine lacks something.
    """
    lengths = {"--candidates": count, "--rounds": rounds, "--steps": steps}
    wrong = [
        Problem(key=name, value=value, reason="is less than 1, so nothing would be measured", fix=f"{name} 3")
        for name, value in lengths.items()
        if value is not None and value < 1
    ]
    with gathered(wrong):
        composed = compose_run(overrides, recipes_dirs=recipes_dirs)
        config = in_folder(composed, ROOT)
        wrong += unready(config, "tuning", "`canzona plan --layouts` simulates larger jobs")
        resolved, layout_of_run = resolve(config)
    refuse(wrong)
    config = replace(config, cluster=replace(resolved.cluster, nodes=config.cluster.nodes))
    fitting = [candidate.layout for candidate in candidates(config) if candidate.fits]
    chosen = fitting
    if count is not None:
        # On the cores there are, which a run's own choice does not depend on.
        chosen = [tried.layout for tried in search(with_cores(config), count).best]
        chosen += [layout_of_run] if layout_of_run not in chosen else []
    short = replace(
        config,
        # The rates of the recipe's own first steps, however short a turn is.
        schedule=config.schedule.complete(config.train.steps),
        train=replace(config.train, steps=WARM_UP_STEPS + SETTLING_STEPS + steps, eval_interval=0),
    )
    entrants, notes = list[Entrant](), list[str]()
    for layout in chosen:
        try:
            entrants.append(entrant(fill(short, layout), layout, layout_name(layout)))
        except (ConfigError, DoesNotFit) as error:
            notes.append(f"without {layout_name(layout)}: {error.problems[0].reason}")
    preflight.check_machine(resolved, layout_of_run)
    check_free(config)
    entrants.sort(key=lambda one: one.predicted.iteration_s / one.layout.global_batch_size)
    return Tuning(
        overrides=tuple(overrides),
        config=config,
        entrants={one.name: one for one in entrants},
        chosen=layout_name(layout_of_run),
        legal=len(fitting),
        everything=count is None,
        rounds=rounds,
        steps=steps,
        warnings=(*composed.warnings, *profile_warnings(config.cluster)),
        notes=tuple(notes),
    )


def run(tuning: Tuning, say: Say) -> tuple[TuneResult, Path]:
    """Give every layout its turns; returns the result and the directory with all raw numbers.

    Raises:
        KeyboardInterrupt: somebody stopped it.
        CanzonaError: files cannot be written, or no layout could be measured.
    """
    config, entrants = tuning.config, tuning.entrants
    machine = machine_now(config)
    corpus = corpus_of(config, say)
    first = next(iter(entrants.values()))
    files = create(first.config, entrants.values())
    turns = Turns(
        names=tuple(entrants),
        rounds=tuning.rounds,
        steps_per_turn=WARM_UP_STEPS + tuning.steps,
        warm_up_steps=WARM_UP_STEPS,
        settling=SETTLING_STEPS,
        apart=True,
    )
    say(
        f"{config.name}: {len(entrants)} of {plural(tuning.legal, 'layout')} on {plural(config.gpus, 'rank')}, "
        f"{plural(tuning.rounds, 'round')} of {plural(tuning.steps, 'step')} after {WARM_UP_STEPS} to warm up; about "
        f"{duration(tuning.seconds)} if the predictions hold; {files.root}"
    )
    left = sit(first, files.sitting(0), turns, corpus, name="layouts", say=say)
    fitted_on = str(config.cluster.measured_on.get("fitted_on", ""))
    reasons = {name: BenchFiles.failure(left, name) for name in entrants}
    failed = {name: clean(path.read_text(encoding="utf-8")) for name, path in reasons.items() if path.exists()}
    if len(failed) == len(entrants):
        log = f"what the ranks wrote: {left.root}"
        raise WorkerCrashed(*(Problem(key=name, reason=reason, fix=log) for name, reason in failed.items()))
    layouts = {
        name: LayoutBench(
            layout=one.layout,
            measured=tuple(
                last_steps(read_samples(BenchFiles.turn(left, number, name))[name], tuning.steps)
                for number in range(tuning.rounds)
            ),
            predicted=one.predicted,
            fitted=layout_code(one.layout) in fitted_on.split(", "),
        )
        for name, one in entrants.items()
        if name not in failed
    }
    result = TuneResult(
        **TuneResult.header(config, tuning.overrides, machine),
        gpus=config.gpus,
        fitted_on=fitted_on,
        rounds=tuning.rounds,
        steps=tuning.steps,
        warm_up_steps=WARM_UP_STEPS,
        legal=tuning.legal,
        everything=tuning.everything,
        chosen=tuning.chosen,
        layouts=layouts,
        failed=failed,
        notes=(*tuning.notes, *busy(machine), *_unsettled(layouts, turns)),
    )
    write_json_atomic(files.root / "tune.json", content_of(result, None))
    return result, files.root


def _unsettled(layouts: Mapping[str, LayoutBench], turns: Turns) -> Iterator[str]:
    """A note on layouts whose updates were replaced for as long as their first steps were looked at."""
    most = turns.steps_per_turn + turns.settling
    named = [name for name, one in layouts.items() if any(len(turn.losses) == most for turn in one.measured)]
    if named:
        steps = turns.warm_up_steps + turns.settling - 1
        yield (
            f"for {steps} steps or more some updates were replaced (Muon's Gram form by its standard form), which "
            f"takes longer than a plan says: {', '.join(named)}"
        )


def tuned_recipe(config: RunConfig, result: TuneResult, *, name: str) -> str:
    """A recipe of the run in its fastest layout.

    Args:
        config: as composed.
        name: the recipe's name.
    """
    best = result.layouts[result.best]
    pinned = fill(config, best.layout)
    # Only what makes the layout: the rest is still chosen when a run starts.
    recipe = replace(pinned, name=name, schedule=config.schedule, cluster=config.cluster, run=config.run)
    others = plural(len(result.layouts) - 1, "other layout")
    measured_s = f"{best.median_s:.4g} s a step, median of {plural(result.rounds, 'round')} in turns with {others}"
    return recipe_text(recipe, origin=config.name, notes=(f"Its layout was measured by `canzona tune`: {measured_s}.",))
