"""Pipeline stages of several model chunks train what stages of one chunk train, and save what every layout reads."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.dist import compared, jobs
from tests.dist.compared import Bounds, Found
from tests.dist.saved import Case, resolve, saving_runs, units_of
from tests.dist.trained import FIXED, OPTIMIZERS, different

FOUR = ("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=96", "train.seq_length=32")
EIGHT = (*FOUR, "model.num_layers=8")
LAYOUTS = {
    "one rank": (*FOUR, "gpus=1"),
    "pp2": (*FOUR, "gpus=4", "parallel.pp=2", "parallel.vpp=1"),
    "pp2 vpp2": (*FOUR, "gpus=4", "parallel.pp=2", "parallel.vpp=2"),
    "one rank, deep": (*EIGHT, "gpus=1"),
    # More than two stages send both ways through one communicator; as many micro-batches as there are stages are all
    # on their way before the first backward pass.
    "pp4 vpp2": (*EIGHT, "gpus=4", "parallel.pp=4", "parallel.vpp=2"),
}
SETTINGS = {
    "muon": ("optimizer=muon", "optimizer.clip_grad=0"),
    "adamw": ("optimizer=adamw",),
    # Megatron's own needs bf16 weights.
    "layerwise": ("engine.strategy=layerwise", "engine.splitting=qkv", "train.precision=bf16"),
    "sc": (*OPTIMIZERS["soap"], "engine.strategy=sc", "train.recompute=full"),
}


OFTEN, SELDOM = ("muon", "adamw"), ("layerwise", "sc")


# Seen: 4e-7, 5e-5, and 1e-4, 2e-3 with SOAP.
FP32 = Bounds(loss=2e-6, grad_norm=2e-4, weights=5e-3)
BF16 = Bounds(loss=5e-4, grad_norm=3e-3, weights=0.15)


@cache
def _found(where: str, *hows: str) -> dict[str, Found]:
    # 512 tokens: 16 sequences, 4 micro-batches on two data-parallel ranks, 8 on one.
    fixed = (*FIXED, "train.micro_batch_size=2")
    return compared.found({how: jobs.resolve(*fixed, *SETTINGS[how], *LAYOUTS[where]) for how in hows})


def _assert_close(found: dict[str, Found], reference: dict[str, Found]) -> None:
    for how, one in reference.items():
        compared.assert_close(found[how], one, BF16 if "bf16" in " ".join(SETTINGS[how]) else FP32)


@pytest.mark.parametrize("hows", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.sweep)], ids=" ".join)
def test_two_stages_of_two_chunks_train_what_one_rank_trains(hows: tuple[str, ...]) -> None:
    _assert_close(_found("pp2 vpp2", *hows), _found("one rank", *hows))


@pytest.mark.sweep
def test_four_stages_of_two_chunks_train_what_one_rank_trains() -> None:
    _assert_close(_found("pp4 vpp2", "muon"), _found("one rank, deep", "muon"))


def test_chunks_change_no_bit() -> None:
    """The same sums in the same order, but for the norm of all gradients, by which muon is not clipped here."""
    interleaved, plain = _found("pp2 vpp2", *OFTEN)["muon"], _found("pp2", "muon")["muon"]
    assert interleaved.losses == plain.losses
    assert interleaved.validation == plain.validation
    assert interleaved.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)
    assert different(interleaved.after, plain.after) == []


def test_a_checkpoint_of_chunks_is_that_of_every_layout(tmp_path: Path) -> None:
    """Masters and state, by way of tensor-parallel ranks and back, to the last bit."""
    chunks = (*FOUR, "gpus=2", "parallel.pp=2", "parallel.vpp=2")
    first = Case(settings=chunks, steps=2)
    read = Case(settings=(*FOUR, "gpus=2", "parallel.tp=2"), start=first)
    back = Case(settings=(*chunks, "train.seed=99"), start=read)
    runs, model = saving_runs(tmp_path, (first, read, back)), resolve(*chunks)[0].model
    had, there, again = (units_of(runs[case].checkpoint, model) for case in (first, read, back))
    assert had.keys() == there.keys() == again.keys()
    assert [name for name in had if not np.array_equal(had[name], there[name])] == []
    assert [name for name in had if not np.array_equal(had[name], again[name])] == []
    assert different(runs[back].weights, runs[first].weights) == []
