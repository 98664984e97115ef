"""A whole run with the real worker on forked gloo ranks: all of `canzona train` but torchrun and the terminal.

torchrun's part in a failure is tested with a stand-in worker; here it is what happens inside the real one, without the
seconds that every process of its own takes to import Megatron.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Execution
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.launch import torchrun
from canzona_cli.launch.outcome import Outcome, Workers, judge
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.records.codec import save
from canzona_cli.training import data
from canzona_cli.training.data import Batch
from canzona_cli.training.records import RankRecord
from canzona_cli.training.worker import train_rank
from tests.dist.jobs import SMALL
from tests.dist.ranks import run_ranks

Spoil = Callable[[int, int, Batch], Batch]
"""Given a rank, a step and its batch: the batch that the rank gets instead."""


def forked_run(
    run_dir: Path, *overrides: str, job: Sequence[str] = SMALL, spoil: Spoil = lambda rank, step, batch: batch
) -> Outcome:
    """Train to the end, or whatever end it comes to. Each step is one micro-batch, and nothing is validated.

    A second time in the same directory it continues from the last checkpoint there.
    """
    one_batch = ("train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_interval=0")
    wanted = [*job, "gpus=4", "parallel.tp=2", "parallel.pp=1", *one_batch, f"run.dir={run_dir}", *overrides]
    config, layout = resolve(compose_run(wanted).config)
    corpus = ensure_corpus(config)
    run = RunDirectory.create(config, resumes=True)
    run.resume(config, layout)
    run.write_inputs(
        config_yaml=dump_resolved(config),
        layout=layout,
        corpus=corpus,
        command=torchrun.build(config, run.path),
        plan=make_plan(config.setup, layout).to_json() if config.execution is Execution.PLANNED else None,
    )

    files = run.files

    def rank() -> int:
        number = int(os.environ["RANK"])
        record = RankRecord(files, number)
        record.record_start()
        _spoil_batches(number, spoil)
        try:
            return int(record.record_end(train_rank(files, record, number)))
        except Exception as error:
            return int(record.record_failure(error))

    try:
        codes = run_ranks(layout.world_size, rank)
    finally:
        del run  # It holds the directory until here, also where a traceback keeps this frame.
    outcome = judge(
        Workers(files=files, ranks=range(len(codes)), node_rank=0, agent_code=int(any(codes))), stopping=False
    )
    save(files.result, outcome.result)
    return outcome


def _spoil_batches(rank: int, spoil: Spoil) -> None:
    """Spoils batches in this process from now on."""
    read = data.BatchStream.__next__
    steps: Iterator[int] = iter(range(1, 1 << 30))

    def spoiled(stream: data.BatchStream) -> Batch:
        return spoil(rank, next(steps), read(stream))

    data.BatchStream.__next__ = spoiled  # type: ignore[method-assign, assignment]
