"""The engine moves fragments and nothing else: fp32 weights equal, to the last bit, an ordinary optimizer's.

Every layout gets the same gradients, each matrix whole is updated by one ordinary optimizer on one rank, so there is no
sum whose order could differ; clipping is off because the global norm is one.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

from canzona_cli.config.schema import Layout, MuonConfig, RunConfig, ShampooConfig, SoapConfig
from canzona_cli.optimizers.muon import Muon
from canzona_cli.optimizers.shampoo import Shampoo
from canzona_cli.optimizers.soap import SOAP
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.dist.synthetic import Result, run_engine, single_process
from tests.dist.whole import Weights

STEPS = 5
"""Factors are renewed at every other, three times in all."""
FIXED = (
    *SMALL,
    "train.precision=fp32",
    "optimizer.clip_grad=0",
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
    "engine.strategy=canzona",
)
LAYOUTS = {
    "tp1 dp4": ("gpus=4", "parallel.tp=1", "parallel.pp=1"),
    "tp2 dp2": ("gpus=4", "parallel.tp=2"),
    "tp4 dp1": ("gpus=4", "parallel.tp=4"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "dp3": ("gpus=3", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=12"),
    "tp4 dp2": ("gpus=8", "parallel.tp=4"),
    "tp2 pp2 dp2": ("gpus=8", "parallel.tp=2", "parallel.pp=2"),
}
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


def _ordinary(config: RunConfig) -> Make:
    """The run's optimizer, made as a single process would."""
    o = config.optimizer
    if isinstance(o, MuonConfig):
        return lambda params: Muon(params, o.lr, weight_decay=o.weight_decay, precision="fp32")
    if isinstance(o, SoapConfig):
        return lambda params: SOAP(
            params, o.lr, weight_decay=o.weight_decay, betas=(o.beta1, o.beta2), eps=o.eps,
            shampoo_beta=o.shampoo_beta, precondition_frequency=o.precondition_frequency,
            max_preconditioner_dim=o.max_preconditioner_dim,
        )  # fmt: skip
    assert isinstance(o, ShampooConfig)
    return lambda params: Shampoo(
        params, o.lr, weight_decay=o.weight_decay, betas=(o.beta1, o.beta2), eps=o.eps, shampoo_beta=o.shampoo_beta,
        shampoo_eps=o.shampoo_eps, precondition_frequency=o.precondition_frequency,
        max_preconditioner_dim=o.max_preconditioner_dim, grafting=o.grafting,
    )  # fmt: skip


def _different(first: Weights, second: Weights, names: Weights) -> list[str]:
    return [name for name in names if not torch.equal(first[name], second[name])]


@pytest.fixture(scope="module", params=["muon", "shampoo", "soap"])
def reference(request: pytest.FixtureRequest) -> tuple[str, Weights]:
    """An optimizer and the weights it comes to in one process without the engine."""
    name = request.param
    overrides = () if name == "muon" else ("optimizer.stagger=false", "optimizer.precondition_frequency=2")
    config, layout = _resolve(f"optimizer={name}", "gpus=1", *overrides)
    start = run_engine(config, layout, 0)
    return name, single_process(start.before, config, STEPS, _ordinary(config))


@pytest.mark.parametrize("where", LAYOUTS)
def test_five_steps_equal_a_single_process_bitwise(reference: tuple[str, Weights], where: str) -> None:
    name, expected = reference
    overrides = () if name == "muon" else ("optimizer.stagger=false", "optimizer.precondition_frequency=2")
    found = run_engine(*_resolve(f"optimizer={name}", *LAYOUTS[where], *overrides), STEPS)
    assert _different(found.after, expected, expected) == []
    assert all(not torch.equal(found.before[key], expected[key]) for key in expected), "nothing was updated"


def test_muon_is_that_of_emerging_optimizers() -> None:
    """Not ours: NVIDIA's on whole matrices. Rounding of products in another order, through an iteration that makes
    singular values of about 1e-3 into 1: seen 2e-6 of a step of 0.2 * sqrt(192) * lr; asserted 1e-4."""
    config, layout = _resolve("optimizer=muon", *LAYOUTS["tp2 dp2"])
    found = run_engine(config, layout, STEPS)
    theirs = single_process(
        found.before, config, STEPS,
        lambda params: EmergingMuon(
            params, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, num_ns_steps=5, coefficient_type="quintic",
            scale_mode="spectral", extra_scale_factor=0.2, fp32_matmul_prec="highest",
        ),
    )  # fmt: skip
    worst = max((found.after[name] - theirs[name]).abs().max().item() for name in theirs)
    assert worst < 1e-4 * 0.01


