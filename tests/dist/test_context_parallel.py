"""Sequences cut over context-parallel ranks train the model that whole ones train."""

import math
from dataclasses import dataclass
from functools import cache

import pytest

from canzona_cli.config.schema import Layout, RunConfig
from tests.dist import compared, jobs
from tests.dist.compared import Found
from tests.dist.trained import FIXED, different

LAYOUTS = {
    "one rank": ("gpus=1",),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "cp2 tp2": ("gpus=4", "parallel.cp=2", "parallel.tp=2"),
    "cp2 dp2": ("gpus=4", "parallel.cp=2"),
    "cp2 pp2": ("gpus=4", "parallel.cp=2", "parallel.pp=2"),
}
SETTINGS = {
    "muon": ("optimizer=muon",),
    "adamw": ("optimizer=adamw",),
    "muon bf16 selective": ("optimizer=muon", "train.precision=bf16", "train.recompute=selective"),
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What adding up in another order may come to in four steps, relative."""

    loss: float
    grad_norm: float
    weights: float


# Seen: 2e-7, 8e-6, 1e-4; and 1e-4, 7e-4, 0.05.
FP32 = Bounds(loss=2e-6, grad_norm=3e-5, weights=5e-4)
BF16 = Bounds(loss=5e-4, grad_norm=3e-3, weights=0.15)


def _resolve(where: str, how: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, "train.micro_batch_size=4", *SETTINGS[how], *LAYOUTS[where])


@cache
def _found(where: str) -> dict[str, Found]:
    return compared.found({how: _resolve(where, how) for how in SETTINGS})


def test_a_loss_is_the_mean_over_the_tokens_that_count() -> None:
    """More than a quarter do not. Weights as small as the first ones give any token the chance of every other."""
    config, _ = _resolve("one rank", "adamw")
    first = _found("one rank")["adamw"].losses[0]
    assert first == pytest.approx(math.log(config.model.vocab_size), rel=0.02)


@pytest.mark.parametrize("where", [where for where in LAYOUTS if where != "one rank"])
@pytest.mark.parametrize("how", SETTINGS)
def test_cut_sequences_train_what_whole_ones_train(how: str, where: str) -> None:
    one, found, bounds = _found("one rank")[how], _found(where)[how], BF16 if "bf16" in how else FP32
    assert min(one.grad_norms) > 0.25, "clipping is not active"
    assert different(found.before, one.before) == []
    assert (*found.losses, found.validation) == pytest.approx((*one.losses, one.validation), rel=bounds.loss)
    assert found.grad_norms == pytest.approx(one.grad_norms, rel=bounds.grad_norm)
    assert compared.apart(found, one) < bounds.weights
