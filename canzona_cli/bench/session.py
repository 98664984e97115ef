"""One bench from its command line to its result: check and resolve, launch each sitting,
put the result together.

This is the launcher's side, so it imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from canzona_cli.bench.launching import Say, busy, corpus_of, create, in_folder, machine_now, predicted, sit, unready
from canzona_cli.bench.lineup import LineUp, Sitting, available_bytes, into_sittings, line_up
from canzona_cli.bench.results import BenchResult, Measured, StrategyBench, save
from canzona_cli.bench.sitting import BenchFiles, Turns, measured, read_samples
from canzona_cli.cluster.profiles import profile_warnings
from canzona_cli.config.compose import Composed, compose_run
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import ConfigError, Problem, refuse
from canzona_cli.launch import preflight
from canzona_cli.launch.run_dir import check_free
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.run.words import plural

WORKER_MODULE = "canzona_cli.bench.worker"
ROOT = "bench"
"""The folder for bench directories, unless run.root names another."""
WARM_UP_ROUNDS = 1


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
        strategies: the strategies to run; None for every strategy that the run can have.
        rounds: the number of measured rounds, at least 1.
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
    composed = replace(composed, config=in_folder(composed, ROOT, directory))
    ready = partial(unready, what="a bench", otherwise="`canzona bench --simulate` predicts larger jobs")
    steps = (WARM_UP_ROUNDS + rounds) * steps_per_turn
    try:
        lined_up = line_up(composed, strategies, steps=steps)
    except ConfigError as error:
        raise ConfigError(*problems, *ready(composed.config), *error.problems) from None
    config = lined_up.reference.config
    wrong = [*problems, *ready(config)]
    refuse(wrong)
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
    machine = machine_now(config)
    corpus = corpus_of(config, say)
    files = create(config, {strategy.name: strategy for strategy in lined_up.strategies})
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


def _warnings(composed: Composed) -> tuple[str, ...]:
    ignored = {
        "engine.strategy": "--strategies chooses what a bench runs",
        "train.steps": "--rounds and --steps-per-turn set the length of a bench; only the schedule follows it",
        "train.eval_interval": "a bench does not validate",
    }
    return tuple(f"{key} is ignored: {why}" for key, why in ignored.items() if key in composed.explicit)


def _run_sitting(
    session: Session, files: BenchFiles, number: int, sitting: Sitting, corpus: PreparedCorpus, name: str, say: Say
) -> dict[str, Measured]:
    """Each strategy's figures from one sitting."""
    turns = Turns(
        names=tuple(strategy.name for strategy in sitting.strategies),
        rounds=WARM_UP_ROUNDS + session.rounds,
        steps_per_turn=session.steps_per_turn,
    )
    config, layout = sitting.strategies[0].config, session.line_up.layout
    left = sit(config, layout, files.sitting(number), turns, corpus, module=WORKER_MODULE, name=name, say=say)
    return {
        strategy: measured(samples, warm_up_rounds=WARM_UP_ROUNDS, steps_per_turn=session.steps_per_turn)
        for strategy, samples in read_samples(left).items()
    }


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
            predicted=predicted(strategy, lined_up.layout),
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
        calibrated=config.cluster.calibrated,
        machine=machine,
        rounds=session.rounds,
        steps_per_turn=session.steps_per_turn,
        warm_up_rounds=WARM_UP_ROUNDS,
        reference=reference,
        strategies=strategies,
        references=tuple(measured.get(reference, measurements[0][reference]) for measured in measurements),
        arithmetic=lined_up.arithmetic,
        notes=(*lined_up.notes, *_notes(sittings, reference, machine)),
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
    notes += busy(machine)
    return notes
