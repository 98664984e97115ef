"""Runs one rank of an evaluation: `python -m canzona_cli.training.evaluation DIR`, started by torchrun.

Model and batches are built as for a run, but without an optimizer, and the loss is computed by the code that
validates runs.
"""

import sys
from pathlib import Path

from canzona_cli.records.codec import load, save
from canzona_cli.records.files import RunFiles, cache_root
from canzona_cli.records.records import Ending, ResumePoint, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import Journal, RankRecord

SLOW_IMPORTS = (*IMPORTED_BY_ALL, "canzona_cli.training.step", "canzona_cli.checkpoint.restore")


def evaluate_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Computes the loss of a checkpoint on some data, both of which the launcher chose. Rank 0 writes the
    evaluation."""
    from canzona_cli.checkpoint.restore import load_weights, verify_together
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.errors import EnvironmentProblem, refuse
    from canzona_cli.core.megatron import contract, parallel
    from canzona_cli.core.megatron.model import Model, build_model
    from canzona_cli.core.megatron.timers import PhaseTimer
    from canzona_cli.data.corpus import token_bytes
    from canzona_cli.records.corpus import read_corpus
    from canzona_cli.records.records import Evaluation, evaluation_file
    from canzona_cli.training.assemble import join
    from canzona_cli.training.data import BatchStream, CountingStream, build_validation
    from canzona_cli.training.step import validate

    config = load_resolved(files.config)
    layout, corpus = read_layout(files.layout), read_corpus(files)
    point = load(files.resume, ResumePoint, key="resume.json", fix="evaluate again")
    world = join(config, layout, alive=record.watchdog.progress)
    journal = Journal(files, writes=rank == 0, watchdog=record.watchdog)
    journal.stage("build model", config.model.name)
    refuse(contract.PROBLEMS, EnvironmentProblem)
    model = Model(
        setup=config.setup, world=world, chunks=build_model(config.setup, world), timer=PhaseTimer(world.device)
    )
    model.timer.on_change = lambda phase: record.watchdog.progress()
    journal.stage("build data", ", ".join(str(part.prefix) for part in corpus.sets))
    validation_sets = build_validation(config, corpus, cache=cache_root() / "indices")
    lengths = token_bytes(corpus)
    checkpoint = Path(point.checkpoint)
    journal.stage("load", checkpoint.name)
    load_weights(model, checkpoint, verify_together(world, checkpoint))
    journal.stage("validate", f"step {point.step}")
    losses = {}
    totals = []
    for part in validation_sets:
        stream = BatchStream(part.samples, world, count=part.count)
        batches = CountingStream(stream, world, None if lengths is None else lengths.values)
        losses[part.name] = validate(model, batches, samples=part.count)
        totals.append(batches.totals())
    tokens = sum(set_tokens for set_tokens, _ in totals)
    text_bytes = sum(
        part.share * set_bytes * tokens / set_tokens
        for part, (set_tokens, set_bytes) in zip(validation_sets, totals, strict=True)
    )
    loss = sum(part.share * losses[part.name] for part in validation_sets)
    if rank == 0:
        evaluation = Evaluation(
            checkpoint=checkpoint,
            step=point.step,
            data=corpus.prefix,
            tokenizer=corpus.tokenizer,
            documents="held-out" if corpus.train_tokens else "all",
            layout=layout,
            sequences=sum(part.count for part in validation_sets),
            tokens=round(tokens),
            epochs=tokens / max(1, corpus.validation_tokens),
            text_bytes=None if lengths is None else text_bytes,
            bytes_counted=lengths is not None and lengths.counted,
            loss=loss,
            sets=losses if len(losses) > 1 else {},
        )
        journal.validation(point.step, loss, evaluation.sets)
        save(evaluation_file(files), evaluation)
    parallel.shutdown()
    return "done"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), evaluate_rank)
