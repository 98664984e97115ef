"""Reads batches from Megatron's `GPTDataset`, in an order that depends only on the seed, not on the
layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import normalize
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.checkpoint.manifest import BEGINNING, Progress
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import Layout
from canzona_cli.data.order import continue_plan, set_sizes
from canzona_cli.records.corpus import DataPlan, PreparedCorpus, samples_needed
from canzona_cli.training.sample_index import SampleIndex

Batch = dict[str, torch.Tensor]
"""A micro-batch: `tokens`, `labels`, `loss_mask` and `position_ids`, each `[micro_batch, seq_length / cp]`.

A `BatchStream` adds `counted`, the number of tokens over which the micro-batch's mean loss is taken, on all
context-parallel ranks together."""
Samples = torch.utils.data.Dataset[Batch]
_VALIDATION_SEED: Final = 1234
"""The seed of the order of validation samples, so that a validation loss is a property of the weights. It is
the default of `train.seed`, so default runs validate on the samples of that seed."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """The validation samples of one data set. They are the same for every run of this data: they do not
    depend on the run's seed, batch or layout."""

    name: str
    share: float
    """The data set's share of the training data; the shares of all sets add up to 1."""
    samples: Samples
    count: int
    """The number of samples to validate on, from the first one on."""


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The training and validation samples. Each sample is `seq_length` tokens, with the next tokens as
    labels."""

    train: Samples
    validation: tuple[ValidationSet, ...] = ()
    """The validation samples of each data set; empty if the run does not validate."""


class _ContinuedBlend(torch.utils.data.Dataset[Batch]):
    """The samples of a run that mixes its sets in other shares from some sample on. Each set continues with
    its own next sample.

    Args:
        plan: the plan, with the sample at which the present shares began, and the position of each set.
        blend: the samples from there on.
    """

    def __init__(self, plan: DataPlan, sets: Sequence[GPTDataset], blend: BlendedDataset | None) -> None:
        self._plan, self._sets, self._blend = plan, sets, blend

    def __len__(self) -> int:
        return self._plan.samples

    def __getitem__(self, index: int) -> Batch:
        index -= self._plan.blend_start
        assert index >= 0, "the samples before the change were read with other shares"
        number = 0 if self._blend is None else int(self._blend.dataset_index[index])
        in_set = index if self._blend is None else int(self._blend.dataset_sample_index[index])
        sample: Batch = self._sets[number][in_set + self._plan.start_of(number)]
        return sample


def plan_data(
    config: RunConfig, corpus: PreparedCorpus, *, progress: Progress = BEGINNING, saved: DataPlan | None = None
) -> DataPlan:
    """Returns the data plan of a run that starts at `progress`.

    Args:
        saved: the plan of the checkpoint; None without a checkpoint, and for one that has no plan.
    """
    batch = config.train.global_batch_size
    assert batch is not None
    samples = samples_needed(config.train, batch, step=progress.step, samples=progress.samples)
    if saved is None:
        return DataPlan(corpus=corpus, samples=samples)
    return continue_plan(saved, corpus, samples=samples, done=progress.samples, count=_count_by_set)


def _count_by_set(shares: Sequence[float], samples: int) -> list[int]:
    """Returns how many of the first `samples` samples of a blend are of each set."""
    numbers, places = np.zeros(samples, dtype=np.int16), np.zeros(samples, dtype=np.int64)
    weights = normalize(normalize(shares))  # as the blend does
    helpers.build_blending_indices(numbers, places, weights, len(shares), samples, False)
    counts: list[int] = np.bincount(numbers, minlength=len(shares)).tolist()
    return counts


def build_datasets(config: RunConfig, corpus: PreparedCorpus, *, cache: Path, plan: DataPlan | None = None) -> Datasets:
    """Builds the run's training and validation samples. Rank 0 writes the sample indices, and the other ranks
    read them. Collective.

    Args:
        plan: the plan of a resumed run; None for a run that starts at its first step.

    Raises:
        EnvironmentProblem: the indices cannot be written.
    """
    plan = plan or plan_data(config, corpus)
    index = _sample_index(config, corpus, cache, seed=config.train.seed)
    shares: list[float] = normalize([part.share for part in corpus.sets])
    left = plan.samples - plan.blend_start
    sets = [index.training_set(part, size) for part, size in zip(corpus.sets, set_sizes(plan), strict=True)]
    blend = index.blend(sets, shares, sum(math.ceil(left * share) for share in shares)) if len(sets) > 1 else None
    validates = config.train.eval_interval > 0 and corpus.validation_tokens > 0
    train: Samples = sets[0] if blend is None else blend
    if plan.blend_start:
        train = _ContinuedBlend(plan, sets, blend)
    return Datasets(train=train, validation=build_validation(config, corpus, cache=cache) if validates else ())


def build_validation(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> tuple[ValidationSet, ...]:
    """Builds the validation samples of each data set with validation tokens. Collective."""
    index = _sample_index(config, corpus, cache, seed=_VALIDATION_SEED)
    sets = []
    for part in corpus.validation_sets:
        samples = index.validation_set(part)
        count = min(config.train.eval_sequences, len(samples))
        sets.append(ValidationSet(name=part.name, share=part.share, samples=samples, count=count))
    return tuple(sets)


def _sample_index(config: RunConfig, corpus: PreparedCorpus, cache: Path, *, seed: int) -> SampleIndex:
    return SampleIndex(
        corpus=corpus,
        vocab_size=config.model.vocab_size,
        seq_length=config.train.seq_length,
        seed=seed,
        data=config.data,
        cache=cache,
    )


class BatchStream(Iterator[Batch]):
    """An iterator over this data-parallel rank's micro-batches of consecutive global batches.

    In every layout, a global batch consists of the samples that follow those of the batch before it, from sample
    `first_sample` on. A micro-batch is `micro_batch_size` of these samples, so the number of data-parallel ranks only
    decides which rank computes a sample, and batches may differ in size.

    Args:
        first_sample: the first sample to read.
        count: the number of samples to read; after them, masked samples fill the last micro-batches. None reads to the
            end, without a rest that no batch can have.
    """

    def __init__(self, dataset: Samples, world: World, *, first_sample: int = 0, count: int | None = None) -> None:
        self._world = world
        if count is None:
            left: int = len(dataset) - first_sample  # type: ignore[arg-type]
            count = left - left % world.layout.batch_multiple
        indices = _indices(world.layout, world.dp_rank, first=first_sample, count=count)
        on_gpu = world.device.type == "cuda"
        self._batches = iter(
            torch.utils.data.DataLoader(
                dataset,
                batch_sampler=indices,
                num_workers=2 if on_gpu else 0,
                pin_memory=on_gpu,
                # Without a generator, a loader draws a seed for its workers from torch's global generator.
                # Then torch's random state would depend on how often a run was validated and resumed.
                generator=torch.Generator(),
            )
        )

    def __next__(self) -> Batch:
        raw = next(self._batches)
        batch = {
            key: raw[key].to(self._world.device, non_blocking=True)
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        }
        # Counted before the sequence is divided, because all context-parallel ranks must divide by the same
        # number.
        counted = batch["loss_mask"].sum()
        if self._world.layout.cp > 1:
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=self._world.groups.cp)
        return {**batch, "counted": counted}


def padded_micro_batches(layout: Layout, count: int) -> int:
    """Returns the number of micro-batches of each data-parallel rank that together hold `count` samples. The
    interleaved schedule needs a multiple of the number of stages."""
    batches = math.ceil(count / layout.batch_multiple)
    return batches * layout.batch_multiple // (layout.micro_batch_size * layout.dp)


def _indices(layout: Layout, dp_rank: int, *, first: int, count: int) -> list[list[int | None]]:
    """Returns the sample indices of each micro-batch of one data-parallel rank for `count` samples from `first` on.
    None stands for a sample without loss, as in `GPTDataset`."""
    micro_batches: list[list[int | None]] = []
    for micro in range(padded_micro_batches(layout, count)):
        start = (micro * layout.dp + dp_rank) * layout.micro_batch_size
        micro_batches.append([first + i if i < count else None for i in range(start, start + layout.micro_batch_size)])
    return micro_batches


class CountingStream(Iterator[Batch]):
    """An iterator that passes batches on unchanged, and counts their tokens and the bytes of their text.

    Args:
        lengths: The number of bytes of each token, `[vocab_size]`; None if they are not known, in which case
            no bytes are counted.
    """

    def __init__(self, batches: Iterator[Batch], world: World, lengths: npt.NDArray[np.float64] | None) -> None:
        self._batches, self._world = batches, world
        self._lengths = None if lengths is None else torch.from_numpy(lengths).to(world.device)
        self._totals = torch.zeros(2, dtype=torch.float64, device=world.device)

    def __next__(self) -> Batch:
        batch = next(self._batches)
        counts = batch["loss_mask"].double()
        self._totals[0] += counts.sum()
        if self._lengths is not None:
            self._totals[1] += (self._lengths[batch["labels"]] * counts).sum()
        return batch

    def totals(self) -> tuple[float, float]:
        """Returns the numbers of tokens and bytes in the batches so far, on all ranks together.
        Collective."""
        totals = self._totals.clone()
        torch.distributed.all_reduce(totals)
        # Tensor-parallel ranks and pipeline stages receive the same batches, so each was counted tp * pp
        # times.
        tokens, text_bytes = (totals / (self._world.layout.tp * self._world.layout.pp)).tolist()
        return tokens, text_bytes
