"""Batches of Megatron's `GPTDataset`, in an order that depends on the seed alone, not on the layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron.parallel import World
from canzona_cli.run.corpus import PreparedCorpus

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `loss_mask` and `position_ids`, each `[micro_batch, seq_length / cp]`, and from a `BatchStream`
also `counted`: how many tokens of the micro-batch the loss is the mean of, on all context-parallel ranks together."""


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """What `GPTDataset` wants to know of a tokenizer: it reads ids and never text."""

    vocab_size: int
    eod: int | None
    name: str

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {"class": "canzona", "name": self.name, "vocab_size": str(self.vocab_size)}


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Samples of `seq_length` tokens with their successors as labels."""

    train: torch.utils.data.Dataset[Batch]
    validation: torch.utils.data.Dataset[Batch] | None


def build_datasets(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> Datasets:
    """The run's training and validation samples; rank 0 builds the sample indices, the others read them."""
    train, batch = config.train, config.train.global_batch_size
    assert batch is not None
    wants_validation = train.eval_interval > 0 and train.eval_batches > 0
    share = config.data.validation_fraction if wants_validation else 0.0
    sizes = (train.steps * batch, train.eval_batches * batch if wants_validation else 0)
    training, validation = _build(config, corpus, share, sizes, cache)
    assert training is not None
    return Datasets(train=training, validation=validation)


def build_validation(config: RunConfig, corpus: PreparedCorpus, *, cache: Path) -> torch.utils.data.Dataset[Batch]:
    """The samples on which a run of these settings is validated; those of all documents where the corpus has none to
    train on."""
    batch = config.train.global_batch_size
    assert batch is not None
    share = config.data.validation_fraction if corpus.train_tokens else 1.0
    _, validation = _build(config, corpus, share, (batch, config.train.eval_batches * batch), cache)
    assert validation is not None
    return validation


def _build(
    config: RunConfig, corpus: PreparedCorpus, share: float, sizes: tuple[int, int], cache: Path
) -> "tuple[torch.utils.data.Dataset[Batch] | None, torch.utils.data.Dataset[Batch] | None]":
    """Samples for training and for validation.

    Args:
        share: of the documents, for validation.
        sizes: samples of each; none are made where the share leaves no documents.
    """
    train = config.train
    facts = CorpusFacts(vocab_size=config.model.vocab_size, eod=corpus.eod, name=corpus.tokenizer)
    settings = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=train.seq_length,
        blend=([str(corpus.prefix)], None),
        split=f"{1 - share:.6f},{share:.6f},0",
        path_to_cache=str(cache),
        tokenizer=facts,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        # The attention layers mask causally by themselves; a mask per sample would be seq_length^2 bytes of traffic.
        create_attention_mask=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, (*sizes, 0), lambda: True, settings).build()
    return built[0], built[1] if share else None


class BatchStream(Iterator[Batch]):
    """This data-parallel rank's micro-batches of consecutive global batches.

    Global batch `b` is the `global_batch_size` samples from `first_sample + b * global_batch_size` on, for every
    layout; micro-batch `m` of data-parallel rank `r` takes `micro_batch_size` of them, so dp only decides who computes
    a sample.
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
                # Else a loader draws a seed for its workers from torch's own state, and that would depend on how often
                # a run was validated and resumed.
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
    """Sample numbers of each micro-batch of one data-parallel rank, in order."""
    per_step = global_batch_size // (micro_batch_size * dp)
    return [
        list(range(start, start + micro_batch_size))
        for batch in range(first_sample, total - global_batch_size + 1, global_batch_size)
        for micro in range(per_step)
        for start in [batch + (micro * dp + dp_rank) * micro_batch_size]
    ]
