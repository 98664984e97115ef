"""Megatron's Muon in its mode `distributed` computes the same update as in `duplicated`, on real ranks.

Gradients of whole matrices are known (`tests.dist.synthetic`). The right update is `exact_muon`: one process in fp64.
"""

import re
from collections.abc import Sequence

import pytest
import torch

from tests.dist.engine_support import resolve
from tests.dist.jobs import Runs, ranks_of
from tests.dist.synthetic import FARTHER, FARTHEST, Case, Result, exact_muon, farther, run_engines, whole_gradients
from tests.dist.whole import Weights

STEPS = 3
SC = ("engine.strategy=sc", "train.precision=fp32", "optimizer.lr=0.01")
# Steps are large beside the last bit of bf16 weights.
LAYERWISE = ("engine.strategy=layerwise", "train.precision=bf16", "optimizer.lr=0.1")
CASES = {
    "fp32": (*SC, "gpus=2", "parallel.tp=2"),
    "bf16": (*LAYERWISE, "gpus=4", "parallel.tp=2"),
}
FP32 = 1e-5
"""The largest distance in fp32 from the right weights, over the distance that the weights have moved. Seen: 7.5e-7."""


def _run(runs: Sequence[tuple[str, ...]]) -> list[Result]:
    made = [resolve("optimizer=muon", "optimizer.clip_grad=0", "engine.splitting=qkv", *run) for run in runs]
    return run_engines([Case(config=config, layout=layout, steps=STEPS) for config, layout in made])


def _in_mode(case: str, mode: str) -> tuple[str, ...]:
    return (*CASES[case], f"engine.muon_tp_mode={mode}")


MODES = ("duplicated", "distributed")
RUNS = Runs([_in_mode(case, mode) for case in CASES for mode in MODES], ranks_of, _run)


def _fused(weights: Weights) -> Weights:
    """The matrices that Megatron's Muon updates: gate and up are one."""
    found = {name: weight for name, weight in weights.items() if re.search("[qkvo]_proj|down_proj", name)}
    for name in (name for name in weights if "gate_proj" in name):
        found[name] = torch.cat([weights[name], weights[name.replace("gate_proj", "up_proj")]])
    return found


@pytest.mark.parametrize("case", CASES)
def test_fragments_with_summed_squares_are_updated_like_whole_matrices(case: str) -> None:
    config, _ = resolve("optimizer=muon", *_in_mode(case, "distributed"))
    duplicated, distributed = (RUNS[_in_mode(case, mode)] for mode in MODES)
    before = _fused(distributed.before)
    gradients = [_fused(whole_gradients(distributed.before, config.model, step)) for step in range(STEPS)]
    right = exact_muon(before, gradients, config.optimizer.lr)
    found, other = ({name: _fused(run.after)[name] for name in right} for run in (distributed, duplicated))
    assert any(not torch.equal(found[name], other[name]) for name in right), "both are the same mode"
    together, single = farther(found, other, right)
    assert together < FARTHER
    assert single < FARTHEST
    if case == "fp32":
        moved = sum(float((right[name] - before[name]).norm()) for name in right)
        missed = sum(float((found[name] - right[name]).norm()) for name in right)
        assert missed / moved < FP32
