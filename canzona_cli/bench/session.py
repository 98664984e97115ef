"""One bench from its command line to its result: check and resolve, launch each sitting, put the result together.

This is the launcher's side, so it imports no torch.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.bench.lineup import LineUp, PreparedStrategy, Sitting, available_bytes, into_sittings, line_up
from canzona_cli.bench.results import BenchResult, Measured, Predicted, StrategyBench
from canzona_cli.bench.results_file import save
from canzona_cli.bench.sitting import BenchFiles, Turns, measured, read_samples
from canzona_cli.cluster.machine import machine_facts, profile_warnings
from canzona_cli.config.compose import Composed, compose_run, dump_resolved
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.errors import (
    CanzonaError,
    ConfigError,
    Problem,
    unwritable,
)
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.resume import next_free
from canzona_cli.launch.run_dir import RunDirectory, check_free
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.launch.view import TrainView
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.machine import cores
from canzona_cli.run.records import Note, StageEvent, StepMetrics
from canzona_cli.run.words import plural
from canzona_cli.simulate.predict import predict

WORKER_MODULE = "canzona_cli.bench.worker"
ROOT = "bench"
"""Where bench directories go unless run.root says otherwise."""
WARM_UP_ROUNDS = 1
_BUSY = 0.5
"""Load average over cores above which other work disturbs the measurement."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Session:
    """A bench that is ready to run: nothing has been written or started."""

    overrides: tuple[str, ...]
    line_up: LineUp
    rounds: int
    steps_per_turn: int
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The reference's."""
        return self.line_up.reference.config


def prepare(
    overrides: Sequence[str],
    *,
    strategies: Sequence[AnyStrategy] | None = None,
    rounds: int,
    steps_per_turn: int,
    recipes_dirs: Sequence[Path] = (),
    directory: str | None = None,
    problems: Sequence[Problem] = (),
) -> Session:
    """Resolve and check everything that can be known before anything is written.

    Args:
        strategies: what to run; None for every strategy that the run can have.
        rounds: how many are measured, at least 1.
        steps_per_turn: at least 2, as the first step of a turn is not counted.
        directory: the bench directory; None for `run.dir`, else a new one under `run.root`.
        problems: found on the command line before; raised together with the run's own.

    Raises:
        ConfigError: the settings or the data are wrong; every problem at once.
        DoesNotFit: a strategy needs more memory than the profile has.
        EnvironmentProblem: this machine lacks something.
    """
    try:
        composed = compose_run(overrides, recipes_dirs=recipes_dirs)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    composed = replace(composed, config=_in_bench_folder(composed, directory))
    steps = (WARM_UP_ROUNDS + rounds) * steps_per_turn
    wrong = [*problems, *_data_problems(composed.config)]
    try:
        lined_up = line_up(composed, strategies, steps=steps)
    except ConfigError as error:
        raise ConfigError(*wrong, *error.problems) from None
    config = lined_up.reference.config
    if torchrun.node_count(config) > 1:
        nodes, per_node = torchrun.node_count(config), config.cluster.gpus_per_node
        wrong.append(
            Problem(
                key="gpus",
                value=config.gpus,
                reason=f"are on {nodes} machines, but a bench runs on a single one, with {per_node}",
                fix=f"use gpus={per_node}; `canzona bench --simulate` predicts larger jobs",
            )
        )
    if wrong:
        raise ConfigError(*wrong)
    preflight.check_machine(config, lined_up.layout)
    check_free(config)
    return Session(
        overrides=tuple(overrides),
        line_up=lined_up,
        rounds=rounds,
        steps_per_turn=steps_per_turn,
        warnings=(*composed.warnings, *profile_warnings(composed.config.cluster), *_warnings(composed)),
    )


