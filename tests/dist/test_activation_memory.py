"""The activation formulas of the memory estimate against what autograd really saves."""

import logging
from dataclasses import replace

import pytest
import torch

from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.megatron import parallel
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import Layout, Precision, Recompute
from tests.dist.ranks import run_ranks
from tests.sizes import run

MICRO_BATCH = 4
CASES: tuple[tuple[Precision, Recompute], ...] = tuple(
    (precision, recompute) for precision in ("bf16", "fp32") for recompute in ("none", "selective", "full")
)


def _resolve(cp: int, precision: Precision, recompute: Recompute) -> tuple[RunConfig, Layout]:
    config = run("tiny", cp, tp=1, pp=1, micro_batch_size=MICRO_BATCH, precision=precision, recompute=recompute)
    return resolve(replace(config, parallel=replace(config.parallel, cp=cp)))


def _saved_bytes(config: RunConfig, world: World) -> int:
    """Bytes of the distinct storages, weights apart, that the backward pass of one micro-batch would need."""
    [model] = build_model(config.setup, world)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept.setdefault(storage, tensor)  # holding the tensor keeps its address from being used again
        return tensor

    tokens = torch.randint(0, 256, (MICRO_BATCH, config.train.seq_length // world.layout.cp))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, torch.zeros_like(tokens), None, labels=tokens)
    assert torch.isfinite(loss).all()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_estimated_activations_are_what_autograd_saves(cp: int) -> None:
    """They agree within 2%: rotary tables, log-sum-exps and masks are left out of the formulas."""
    cases = [_resolve(cp, *case) for case in CASES]

    def rank() -> list[int]:
        logging.disable(logging.WARNING)
        world = parallel.initialize(cases[0][1], "cpu", seed=1)
        return [_saved_bytes(config, replace(world, layout=layout)) for config, layout in cases]

    for measured in run_ranks(cp, rank):
        for case, (config, layout), found in zip(CASES, cases, measured, strict=True):
            # Of the logits, autograd saves the fp32 softmax; the estimate adds the logits and their gradient.
            softmax = 4 * MICRO_BATCH * config.train.seq_length // cp * config.model.vocab_size
            expected = estimate(config.setup, layout).parts["activations"] + softmax
            assert abs(found - expected) <= 0.02 * expected, case
