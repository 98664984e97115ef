"""Runs that no longer learn are reported once; what mends itself sets off nothing."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from canzona_cli.checkpoint.manifest import Header, LossMemory, Manifest, Progress, manifest_text, parse_manifest
from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.core.setup import EngineConfig, MuonConfig, TrainConfig
from canzona_cli.training.guards import (
    Divergence,
    DivergenceGuard,
)
from tests.sizes import CPU, model

VOCABULARY = 384
CONFIG = RunConfig(
    name="small",
    gpus=1,
    model=replace(model("tiny"), vocab_size=VOCABULARY),
    train=TrainConfig(steps=1000, seq_length=32, batch_tokens=64),
    optimizer=MuonConfig(name="muon", lr=3e-3),
    engine=EngineConfig(strategy="canzona"),
    cluster=CPU,
    data=DataConfig(source="stdlib"),
)
UNIFORM = math.log(VOCABULARY)

# Measured: Muon at learning rate 0.4 without a warm-up (far too much), which learnt all the same.
ASTRAY = (5.69, 10.60, 8.22, 10.04, 13.58, 9.41, 6.97, 7.50, 6.38, 5.70, 5.11, 4.81, 4.13, 4.11, 4.24, 4.12, 3.45, 3.26)
# Measured: AdamW at learning rate 5.
LOST = (5.69, 5.78, 68.73, 482.09, 212.33, 274.49)


def guard(memory: LossMemory = LossMemory()) -> DivergenceGuard:
    return DivergenceGuard(CONFIG.model.vocab_size, memory)


def found(losses: Iterable[float | None], watching: DivergenceGuard | None = None, first: int = 1) -> list[Divergence]:
    watching = watching or guard()
    said = (watching.notice(step, loss) for step, loss in enumerate(losses, start=first))
    return [divergence for divergence in said if divergence is not None]


def descent(steps: int, *, noise: float = 0.02, seed: int = 0, to: float = 2.0) -> list[float]:
    numbers = random.Random(seed)
    return [to + (5.7 - to) * math.exp(-step / 80) + numbers.gauss(0, noise) for step in range(steps)]


def spiked(factor: float, length: int, *, at: int) -> list[float]:
    losses = descent(at + length + 200)
    losses[at : at + length] = [factor * loss for loss in losses[at : at + length]]
    return losses


HEALTHY = {
    "a descent": descent(3000),
    "batches so small that losses scatter by a seventh": descent(5000, noise=0.3),
    "a memorised corpus": descent(3000, noise=0.02, to=0.05),
    "a start gone astray": [*ASTRAY, *descent(500)],
    "a spike to twice the loss for 25 steps": spiked(2, 25, at=400),
    "a spike to thrice the loss for 8 steps, early": spiked(3, 8, at=20),
    "one batch a thousand times as bad": spiked(1000, 1, at=400),
    "other data, a third harder": [*descent(500), *(loss + 0.25 for loss in descent(500)[300:])],
    "initial weights far too large": [300 * math.exp(-step / 30) + 3 for step in range(300)],
    "weights of another run, annealed": [2.3 - step / 1000 for step in range(500)],
    "nothing is learnt at all": [UNIFORM + 0.05] * 500,
    "a rate so small that nothing moves": [5.69] * 500,
}


@pytest.mark.parametrize("losses", HEALTHY.values(), ids=HEALTHY.keys())
def test_what_goes_well_or_mends_itself_sets_off_nothing(losses: list[float]) -> None:
    assert found(losses) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_any_kind_adds_up_to_nothing(seed: int) -> None:
    numbers = random.Random(seed)
    heavy = [loss * math.exp(numbers.gauss(0, 0.25)) for loss in descent(4000, noise=0, seed=seed)]
    assert found(heavy) == []


def test_a_rate_far_too_high_is_found_within_steps_and_its_beginning_is_named() -> None:
    (divergence,) = found(LOST)
    assert (divergence.step, divergence.since) == (6, 3)
    error = divergence.error()
    assert (error.exit_code, error.headline, error.since) == (70, "The run diverged", 3)
    for word in ("step 3", "5.95"):
        assert word in str(error)


@pytest.mark.parametrize(("level", "at_most"), [(1.5 * UNIFORM, 22), (UNIFORM, 50), (5.0, 150)])
def test_a_loss_that_goes_back_towards_a_guess_is_lost_the_sooner_the_higher(level: float, at_most: int) -> None:
    """The run had reached 2 nats; half of what was learnt is lost at 3.97."""
    losses = [*descent(600), *[level] * 200]
    (lost,) = found(losses)
    assert lost.rule == "far"
    assert lost.since == 601
    assert lost.step - 600 <= at_most


def test_a_run_that_recovers_is_no_longer_lost() -> None:
    """A run may recover with train.divergence=warn: by its losses, or by a validation."""
    watching = guard()
    *_, lost = found([*descent(600), *[9.0] * 30], watching)
    assert watching.persists(lost)
    assert f"continued to its last step, {700}" in lost.error(last_step=700).problems[0].reason
    found(descent(700)[600:], watching, first=631)
    assert not watching.persists(lost)

    watching = guard()
    said = [watching.notice_validation(step, loss, final=False) for step, loss in ((0, 5.7), (50, 9.0), (100, 9.0))]
    assert said[-1] is not None
    assert watching.persists(said[-1])
    watching.notice_validation(150, 4.0, final=False)
    assert not watching.persists(said[-1])


def test_a_rise_that_may_still_mend_itself_is_not_lost() -> None:
    up, down = [2.6] * 100, descent(1000)[700:]
    assert found([*descent(700), *up, *down, *up]) == []


def test_steps_that_are_all_skipped_do_not_go_on_all_night() -> None:
    assert found([*descent(100), *[None] * 10, *descent(200)[100:]]) == []
    (lost,) = found([*descent(100), *[None] * 100])
    assert lost.step <= 100 + 20
    assert "not finite" in lost.words


@pytest.mark.parametrize("cut", [1, 4, 5, 603, 630, 640])
def test_a_resumed_run_is_judged_as_the_unbroken_one(cut: int) -> None:
    """Also in the middle of a rise, through the very text of a checkpoint's manifest."""
    for losses in (list(LOST), [*descent(600), *[9.0] * 60], spiked(2, 25, at=400)):
        whole, before = guard(), guard()
        said = found(losses, whole)
        first = found(losses[:cut], before)
        after = guard(through_a_manifest(before.memory))
        rest = found(losses[cut:], after, first=cut + 1)
        # What goes on is said again by the new launch.
        rules = {one.rule for one in first}
        assert [one for one in rest if one.rule not in rules] == [one for one in said if one.rule not in rules]
        assert all(one.step <= cut + 2 for one in rest if one.rule in rules)
        assert after.memory == whole.memory


