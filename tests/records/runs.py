"""A small run to show: its configuration, its layout, and records like a worker's."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.core.setup import EngineConfig, MuonConfig, TrainConfig
from canzona_cli.records.corpus import PreparedCorpus, PreparedSet
from canzona_cli.records.records import StepMetrics
from tests.sizes import CPU, layout, model

STEPS = 300

CONFIG = RunConfig(
    name="qwen3-tiny",
    gpus=4,
    model=replace(model("tiny"), name="qwen3-tiny", vocab_size=16384),
    train=TrainConfig(steps=STEPS, seq_length=256, batch_tokens=8192),
    optimizer=MuonConfig(name="muon", lr=3e-3),
    engine=EngineConfig(strategy="canzona"),
    cluster=CPU,
    data=DataConfig(source="stdlib"),
)

LAYOUT = replace(layout(tp=2, dp=2, micro=4, count=4), sequence_parallel=False)

CORPUS = PreparedCorpus(
    sets=(
        PreparedSet(
            name="stdlib",
            prefix=Path("cache/stdlib"),
            tokens=9_412_345,
            documents=1204,
            train_tokens=9_300_000,
            validation_tokens=112_345,
        ),
    ),
    tokenizer="bpe-16384",
    vocab_size=16384,
    max_token_id=16383,
    eod=0,
)


def with_tokens(*train_tokens: int) -> PreparedCorpus:
    """Returns a corpus to train on, of sets with equal shares."""
    (one,) = CORPUS.sets
    share = 1 / len(train_tokens)
    sets = (
        replace(one, name=f"set{n}", prefix=Path(f"cache/set{n}"), share=share, train_tokens=t)
        for n, t in enumerate(train_tokens)
    )
    return replace(CORPUS, sets=tuple(sets))


def metrics(steps: int = STEPS, step_s: float = 0.4) -> Iterator[StepMetrics]:
    """Lines of metrics.jsonl for a loss that falls from ln(16384), a little ragged."""
    for step in range(1, steps + 1):
        yield StepMetrics(
            step=step,
            loss=3.6 + (math.log(16384) - 3.6) * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7),
            lr=3e-3 * min(1.0, step / 20),
            grad_norm=0.8 + 0.2 * math.cos(step),
            tokens_per_s=8192 / step_s,
            step_s=step_s,
            tokens=8192 * step,
            time=1_700_000_000 + step * step_s,
        )
