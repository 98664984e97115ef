"""Launches a bench: its directory, the ranks of one sitting, and what they report meanwhile. No torch."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from canzona_cli.bench.lineup import PreparedStrategy
from canzona_cli.bench.results import Predicted
from canzona_cli.bench.sitting import BenchFiles, Turns
from canzona_cli.cluster.machine import machine_facts
from canzona_cli.config.compose import Composed, dump_resolved
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.errors import Problem, gathered, unwritable
from canzona_cli.launch import torchrun
from canzona_cli.launch.resume import next_free
from canzona_cli.launch.supervisor import run_ranks
from canzona_cli.launch.view import TrainView
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.run.files import RunFiles, write_text_atomic
from canzona_cli.run.machine import cores
from canzona_cli.run.records import Note, StageEvent, StepMetrics
from canzona_cli.run.words import plural
from canzona_cli.simulate.predict import predict

Say = Callable[[str], None]
_BUSY = 0.5
"""Load average over cores above which other work disturbs the measurement."""


def in_folder(composed: Composed, root: str, directory: str | None = None) -> RunConfig:
    """The run with a directory of a bench.

    Args:
        root: where such directories go unless run.root says otherwise.
        directory: the directory; None for `run.dir`, else a new one under the root.
    """
    settings = composed.config.run
    root = settings.root if {"run", "run.root"} & composed.explicit else root
    return replace(composed.config, run=replace(settings, root=root, dir=directory or settings.dir, trackers=()))


def unready(config: RunConfig, what: str, otherwise: str) -> tuple[Problem, ...]:
    """Lists why nothing can be measured: more than one machine; missing or damaged data. The built-in corpus
    is prepared later, when everything else is known to work.

    Args:
        what: measures: `a bench`.
        otherwise: the way out for more ranks.
    """
    problems: list[Problem] = []
    if config.data.source == "prepared":
        with gathered(problems):
            ensure_corpus(config)
    nodes, per_node = torchrun.node_count(config), config.cluster.gpus_per_node
    if nodes > 1:
        reason = f"are on {nodes} machines, but {what} runs on a single one, with {per_node}"
        problems.append(Problem(key="gpus", value=config.gpus, reason=reason, fix=f"use gpus={per_node}; {otherwise}"))
    return tuple(problems)


def corpus_of(config: RunConfig, say: Say) -> PreparedCorpus:
    """The run's data, prepared if need be; each thing that begins is said once."""
    seen: set[str] = set()

    def progress(what: str, fraction: float) -> None:
        if what not in seen:
            seen.add(what)
            say(what)

    return ensure_corpus(config, progress)


def machine_now(config: RunConfig) -> dict[str, str | int | float]:
    """The machine that measures. Includes the load of the last minute:
    call it before anything of ours runs."""
    load = round(os.getloadavg()[0], 2)
    return {**machine_facts(config.cluster.device), "ranks": config.gpus, "load_average": load}


def busy(machine: Mapping[str, str | int | float]) -> Iterator[str]:
    """A remark where something else ran as well."""
    load = machine["load_average"]
    if isinstance(load, float) and load > _BUSY * cores():
        yield (
            f"the machine was busy before it began (load average {load:g} on {plural(cores(), 'core')}): expect "
            "longer times and wide spreads"
        )


def predicted(entrant: PreparedStrategy, layout: Layout) -> Predicted:
    """The simulator's prediction of a strategy on this machine."""
    prediction = predict(entrant.config, layout, entrant.plan)
    return Predicted(
        iteration_s=prediction.iteration_s,
        optimizer_s=prediction.optimizer_s,
        phases=dict(prediction.phases),
        load_balance=prediction.load_balance,
        tensor_bytes=entrant.tensor_bytes,
        memory_bytes=prediction.memory_bytes,
    )


def create(config: RunConfig, entrants: Mapping[str, PreparedStrategy]) -> BenchFiles:
    """Make the bench directory, with the configurations and plans that the workers of every sitting read.

    Args:
        entrants: strategies or layouts, by name.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if config.run.dir is not None:
            files = BenchFiles(Path(config.run.dir).absolute())
            files.root.mkdir(parents=True, exist_ok=True)
        else:
            root = Path(config.run.root).absolute()
            root.mkdir(parents=True, exist_ok=True)
            files = BenchFiles(_new_folder(root / stem))
        for name, entrant in entrants.items():
            write_text_atomic(files.config(name), dump_resolved(entrant.config))
            if entrant.plan is not None:
                write_text_atomic(files.plan(name), entrant.plan.to_json())
    except OSError as error:
        key, value = ("run.root", config.run.root) if config.run.dir is None else ("run.dir", config.run.dir)
        fix = "run.dir=DIR with a directory you may write to"
        raise unwritable(key, value, error, fix=fix, what="the bench directory") from None
    return files


def sit(
    config: RunConfig,
    layout: Layout,
    run_dir: Path,
    turns: Turns,
    corpus: PreparedCorpus,
    *,
    module: str,
    name: str,
    say: Say,
) -> RunFiles:
    """Launch the ranks of one sitting and wait for their end; what they left.

    Args:
        config, layout: the configuration and layout of the first strategy that takes a turn.
        module: the module that each rank runs.
        name: the name of the sitting, for messages.

    Raises:
        KeyboardInterrupt: somebody stopped it.
        CanzonaError: a rank failed: the error that it ended with.
    """
    config = replace(config, run=replace(config.run, dir=str(run_dir)))
    view = _RoundLines(say, name, turns=len(turns.names), rounds=turns.rounds)
    return run_ranks(config, layout, corpus, module=module, view=view, say=say, write_more=turns.write)


def _new_folder(path: Path) -> Path:
    """That folder, or the next name that is free if another bench started in the same second."""
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            path = next_free(path)
        else:
            return path


class _RoundLines(TrainView):
    """A line for each round that is over: a live display would take processor time from what is measured.

    Args:
        say: receives each line.
        sitting: the name of this sitting: `sitting 2 of 3`.
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