def through_a_manifest(memory: LossMemory) -> LossMemory:
    header = Header(
        progress=Progress(step=1, samples=1, tokens=1, losses=memory), optimizer="muon", strategy="canzona",
        splitting="split", world_size=1, created=0.0, canzona="0",
    )  # fmt: skip
    return parse_manifest(manifest_text(Manifest(**vars(header))).encode()).progress.losses


def test_a_validation_worse_than_before_training_counts_twice_or_at_the_end() -> None:
    for final, said in ((False, [None, None, "validation"]), (True, [None, "validation"])):
        watching = guard()
        watching.notice_validation(0, 5.6, final=False)
        found([5.9] * 200, watching)
        verdicts = [
            watching.notice_validation(100, 5.61, final=False),
            watching.notice_validation(200, 6.3, final=final),
        ]
        if not final:
            verdicts.append(watching.notice_validation(300, 6.4, final=False))
        assert [None if one is None else one.rule for one in verdicts] == said
        last = verdicts[-1]
        assert last is not None
        assert last.since == 101


def test_the_first_steps_may_go_astray_in_a_validation_too() -> None:
    watching = guard()
    watching.notice_validation(0, 5.6, final=False)
    assert [watching.notice_validation(step, 8.0, final=step == 4) for step in (1, 2, 3, 4)] == [None] * 4
    watching.notice_validation(5, 30.0, final=False)
    assert watching.notice_validation(6, 30.0, final=False) is not None


def test_a_validation_that_is_no_number_is_the_end() -> None:
    watching = guard()
    watching.notice_validation(0, 5.6, final=False)
    assert watching.notice_validation(50, math.nan, final=False) is not None
    assert watching.notice_validation(100, math.inf, final=False) is None, "said once"


def test_what_is_learnt_by_heart_is_not_lost() -> None:
    watching = guard()
    watching.notice_validation(0, 5.6, final=False)
    found(descent(2000, to=0.1), watching)
    said = [watching.notice_validation(step, 7.0, final=step == 2000) for step in (1000, 1500, 2000)]
    assert said == [None] * 3


def test_going_on_from_trained_weights_may_lose_some_of_it() -> None:
    """A high rate costs some of what was learnt before it gains more."""
    watching = guard()
    watching.notice_validation(0, 2.3, final=False)
    said = found([2.3 + 0.5 * math.sin(step / 100) for step in range(300)], watching)
    assert said == []
    assert [watching.notice_validation(step, 2.8, final=False) for step in (100, 200, 300)] == [None] * 3


# -------------------------------------------------------------------------------------------- sudden rises
