"""A checkpoint's weights without anything that trains them, on layouts other than that which saved it."""

import numpy as np
import pytest
import torch

from canzona_cli.checkpoint.restore import load_weights, restore, verify_together
from canzona_cli.core.megatron.model import Model, build_model
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Batch, BatchStream, CountingStream
from canzona_cli.training.step import validate
from tests.dist import whole
from tests.dist.jobs import Runs, on_ranks, planned
from tests.dist.samples import RandomTokens
from tests.dist.saved import Case, Outcome, resolve, saving_runs

SHAPE = (
    *("optimizer=muon", "model.num_layers=4", "train.seq_length=32", "train.batch_tokens=256"),
    "train.micro_batch_size=4",
)
SAVED = Case(settings=(*SHAPE, "gpus=2", "parallel.tp=2"), steps=2)
LAYOUTS = {
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "pp2 vpp2": ("gpus=2", "parallel.pp=2", "parallel.vpp=2"),
}
BATCHES = 2


class Part(torch.utils.data.Dataset[Batch]):
    """The samples from the `first` one on, and samples without loss, as Megatron's data sets have them."""

    def __init__(self, samples: RandomTokens, first: int) -> None:
        self._samples, self._first = samples, first

    def __getitem__(self, index: int | None) -> Batch:
        if index is not None:
            return self._samples[index + self._first]
        sample = self._samples[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs[Case, Outcome]:
    return saving_runs(tmp_path_factory.mktemp("saved"), [SAVED])


@pytest.mark.parametrize("where", LAYOUTS)
def test_weights_are_those_that_were_trained_and_every_token_counts_once(where: str, runs: Runs[Case, Outcome]) -> None:
    """Weights are bf16: they are rounded as training rounds them, and the loss is that of a run that continues from
    there."""
    saved = runs[SAVED]
    config, layout = resolve(*SHAPE, *LAYOUTS[where])
    plan = planned(config, layout)
    size, vocabulary, length = layout.global_batch_size, config.model.vocab_size, config.train.seq_length
    samples = RandomTokens(samples=BATCHES * size, seq_length=length, vocab_size=vocabulary)
    lengths = (np.arange(vocabulary) % 7).astype(np.float64)

    def work(_: int, world: World) -> tuple[whole.Part, float, float, tuple[float, float], list[float]]:
        folder = saved.checkpoint
        manifest = verify_together(world, folder)
        model = Model(
            setup=config.setup, world=world, chunks=build_model(config.setup, world), timer=PhaseTimer(world.device)
        )
        load_weights(model, folder, manifest)
        batches = CountingStream(BatchStream(samples, world), world, lengths)
        loss = validate(model, batches, samples=BATCHES * size)
        trainee = assemble(config, world, plan)
        restore(trainee, folder, manifest)
        trained = validate(trainee, BatchStream(samples, world), samples=BATCHES * size)
        few = BATCHES * size - 3
        parts = []
        for first, last in ((0, few), (few, BATCHES * size)):
            part = Part(samples, first)
            counting = CountingStream(BatchStream(part, world, count=last - first), world, None)
            parts.append(validate(model, counting, samples=last - first))
            assert counting.totals()[0] == (last - first) * length
        return whole.part_of(model.chunks, world), loss, trained, batches.totals(), parts

    (ranks,) = on_ranks({0: (config, layout)}, work).values()
    weights = whole.assemble([part for part, *_ in ranks], config.model)
    assert weights.keys() == saved.weights.keys()
    assert all(torch.equal(weights[name], saved.weights[name]) for name in weights)
    labels = torch.stack([samples[index]["labels"] for index in range(BATCHES * size)])
    counted = (labels.numel(), lengths[labels.numpy()].sum())
    for _, loss, trained, totals, parts in ranks:
        assert loss == trained
        # Batches of 8: the last one of 13 is not full, and neither is one of 3. Every sample counts once.
        most, rest = parts
        assert loss == pytest.approx(((BATCHES * size - 3) * most + 3 * rest) / (BATCHES * size), rel=1e-6)
        assert most != rest
        assert totals == counted
