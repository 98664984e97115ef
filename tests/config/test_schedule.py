"""Learning rates of `build_schedule` against the formulas of the papers, written out here.

Warm-up is linear from 0: step `s` (counted from 0) uses `lr * s / warmup_steps` (Goyal et al. 2017, arXiv:1706.02677).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve, swept_runs
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.optimizer import build_schedule
from canzona_cli.core.setup import DecayStyle
from canzona_cli.training.step import step_rates

LR, MIN_LR, STEPS, WARMUP, WSD_DECAY = 3e-3, 2e-4, 100, 10, 30


def _config(*overrides: str) -> RunConfig:
    composed = compose_run(
        [
            "recipe=qwen3-tiny",
            f"train.steps={STEPS}",
            f"optimizer.lr={LR}",
            *(() if "schedule.decay=constant" in overrides else (f"optimizer.min_lr_ratio={MIN_LR / LR}",)),
            f"schedule.warmup_steps={WARMUP}",
            *overrides,
        ]
    )
    return resolve(composed.config)[0]


def _rates(config: RunConfig, steps: int = STEPS + 20) -> list[float]:
    """The rate each step uses, from the first."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, config.setup)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step(increment=1)
    return rates


def _cosine(progress: float) -> float:
    """SGDR (Loshchilov and Hutter 2016, arXiv:1608.03983), one cycle."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1 - progress


def _constant(progress: float) -> float:
    return 1.0


def _wsd(progress: float) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395) with a linear decay of the last `WSD_DECAY` steps."""
    after = progress * (STEPS - WARMUP) - (STEPS - WARMUP - WSD_DECAY)
    return 1 - max(0.0, after) / WSD_DECAY


DECAYS: dict[DecayStyle, tuple[Callable[[float], float], tuple[str, ...]]] = {
    "cosine": (_cosine, ()),
    "linear": (_linear, ()),
    "constant": (_constant, ()),
    "wsd": (_wsd, (f"schedule.wsd_decay_steps={WSD_DECAY}",)),
}


@pytest.mark.parametrize("decay", DECAYS)
def test_rates_follow_the_published_formula(decay: DecayStyle) -> None:
    share, overrides = DECAYS[decay]
    expected = []
    for step in range(STEPS + 20):
        progress = min(1.0, (step - WARMUP) / (STEPS - WARMUP))
        decayed = MIN_LR + (LR - MIN_LR) * share(progress) if decay != "constant" else LR
        expected.append(LR * step / WARMUP if step < WARMUP else decayed)
    assert _rates(_config(f"schedule.decay={decay}", *overrides)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
def test_without_warm_up_the_first_step_uses_the_full_rate(decay: DecayStyle) -> None:
    rates = _rates(_config(f"schedule.decay={decay}", *DECAYS[decay][1], "schedule.warmup_steps=0"))
    assert rates[0] == LR


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_the_minimum_is_reached_at_decay_steps_and_kept(decay: DecayStyle) -> None:
    rates = _rates(_config(f"schedule.decay={decay}", "schedule.decay_steps=60"))
    assert rates[60:] == pytest.approx([MIN_LR] * len(rates[60:]), rel=1e-12)
    assert rates[59] > MIN_LR


def test_wsd_decays_over_a_tenth_of_what_follows_the_warm_up_unless_told_otherwise() -> None:
    rates = _rates(_config("schedule.decay=wsd"))
    stable_until = STEPS - (STEPS - WARMUP) // 10
    assert rates[WARMUP : stable_until + 1] == [LR] * (stable_until + 1 - WARMUP)
    assert rates[stable_until + 1] < LR


@pytest.mark.parametrize("decay", DECAYS)
def test_both_rates_follow_one_schedule_and_are_recorded_as_the_groups_have_them(decay: DecayStyle) -> None:
    config = _config(f"schedule.decay={decay}", *DECAYS[decay][1], "optimizer.adamw_lr=0.0006")
    own = {"max_lr": 0.0006, "min_lr": MIN_LR / 5}
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **rates} for rates in ({}, own)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    trainee: Any = SimpleNamespace(setup=config.setup, schedule=build_schedule(optimizer, config.setup))
    for _ in range(STEPS + 20):
        recorded, adamw = step_rates(trainee)
        assert adamw is not None
        assert [recorded, adamw] == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12)
        assert adamw == pytest.approx(recorded / 5, rel=1e-12)
        trainee.schedule.step(increment=1)
    trainee.setup = _config(f"schedule.decay={decay}", *DECAYS[decay][1], "optimizer.adamw_lr=null").setup
    assert step_rates(trainee)[1] is None


def test_weight_decay_stays_what_it_was() -> None:
    config = _config()
    config = replace(config, optimizer=replace(config.optimizer, weight_decay=0.3))
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0}], lr=1.0)
    schedule = build_schedule(optimizer, config.setup)
    for _ in range(STEPS):
        schedule.step(increment=1)
        assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_the_minimum_is_a_share_of_the_rate_as_decimals_are() -> None:
    """As binary fractions, 0.1 times 0.0003 is a little more than 0.00003."""

    def minimum(*overrides: str) -> float:
        return compose_run(["recipe=qwen3-tiny", *overrides]).config.optimizer.min_lr

    assert minimum("optimizer.lr=0.0003") == 0.00003
    assert minimum("optimizer.lr=0.0006", "optimizer.min_lr_ratio=0.25") == 0.00015
    assert minimum("optimizer.lr=0.0006", "optimizer.min_lr_ratio=1") == 0.0006


def test_in_a_sweep_of_learning_rates_the_minimum_keeps_its_share() -> None:
    swept = [run.config.optimizer for run in swept_runs(["recipe=qwen3-tiny", "optimizer.lr=1e-4,2e-2"], [])]
    assert [own.min_lr for own in swept] == [1e-5, 2e-3]
