"""Runs one rank of a run: `python -m canzona_cli.training.worker RUN_DIR`, started by torchrun."""

import json
import sys
from pathlib import Path

from canzona_cli.records.codec import load_if_valid, record_dict
from canzona_cli.records.files import RunFiles, cache_root
from canzona_cli.records.records import Ending, ResumePoint, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, count_host_waits, run_rank
from canzona_cli.training.records import Journal, RankRecord

SLOW_IMPORTS = (
    *IMPORTED_BY_ALL,
    "canzona_cli.training.loop",
    "canzona_cli.checkpoint.restore",
    "canzona_cli.core.planner.plan_file",
)
"""The modules that `training.agent` imports before it forks the ranks."""


def train_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Trains one rank to the end of the run, from the checkpoint that the launcher chose, or from the
    beginning."""
    from canzona_cli.checkpoint.restore import restore, verify_together
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.errors import Diverged, WorkerCrashed
    from canzona_cli.core.megatron import owner_bucket_group, parallel
    from canzona_cli.core.planner.plan_file import read_plan
    from canzona_cli.core.setup import Execution
    from canzona_cli.records.corpus import DATA_FILE, DataPlan, read_corpus
    from canzona_cli.records.records import write_timeline
    from canzona_cli.records.words import jsonable
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import build_datasets, plan_data
    from canzona_cli.training.loop import Start, Training
    from canzona_cli.training.measure import gather_breakdown
    from canzona_cli.training.saving import Saver

    config = load_resolved(files.config)
    layout, corpus = read_layout(files.layout), read_corpus(files)
    plan = read_plan(files.plan) if config.execution is Execution.PLANNED else None
    world = join(config, layout, alive=record.watchdog.progress)
    journal = Journal(files, writes=rank == 0, watchdog=record.watchdog)

    journal.stage("build model", config.model.name)
    trainee = assemble(config, world, plan)
    count_host_waits(trainee.timer)
    trainee.timer.on_change = lambda phase: record.watchdog.progress()
    assumed = config.cluster.grouped_collectives
    if (contradiction := owner_bucket_group.find_contradiction(trainee.chunks, world, assumed=assumed)) is not None:
        journal.incident("grouping", detail=contradiction, level="warning")

    start = Start()
    saved_plan = None
    point = load_if_valid(files.resume, ResumePoint)
    if point is not None:
        checkpoint = Path(point.checkpoint)
        journal.stage("load", checkpoint.name)
        manifest = verify_together(world, checkpoint)
        restore(trainee, checkpoint, manifest, weights_only=point.weights_only)
        if not point.weights_only:
            start = Start(progress=manifest.progress, validate=point.validate, validation=point.validation)
            record.step = manifest.progress.step
            saved_plan = load_if_valid(checkpoint / DATA_FILE, DataPlan)

    journal.stage("build data", ", ".join(str(part.prefix) for part in corpus.sets))
    data_plan = plan_data(config, corpus, progress=start.progress, saved=saved_plan)
    datasets = build_datasets(config, corpus, cache=cache_root() / "indices", plan=data_plan)

    inputs = (files.config, files.layout, *([files.plan] if plan is not None else []))
    texts = {path.name: path.read_text(encoding="utf-8") for path in inputs}
    texts[DATA_FILE] = json.dumps(jsonable(record_dict(data_plan)), indent=1) + "\n"
    last_checkpoint = None if point is None or point.weights_only else Path(point.checkpoint).name
    saver = Saver(
        trainee,
        config.checkpoint,
        files,
        journal,
        texts=texts,
        last_checkpoint=last_checkpoint,
        alive=record.watchdog.progress,
    )
    try:
        training = Training(config, trainee, datasets, files, journal, record, start=start, saver=saver)
        ending = training.run()
    except (Diverged, WorkerCrashed):
        # All ranks, or for WorkerCrashed all ranks of a stage, raise these errors together, so a save of an
        # earlier step can still be completed.
        saver.wait_until_written()
        raise
    journal.stage("finish")
    write_timeline(files, rank, trainee.timer.timelines())
    breakdown = gather_breakdown(config, world, trainee.timer.timings())
    if breakdown is not None:
        journal.breakdown(breakdown)
    record.lost = journal.lost
    parallel.shutdown()
    if ending == "done":
        training.check_recovered()
    return ending


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), train_rank)
