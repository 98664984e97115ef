"""A bench session: checks and resolves the run, launches the ranks, and builds the result.

This module runs in the launcher, so it does not import torch.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.bench.lineup import Entrant, LineUp, line_up
from canzona_cli.bench.results import (
    BenchFiles,
    BenchResult,
    Machine,
    Measured,
    StrategyBench,
    Turns,
    read_samples,
    save,
    summarise,
)
from canzona_cli.config.compose import Composed, compose_run, dump_resolved
from canzona_cli.config.profiles import profile_warnings
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.machine import machine_facts
from canzona_cli.core.costs.sharing import mode_warnings
from canzona_cli.core.errors import Problem, closest, collect_problems, refuse, write_error
from canzona_cli.core.host import cores
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.setup.execution import has_tp_modes
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.launch import preflight
from canzona_cli.launch.resume import next_free
from canzona_cli.launch.run_dir import check_free
from canzona_cli.launch.supervisor import run_ranks
from canzona_cli.launch.view import TrainView
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import Note, StageEvent, StepMetrics
from canzona_cli.records.words import plural

Say = Callable[[str], None]
WORKER_MODULE = "canzona_cli.bench.worker"
ROOT = "bench"
"""The default folder for bench directories; `run.root` overrides it."""
WARM_UP_ROUNDS = 1
_BUSY = 0.5
"""The load average per core above which other programs disturb the measurement."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A bench that is ready to run. No file has been written, and no process has been started."""

    overrides: tuple[str, ...]
    line_up: LineUp
    rounds: int
    steps_per_turn: int
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The configuration of the reference."""
        return self.line_up.reference.config


def prepare(
    overrides: Sequence[str],
    *,
    strategies: Sequence[str] = (),
    rounds: int,
    steps_per_turn: int,
    recipes_dirs: Sequence[Path] = (),
    problems: Sequence[Problem] = (),
) -> Session:
    """Resolves the run and checks everything that can be checked before anything is written.

    Args:
        strategies: the strategies to run; empty for every possible strategy.
        rounds: the number of measured rounds, at least 1.
        steps_per_turn: the number of steps in a turn, at least 2, because the first step is not measured.
        problems: problems with the command line, which are raised together with those of the run.

    Raises:
        ConfigError: the command line, the settings or the data are wrong.
        DoesNotFit: the reference, or a strategy that the user named, does not fit in memory.
        EnvironmentProblem: this machine does not have everything that the run needs.
    """
    all_problems = [*problems, *_option_problems(strategies, rounds, steps_per_turn)]
    # Invalid numbers are corrected, so that the rest can be checked.
    rounds, steps_per_turn = max(1, rounds), max(2, steps_per_turn)
    named = tuple(name for name in STRATEGIES if name in strategies) or None
    with collect_problems(all_problems):
        composed = compose_run(overrides, recipes_dirs=recipes_dirs)
        composed = replace(composed, config=_with_folder(composed))
        all_problems += _problems(composed.config)
        lined_up = line_up(composed, named, steps=(WARM_UP_ROUNDS + rounds) * steps_per_turn)
    refuse(all_problems)
    preflight.check_machine(lined_up.reference.config, lined_up.reference.layout)
    check_free(lined_up.reference.config)
    return Session(
        overrides=tuple(overrides),
        line_up=lined_up,
        rounds=rounds,
        steps_per_turn=steps_per_turn,
        warnings=(
            *_warnings_of_run(composed, lined_up),
            *profile_warnings(composed.config.cluster),
            *mode_warnings(lined_up.reference.config.setup, lined_up.reference.layout),
            *_ignored_warnings(composed),
        ),
    )


def _option_problems(strategies: Sequence[str], rounds: int, steps_per_turn: int) -> Iterator[Problem]:
    for name in strategies:
        if name not in STRATEGIES:
            hint = closest(name, STRATEGIES)
            reason = f"is not one of {', '.join(STRATEGIES)}"
            yield Problem("--strategies", reason, f"did you mean {hint}?" if hint else "--strategies canzona,sc", name)
    if rounds < 1:
        reason = "is less than 1, so nothing would be measured"
        yield Problem("--rounds", reason, "use --rounds 6", rounds)
    if steps_per_turn < 2:
        reason = "must be at least 2, because the first step of a turn is not measured"
        yield Problem("--steps-per-turn", reason, "use --steps-per-turn 3", steps_per_turn)


def _warnings_of_run(composed: Composed, lined_up: LineUp) -> list[str]:
    """Returns the warnings about the user's settings. `engine.muon_tp_mode` has an effect if any strategy of the bench
    has modes, even if that of the recipe does not."""
    used = any(has_tp_modes(entrant.config.setup) for entrant in lined_up.strategies)
    return [text for text in composed.warnings if not (used and text.startswith("engine.muon_tp_mode is ignored"))]


def run(session: Session, say: Say) -> tuple[BenchResult, Path]:
    """Runs the bench; returns the result and the bench directory.

    Args:
        say: a function that receives progress lines.

    Raises:
        ConfigError: the bench directory already holds a bench.
        EnvironmentProblem: files cannot be written.
        CanzonaError: a rank failed. This is the error of that rank, or WorkerCrashed.
        KeyboardInterrupt: the user stopped the bench.
    """
    lined_up, config = session.line_up, session.config
    machine = machine_now(config)
    corpus = corpus_of(config, say)
    files = create(config, lined_up.strategies)
    turns = Turns(
        names=tuple(strategy.name for strategy in lined_up.strategies),
        rounds=WARM_UP_ROUNDS + session.rounds,
        steps_per_turn=session.steps_per_turn,
    )
    rounds = f"{plural(session.rounds, 'round')} of {session.steps_per_turn} steps each"
    say(f"{config.name}: {', '.join(turns.names)} on {plural(config.gpus, 'rank')}, {rounds}; writes to {files.root}")
    samples = read_samples(run_turns(lined_up.reference, files.ranks, turns, corpus, say=say))
    measured = {
        name: summarise(each, warm_up_rounds=WARM_UP_ROUNDS, steps_per_turn=session.steps_per_turn)
        for name, each in samples.items()
    }
    result = _result(session, measured, machine)
    # The result is saved even if the strategies' losses disagree.
    save(result, files.result)
    return result, files.root


def _ignored_warnings(composed: Composed) -> Iterator[str]:
    """Yields a warning for each of the user's settings that a bench ignores."""
    ignored = {
        "engine.strategy": "--strategies chooses what a bench runs",
        "train.steps": "--rounds and --steps-per-turn set the length of a bench; only the schedule uses train.steps",
        "train.batch_rampup": "a bench measures steps with the full batch",
        "train.ema": "a bench keeps no average of the weights",
        "train.eval_interval": "a bench does not validate",
    }
    yield from (f"{key} is ignored: {reason}" for key, reason in ignored.items() if key in composed.explicit)


