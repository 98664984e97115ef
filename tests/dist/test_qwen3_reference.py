"""Our Qwen3 and Llama compute what Hugging Face's compute, whatever the layout.

The reference shares no code with Megatron-core: it is built from the same shapes, given the weights that the ranks
hold, and runs in one process.
"""

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from canzona_cli.core.megatron import parallel
from canzona_cli.core.megatron.model import build_model
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.dist.ranks import run_ranks
from tests.dist.reference import LLAMA, hugging_face_model, token_losses
from tests.dist.whole import Part, Weights, assemble, named_parameters, part_of

BATCH, SEQ = 2, 64
# Of the largest logit. Seen: 0 on one rank and 1e-6 on several, where sums run in another order (fp32 carries 6e-8 per
# operation). What it must not hide: norm_eps 1e-5 instead of 1e-6 moves a logit by 1e-4,
# Llama 3.1's rope scaling by 8e-2.
RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Output:
    """The outputs of one rank of ours."""

    part: Part
    losses: np.ndarray
    """`[batch, seq_length]`, nats."""
    logits: np.ndarray
    """`[batch, seq_length, vocab_size / tp]`."""


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(7))


def _perturb_norms(model: torch.nn.Module) -> None:
    """Norms start at 1, where forgetting one or permuting a head changes little; move them."""
    with torch.no_grad():
        for name, param in named_parameters([model]):
            if param.dim() == 1:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                param.mul_(1 + 0.3 * torch.randn(param.shape, generator=generator))


def _run_ours(*overrides: str) -> tuple[list[Output], Weights, torch.Tensor, torch.Tensor]:
    """Outputs of every rank, the whole weights, and the reference's logits and losses."""
    # Ten times the usual weights: attention is far from uniform, so that a wrong rotation or a wrong head shows.
    fixed = ("optimizer=adamw", "train.precision=fp32", f"train.seq_length={SEQ}", "model.init_std=0.2")
    config, layout = jobs.resolve(*SMALL, *fixed, *overrides)
    tokens = _tokens(config.model.vocab_size)

    @torch.no_grad()
    def ours() -> Output:
        logging.disable(logging.WARNING)
        world = parallel.initialize(layout, "cpu", seed=config.train.seed)
        [model] = build_model(config.setup, world)
        model.eval()
        _perturb_norms(model)
        positions = torch.arange(SEQ).expand(BATCH, SEQ)
        logits = model(tokens[:, :-1], positions, None)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return Output(part=part_of([model], world), losses=losses.numpy(), logits=logits.numpy())

    outputs = run_ranks(layout.world_size, ours)
    weights = assemble([output.part for output in outputs], config.model)

    def theirs() -> tuple[np.ndarray, np.ndarray]:
        reference = hugging_face_model(config.model, weights, max_length=SEQ).eval()
        with torch.no_grad():
            logits = reference(input_ids=tokens[:, :-1]).logits
            return logits.numpy(), token_losses(reference, tokens[:, :-1], tokens[:, 1:]).numpy()

    ((logits, losses),) = run_ranks(1, theirs)
    return outputs, weights, torch.from_numpy(logits), torch.from_numpy(losses)


KINDS: dict[str, tuple[str, ...]] = {
    "untied": ("gpus=1", "model.tied_embeddings=false"),
    "tied": ("gpus=4", "parallel.tp=4", "model.tied_embeddings=true"),
    "llama": ("gpus=2", "parallel.tp=2", "model.tied_embeddings=false", *LLAMA),
    "experts": (
        "gpus=2",
        "parallel.tp=2",
        "model.tied_embeddings=false",
        "model.ffn_hidden_size=64",
        "model.num_experts=8",
    ),
    "llama 3.1": ("gpus=1", "model.tied_embeddings=false", *LLAMA, "model.rope_scaling=8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_losses_are_those_of_hugging_face(kind: str) -> None:
    outputs, weights, logits, losses = _run_ours(*KINDS[kind])
    assert ("lm_head.weight" in weights) is (kind != "tied")
    assert logits.std() > 0.5, "the reference says nothing: its logits are almost constant"
    ours = torch.cat([torch.from_numpy(output.logits) for output in outputs], dim=-1)
    assert ours.shape == logits.shape
    assert (ours - logits).abs().max() <= RELATIVE * logits.abs().max()
    for output in outputs:
        assert np.abs(output.losses - losses.numpy()).max() <= RELATIVE * losses.abs().max()


@pytest.mark.parametrize("queries_per_group", [1, 8], ids=["mha", "mqa"])
def test_every_kind_of_head_grouping(queries_per_group: int) -> None:
    """One case has as many key/value heads as queries, the other one for all; all other tests have half as many."""
    outputs, weights, logits, _ = _run_ours(
        "gpus=1", "model.num_attention_heads=8", f"model.num_query_groups={8 // queries_per_group}"
    )
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape[0] == 8 // queries_per_group * 16
    ours = torch.from_numpy(outputs[0].logits)
    assert (ours - logits).abs().max() <= RELATIVE * logits.abs().max()
