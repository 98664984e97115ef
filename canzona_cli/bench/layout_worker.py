"""One rank of the sitting in which layouts take turns:
`python -m canzona_cli.bench.layout_worker SITTING_DIR`.

Megatron has one layout for all of a process's life, so each turn is a process of its own: on CPUs a fork of
this one, which has imported everything and computed nothing; where there are GPUs a new Python, for what
imports leave on a device does not survive a fork. A layout that fails on one rank is over on all, and has no
further turns; the others continue.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from canzona_cli.bench.sitting import BenchFiles, Turns, write_samples
from canzona_cli.bench.worker import SLOW_IMPORTS
from canzona_cli.config.secrets import redacted
from canzona_cli.errors import CanzonaError, ExitCode
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.orphan import AGENT_VARIABLE, die_with_parent
from canzona_cli.run.records import Ending
from canzona_cli.run.words import plural
from canzona_cli.training.process import run_rank
from canzona_cli.training.records import Journal, RankRecord

__all__ = ["SLOW_IMPORTS"]

_LOOK_S = 0.5
"""Seconds between a rank's looks at whether its turn has failed on another rank."""


def layouts_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Give every layout its turns, one after another."""
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.launch.torchrun import forks_ranks

    turns, inputs = Turns.read(files), BenchFiles(files.root.parent)
    forks = forks_ranks(load_resolved(inputs.config(turns.names[0])))
    # The thread that waits for signals holds nothing that the fork would need.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded, use of fork")
    start: Callable[..., BaseProcess] = ForkProcess if forks else SpawnProcess
    length = f"{plural(turns.rounds, 'round')} of {plural(len(turns.names), 'layout')}"
    Journal(files, writes=rank == 0).stage("train", length)
    ordered = [(number, name) for number in range(turns.rounds) for name in turns.order(number)]
    for number, name in ordered:
        failure = BenchFiles.failure(files, name)
        if failure.exists():
            continue
        process = start(target=_turn, args=(files, rank, number, name))
        process.start()
        while process.is_alive() and not failure.exists():
            process.join(_LOOK_S)
        process.kill()  # a rank that waits for one that failed may do so for minutes
        process.join()
        if process.exitcode == ExitCode.INTERRUPTED:
            return "interrupted"
        if process.exitcode:
            _tell(failure, f"rank {rank} ended with code {process.exitcode}")
    return "done"


def _tell(failure: Path, reason: str) -> None:
    """Leave why a turn failed; what others already said stays,
    for one rank's end is why the next one fails."""
    with suppress(FileExistsError), failure.open("x", encoding="utf-8") as file:
        file.write(reason)


def _turn(files: RunFiles, rank: int, number: int, name: str) -> NoReturn:
    """Build the run in one layout and take its turn; rank 0 writes the samples."""
    record = RankRecord(files, rank)
    if AGENT_VARIABLE in os.environ:
        os.environ[AGENT_VARIABLE] = str(os.getppid())
        die_with_parent()
    code: int = ExitCode.OK
    try:
        if not _measure(files, record, rank, number, name):
            code = ExitCode.INTERRUPTED
    except BaseException as error:
        code = ExitCode.CRASH
        logging.getLogger(__name__).exception("rank %d failed in the turn of %s", rank, name)
        reason = f"rank {rank}: {type(error).__name__}: {error}"
        if isinstance(error, CanzonaError):
            reason = error.problems[0].reason  # which all ranks say alike
        _tell(BenchFiles.failure(files, name), redacted(reason))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of torch is torn down


def _measure(files: RunFiles, record: RankRecord, rank: int, number: int, name: str) -> bool:
    """False after a request to stop."""
    import canzona_cli.megatron  # noqa: F401 - before anything imports Megatron
    from canzona_cli.bench.turns import RunningStrategy, gather_samples, take_turns
    from canzona_cli.cluster.fit import resolve
    from canzona_cli.config.caches import cache_root
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.config.execution import Execution, execution_of
    from canzona_cli.planner.plan_file import read_plan
    from canzona_cli.run.corpus import read_corpus
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import BatchStream, build_datasets

    turns, inputs = Turns.read(files), BenchFiles(files.root.parent)
    config, layout = resolve(load_resolved(inputs.config(name)))
    world = join(config, layout, turn=f"round {number} {name}")
    data = build_datasets(config, read_corpus(files), cache=cache_root(config) / "indices").train
    plan = read_plan(inputs.plan(name)) if execution_of(config) is Execution.PLANNED else None
    running = {name: RunningStrategy(trainee=assemble(config, world, plan), batches=BatchStream(data, world))}

    def tell(_: int, name: str, loss: float) -> None:
        record.step, record.loss = turns.steps_per_turn, loss
        if rank == 0:
            line = {"step": record.step, "loss": loss, "layout": name, "round": number + 1, "rounds": turns.rounds}
            append_json_line(files.metrics, {**line, "time": time.time()})

    once = replace(turns, names=(name,), rounds=1)
    if not take_turns(once, running, stop_requested=lambda: rank == 0 and files.stop_requested(), tell=tell):
        return False
    samples = gather_samples(running)
    if rank == 0:
        left = inputs.turn(files, number, name)
        left.root.mkdir()
        write_samples(left, samples)
    return True


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), layouts_rank)
