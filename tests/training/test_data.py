"""The samples that a rank trains on: a property of the run, never of its layout."""

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import Layout
from canzona_cli.training.data import Batch, BatchStream
from tests.sizes import layout


class Numbers(torch.utils.data.Dataset[Batch]):
    """Samples of one token, which is the sample's number."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), torch.tensor([index]))


def read(ranks: Layout, dp_rank: int, *, first: int, samples: int) -> list[list[int]]:
    """Returns the samples of a rank's micro-batches, from sample `first` on."""
    world = cast(World, SimpleNamespace(layout=ranks, dp_rank=dp_rank, device=torch.device("cpu")))
    stream = BatchStream(Numbers(samples), world, first_sample=first)
    return [batch["tokens"].flatten().tolist() for batch in stream]


@given(
    dp=st.integers(1, 4),
    micro_batch_size=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    batches=st.integers(1, 4),
    first_batch=st.integers(0, 3),
    left_over=st.integers(0, 31),
)
def test_the_ranks_of_a_step_read_exactly_the_samples_of_its_global_batch(
    dp: int, micro_batch_size: int, micro_batches: int, batches: int, first_batch: int, left_over: int
) -> None:
    """Batch `b` is samples `[b * G, (b + 1) * G)`, each once, for every dp and every micro-batch size; starting
    later continues the same sequence."""
    size = dp * micro_batch_size * micro_batches
    total = batches * size + left_over % (dp * micro_batch_size)  # a rest that no batch can have
    ranks = layout(dp=dp, micro=micro_batch_size, count=micro_batches)
    by_rank = [read(ranks, rank, first=first_batch * size, samples=total) for rank in range(dp)]
    expected_batches = range(first_batch, batches)
    for rank, of_rank in enumerate(by_rank):
        assert len(of_rank) == micro_batches * len(expected_batches)
        assert all(len(samples) == micro_batch_size for samples in of_rank)
        assert of_rank == read(ranks, rank, first=0, samples=total)[micro_batches * first_batch :]
    for done, batch in enumerate(expected_batches):
        step = slice(done * micro_batches, (done + 1) * micro_batches)
        samples = [sample for of_rank in by_rank for samples in of_rank[step] for sample in samples]
        assert sorted(samples) == list(range(batch * size, (batch + 1) * size))
