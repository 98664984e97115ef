"""One seed gives one training run, whatever the layout: same weights, same samples, same updates."""

import itertools
import math
from pathlib import Path

import pytest

from tests.dist.jobs import Curve, train, train_each

STEPS = 2
LAYOUTS = {
    "dp4": ("gpus=4", "parallel.tp=1", "parallel.pp=1"),
    "tp2 dp2": ("gpus=4", "parallel.tp=2", "parallel.pp=1"),
    "tp4": ("gpus=4", "parallel.tp=4", "train.micro_batch_size=4"),
    "pp2 dp2": ("gpus=4", "parallel.tp=1", "parallel.pp=2"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=4"),
}
FEW = ("dp4", "tp2 pp2")
"""Every kind of parallelism once; Megatron's AdamW on the others, and other updates on all, are swept."""
OTHERS = tuple(LAYOUTS.keys() - set(FEW))
# bf16 keeps 8 bits of a weight and of an activation; another layout adds partial sums in another order, so single
# losses differ by rounding. The worst seen over 20 steps, of losses from 5.8 to 3.2, is 6.8e-4.
BF16_LOSS = 3e-3
# fp32 sums in another order: a few units in the last place of a loss near 6 (4.8e-7 each). The worst seen is 9.5e-7.
FP32_LOSS = 5e-6
FP32 = "train.precision=fp32"
UPDATES = {
    "muon-layerwise": (("optimizer=muon", "engine.strategy=layerwise"), BF16_LOSS),
    "muon-sc": (("optimizer=muon", "engine.strategy=sc"), BF16_LOSS),
    "muon-sc-fp32": (("optimizer=muon", "engine.strategy=sc", FP32), FP32_LOSS),
    "adamw": (("optimizer=adamw", "optimizer.lr=0.005"), BF16_LOSS),
    "adamw-fp32": (("optimizer=adamw", "optimizer.lr=0.005", FP32), FP32_LOSS),
}
"""Settings, and how far apart losses may be."""


def _worst(curve: Curve, reference: Curve) -> float:
    return max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("adamw-fp32", FEW),
        pytest.param("adamw-fp32", OTHERS, marks=pytest.mark.sweep),
        *(pytest.param(name, tuple(LAYOUTS), marks=pytest.mark.sweep) for name in UPDATES if name != "adamw-fp32"),
    ],
)
def test_every_layout_trains_the_same_curve(corpus_cache: Path, name: str, where: tuple[str, ...]) -> None:
    overrides, bound = UPDATES[name]
    [reference], [longer] = train_each(
        corpus_cache, *(("gpus=1", f"train.steps={steps}", *overrides) for steps in (STEPS, 4 * STEPS))
    )
    # About ln(vocabulary) before training: nothing is known yet. Then it learns.
    assert abs(reference.validation_before - math.log(384)) < 0.5
    assert longer.validation_after < 0.75 * reference.validation_before
    for layout in where:
        ranks = train(corpus_cache, f"train.steps={STEPS}", *LAYOUTS[layout], *overrides)
        for a, b in itertools.pairwise(ranks):
            assert a.losses == b.losses, "ranks disagree about the loss"
        assert _worst(ranks[0], reference) < bound, layout
        assert abs(ranks[0].validation_after - reference.validation_after) < bound, layout


def test_the_strategies_of_megatron_train_the_same_curve(corpus_cache: Path) -> None:
    """`sc` and `layerwise` differ in who computes an update, not in the update."""
    setup = (*LAYOUTS["tp2 dp2"], f"train.steps={STEPS}")
    runs = [(*setup, f"engine.strategy={strategy}") for strategy in ("sc", "layerwise")]
    sc, layerwise = (ranks[0] for ranks in train_each(corpus_cache, *runs))
    assert _worst(sc, layerwise) < BF16_LOSS


def test_recomputation_and_accumulation_change_nothing(corpus_cache: Path) -> None:
    settings = ((), ("train.recompute=full",), ("train.recompute=selective",), ("train.micro_batch_size=8",))
    runs = [("gpus=1", f"train.steps={STEPS}", *each) for each in settings]
    reference, *others = (curve for [curve] in train_each(corpus_cache, *runs))
    for each, curve in zip(settings[1:], others, strict=True):
        assert _worst(curve, reference) < BF16_LOSS, each
