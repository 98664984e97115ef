"""One rank of a run: `python -m canzona_cli.training.worker RUN_DIR`, started by torchrun."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from canzona_cli.launch.files import RunFiles
from canzona_cli.launch.orphan import die_with_parent
from canzona_cli.training.records import Journal, RankRecord


def main(arguments: list[str]) -> NoReturn:
    """Train one rank to the end of the run and exit; the exit code also stands in the rank's result file."""
    die_with_parent()
    files = RunFiles(Path(arguments[0]))
    rank = int(os.environ["RANK"])
    record = RankRecord(files, rank)
    record.running()
    journal = Journal(files, writes=rank == 0)
    journal.stage("start workers", f"{os.environ['WORLD_SIZE']} ranks")
    try:
        finished = _run(files, record, rank)
    except BaseException as error:
        code = record.failed(error)
        logging.getLogger(__name__).exception("rank %d failed", rank)
        # No destructors, no collective shutdown: peers may be waiting in a collective that will never complete.
        sys.stderr.flush()
        os._exit(int(code))
    if finished:
        record.done()
    else:
        record.interrupted()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk and every group is closed; tearing down torch would only keep the terminal for seconds.
    os._exit(0)


def _run(files: RunFiles, record: RankRecord, rank: int) -> bool:
    # The slow imports come after the first sign of life. What they say of optional packages and of their own future is
    # nothing the reader of a log can act on, and it would stand above a rank's own error.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.config.schema import Layout
    from canzona_cli.data.prepare import cache_root
    from canzona_cli.megatron import parallel
    from canzona_cli.planner.obtain import executes_plan
    from canzona_cli.planner.plan_file import read_plan
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import CorpusFacts, build_datasets
    from canzona_cli.training.loop import train
    from canzona_cli.training.measure import gather_breakdown
    from canzona_cli.training.trace import write_timeline

    config = load_resolved(files.config)
    layout = Layout(**json.loads(files.layout.read_text(encoding="utf-8")))
    corpus = json.loads(files.corpus.read_text(encoding="utf-8"))
    plan = read_plan(files.plan) if executes_plan(config) else None
    world = join(config, layout)
    journal = Journal(files, writes=rank == 0, tensorboard=config.run.tensorboard)

    journal.stage("build model", config.model.name)
    trainee = assemble(config, world, plan)

    journal.stage("build data", str(corpus["prefix"]))
    facts = CorpusFacts(vocab_size=config.model.vocab_size, eod=corpus["eod"], name=corpus["tokenizer"])
    datasets = build_datasets(config, Path(corpus["prefix"]), facts, cache=cache_root(config) / "indices")

    finished = train(trainee, datasets, files, journal, record)
    journal.stage("finish")
    write_timeline(files, rank, trainee.timer.timelines())
    breakdown = gather_breakdown(config, world, trainee.timer.timings())
    if breakdown is not None:
        journal.breakdown(breakdown)
    journal.close()
    parallel.shutdown()
    return finished


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(sys.argv[1:])
