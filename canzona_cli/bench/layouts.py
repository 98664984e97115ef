"""`canzona tune`: chooses layouts, measures them, compares the times with the predictions, and writes a
recipe with the fastest layout. Does not import torch.

An error is predicted / measured - 1. MAPE is the mean of the absolute errors. Times are seconds of a step on
the slowest rank. Layouts are compared by time per sequence, because their batch sizes may differ.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from canzona_cli.bench.lineup import Entrant, entrant, entrant_name
from canzona_cli.bench.results import Measured, Predicted, TurnsResult
from canzona_cli.bench.session import (
    Say,
    bench_problems,
    busy_notes,
    corpus_of,
    create,
    machine_now,
    run_group,
    with_folder,
)
from canzona_cli.bench.sitting import BenchFiles, Turns, last_steps, read_samples
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.possible import fill
from canzona_cli.cluster.profiles import profile_warnings
from canzona_cli.cluster.search import candidates, search
from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import recipe_text
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, DoesNotFit, Problem, WorkerCrashed, collect_problems, refuse
from canzona_cli.launch import preflight
from canzona_cli.launch.run_dir import check_free
from canzona_cli.run.files import write_json_atomic
from canzona_cli.run.phases import IN_STEP
from canzona_cli.run.statistics import SIGNIFICANCE, Quartiles, Speedup
from canzona_cli.run.words import clean, duration, layout_code, plural
from canzona_cli.simulate.predict import with_cores

ORDER_MARGIN = 0.10
"""The relative difference between two measured times above which predictions should have the same order."""
LEAST_SHARE = 0.01
"""The share of a step below which a phase's error is only noise."""


