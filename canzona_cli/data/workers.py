"""Parts made side by side, each in one of a few processes, which end with this one however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from canzona_cli.data.parts import Part, Recipe, make_part
from canzona_cli.data.sources import TooManyBadLines
from canzona_cli.data.tally import Tally
from canzona_cli.errors import CanzonaError, EnvironmentProblem, Problem

_OF_THE_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""The signals that a terminal or a batch system sends to all processes; the parent decides what they mean."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A part, and where its pair is to lie."""

    part: Part
    prefix: Path


_Refusal = tuple[type[CanzonaError], tuple[Problem, ...]]


def made(jobs: Sequence[Job], recipe: Recipe, *, workers: int) -> Iterator[tuple[Job, Tally]]:
    """Make all parts; each job when it is done, with what was counted. One that has too many bad lines is not finished.

    Args:
        workers: processes; where there are fewer parts, their tokenizers use more threads.

    Raises:
        CanzonaError: the first that a part raises.
        EnvironmentProblem: a process died.
    """
    processes: dict[Connection, SpawnProcess] = {}
    doing: dict[Connection, Job] = {}
    waiting = list(reversed(jobs))
    number = min(workers, len(jobs))
    try:
        for _ in range(number):
            process, connection = _start(recipe, threads=max(1, workers // number))
            processes[connection] = process
            doing[connection] = waiting.pop()
            connection.send(doing[connection])
        while doing:
            answered = wait([*doing])
            for connection in [one for one in doing if one in answered]:
                try:
                    answer: Tally | _Refusal = connection.recv()
                except EOFError:
                    processes[connection].join()
                    raise _died(processes[connection].exitcode, doing[connection]) from None
                if not isinstance(answer, Tally):
                    kind, problems = answer
                    raise kind(*problems)
                job = doing.pop(connection)
                if waiting:
                    doing[connection] = waiting.pop()
                    connection.send(doing[connection])
                yield job, answer
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def _start(recipe: Recipe, *, threads: int) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, recipe, threads), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)  # which processes inherit
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _work(connection: Connection, recipe: Recipe, threads: int) -> None:
    """The main function of a process: jobs in, tallies out."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # read when the tokenizer's thread pool starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        job: Job = connection.recv()
        try:
            connection.send(make_part(job.part, job.prefix, recipe))
        except TooManyBadLines as error:
            connection.send(error.tally)
        except CanzonaError as error:
            connection.send((type(error), error.problems))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _died(code: int | None, job: Job) -> EnvironmentProblem:
    labels = ", ".join(source.label for source in job.part.sources[:3])
    reason = f"a process that tokenised {labels} died (exit code {code})"
    fix = "-9 means the machine ran out of memory: fewer --workers; finished parts are kept, the same command goes on"
    return EnvironmentProblem(Problem(key="INPUT", reason=reason, fix=fix))
