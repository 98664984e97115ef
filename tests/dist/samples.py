"""Samples without a corpus, for tests that only need tokens."""

import torch

from canzona_cli.core.setup import Setup
from canzona_cli.training.data import Batch


class RandomTokens(torch.utils.data.Dataset[Batch]):
    """Sample `i` is always the same `seq_length` random tokens with their successors as labels."""

    def __init__(self, *, samples: int, seq_length: int, vocab_size: int) -> None:
        self._samples, self._seq_length, self._vocab_size = samples, seq_length, vocab_size

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(self._vocab_size, (self._seq_length + 1,), generator=generator)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }


def samples_of(setup: Setup, count: int) -> RandomTokens:
    """Returns samples with the length of the run's sequences and the vocabulary of its model."""
    return RandomTokens(samples=count, seq_length=setup.train.seq_length, vocab_size=setup.model.vocab_size)
