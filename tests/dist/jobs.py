"""Small real training jobs for tests, from the recipes people use."""

import logging
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.megatron.timers import StepTiming
from canzona_cli.megatron.trainee import Trainee
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.planner import make_plan
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.training.assemble import assemble as assemble_trainee
from canzona_cli.training.assemble import join
from canzona_cli.training.data import BatchStream, build_datasets
from canzona_cli.training.step import train_step, validate
from tests.dist.ranks import run_ranks

# A small qwen3-tiny that every layout of four ranks divides. Few micro-batches: four ranks on two cores spend
# milliseconds on each tensor-parallel all-reduce.
SMALL = (
    "recipe=qwen3-tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=192",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.head_dim=16",
    "train.seq_length=64",
    "train.batch_tokens=512",
    "train.micro_batch_size=2",
    # Several buckets, so that reduction and gathering really overlap.
    "parallel.bucket_elements=25000",
)


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    """A run as its launcher has it. Its plan is made here, where ranks forked from this process find it."""
    config, layout = _resolved(overrides)
    planned(config, layout)
    return config, layout


@cache
def _resolved(overrides: tuple[str, ...]) -> tuple[RunConfig, Layout]:
    return fit.resolve(compose_run(list(overrides)).config)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one rank saw of a run."""

    validation_before: float
    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    validation_after: float
    timings: list[StepTiming]


def train(cache: Path, *overrides: str) -> list[Curve]:
    """Train `SMALL` with `overrides` on as many ranks as `gpus` says; the curve every rank saw."""
    config, layout, corpus = prepare(cache, *overrides)
    rank = partial(_train_rank, config, layout, planned(config, layout), corpus, cache / "indices")
    return run_ranks(config.gpus, rank)


def assemble(cache: Path, *overrides: str) -> tuple[Trainee, PreparedCorpus]:
    """What a worker has before its first step."""
    config, layout, corpus = prepare(cache, *overrides)
    return build(config, layout), corpus


def prepare(cache: Path, *overrides: str) -> tuple[RunConfig, Layout, PreparedCorpus]:
    """What the launcher of a run of `SMALL` hands to its workers."""
    config, layout = resolve(*SMALL, f"data.cache_dir={cache}", *overrides)
    return config, layout, ensure_corpus(config)


def build(config: RunConfig, layout: Layout, plan: Plan | None = None) -> Trainee:
    """The model and all that updates it, as a worker builds them.

    Args:
        plan: the run's, where it was made before the ranks took the call; else it is made here.
    """
    logging.disable(logging.WARNING)
    return assemble_trainee(config, join(config, layout), plan or planned(config, layout))


def planned(config: RunConfig, layout: Layout) -> Plan | None:
    """The run's plan; None for one that executes none."""
    return make_plan(config, layout) if execution_of(config) is Execution.PLANNED else None


def _train_rank(config: RunConfig, layout: Layout, plan: Plan | None, corpus: PreparedCorpus, indices: Path) -> Curve:
    trainee = build(config, layout, plan)
    datasets = build_datasets(config, corpus, cache=indices)
    assert datasets.validation is not None
    before = validate(trainee, BatchStream(datasets.validation, trainee.world), global_batches=2)
    batches = BatchStream(datasets.train, trainee.world)
    steps = [train_step(trainee, batches) for _ in range(trainee.config.train.steps)]
    after = validate(trainee, BatchStream(datasets.validation, trainee.world), global_batches=2)
    return Curve(
        validation_before=before,
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        learning_rates=[step.lr for step in steps],
        validation_after=after,
        timings=trainee.timer.timings(),
    )
