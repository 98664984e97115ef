"""Reads batches from Megatron's `GPTDataset`, in an order that depends only on the seed, not on the
layout."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import write_error
from canzona_cli.megatron.parallel import World
from canzona_cli.run.corpus import PreparedCorpus, PreparedSet

Batch = dict[str, torch.Tensor]
"""A micro-batch: `tokens`, `labels`, `loss_mask` and `position_ids`, each `[micro_batch, seq_length / cp]`.

A `BatchStream` adds `counted`, the number of tokens over which the micro-batch's mean loss is taken, on all
context-parallel ranks together."""


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """A stand-in for a tokenizer, with the attributes that `GPTDataset` requires. They suffice, because
    `GPTDataset` reads token ids, never text."""

    vocab_size: int
    eod: int | None
    name: str
    sets: tuple[tuple[int, int], ...]
    """The number of tokens and the number of documents of each data set. Megatron identifies its cached
    sample indices by the data's path and these numbers, so data that is prepared again under the same path
    gets new indices."""

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        sets = ", ".join(f"{tokens} in {documents}" for tokens, documents in self.sets)
        return {"class": "canzona", "name": self.name, "vocab_size": str(self.vocab_size), "sets": sets}


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """The validation samples of one data set."""

    name: str
    share: float
    """The data set's share of the training data; the shares of all sets add up to 1."""
    samples: torch.utils.data.Dataset[Batch]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The training and validation samples. Each sample is `seq_length` tokens, with the next tokens as
    labels."""

    train: torch.utils.data.Dataset[Batch]
    validation: tuple[ValidationSet, ...] = ()
    """The validation samples of each data set; empty if the run does not validate."""


def build_datasets(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> Datasets:
    """Builds the run's training and validation samples. Rank 0 writes the sample indices, and the other ranks
    read them. Collective.

    Raises:
        EnvironmentProblem: the indices cannot be written.
    """
    wants_validation = config.train.eval_interval > 0 and config.train.eval_batches > 0
    held_out = config.data.validation_fraction if wants_validation else 0.0
    assert config.train.global_batch_size is not None
    samples = config.train.steps * config.train.global_batch_size
    train = _build(config, corpus, corpus.sets, split=(0.0, 1 - held_out), samples=samples, cache=cache)
    return Datasets(train=train, validation=build_validation(config, corpus, cache=cache) if held_out else ())


def build_validation(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> tuple[ValidationSet, ...]:
    """Builds the validation samples of each data set: from the sequences that are not used for training, or
    from all sequences if the corpus has no training tokens. Collective."""
    assert config.train.global_batch_size is not None
    held_out = config.data.validation_fraction if corpus.train_tokens else 1.0
    samples = config.train.eval_batches * config.train.global_batch_size
    return tuple(
        ValidationSet(
            name=part.name,
            share=part.share,
            samples=_build(config, corpus, [part], split=(1 - held_out, 1.0), samples=samples, cache=cache),
        )
        for part in corpus.sets
    )


def _build(
    config: RunConfig,
    corpus: PreparedCorpus,
    sets: Sequence[PreparedSet],
    *,
    split: tuple[float, float],
    samples: int,
    cache: Path,
) -> torch.utils.data.Dataset[Batch]:
    """Builds at least `samples` samples from a part of each data set. Several sets are interleaved in
    proportion to their shares.

    Args:
        split: The start and end of the part, as fractions of each set's sequences, such as (0.0, 0.9).
    """
    weights = [part.share for part in sets]
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.train.seq_length,
        blend=([str(part.prefix) for part in sets], weights if len(sets) > 1 else None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=CorpusFacts(
            vocab_size=config.model.vocab_size,
            eod=corpus.eod,
            name=corpus.tokenizer,
            sets=tuple((part.tokens, part.documents) for part in sets),
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # The attention layers apply the causal mask themselves; a mask for each sample would take
        # seq_length^2 bytes.
        create_attention_mask=False,
        # A blend takes at most one sample more from a set than its share, and has an extra sample for each
        # set.
        mid_level_dataset_surplus=max(0.005, (len(sets) + 1 / min(weights)) / samples),
    )
    # Only one of Megatron's three splits is built here: train or validation. The split is part of the index
    # files' names, and does not affect the seed.
    used = 0 if split[0] == 0 else 1
    settings.split_matrix = [split if index == used else None for index in range(3)]
    sizes = [samples if index == used else 0 for index in range(3)]
    built: torch.utils.data.Dataset[Batch] | None
    try:
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()[used]
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(cache):
            raise
        if error.errno is None:  # numpy does not name the reason when a disk becomes full
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fix = "make room there, or choose another folder: data.cache_dir=FOLDER"
        raise write_error("data.cache_dir", cache, error, fix=fix, what="the index of samples") from None
    assert built is not None
    return built


class BatchStream(Iterator[Batch]):
    """An iterator over this data-parallel rank's micro-batches of consecutive global batches.

    In every layout, global batch `b` consists of the `global_batch_size` samples that start at sample
    `first_sample + b * global_batch_size`. A micro-batch is `micro_batch_size` of these samples, so the
    number of data-parallel ranks only decides which rank computes a sample.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Batch], world: World, *, first_sample: int = 0) -> None:
        self._world = world
        sample_count = len(dataset)  # type: ignore[arg-type]
        indices = _indices(world.layout, world.dp_rank, first_sample=first_sample, sample_count=sample_count)
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


def _indices(layout: Layout, dp_rank: int, *, first_sample: int, sample_count: int) -> list[list[int]]:
    """Returns the sample indices of each micro-batch of one data-parallel rank, in order."""
    micro_batches = []
    for batch_start in range(first_sample, sample_count - layout.global_batch_size + 1, layout.global_batch_size):
        for micro in range(layout.num_microbatches):
            start = batch_start + (micro * layout.dp + dp_rank) * layout.micro_batch_size
            micro_batches.append(list(range(start, start + layout.micro_batch_size)))
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
