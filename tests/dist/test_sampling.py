"""The text that a model writes during training is the one that Hugging Face's Qwen3 writes greedily with the same
weights, on every layout; and training continues as if no text had been written."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from canzona_cli.checkpoint.snapshot import random_states
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup.training import TEMPERATURE
from canzona_cli.data.tokenizers import ByteTokenizer
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import continuation, gumbel_noise, train_step
from tests.dist import jobs, whole
from tests.dist.jobs import SMALL, on_ranks, planned
from tests.dist.ranks import run_ranks
from tests.dist.reference import hugging_face_model
from tests.dist.samples import RandomTokens
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, Weights

STEPS = 2
FIXED = (
    *SMALL,
    "train.seq_length=32",
    "train.batch_tokens=256",
    "train.precision=fp32",
    f"train.steps={STEPS}",
    # Ten times the usual weights and a small rate: what is written does not repeat itself, and stays far from ties.
    "model.init_std=0.2",
    "optimizer.lr=3e-3",
)
LAYOUTS = {
    "tp2": ("gpus=2", "parallel.tp=2"),
    "pp2 vpp2": ("gpus=2", "parallel.pp=2", "parallel.vpp=2", "model.num_layers=4"),
    "cp2": ("gpus=2", "parallel.cp=2", "model.tied_embeddings=false"),
    "tp2 pp2 bf16": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "train.precision=bf16", "train.recompute=full"),
}
SWEPT = ("pp2 vpp2", "cp2", "tp2 pp2 bf16")
EVERYWHERE = [pytest.param(where, marks=[pytest.mark.sweep] if where in SWEPT else []) for where in LAYOUTS]
PROMPT = (100, 101, 102, 32, 109)
TOKENS = 40
"""More than the sequence has room for."""
ROOM = 32 - len(PROMPT)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The part of a run that one rank saw."""

    written: list[list[int]]
    """The texts written before the first step and after the last; empty for a run that wrote no text."""
    ended: list[int]
    """The text before the first step, if its fifth token were the end of a document."""
    losses: list[float]
    random: dict[str, list[float]]
    before: Part
    after: Part


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of all ranks."""

    config: RunConfig
    looked: list[Seen]
    other: list[Seen]
    """The same of a run that wrote no text."""

    def weights(self, when: str) -> Weights:
        return whole.assemble([getattr(seen, when) for seen in self.looked], self.config.model)


@cache
def _found(where: str) -> Found:
    config, layout = jobs.resolve(*FIXED, *LAYOUTS[where])
    plan = planned(config, layout)

    def work(looks: bool, world: World) -> Seen:
        trainee = assemble(config, world, plan)
        before = whole.part_of(trainee.chunks, world)
        written: list[list[int]] = []
        losses: list[float] = []
        ended: list[int] = []
        samples = RandomTokens(samples=STEPS * layout.global_batch_size, seq_length=32, vocab_size=257)
        batches = BatchStream(samples, world)
        for step in range(STEPS + 1):
            if looks and step in (0, STEPS):
                written.append(continuation(trainee, PROMPT, tokens=TOKENS, end=-1))
                ended = ended or continuation(trainee, PROMPT, tokens=TOKENS, end=written[0][4])
            if step < STEPS:
                losses.append(train_step(trainee, batches).loss)
        finish_gathering(trainee)
        return Seen(
            written=written,
            ended=ended,
            losses=losses,
            random={name: state.double().tolist() for name, state in random_states().items()},
            before=before,
            after=whole.part_of(trainee.chunks, world),
        )

    ranks = on_ranks({True: (config, layout), False: (config, layout)}, work)
    return Found(config=config, looked=ranks[True], other=ranks[False])


@pytest.mark.parametrize("where", EVERYWHERE)
def test_all_ranks_write_what_hugging_face_writes_with_the_same_weights(where: str) -> None:
    found = _found(where)
    written = found.looked[0].written
    assert all(seen.written == written for seen in found.looked)
    assert {len(text) for text in written} == {ROOM}
    assert len({tuple(text) for text in written}) > 1, "training changed nothing of it"
    assert min(len(set(text)) for text in written) > 5, "it repeats itself, and any model might write it"
    if found.config.train.precision == "bf16":
        return  # two arithmetics of bf16 part at the first near tie
    for when, text in (("before", written[0]), ("after", written[-1])):
        weights = found.weights(when)

        def theirs(weights: Weights = weights) -> list[int]:
            reference = hugging_face_model(found.config.model, weights, max_length=32).eval()
            ids = torch.tensor([PROMPT])
            with torch.no_grad():
                for _ in range(ROOM):
                    logits = reference(input_ids=ids).logits[0, -1]
                    best = (logits / TEMPERATURE + gumbel_noise(ids.size(1) - 1, len(logits))).argmax()
                    ids = torch.cat([ids, best.view(1, 1)], dim=1)
            return ids[0, len(PROMPT) :].tolist()

        assert run_ranks(1, theirs) == [text]


def test_noise_draws_tokens_with_the_softmax_of_their_logits_however_the_vocabulary_is_padded() -> None:
    logits, positions = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]), 4000
    noise = [gumbel_noise(position, 64) for position in range(positions)]
    assert all(torch.equal(each[:5], gumbel_noise(position, 5)) for position, each in enumerate(noise))
    drawn = (logits / TEMPERATURE + torch.stack(noise)[:, :5]).argmax(dim=1).bincount(minlength=5) / positions
    likely = (logits / TEMPERATURE).softmax(dim=0)
    assert ((drawn - likely).abs() < 5 * (likely * (1 - likely) / positions).sqrt()).all(), "five standard errors"


@pytest.mark.parametrize("where", EVERYWHERE)
def test_looking_changes_nothing_of_training(where: str) -> None:
    found = _found(where)
    for looked, other in zip(found.looked, found.other, strict=True):
        assert looked.losses == other.losses
        assert looked.random == other.random
        for name, fragment in looked.after.fragments.items():
            assert (fragment.values == other.after.fragments[name].values).all(), name


def test_a_sample_ends_where_a_document_does() -> None:
    """Told that its fifth token ends documents, it writes what comes before that."""
    found = _found("tp2")
    text = found.looked[0].written[0]
    assert found.looked[0].ended == text[: text.index(text[4])]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert ByteTokenizer().decode([72, 105, 0xC3, 256, 500, 0xC3, 0xA9]) == "Hi\ufffd\ufffd\ufffd\u00e9"