def run(session: Session, say: Say) -> tuple[BenchResult, Path]:
    """Run every sitting; returns the result and the bench directory.

    Args:
        say: receives a line whenever something begins.

    Raises:
        ConfigError: the bench directory is not empty.
        EnvironmentProblem: files cannot be written.
        WorkerCrashed: a rank failed; or the error that it ended with.
        KeyboardInterrupt: somebody stopped it.
    """
    lined_up, config = session.line_up, session.config
    # The load of the last minute, before anything of ours runs.
    machine = {
        **machine_facts(config.cluster.device),
        "ranks": config.gpus,
        "load_average": round(os.getloadavg()[0], 2),
    }
    seen: set[str] = set()

    def progress(what: str, fraction: float) -> None:
        if what not in seen:
            seen.add(what)
            say(what)

    corpus = ensure_corpus(config, progress)
    files = _create(config, lined_up)
    sittings = into_sittings(lined_up, available_bytes(config.cluster))
    names = ", ".join(strategy.name for strategy in lined_up.strategies)
    rounds = f"{plural(session.rounds, 'round')} of {session.steps_per_turn} steps each"
    say(f"{config.name}: {names} on {plural(config.gpus, 'rank')}, {rounds}; {files.root}")
    measurements = []
    for number, sitting in enumerate(sittings):
        name = "sitting" if len(sittings) == 1 else f"sitting {number + 1} of {len(sittings)}"
        measurements.append(_run_sitting(session, files, number, sitting, corpus, name, say))
    result = _result(session, sittings, measurements, machine)
    # All raw numbers are kept, even if the strategies disagree.
    save(result, files.result)
    return result, files.root


def _in_bench_folder(composed: Composed, directory: str | None) -> RunConfig:
    settings = composed.config.run
    root = settings.root if {"run", "run.root"} & composed.explicit else ROOT
    return replace(composed.config, run=replace(settings, root=root, dir=directory or settings.dir, tensorboard=False))


def _data_problems(config: RunConfig) -> tuple[Problem, ...]:
    """Missing or damaged data; the built-in corpus is prepared later, when everything else is known to work."""
    if config.data.source != "prepared":
        return ()
    try:
        ensure_corpus(config)
    except ConfigError as error:
        return error.problems
    return ()


def _warnings(composed: Composed) -> tuple[str, ...]:
    ignored = {
        "engine.strategy": "--strategies chooses what a bench runs",
        "train.steps": "--rounds and --steps-per-turn set the length of a bench; only the schedule follows it",
        "train.eval_interval": "a bench does not validate",
    }
    return tuple(f"{key} is ignored: {why}" for key, why in ignored.items() if key in composed.explicit)


def _create(config: RunConfig, lined_up: LineUp) -> BenchFiles:
    """Make the bench directory, with the configurations and plans that the workers of every sitting read."""
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if config.run.dir is not None:
            files = BenchFiles(Path(config.run.dir).absolute())
            files.root.mkdir(parents=True, exist_ok=True)
        else:
            root = Path(config.run.root).absolute()
            root.mkdir(parents=True, exist_ok=True)
            files = BenchFiles(_new_folder(root / stem))
        for strategy in lined_up.strategies:
            write_text_atomic(files.config(strategy.name), dump_resolved(strategy.config))
            if strategy.plan is not None:
                write_text_atomic(files.plan(strategy.name), strategy.plan.to_json())
    except OSError as error:
        key, value = ("run.root", config.run.root) if config.run.dir is None else ("run.dir", config.run.dir)
        fix = "run.dir=DIR with a directory you may write to"
        raise unwritable(key, value, error, fix=fix, what="the bench directory") from None
    return files


def _new_folder(path: Path) -> Path:
    """That folder, or the next name that is free if another bench started in the same second."""
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            path = next_free(path)
        else:
            return path


def _run_sitting(
    session: Session,
    files: BenchFiles,
    number: int,
    sitting: Sitting,
    corpus: PreparedCorpus,
    name: str,
    say: Say,
) -> dict[str, Measured]:
    """Launch the ranks of one sitting, wait for their end, and return each strategy's figures."""
    first = sitting.strategies[0].config
    config = replace(first, run=replace(first.run, dir=str(files.sitting(number))))
    layout, run = session.line_up.layout, RunDirectory.create(config)
    command = torchrun.build(config, run.path, module=WORKER_MODULE)
    with run.never_without_result():
        run.write_inputs(config_yaml=dump_resolved(config), layout=layout, corpus=corpus, command=command)
        Turns(
            strategies=tuple(strategy.name for strategy in sitting.strategies),
            rounds=WARM_UP_ROUNDS + session.rounds,
            steps_per_turn=session.steps_per_turn,
        ).write(run.files)
        view = _RoundLines(say, name, turns=len(sitting.strategies), rounds=WARM_UP_ROUNDS + session.rounds)
        outcome = Supervision(run.files, command, view, ranks=range(config.gpus), say=say).run()
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    if outcome.failed:
        raise _failure(outcome)
    return {
        strategy: measured(samples, warm_up_rounds=WARM_UP_ROUNDS, steps_per_turn=session.steps_per_turn)
        for strategy, samples in read_samples(run.files).items()
    }


