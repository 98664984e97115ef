"""`canzona tune` from its command line to its result: the layouts to measure, their turns,
the recipe of the fastest.

No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.bench.launching import Say, busy, corpus_of, create, in_folder, machine_now, predicted, sit, unready
from canzona_cli.bench.layout_results import LayoutBench, TuneResult, content_of, layout_name, was_fitted
from canzona_cli.bench.lineup import PreparedStrategy, prepare_strategy
from canzona_cli.bench.results import Predicted
from canzona_cli.bench.sitting import BenchFiles, Turns, last_steps, read_samples
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.profiles import profile_warnings
from canzona_cli.cluster.search import candidates, fill, search
from canzona_cli.config.compose import compose_run
from canzona_cli.config.execution import strategy_of
from canzona_cli.config.recipes import recipe_text
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit, Problem, WorkerCrashed, gathered, refuse
from canzona_cli.launch import preflight
from canzona_cli.launch.run_dir import check_free
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.words import clean, duration, json_text, plural
from canzona_cli.simulate.predict import with_cores

WORKER_MODULE = "canzona_cli.bench.layout_worker"
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
class Entrant:
    """A layout that is to be measured."""

    layout: Layout
    prepared: PreparedStrategy
    predicted: Predicted


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
        wrong += [one for one in unready(resolved, "tuning", "`canzona plan --layouts` simulates") if one not in wrong]
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
    entrants, notes = {}, []
    for layout in chosen:
        try:
            one = prepare_strategy(fill(short, layout), layout, strategy_of(config))
            entrants[layout_name(layout)] = Entrant(layout=layout, prepared=one, predicted=predicted(one, layout))
        except (ConfigError, DoesNotFit) as error:
            notes.append(f"without {layout_name(layout)}: {error.problems[0].reason}")
    preflight.check_machine(resolved, layout_of_run)
    check_free(config)
    by_time = sorted(
        entrants, key=lambda name: entrants[name].predicted.iteration_s / entrants[name].layout.global_batch_size
    )
    return Tuning(
        overrides=tuple(overrides),
        config=config,
        entrants={name: entrants[name] for name in by_time},
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
    prepared = {name: one.prepared for name, one in entrants.items()}
    first = next(iter(entrants.values()))
    files = create(first.prepared.config, prepared)
    turns = Turns(
        names=tuple(entrants),
        rounds=tuning.rounds,
        steps_per_turn=WARM_UP_STEPS + tuning.steps,
        warm_up_steps=WARM_UP_STEPS,
        settling=SETTLING_STEPS,
    )
    say(
        f"{config.name}: {len(entrants)} of {plural(tuning.legal, 'layout')} on {plural(config.gpus, 'rank')}, "
        f"{plural(tuning.rounds, 'round')} of {plural(tuning.steps, 'step')} after {WARM_UP_STEPS} to warm up; about "
        f"{duration(tuning.seconds)} if the predictions hold; {files.root}"
    )
    left = sit(
        first.prepared.config,
        first.layout,
        files.sitting(0),
        turns,
        corpus,
        module=WORKER_MODULE,
        name="layouts",
        say=say,
    )
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
            fitted=was_fitted(one.layout, fitted_on),
        )
        for name, one in entrants.items()
        if name not in failed
    }
    result = TuneResult(
        recipe=config.name,
        overrides=tuning.overrides,
        optimizer=config.optimizer.name,
        gpus=config.gpus,
        device=config.cluster.device,
        profile=config.cluster.name,
        calibrated=config.cluster.calibrated,
        fitted_on=fitted_on,
        machine=machine,
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
    write_text_atomic(files.root / "tune.json", json_text(content_of(result, None)) + "\n")
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
