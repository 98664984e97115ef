"""One rank of a measurement group: `python -m canzona_cli.bench.worker SITTING_DIR`, started by torchrun.

Strategies take their turns in this process. Each turn of a layout runs in a separate process, because
Megatron supports only one layout in a process. On CPUs the separate process is a fork of this one, which has
imported everything but computed nothing. On GPUs it is a new Python process, because device state does not
survive a fork. If a layout fails on one rank, its turn ends on all ranks and it has no further turns; the
other layouts continue.
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
from canzona_cli.config.secrets import redact
from canzona_cli.errors import CanzonaError, ExitCode
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.orphan import AGENT_VARIABLE, die_with_parent
from canzona_cli.run.records import Ending, read_layout
from canzona_cli.run.words import plural
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import Journal, RankRecord

SLOW_IMPORTS = (*IMPORTED_BY_ALL, "canzona_cli.bench.turns")
_CHECK_S = 0.5
"""The interval in seconds at which a rank checks whether its turn has failed on another rank."""


def sitting_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Runs one measurement group; rank 0 writes the samples."""
    turns = Turns.read(files)
    if turns.separate_processes:
        return layouts_rank(files, record, rank)
    from canzona_cli.megatron import parallel

    finished = _take_turns(files, files, record, rank, turns)
    parallel.shutdown()
    return "done" if finished else "interrupted"


def layouts_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Runs the turns of all layouts, one after another, each in a separate process."""
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.launch.torchrun import forks_ranks

    turns, inputs = Turns.read(files), BenchFiles(files.root.parent)
    forks = forks_ranks(load_resolved(inputs.config(turns.names[0])))
    # Python warns of forks in a process with threads. The only other thread here waits for signals, and a
    # forked process needs none of the locks that this thread may hold.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded, use of fork")
    start: Callable[..., BaseProcess] = ForkProcess if forks else SpawnProcess
    extent = f"{plural(turns.rounds, 'round')} of {plural(len(turns.names), 'layout')}"
    Journal(files, writes=rank == 0).stage("train", extent)
    ordered = [(round_, name) for round_ in range(turns.rounds) for name in turns.order(round_)]
    for round_, name in ordered:
        failure = BenchFiles.failure(files, name)
        if failure.exists():
            continue
        process = start(target=_turn, args=(files, rank, round_, name))
        process.start()
        while process.is_alive() and not failure.exists():
            process.join(_CHECK_S)
        process.kill()  # if another rank has failed, this process might wait for it for minutes
        process.join()
        if process.exitcode == ExitCode.INTERRUPTED:
            return "interrupted"
        if process.exitcode:
            _report(failure, f"rank {rank} ended with code {process.exitcode}")
    return "done"


def _report(failure: Path, reason: str) -> None:
    """Writes the reason for a turn's failure, unless another rank has already written a reason: the first
    failure causes the later ones."""
    with suppress(FileExistsError), failure.open("x", encoding="utf-8") as file:
        file.write(reason)


def _turn(files: RunFiles, rank: int, round_: int, name: str) -> NoReturn:
    """Builds the run in one layout, runs one turn and exits. This is the entry point of a turn's process."""
    record = RankRecord(files, rank)
    if AGENT_VARIABLE in os.environ:
        os.environ[AGENT_VARIABLE] = str(os.getppid())
        die_with_parent()
    code: int = ExitCode.OK
    try:
        turns = replace(Turns.read(files), names=(name,), rounds=1)
        output = BenchFiles.turn(files, round_, name)
        if not _take_turns(files, output, record, rank, turns, turn=f"round {round_} {name}"):
            code = ExitCode.INTERRUPTED
    except BaseException as error:
        code = ExitCode.CRASH
        logging.getLogger(__name__).exception("rank %d failed in the turn of %s", rank, name)
        reason = f"rank {rank}: {type(error).__name__}: {error}"
        if isinstance(error, CanzonaError):
            reason = error.problems[0].reason  # the rank is not named, because all ranks have the same problem
        _report(BenchFiles.failure(files, name), redact(reason))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips torch's teardown


def _take_turns(
    files: RunFiles, output: RunFiles, record: RankRecord, rank: int, turns: Turns, *, turn: str = ""
) -> bool:
    """Builds a model, an optimizer and batches for each strategy (or for the one layout), and runs all turns.

    Args:
        output: the folder for the samples, which rank 0 writes.
        turn: the name of the turn if every turn has separate processes; empty if this process runs all turns.

    Returns:
        False after a request to stop.
    """
    import canzona_cli.megatron.quick_import  # noqa: F401 - before anything imports Megatron
    from canzona_cli.bench.turns import RunningStrategy, gather_samples, take_turns
    from canzona_cli.cluster.fit import resolve
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.config.schema import Execution
    from canzona_cli.engine.kernels import choose_kernels
    from canzona_cli.planner.plan_file import read_plan
    from canzona_cli.run.corpus import read_corpus
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import BatchStream, build_datasets

    inputs, journal = BenchFiles(files.root.parent), Journal(files, writes=rank == 0 and not turn)
    configs = {name: load_resolved(inputs.config(name)) for name in turns.names}
    first_config = configs[turns.names[0]]
    layout = resolve(first_config)[1] if turn else read_layout(files.layout)
    world = join(first_config, layout, alive=record.watchdog.progress, turn=turn)
    data = build_datasets(first_config, read_corpus(files), cache=first_config.data.cache_root / "indices").train
    running: dict[str, RunningStrategy] = {}
    for name, config in configs.items():
        journal.stage("build model", name)
        plan = read_plan(inputs.plan(name)) if config.execution is Execution.PLANNED else None
        trainee = assemble(config, world, plan)
        running[name] = RunningStrategy(trainee=trainee, batches=BatchStream(data, world))

    # Choose the same kernels as training on this machine.
    ours = next((config for config in configs.values() if config.execution.ours), first_config)
    choose_kernels(ours, world.device, begin=lambda shape: record.watchdog.progress())

    def on_turn(name: str, loss: float) -> None:
        record.step, record.loss = len(running[name].losses), loss
        if rank == 0:
            append_json_line(files.metrics, {"step": record.step, "loss": loss, "name": name, "time": time.time()})

    journal.stage("train", f"{turns.rounds} rounds of {', '.join(turns.names)}")
    if not take_turns(turns, running, stop_requested=lambda: rank == 0 and files.stop_requested(), on_turn=on_turn):
        return False
    samples = gather_samples(running)
    if rank == 0:
        output.root.mkdir(exist_ok=True)
        write_samples(output, samples)
    return True


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sitting_rank)
