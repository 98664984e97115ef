"""Reads batches from Megatron's `GPTDataset`, in an order that depends only on the seed, not on the
layout."""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, normalize
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.checkpoint.manifest import BEGINNING, Progress
from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.core.errors import EnvironmentProblem, Problem, refuse, write_error
from canzona_cli.core.megatron.parallel import World, gather
from canzona_cli.core.setup import Layout
from canzona_cli.core.writing import exclusive_lock, write_new
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.order import Mask, continue_plan, held_out, set_sizes
from canzona_cli.records.corpus import DataPlan, PreparedCorpus, PreparedSet, samples_needed
from canzona_cli.records.files import staged

_HASHES: Final = "files.json"
"""The file of an index with the hashes of its other files. It is written last."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """A stand-in for a tokenizer, with the attributes that `GPTDataset` requires. They suffice, because
    `GPTDataset` reads token ids, never text."""

    vocab_size: int
    eod: int | None
    contents: tuple[str, ...]
    """The hashes of the data, because Megatron identifies an index by the path of the data, not by what is
    there."""

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {"class": "canzona", "vocab_size": str(self.vocab_size), "contents": ", ".join(self.contents)}


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """A builder of datasets whose samples have `seq_length` tokens and the tokens that follow them, with their indices
    in a cache that every launch can trust.

    An index belongs to the contents of its data: the key of its folder contains a hash of them. Rank 0 builds the
    index in a hidden folder, adds the hashes of its files, and renames the folder, so that an index is whole or
    absent even if the build is killed. An index whose files do not match their hashes is built again.
    """

    corpus: PreparedCorpus
    vocab_size: int
    seq_length: int
    seed: int
    data: DataConfig
    cache: Path
    """The folder of all indices."""

    def training_set(self, part: PreparedSet, samples: int) -> GPTDataset:
        """Returns at least `samples` samples of a set's training documents. Collective."""
        return self._dataset(part, ~self._held_out(part), samples, Split.train)

    def validation_set(self, part: PreparedSet) -> GPTDataset:
        """Returns each sample of a set's validation tokens once. Collective."""
        return self._dataset(part, self._held_out(part), None, Split.valid)

    def _held_out(self, part: PreparedSet) -> Mask:
        pair = inspect_pair(part.prefix)
        return held_out(pair, part.division, self.data) if part.train_tokens else np.ones(pair.sequences, np.bool_)

    def blend(self, sets: list[GPTDataset], shares: list[float], samples: int) -> BlendedDataset:
        """Returns samples of several sets in fixed shares. Collective."""
        key = {"sets": [data.unique_description for data in sets], "shares": shares, "samples": samples}
        settings = self._settings(self.corpus.sets)
        return self._built(key, settings, lambda where: BlendedDataset(sets, shares, samples, where))

    def _dataset(self, part: PreparedSet, sequences: Mask, samples: int | None, split: Split) -> GPTDataset:
        settings = self._settings([part])
        indices = np.flatnonzero(sequences).astype(np.int32)
        documents = hashlib.sha256(indices.data).hexdigest()
        # A name for Megatron's description; the documents are passed below.
        settings.split_matrix = [documents if name is split else None for name in Split]
        tokens = GPTDataset.build_low_level_dataset(str(part.prefix), settings)
        key = {
            "contents": part.fingerprint,
            "path": str(part.prefix),
            "documents": documents,
            "samples": samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "vocab_size": self.vocab_size,
            "eod": self.corpus.eod,
        }
        return self._built(
            key, settings, lambda where: GPTDataset(tokens, str(part.prefix), indices, samples, split, where)
        )

    def _settings(self, sets: Sequence[PreparedSet]) -> GPTDatasetConfig:
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=([str(part.prefix) for part in sets], None),
            split="1",
            tokenizer=_Facts(
                vocab_size=self.vocab_size,
                eod=self.corpus.eod,
                contents=tuple(part.fingerprint for part in sets),
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            # The attention layers apply the causal mask themselves; a mask for each sample would take
            # seq_length^2 bytes.
            create_attention_mask=False,
        )

    def _built[T](
        self, key: Mapping[str, object], settings: GPTDatasetConfig, build: Callable[[GPTDatasetConfig], T]
    ) -> T:
        """Returns a dataset whose index is in the cache, after rank 0 has built the index if necessary.
        Collective.

        Raises:
            EnvironmentProblem: on every rank together, if the index cannot be written.
        """
        folder = self.cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

        def build_in(where: Path) -> None:
            settings.path_to_cache = str(where)
            build(settings)

        problems: list[Problem] = []
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            try:
                _make_whole(folder, build_in)
            except OSError as error:
                if error.filename is not None and not Path(str(error.filename)).is_relative_to(self.cache):
                    raise
                problems += _as_problems(self.cache, error)
        if torch.distributed.is_initialized():
            problems = gather(problems, list[Problem])[0]
        refuse(problems, EnvironmentProblem)
        settings.path_to_cache = str(folder)
        return build(settings)


def _as_problems(cache: Path, error: OSError) -> tuple[Problem, ...]:
    if error.errno is None:  # numpy does not name the reason when a disk becomes full
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fix = "make room there, or set CANZONA_CACHE=FOLDER in the environment"
    return write_error("CANZONA_CACHE", str(cache), error, fix=fix, what="the index of samples").problems


def _make_whole(folder: Path, build: Callable[[Path], None]) -> None:
    """Makes sure that an index is in the cache and undamaged; builds it if it is not.

    Raises:
        OSError: the index cannot be written.
    """
    if _is_whole(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder.with_name(f".{folder.name}.lock"), on_wait=lambda: None):
        if _is_whole(folder):  # another run built it while this one waited
            return
        shutil.rmtree(folder, ignore_errors=True)
        with staged(folder) as partial:
            build(partial)
            hashes = {path.name: _hash(path) for path in sorted(partial.iterdir())}
            for name in hashes:
                with (partial / name).open("rb+") as file:
                    os.fsync(file.fileno())
            write_new(partial / _HASHES, json.dumps(hashes).encode())


def _is_whole(folder: Path) -> bool:
    """Returns True if the files of an index have the hashes that were recorded when it was built."""
    try:
        hashes = json.loads((folder / _HASHES).read_text())
        return bool(hashes) and all(_hash(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


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