def _failure(outcome: Outcome) -> CanzonaError:
    """The error of the rank that failed, with its traceback and the path of its log."""
    error = outcome.error()
    first, *others = error.problems
    log = "" if outcome.log is None else f"its whole output: {outcome.log}"
    named = replace(first, reason="\n".join([first.reason, *outcome.traceback]), fix=first.fix or log)
    return type(error)(named, *others)


def _result(
    session: Session,
    sittings: Sequence[Sitting],
    measurements: Sequence[Mapping[str, Measured]],
    machine: Mapping[str, str | int | float],
) -> BenchResult:
    lined_up, config = session.line_up, session.config
    reference = lined_up.reference.name
    places: dict[str, tuple[int, bool]] = {}
    for number, sitting in enumerate(sittings):
        for strategy in sitting.strategies:
            places.setdefault(strategy.name, (number, sitting.alone))
    strategies: dict[str, StrategyBench] = {}
    for strategy in lined_up.strategies:
        place, alone = places[strategy.name]
        strategies[strategy.name] = StrategyBench(
            measured=measurements[place][strategy.name],
            predicted=_predicted(strategy, lined_up.layout),
            sitting=place,
            arithmetic=strategy.arithmetic,
            alone=alone,
        )
    return BenchResult(
        recipe=config.name,
        overrides=session.overrides,
        optimizer=config.optimizer.name,
        layout=lined_up.layout,
        device=config.cluster.device,
        profile=config.cluster.name,
        calibrated=bool(config.cluster.measured_on),
        machine=machine,
        rounds=session.rounds,
        steps_per_turn=session.steps_per_turn,
        warm_up_rounds=WARM_UP_ROUNDS,
        reference=reference,
        strategies=strategies,
        references=tuple(found.get(reference, measurements[0][reference]) for found in measurements),
        notes=(*lined_up.notes, *_notes(sittings, reference, machine)),
    )


def _predicted(strategy: PreparedStrategy, layout: Layout) -> Predicted:
    prediction = predict(strategy.config, layout, strategy.plan)
    return Predicted(
        iteration_s=prediction.iteration_s,
        optimizer_s=prediction.optimizer_s,
        phases=dict(prediction.phases),
        load_balance=prediction.load_balance,
        tensor_bytes=strategy.tensor_bytes,
        memory_bytes=prediction.memory_bytes,
    )


def _notes(sittings: Sequence[Sitting], reference: str, machine: Mapping[str, str | int | float]) -> list[str]:
    notes = []
    alone = [strategy.name for sitting in sittings if sitting.alone for strategy in sitting.strategies]
    if len(sittings) - len(alone) > 1:
        notes.append(
            f"the strategies do not all fit into memory together: {len(sittings)} sittings, each with {reference} in it"
        )
    if alone:
        notes.append(
            f"{' and '.join(alone)} ran alone for lack of memory, not in turns with {reference}: anything else the "
            "machine did at that time counts in full"
        )
    load = machine["load_average"]
    if isinstance(load, float) and load > _BUSY * cores():
        notes.append(
            f"the machine was busy before it began (load average {load:g} on {plural(cores(), 'core')}): expect "
            "longer times and wide spreads"
        )
    return notes


class _RoundLines(TrainView):
    """A line for each round that is over: a live display would take processor time from what is measured.

    Args:
        say: receives each line.
        sitting: what to call this sitting: `sitting 2 of 3`.
        turns: in one round.
        rounds: in all, warm-up included.
    """

    def __init__(self, say: Say, sitting: str, *, turns: int, rounds: int) -> None:
        self._say, self._sitting, self._turns, self._rounds, self._seen = say, sitting, turns, rounds, 0

    def stage(self, event: StageEvent) -> None:
        if event.stage == "train":
            self._say(f"{self._sitting}: {event.detail}")
        elif event.stage == "build model":
            self._say(f"{self._sitting}: building models")

    def step(self, metrics: StepMetrics) -> None:
        self._seen += 1
        if self._seen % self._turns == 0:
            self._say(f"{self._sitting}: round {self._seen // self._turns} of {self._rounds}")

    def note(self, note: Note) -> None:
        self._say(f"{self._sitting}: {note.text}")
