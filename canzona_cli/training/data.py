"""Batches of Megatron's `GPTDataset`, in an order that depends on the seed alone, not on the layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.run.corpus import PreparedCorpus, PreparedSet

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `loss_mask` and `position_ids`, each `[micro_batch, seq_length / cp]`, and from a
`BatchStream` also `counted`: how many tokens of the micro-batch the loss is the mean of, on all
context-parallel ranks together."""


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """The facts that `GPTDataset` asks of a tokenizer: it reads ids and never text."""

    vocab_size: int
    eod: int | None
    name: str
    sets: tuple[tuple[int, int], ...]
    """Tokens and documents of each set: Megatron finds its sample indices again by paths, and what lies there
    may have been prepared anew."""

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        sets = ", ".join(f"{tokens} in {documents}" for tokens, documents in self.sets)
        return {"class": "canzona", "name": self.name, "vocab_size": str(self.vocab_size), "sets": sets}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Samples of one set for validation."""

    name: str
    share: float
    """The share of the set in training, 1 for all together."""
    samples: torch.utils.data.Dataset[Batch]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Samples of `seq_length` tokens with their successors as labels."""

    train: torch.utils.data.Dataset[Batch]
    validation: tuple[HeldOut, ...] = ()
    """Nothing where a run is not validated."""


def build_datasets(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> Datasets:
    """Builds the run's training and validation samples; rank 0 builds the sample indices, the others read them."""
    wants_validation = config.train.eval_interval > 0 and config.train.eval_batches > 0
    share = config.data.validation_fraction if wants_validation else 0.0
    batch = config.train.global_batch_size
    assert batch is not None
    train = _build(config, corpus, corpus.sets, split=(0.0, 1 - share), samples=config.train.steps * batch, cache=cache)
    return Datasets(train=train, validation=build_validation(config, corpus, cache=cache) if share else ())


def build_validation(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> tuple[HeldOut, ...]:
    """Builds the validation samples of each set; those of all documents where the corpus has none to train on."""
    assert config.train.global_batch_size is not None
    share = config.data.validation_fraction if corpus.train_tokens else 1.0
    samples = config.train.eval_batches * config.train.global_batch_size
    return tuple(
        HeldOut(
            name=one.name,
            share=one.share,
            samples=_build(config, corpus, [one], split=(1 - share, 1.0), samples=samples, cache=cache),
        )
        for one in corpus.sets
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
    """Builds at least so many samples of these parts of the sets: in turn, by their shares,
    if there are several."""
    weights = [one.share for one in sets]
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.train.seq_length,
        blend=([str(one.prefix) for one in sets], weights if len(sets) > 1 else None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=CorpusFacts(
            vocab_size=config.model.vocab_size,
            eod=corpus.eod,
            name=corpus.tokenizer,
            sets=tuple((one.tokens, one.documents) for one in sets),
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # The attention layers mask causally by themselves; a mask per sample would be seq_length^2 bytes of
        # traffic.
        create_attention_mask=False,
        # A blend takes at most one sample more of a set than its share of them, and has one more for each
        # set.
        mid_level_dataset_surplus=max(0.005, (len(sets) + 1 / min(weights)) / samples),
    )
    index = 0 if split[0] == 0 else 1
    """The one of Megatron's three splits that is built; it seeds nothing, but is told in the files' names."""
    settings.split_matrix = [split if each == index else None for each in range(3)]
    sizes = [samples if each == index else 0 for each in range(3)]
    built: torch.utils.data.Dataset[Batch] | None
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()[index]
    assert built is not None
    return built


class BatchStream(Iterator[Batch]):
    """This data-parallel rank's micro-batches of consecutive global batches.

    Global batch `b` is the `global_batch_size` samples from `first_sample + b * global_batch_size` on, for
    every layout; micro-batch `m` of data-parallel rank `r` takes `micro_batch_size` of them, so dp only
    decides who computes a sample.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Batch], world: World, *, first_sample: int = 0) -> None:
        layout = world.layout
        self._world = world
        indices = _indices(
            first_sample=first_sample,
            total=len(dataset),  # type: ignore[arg-type]
            global_batch_size=layout.global_batch_size,
            micro_batch_size=layout.micro_batch_size,
            dp=layout.dp,
            dp_rank=world.dp_rank,
        )
        on_gpu = world.device.type == "cuda"
        self._batches = iter(
            torch.utils.data.DataLoader(
                dataset,
                batch_sampler=indices,
                num_workers=2 if on_gpu else 0,
                pin_memory=on_gpu,
                # Else a loader draws a seed for its workers from torch's own state, and that would depend on
                # how often a run was validated and resumed.
                generator=torch.Generator(),
            )
        )

    def __next__(self) -> Batch:
        raw = next(self._batches)
        batch = {
            key: raw[key].to(self._world.device, non_blocking=True)
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        }
        # Of the whole sequences: the ranks that share them must agree on what a token counts.
        counted = batch["loss_mask"].sum()
        if self._world.layout.cp > 1:
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=self._world.groups.cp)
        return {**batch, "counted": counted}


def _indices(
    *, first_sample: int, total: int, global_batch_size: int, micro_batch_size: int, dp: int, dp_rank: int
) -> list[list[int]]:
    """Lists the sample numbers of each micro-batch of one data-parallel rank, in order."""
    per_step = global_batch_size // (micro_batch_size * dp)
    return [
        list(range(start, start + micro_batch_size))
        for batch in range(first_sample, total - global_batch_size + 1, global_batch_size)
        for micro in range(per_step)
        for start in [batch + (micro * dp + dp_rank) * micro_batch_size]
    ]


class Counted(Iterator[Batch]):
    """Batches on their way to the model, and how much of text they were.

    Args:
        lengths: bytes of each token, `[vocab_size]`; None where they are not known.
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
        """Tokens and bytes of all ranks' batches. Collective."""
        totals = self._totals.clone()
        torch.distributed.all_reduce(totals)
        # Ranks of a tensor-parallel group, and stages, were given the same ones.
        tokens, size = (totals / (self._world.layout.tp * self._world.layout.pp)).tolist()
        return tokens, size
