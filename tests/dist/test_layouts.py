"""Recomputed activations and other micro-batches give the same training run, on the corpus that recipes have."""

import math
from pathlib import Path

from tests.dist.jobs import Curve, train_each

STEPS = 2
# bf16 keeps 8 bits of a weight and of an activation, so single losses differ by rounding. The worst seen over 20 steps,
# of losses from 5.8 to 3.2, is 6.8e-4.
BF16_LOSS = 3e-3


def _worst(curve: Curve, reference: Curve) -> float:
    return max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))


def test_recomputation_and_accumulation_change_nothing(corpus_cache: Path) -> None:
    settings = ((), ("train.recompute=full",), ("train.recompute=selective",), ("train.micro_batch_size=8",))
    runs = [("gpus=1", f"train.steps={STEPS}", *each) for each in settings]
    longer, reference, *others = (
        curve for [curve] in train_each(corpus_cache, ("gpus=1", f"train.steps={4 * STEPS}"), *runs)
    )
    # About ln(vocabulary) before training: nothing is known yet. Then it learns.
    assert abs(reference.validation_before - math.log(384)) < 0.5
    assert longer.validation_after < 0.75 * reference.validation_before
    for each, curve in zip(settings[1:], others, strict=True):
        assert _worst(curve, reference) < BF16_LOSS, each