@dataclass(frozen=True, kw_only=True)
class LayoutBench:
    """A layout with its measurements and its prediction."""

    layout: Layout
    measured: tuple[Measured, ...]
    """The measurements, one entry per round. Fields by round, such as `iteration_s`, have one element."""
    predicted: Predicted
    fitted: bool
    """True if the cluster profile was fitted to measured steps with the same parallel sizes."""

    @property
    def iteration_s(self) -> tuple[float, ...]:
        """The seconds of a step, by round."""
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
        """The measured seconds of each phase: the mean over ranks, then the median over rounds."""
        means = [turn.means for turn in self.measured]
        present = [phase for phase in IN_STEP if any(phase in turn for turn in means)]
        return {phase: statistics.median(turn.get(phase, 0.0) for turn in means) for phase in present}

    def phase_error(self, phase: str) -> float | None:
        """Returns the prediction error of a phase; None if it takes less than `LEAST_SHARE` of the step."""
        seconds = self.phases.get(phase, 0.0)
        if seconds < LEAST_SHARE * self.median_s:
            return None
        return self.predicted.phases.get(phase, 0.0) / seconds - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The prediction errors of the step, or of one phase, over several layouts."""

    layouts: int
    """The number of layouts; for a phase, only those in which it takes at least `LEAST_SHARE` of the step."""
    mape: float
    mean: float
    """The mean of the signed errors; above 0 if the predicted times are too long."""
    worst: float
    """The error with the largest absolute value, with its sign."""
    worst_layout: str
    share: float
    """The phase's share of the measured step, averaged over these layouts."""

    @classmethod
    def of(cls, predictions: Sequence[tuple[LayoutBench, float, float]]) -> "Errors":
        """Summarises one or more triples of layout, error and share of the step."""
        worst, error, _ = max(predictions, key=lambda prediction: abs(prediction[1]))
        return cls(
            layouts=len(predictions),
            mape=statistics.fmean(abs(error) for _, error, _ in predictions),
            mean=statistics.fmean(error for _, error, _ in predictions),
            worst=error,
            worst_layout=entrant_name(worst.layout),
            share=statistics.fmean(share for *_, share in predictions),
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The accuracy of predictions for layouts to which the cluster profile was not fitted."""

    step: Errors
    phases: Mapping[str, Errors]
    pairs: int
    """The number of pairs of layouts whose measured times differ by more than `ORDER_MARGIN`."""
    in_order: int
    """The number of these pairs that were predicted in the measured order."""


@dataclass(frozen=True, kw_only=True)
class TuneResult(TurnsResult):
    """The result of a tuning: layouts of one run, measured in interleaved rounds."""

    gpus: int
    fitted_on: str
    """The layouts to whose steps the profile was fitted; empty if it was not fitted."""
    steps: int
    """The number of measured steps in each turn; warm-up steps are not included."""
    warm_up_steps: int
    legal: int
    """The number of layouts that are possible and fit in memory."""
    everything: bool
    """True if the user requested all possible layouts."""
    chosen: str
    """The layout that a run gets without tuning, because the simulator predicts that it is the fastest."""
    layouts: Mapping[str, LayoutBench]
    """The measured layouts by `entrant_name`, in the order of predicted time per sequence; at least one."""
    failed: Mapping[str, str]
    """The reason why each failed layout failed, by name. Failed layouts are not in `layouts`."""

    @cached_property
    def best(self) -> str:
        """The name of the layout with the shortest measured time per sequence."""
        return min(self.layouts, key=lambda name: self.layouts[name].per_sequence_s)

    def slower(self, name: str) -> float:
        """Returns how much longer a layout takes per sequence than the fastest layout; 0.03 is 3%."""
        return self.layouts[name].per_sequence_s / self.layouts[self.best].per_sequence_s - 1

    @property
    def certain(self) -> bool | None:
        """True if the simulator's choice is significantly slower than the fastest layout. None if that was not
        judged: there are too few rounds, or the choice is the fastest or was not measured.

        The fastest of several equal layouts looks faster than any other, so the probability of the paired test
        is multiplied by the number of the other layouts (Bonferroni).
        """
        if self.best == self.chosen or self.chosen not in self.layouts:
            return None
        best, chosen = (
            [seconds / layout.layout.global_batch_size for seconds in layout.iteration_s]
            for layout in (self.layouts[self.best], self.layouts[self.chosen])
        )
        p = Speedup.of(chosen, best).p
        return None if p is None else p * (len(self.layouts) - 1) < SIGNIFICANCE

    @cached_property
    def accuracy(self) -> Accuracy | None:
        """The accuracy for layouts to which the profile was not fitted; None if there are none."""
        unseen = [layout for layout in self.layouts.values() if not layout.fitted]
        if not unseen:
            return None
        phases = {phase: list(_phase_errors(unseen, phase)) for phase in IN_STEP}
        pairs = [sorted(pair, key=lambda layout: layout.per_sequence_s) for pair in itertools.combinations(unseen, 2)]
        in_order = [
            slower.predicted_per_sequence_s > faster.predicted_per_sequence_s
            for faster, slower in pairs
            if slower.per_sequence_s / faster.per_sequence_s - 1 > ORDER_MARGIN
        ]
        return Accuracy(
            step=Errors.of([(layout, layout.error, 1.0) for layout in unseen]),
            phases={phase: Errors.of(errors) for phase, errors in phases.items() if errors},
            pairs=len(in_order),
            in_order=sum(in_order),
        )


def content_of(result: TuneResult, recipe: str | None) -> dict[str, object]:
    """Returns the output of `--json`, which is also written to tune.json. The key `result` has the raw data
    behind all figures.

    Args:
        recipe: the file of the tuned recipe; None if none was written.
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
                "layout": asdict(bench.layout),
                "measured_s": bench.median_s,
                "predicted_s": bench.predicted.iteration_s,
                "error": bench.error,
                "slower": result.slower(name),
                "fitted": bench.fitted,
                "phases": {
                    phase: {"measured_s": seconds, "predicted_s": bench.predicted.phases.get(phase, 0.0)}
                    for phase, seconds in bench.phases.items()
                },
            }
            for name, bench in result.layouts.items()
        },
        "accuracy": None if result.accuracy is None else asdict(result.accuracy),
        "result": asdict(result),
    }


def _phase_errors(layouts: Sequence[LayoutBench], phase: str) -> Iterator[tuple[LayoutBench, float, float]]:
    """Yields (layout, error, share of the step) for each layout in which the phase is long enough."""
    for layout in layouts:
        error = layout.phase_error(phase)
        if error is not None:
            yield layout, error, layout.phases[phase] / layout.median_s