@pytest.mark.parametrize("splitting", ["fused", "qkv", "split", "per_head"])
def test_every_splitting_gives_the_same_in_every_layout(splitting: str) -> None:
    one = _three(splitting, "gpus=1")
    for where in ("tp1 dp4", "tp2 dp2", "tp4 dp1"):
        other = _three(splitting, *LAYOUTS[where])
        assert _different(one.after, other.after, one.after) == [], where


@cache
def _three(splitting: str, *overrides: str) -> Result:
    return run_engine(*_resolve("optimizer=muon", f"engine.splitting={splitting}", *overrides), 3)


def test_splittings_differ() -> None:
    """What the test above compares is not one thing under four names."""
    ends = [_three(splitting, "gpus=1").after for splitting in ("fused", "qkv", "split", "per_head")]
    for number, first in enumerate(ends):
        for second in ends[number + 1 :]:
            assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("reduction", ["reduce", "all_to_all"])
@pytest.mark.parametrize("buffers", ["contiguous", "owner", "aligned"])
def test_layouts_of_the_buffer_change_nothing(buffers: str, reduction: str) -> None:
    one = _three("split", "gpus=1")
    settings = (f"engine.layout={buffers}", f"engine.reduction={reduction}")
    other = _three("split", *LAYOUTS["tp2 dp2"], *settings)
    assert _different(one.after, other.after, one.after) == []


@pytest.mark.parametrize(
    "settings",
    [
        ("engine.strategy=asc",),
        ("engine.grouping=greedy", "engine.c_max_mib=0.05"),
        ("engine.layout=aligned", "engine.reduction=even"),
        ("parallel.overlap_param_gather=false",),
        ("parallel.overlap_grad_reduce=false",),
    ],
)
def test_who_updates_what_and_when_changes_nothing(settings: tuple[str, ...]) -> None:
    one = _three("split", "gpus=1")
    other = _three("split", *LAYOUTS["tp4 dp2"], *settings)
    assert _different(one.after, other.after, one.after) == []


@pytest.mark.parametrize("optimizer", ["shampoo", "soap"])
def test_staggered_refreshes_do_not_depend_on_the_layout(optimizer: str) -> None:
    """A matrix's turn is its own, whoever hosts it."""
    settings = (f"optimizer={optimizer}", "optimizer.precondition_frequency=3", "optimizer.stagger=true")
    one = run_engine(*_resolve(*settings, "gpus=1"), 7).after
    together = run_engine(*_resolve(*settings[:2], "optimizer.stagger=false", "gpus=1"), 7).after
    other = run_engine(*_resolve(*settings, *LAYOUTS["tp2 pp2 dp2"]), 7).after
    assert _different(one, other, one) == []
    assert _different(one, together, one) != []


def test_bf16_weights_are_the_rounded_masters() -> None:
    """With bf16 weights a host's master is fp32 all along: the weights are its rounding, never rounded twice."""
    start, layout = _resolve("optimizer=muon", "train.precision=bf16", *LAYOUTS["tp2 dp2"])
    found = run_engine(start, layout, STEPS)
    expected = single_process(
        found.before, start, STEPS,
        lambda params: Muon(params, 0.01, weight_decay=0.1, precision="bf16"),
    )  # fmt: skip
    rounded = {name: weight.bfloat16().float() for name, weight in expected.items()}
    assert _different(found.after, rounded, rounded) == []


def test_gradients_in_bf16_travel_rounded_once() -> None:
    config, layout = _resolve("optimizer=muon", "engine.exchange_dtype=bf16", *LAYOUTS["tp4 dp1"])
    found = run_engine(config, layout, 3)
    exact = run_engine(*_resolve("optimizer=muon", *LAYOUTS["tp4 dp1"]), 3)
    names = single_process(found.before, config, 0, _ordinary(config))
    assert all(not torch.equal(found.after[name], exact.after[name]) for name in names)
    # Steps of orthogonal matrices whose inputs differ by bf16's 2^-9: far from a step's own size.
    moved = max((exact.after[name] - exact.before[name]).abs().max().item() for name in names)
    worst = max((exact.after[name] - found.after[name]).abs().max().item() for name in names)
    assert 0 < worst < 0.1 * moved