def _result(session: Session, measured: Mapping[str, Measured], machine: Machine) -> BenchResult:
    lined_up, config = session.line_up, session.config
    return BenchResult(
        recipe=config.name,
        overrides=session.overrides,
        optimizer=config.optimizer.name,
        device=config.cluster.device,
        profile=config.cluster.name,
        calibrated=config.cluster.calibrated,
        machine=machine,
        layout=lined_up.reference.layout,
        rounds=session.rounds,
        steps_per_turn=session.steps_per_turn,
        warm_up_rounds=WARM_UP_ROUNDS,
        reference=lined_up.reference.strategy,
        strategies={
            entrant.name: StrategyBench(
                measured=measured[entrant.name], predicted=entrant.predicted, arithmetic=entrant.arithmetic
            )
            for entrant in lined_up.strategies
        },
        arithmetic=lined_up.arithmetic,
        notes=(*lined_up.notes, *busy_notes(machine)),
    )


def _with_folder(composed: Composed) -> RunConfig:
    """Returns the configuration of a run that writes to a bench directory and uses no trackers."""
    settings = composed.config.run
    root = settings.root if {"run", "run.root"} & composed.explicit else ROOT
    return replace(composed.config, run=replace(settings, root=root, trackers=()))


def _problems(config: RunConfig) -> list[Problem]:
    """Returns the problems that prevent a bench: more than one machine, or prepared data that the run cannot
    use.

    The built-in corpus is prepared later, after all checks.
    """
    problems: list[Problem] = []
    if config.data.source == "prepared":
        with collect_problems(problems):
            ensure_corpus(config)
    per_node = config.cluster.gpus_per_node
    nodes = config.cluster.nodes or -(-config.gpus // per_node)
    if nodes > 1:
        reason = f"need {nodes} machines, but a bench runs on a single machine, with {per_node} at most"
        fix = f"use gpus={per_node}; `canzona plan` predicts larger jobs"
        problems.append(Problem(key="gpus", value=config.gpus, reason=reason, fix=fix))
    return problems


def corpus_of(config: RunConfig, say: Say) -> PreparedCorpus:
    """Returns the run's data, prepared if necessary; announces each stage of the preparation once."""
    announced: set[str] = set()

    def progress(stage: str, fraction: float) -> None:
        if stage not in announced:
            announced.add(stage)
            say(stage)

    return ensure_corpus(config, progress)


def machine_now(config: RunConfig) -> Machine:
    """Returns facts about this machine, the number of ranks and the load average of the last minute. Call
    this first, because other work raises the load.
    """
    load = round(os.getloadavg()[0], 2)
    return {**machine_facts(config.cluster.device), "ranks": config.gpus, "load_average": load}


def busy_notes(machine: Machine) -> Iterator[str]:
    """Yields a note if other programs kept the machine busy before the measurement."""
    load = float(machine["load_average"])
    if load > _BUSY * cores():
        yield (
            f"the machine was busy before the measurement (load average {load:g} on {plural(cores(), 'core')}): expect "
            "longer times and wider spreads"
        )


def create(config: RunConfig, entrants: Iterable[Entrant]) -> BenchFiles:
    """Creates the bench directory and writes the configurations and plans for the workers.

    Raises:
        EnvironmentProblem: the directory cannot be written.
    """
    chosen = config.run.dir
    root = Path(config.run.root) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if chosen is None and root.exists():
        root = next_free(root)
    files = BenchFiles(Path(chosen or root).absolute())
    try:
        files.root.mkdir(parents=True, exist_ok=chosen is not None)
        for entrant in entrants:
            write_text_atomic(files.config(entrant.name), dump_resolved(entrant.config))
            if entrant.plan is not None:
                write_text_atomic(files.plan(entrant.name), entrant.plan.to_json())
    except OSError as error:
        key, value = ("run.root", config.run.root) if chosen is None else ("run.dir", chosen)
        fix = "run.dir=DIR with a directory you may write to"
        raise write_error(key, value, error, fix=fix, what="the bench directory") from None
    return files


def run_turns(first: Entrant, run_dir: Path, turns: Turns, corpus: PreparedCorpus, *, say: Say) -> RunFiles:
    """Launches the ranks, waits until they end, and returns their files.

    Args:
        first: the entrant with whose configuration and layout the ranks are started.

    Raises:
        KeyboardInterrupt: the user stopped the measurement.
        CanzonaError: the folder is in use or cannot be written; or a rank failed, with the rank's own error.
    """
    config = replace(first.config, run=replace(first.config.run, dir=str(run_dir)))
    return run_ranks(
        config,
        first.layout,
        corpus,
        module=WORKER_MODULE,
        view=_RoundLines(say, turns=len(turns.names), rounds=turns.rounds),
        say=say,
        write_more=turns.write,
    )


class _RoundLines(TrainView):
    """A view that prints one line after each round, because a live display would take processor time from the
    measurement.

    Args:
        say: a function that receives each line.
        turns: the number of turns in a round.
        rounds: the number of rounds, including warm-up rounds.
    """

    def __init__(self, say: Say, *, turns: int, rounds: int) -> None:
        self._say, self._turns, self._rounds, self._seen = say, turns, rounds, 0

    def stage(self, event: StageEvent) -> None:
        if event.stage == "train":
            self._say(f"bench: {event.detail}")
        elif event.stage == "build model":
            self._say("bench: building models")

    def step(self, metrics: StepMetrics) -> None:
        self._seen += 1
        if self._seen % self._turns == 0:
            self._say(f"bench: round {self._seen // self._turns} of {self._rounds}")

    def note(self, note: Note) -> None:
        self._say(f"bench: {note.text}")