ROOT = "tune"
"""The default folder for tune directories; `run.root` overrides it."""
WARM_UP_STEPS = 2
"""The number of steps at the start of a process that are not measured: these steps allocate buffers and
optimizer state, and no parameter gathering overlaps with the first forward pass."""
SETTLING_STEPS = 4
"""The maximum number of additional warm-up steps. A turn adds them while updates in Muon's Gram form are
redone in standard form. After only a few gradients the momentum is close to low rank, which makes the Gram
form unreliable: with qwen3-mini and a batch of two sequences, 36 of 84 updates took twice as long in the
first three steps, and ten in the fourth."""
_START_S = {"cpu": 4.0, "cuda": 40.0}
"""The approximate seconds from the start of a turn to its first step, by device."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning that is ready to run. No file has been written, and no process has been started."""

    overrides: tuple[str, ...]
    config: RunConfig
    """The composed configuration, in which layout settings that the user left open are still null."""
    entrants: dict[str, Entrant]
    """The layouts to measure, by name, in the order of predicted time per sequence."""
    chosen: str
    legal: int
    everything: bool
    rounds: int
    steps: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The estimated duration of the tuning in seconds."""
        start_s = _START_S[self.config.cluster.device]
        steps = WARM_UP_STEPS + self.steps
        steps_s = (steps * layout.predicted.iteration_s for layout in self.entrants.values())
        return self.rounds * sum(start_s + seconds for seconds in steps_s)


def prepare(
    overrides: Sequence[str], *, count: int | None, rounds: int, steps: int, recipes_dirs: Sequence[Path] = ()
) -> Tuning:
    """Chooses the layouts and checks everything that can be checked before anything is written.

    Args:
        count: the number of layouts to measure. Those with the shortest predicted times are chosen, and the
            layout of an untuned run is added if it is not one of them. None for every possible layout that
            fits.
        rounds: the number of turns of each layout.
        steps: the number of measured steps in a turn.

    Raises:
        ConfigError: settings, options or data are wrong, or every layout is refused; problems with the options
            are reported together with the others.
        DoesNotFit: no layout fits in memory.
        EnvironmentProblem: this machine does not have everything that the run needs.
    """
    lengths = {"--candidates": count, "--rounds": rounds, "--steps": steps}
    problems = [
        Problem(key=name, value=value, reason="is less than 1, so nothing would be measured", fix=f"{name} 3")
        for name, value in lengths.items()
        if value is not None and value < 1
    ]
    with collect_problems(problems):
        composed = compose_run(overrides, recipes_dirs=recipes_dirs)
        config = with_folder(composed, ROOT)
        problems += bench_problems(config, "tuning", "`canzona plan --layouts` simulates larger jobs")
        resolved, layout_of_run = resolve(config)
    refuse(problems)
    config = replace(config, cluster=replace(resolved.cluster, nodes=config.cluster.nodes))
    fitting = [candidate.layout for candidate in candidates(config) if candidate.fits]
    layouts = fitting
    if count is not None:
        # Unlike the search of `canzona train`, this search takes the number of this machine's cores into
        # account.
        layouts = [result.layout for result in search(with_cores(config), count).best]
        if layout_of_run not in layouts:
            layouts.append(layout_of_run)
    short_run = replace(
        config,
        # Turns run the first steps of the recipe's full schedule, so learning rates do not depend on their
        # length.
        schedule=config.schedule.complete(config.train.steps),
        train=replace(config.train, steps=WARM_UP_STEPS + SETTLING_STEPS + steps, eval_interval=0),
    )
    entrants, notes, refusals = list[Entrant](), list[str](), list[CanzonaError]()
    for layout in layouts:
        try:
            entrants.append(entrant(fill(short_run, layout), layout, entrant_name(layout)))
        except (ConfigError, DoesNotFit) as error:
            refusals.append(error)
            notes.append(f"without {entrant_name(layout)}: {error.problems[0].reason}")
    if not entrants:
        raise type(refusals[0])(*dict.fromkeys(problem for error in refusals for problem in error.problems))
    preflight.check_machine(resolved, layout_of_run)
    check_free(config)
    entrants.sort(key=lambda entry: entry.predicted.iteration_s / entry.layout.global_batch_size)
    return Tuning(
        overrides=tuple(overrides),
        config=config,
        entrants={entry.name: entry for entry in entrants},
        chosen=entrant_name(layout_of_run),
        legal=len(fitting),
        everything=count is None,
        rounds=rounds,
        steps=steps,
        warnings=(*composed.warnings, *profile_warnings(config.cluster)),
        notes=tuple(notes),
    )


def run(tuning: Tuning, say: Say) -> tuple[TuneResult, Path]:
    """Measures every layout; returns the result and the directory with all raw numbers.

    Raises:
        KeyboardInterrupt: the user stopped the tuning.
        CanzonaError: files cannot be written, or every layout failed.
    """
    config, entrants = tuning.config, tuning.entrants
    machine = machine_now(config)
    corpus = corpus_of(config, say)
    any_entrant = next(iter(entrants.values()))
    files = create(any_entrant.config, entrants.values())
    turns = Turns(
        names=tuple(entrants),
        rounds=tuning.rounds,
        steps_per_turn=WARM_UP_STEPS + tuning.steps,
        warm_up_steps=WARM_UP_STEPS,
        settling=SETTLING_STEPS,
        separate_processes=True,
    )
    say(
        f"{config.name}: {len(entrants)} of {plural(tuning.legal, 'layout')} on {plural(config.gpus, 'rank')}, "
        f"{plural(tuning.rounds, 'round')} of {plural(tuning.steps, 'step')} after {WARM_UP_STEPS} warm-up steps; "
        f"predicted to take about {duration(tuning.seconds)}; writes to {files.root}"
    )
    group_files = run_group(any_entrant, files.sitting(0), turns, corpus, name="layouts", say=say)
    fitted_on = str(config.cluster.measured_on.get("fitted_on", ""))
    reasons = {name: BenchFiles.failure(group_files, name) for name in entrants}
    failed = {name: clean(path.read_text(encoding="utf-8")) for name, path in reasons.items() if path.exists()}
    if len(failed) == len(entrants):
        log = f"see the ranks' logs in {group_files.root}"
        raise WorkerCrashed(*(Problem(key=name, reason=reason, fix=log) for name, reason in failed.items()))
    layouts = {
        name: LayoutBench(
            layout=entry.layout,
            measured=tuple(
                last_steps(read_samples(BenchFiles.turn(group_files, round_, name))[name], tuning.steps)
                for round_ in range(tuning.rounds)
            ),
            predicted=entry.predicted,
            fitted=layout_code(entry.layout) in fitted_on.split(", "),
        )
        for name, entry in entrants.items()
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
        notes=(*tuning.notes, *busy_notes(machine), *_unsettled_notes(layouts, turns)),
    )
    write_json_atomic(files.root / "tune.json", content_of(result, None))
    return result, files.root


def _unsettled_notes(layouts: Mapping[str, LayoutBench], turns: Turns) -> Iterator[str]:
    """Yields a note that names the layouts, if any, that took all extra warm-up steps to settle."""
    limit = turns.steps_per_turn + turns.settling
    names = [name for name, layout in layouts.items() if any(len(turn.losses) == limit for turn in layout.measured)]
    if names:
        steps = turns.warm_up_steps + turns.settling - 1
        yield (
            f"some of Muon's Gram-form updates were redone in standard form for {steps} steps or more, so the measured "
            f"times are longer than planned: {', '.join(names)}"
        )


def tuned_recipe(config: RunConfig, result: TuneResult, *, name: str) -> str:
    """Returns the text of a recipe for the run with its fastest measured layout.

    Args:
        config: the composed configuration, before a layout was filled in.
    """
    best = result.layouts[result.best]
    pinned = fill(config, best.layout)
    # Only the layout is pinned; schedule, cluster and run settings are still resolved when the run starts.
    recipe = replace(pinned, name=name, schedule=config.schedule, cluster=config.cluster, run=config.run)
    others = plural(len(result.layouts) - 1, "other layout")
    measured_s = f"{best.median_s:.4g} s per step, median of {plural(result.rounds, 'round')}, compared with {others}"
    return recipe_text(recipe, origin=config.name, notes=(f"Its layout was measured by `canzona tune`: {measured_s}.",))
