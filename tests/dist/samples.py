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

    def _text(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self._vocab_size, (self._seq_length + 1,), generator=generator)

    def __getitem__(self, index: int) -> Batch:
        text = self._text(index)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }


class FrequentToken(RandomTokens):
    """Samples in which every second token is the same, as frequent as spaces in indented source code."""

    def _text(self, index: int) -> torch.Tensor:
        text = super()._text(index)
        text[::2] = ord(" ")
        return text


def samples_of(setup: Setup, count: int, kind: type[RandomTokens] = RandomTokens) -> RandomTokens:
    """Returns samples with the length of the run's sequences and the vocabulary of its model."""
    return kind(samples=count, seq_length=setup.train.seq_length, vocab_size=setup.model.vocab_size)
