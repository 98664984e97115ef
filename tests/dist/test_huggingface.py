"""A model from Hugging Face, trained on TP 2 x DP 2, with experts on EP 2 too, and exported again: transformers
computes what the engine computes.

Weights come in and go out by the commands people type. Which tensor is which is transformers' own word: it made the
folder that is imported, and reads the one that is exported.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step, validate
from tests.checkpoint.huggingface.folders import random_folder
from tests.cli.commands.support import canzona
from tests.dist import jobs
from tests.dist.jobs import EXPERTS, SMALL, Runs, on_ranks, planned, ranks_of
from tests.dist.ranks import run_ranks
from tests.dist.reference import LLAMA, Reference, token_losses
from tests.dist.samples import RandomTokens, samples_of
from tests.dist.saved import save
from tests.dist.synthetic import finish_gathering

LAYOUT = ("gpus=4", "parallel.tp=2", "train.precision=fp32", "train.steps=20", "optimizer.lr=0.005")
STEPS = 3
KINDS: dict[str, tuple[str, ...]] = {
    "tied": ("model.tied_embeddings=true",),
    "untied": ("model.tied_embeddings=false",),
    "llama": ("model.tied_embeddings=false", *LLAMA, "model.rope_scaling=8"),
    "experts": (
        *("model.tied_embeddings=false", *EXPERTS, "parallel.ep=2"),
        *("model.moe_layer_freq=[0,1]", "model.dense_ffn_hidden_size=96"),
    ),
}
SWEPT = ("untied", "experts")
"""The families that only the sweep runs. Of the others, one has tied embeddings and one an output layer of its own."""
CLASSES: dict[str, type[Reference]] = {
    "tied": Qwen3ForCausalLM,
    "untied": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
    "experts": Qwen3MoeForCausalLM,
}
# Of the largest logit. Seen: 1e-6 (sums in another order, as in test_qwen3_reference).
RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The outputs of one rank, before training and after."""

    logits: tuple[np.ndarray, np.ndarray]
    """`[batch, seq_length, vocab_size / tp]`."""
    losses: tuple[float, float]
    """The validation losses, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Went:
    """A model's whole way."""

    ours: Seen
    logits: tuple[np.ndarray, np.ndarray]
    """Transformers', of the folder that came in and of the one that went out."""
    losses: tuple[float, float]


def _samples(config: RunConfig) -> RandomTokens:
    return samples_of(config.setup, 64)


def _tokens(config: RunConfig) -> torch.Tensor:
    """`[4, seq_length]`."""
    return torch.stack([_samples(config)[sample]["tokens"] for sample in range(4)])


@pytest.fixture(scope="module")
def went(tmp_path_factory: pytest.TempPathFactory) -> Runs[str, Went]:
    """Kinds that are cut over ranks alike on the same ranks."""
    root = tmp_path_factory.mktemp("huggingface")
    usual = [kind for kind in KINDS if kind not in SWEPT]
    return Runs(usual, lambda kind: ranks_of(KINDS[kind]), partial(_go, root), SWEPT)


def _go(root: Path, kinds: Sequence[str]) -> list[Went]:
    made: dict[str, tuple[RunConfig, Layout]] = {}
    for kind in kinds:
        settings = (*SMALL, *LAYOUT, *KINDS[kind])
        made[kind] = jobs.resolve(*settings)
        config = made[kind][0]
        random_folder(root / kind / "in", config.model, max_length=config.train.seq_length, shard="200KB")
        done = canzona("checkpoint", "import", root / kind / "in", "--out", root / kind / "run", *settings, code=0)
    plans = {kind: planned(*made[kind]) for kind in made}

    def work(kind: str, world: World) -> Seen:
        config = made[kind][0]
        trainee = assemble(config, world, plans[kind])
        checkpoint = root / kind / "run" / "checkpoints" / "step-00000000"
        restore(trainee, checkpoint, verify_together(world, checkpoint), weights_only=True)

        @torch.no_grad()
        def logits() -> np.ndarray:
            tokens = _tokens(config)
            [model] = trainee.chunks
            found: np.ndarray = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).numpy()
            return found

        def loss() -> float:
            return validate(trainee, BatchStream(_samples(config), world), samples=1 * world.layout.global_batch_size)

        before = logits(), loss()
        batches = BatchStream(_samples(config), world, first_sample=world.layout.global_batch_size)
        for _ in range(STEPS):
            train_step(trainee, batches)
        finish_gathering(trainee)
        after = logits(), loss()
        save(config, trainee, root / kind / "run" / "checkpoints", STEPS)
        return Seen(logits=(before[0], after[0]), losses=(before[1], after[1]))

    found = []
    for kind, ranks in on_ranks(made, work).items():
        done = canzona(
            "checkpoint", "export", root / kind / "run", root / kind / "out", "--dtype", "fp32", "--json", code=0
        )
        assert json.loads(done.stdout)["step"] == STEPS
        whole = [np.concatenate([rank.logits[time] for rank in ranks[:2]], axis=-1) for time in (0, 1)]
        config, layout = made[kind]
        folders = [root / kind / "in", root / kind / "out"]
        [theirs] = run_ranks(1, partial(_theirs, folders, CLASSES[kind], config, layout.global_batch_size))
        found.append(
            Went(
                ours=Seen(logits=(whole[0], whole[1]), losses=ranks[0].losses),
                logits=(theirs[0][0], theirs[1][0]),
                losses=(theirs[0][1], theirs[1][1]),
            )
        )
    return found


@torch.no_grad()
def _theirs(
    folders: Sequence[Path], expected: type[Reference], config: RunConfig, samples: int
) -> list[tuple[np.ndarray, float]]:
    """Logits of `_tokens` and the loss of the first samples, of the models that transformers reads."""
    found = []
    batch = [_samples(config)[sample] for sample in range(samples)]
    tokens, labels = (torch.stack([sample[key] for sample in batch]) for key in ("tokens", "labels"))
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert isinstance(model, expected)
        assert model.dtype is torch.float32
        found.append((model(_tokens(config)).logits.numpy(), token_losses(model, tokens, labels).mean().item()))
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sweep if kind in SWEPT else ()) for kind in KINDS]
)
def test_transformers_and_the_engine_agree_before_training_and_after(went: Runs[str, Went], kind: str) -> None:
    way = went[kind]
    for ours, theirs in zip(way.ours.logits, way.logits, strict=True):
        assert theirs.std() > 0.5, "the reference says nothing: its logits are almost constant"
        assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()
    before, after = way.logits
    assert np.abs(after - before).max() > 0.1 * np.abs(before).max(), "training moved nothing"
    assert way.ours.losses == pytest.approx(way.losses, rel=RELATIVE)
