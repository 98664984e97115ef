"""The order of samples as the launcher computes it, against Megatron's own datasets on real files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
    _get_size_per_split_per_dataset,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from canzona_cli.data.indexed import PairInfo, inspect_pair
from canzona_cli.data.order import Order, about_by_share, order_of, set_sizes
from canzona_cli.records.corpus import DataPlan
from tests.data.texts import prepare_documents
from tests.records.runs import with_tokens

LENGTH, SEED = 32, 1234


class Ids:
    """The attributes of a tokenizer that `GPTDataset` reads."""

    vocab_size, eod, pad = 257, 256, -1
    unique_identifiers = {"class": "test"}  # noqa: RUF012


def megatrons(pair: PairInfo, samples: int, cache: Path) -> GPTDataset:
    """Builds the data set as Megatron's own training script does."""
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(pair.prefix)], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    assert isinstance(built, GPTDataset)
    return built


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairInfo:
    folder = tmp_path_factory.mktemp("order")
    return inspect_pair(prepare_documents(folder, "text", documents=60, seed=1))


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        (0.3, 0.6, 0.2),
        (0.5, 1.4, 0.3),
        (1.3, 1.9, 0.7),
        (1.2, 1.6, 0.9),
        (1.85, 2.4, 1.2),
        (2.2, 2.5, 1.1),
        (2.9, 3.9, 2),
    ],
)
def test_a_run_of_another_length_has_another_order_where_megatron_has_one(
    pair: PairInfo, tmp_path: Path, before: float, after: float, done: float
) -> None:
    """Numbers are in epochs. Megatron separates a last epoch of which less than four fifths are read."""
    counts = [int(epochs * pair.tokens / LENGTH) for epochs in (before, after, done)]
    first, later, at = counts
    orders: list[Order] = []
    data: list[GPTDataset] = []
    for samples in (first, later):
        orders.append(order_of(tokens=pair.tokens, samples=samples, seq_length=LENGTH, seed=SEED))
        data.append(megatrons(pair, samples, tmp_path))
        assert orders[-1].samples == len(data[-1])
    same = all(torch.equal(data[0][index]["tokens"], data[1][index]["tokens"]) for index in range(at))
    assert (orders[0] == orders[1]) == same


@pytest.mark.parametrize("samples", [7, 1000, 100_000])
def test_the_sets_of_a_blend_are_as_large_as_megatrons(samples: int) -> None:
    corpus = with_tokens(1, 1, 1)
    surplus = max(0.005, (3 + 3) / samples)
    expected = _get_size_per_split_per_dataset([1 / 3, 1 / 3, 1 / 3], [samples], surplus=surplus)
    assert set_sizes(DataPlan(corpus=corpus, samples=samples)) == tuple(size for (size,) in expected)
    assert abs(np.subtract(about_by_share([1 / 3] * 3, samples), samples / 3)).max() < 1
