"""One seed is one model: the ranks' fragments, put together, are bitwise the same for every tp, pp and dp."""

import logging
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron import parallel
from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.model.geometry import weight_of
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.setup import ModelConfig
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.dist.ranks import run_ranks
from tests.dist.whole import Part, Weights, assemble, part_of

RESIDUAL = ("o_proj", "down_proj")


@cache
def _parts(gpus: int, *overrides: str) -> tuple[list[Part], ModelConfig]:
    config, layout = jobs.resolve(*SMALL, "optimizer=adamw", "train.precision=fp32", f"gpus={gpus}", *overrides)

    def build() -> Part:
        logging.disable(logging.WARNING)
        world = parallel.initialize(layout, "cpu", seed=config.train.seed)
        chunks = build_model(config.setup, world)
        _assert_geometry(chunks, config.model, layout.tp)
        if layout.world_size == 1:
            _assert_routing(chunks, config)
        return part_of(chunks, world)

    return run_ranks(layout.world_size, build), config.model


def _assert_geometry(chunks: list[torch.nn.Module], shape: ModelConfig, tp: int) -> None:
    """Megatron's own parameters have the names and shapes that `model.geometry` gives them."""
    for name, param in global_parameters(chunks):
        parameter = weight_of(name, shape)
        assert (parameter is not None) == (param.dim() == 2), name
        if parameter is not None:
            stored = parameter.stored(tp)
            assert (stored.rows, stored.cols) == tuple(param.shape), name


def _assert_routing(chunks: list[torch.nn.Module], config: RunConfig) -> None:
    """The table that a run prints has Megatron's parameters in it, all and no other, with their elements."""
    counts, elements = Counter[str](), Counter[str]()
    for name, param in global_parameters(chunks):
        pattern = re.sub(r"layers\.\d+\.", "layers.*.", name)
        counts[pattern] += 1
        elements[pattern] += param.numel()
    found = routing(config.setup)
    assert {one.pattern: (one.count, one.elements) for one in found.adamw} == {
        pattern: (counts[pattern], elements[pattern]) for pattern in counts
    }
    muon = routing(replace(config, optimizer=compose_run(["recipe=tiny", "optimizer=muon"]).config.optimizer).setup)
    assert sum(one.elements for one in (*muon.matrices, *muon.adamw)) == elements.total()


def _whole(gpus: int, *overrides: str) -> Weights:
    parts, shape = _parts(gpus, *overrides)
    # Already checks that dp replicas, tp replicas of norms and both copies of a tied embedding are bitwise equal.
    return assemble(parts, shape)


def _layout(tp: int, pp: int) -> tuple[str, str]:
    return f"parallel.tp={tp}", f"parallel.pp={pp}"


@pytest.fixture(scope="module")
def one_rank() -> Weights:
    """The model as a single process has it."""
    return _whole(1)


def _assert_same(weights: Weights, expected: Weights) -> None:
    assert weights.keys() == expected.keys()
    different = [name for name, weight in weights.items() if not torch.equal(weight, expected[name])]
    assert not different


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (2, 2)])
def test_fragments_of_every_layout_make_the_model_of_one_process(one_rank: Weights, tp: int, pp: int) -> None:
    """q, k, v, gate and up each in canonical row order, not as Megatron interleaves and stacks them."""
    _assert_same(_whole(tp * pp, *_layout(tp, pp)), one_rank)


def test_data_parallel_ranks_hold_the_same_model(one_rank: Weights) -> None:
    _assert_same(_whole(4, *_layout(2, 1)), one_rank)


def test_untied_embeddings_do_not_depend_on_the_layout_either(one_rank: Weights) -> None:
    untied = "model.tied_embeddings=false"
    weights = _whole(1, untied)
    _assert_same(_whole(4, untied, *_layout(2, 2)), weights)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    # Everything else is what it is in the tied model: a weight depends on its own name alone.
    del weights["lm_head.weight"]
    _assert_same(weights, one_rank)


def test_both_stages_of_a_pipeline_hold_the_tied_embedding() -> None:
    """Megatron zeroes the last stage's copy and adds both up; our draw must end up equal on both, and not doubled."""
    parts, _ = _parts(4, *_layout(2, 2))
    for tp_rank in (0, 1):
        first, last = (
            next(part.fragments for part in parts if (part.tp_rank, part.pp_rank) == (tp_rank, pp_rank))
            for pp_rank in (0, 1)
        )
        embedding = torch.from_numpy(first["embedding.word_embeddings.weight"].values)
        assert torch.equal(embedding, torch.from_numpy(last["output_layer.weight"].values))
        assert embedding.std().item() == pytest.approx(0.02, rel=0.05)


def test_weights_are_drawn_as_promised(one_rank: Weights) -> None:
    """normal(0, init_std), residual projections smaller by sqrt(2 * layers), norms at 1."""
    layers = sum("input_layernorm" in name for name in one_rank)
    for name, weight in one_rank.items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        expected = 0.02 / math.sqrt(2 * layers) if any(part in name for part in RESIDUAL) else 0.02
        n = weight.numel()
        # Five standard errors of a normal sample's mean and standard deviation.
        assert abs(weight.mean().item()) < 5 * expected / math.sqrt(n), name
        assert abs(weight.std().item() / expected - 1) < 5 / math.sqrt(2 * n), name


def test_no_two_matrices_are_the_same_draw(one_rank: Weights) -> None:
    corners = {name: tuple(weight[0, :8].tolist()) for name, weight in one_rank.items() if weight.dim() == 2}
    assert len(set(corners.values())) == len(corners)


def test_another_seed_is_another_model(one_rank: Weights) -> None:
    other = _whole(1, "train.seed=4321")
    assert not any(torch.equal(other[name], weight) for name, weight in one_rank.items() if weight.dim() == 2)


def test_bf16_weights_are_the_same_draw_rounded(one_rank: Weights) -> None:
    rounded = {name: weight.bfloat16().float() for name, weight in one_rank.items()}
    _assert_same(_whole(2, "train.precision=bf16", *_layout(2, 1)), rounded)
