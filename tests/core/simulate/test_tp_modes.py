"""Megatron's baselines are in the faster of the modes that the supported Megatron can run."""

from dataclasses import replace
from functools import cache, partial
from typing import get_args

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.setup import MuonTpMode
from canzona_cli.core.setup.execution import RELEASED_TP_MODES, with_strategy, with_tp_mode
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.compare import SUMMARY, Study, mode_key, study_run
from canzona_cli.core.simulate.predict import simulate_run, simulate_strategy
from canzona_cli.core.simulate.search import fastest_with

CASES = {
    "8b, tp 2": ("recipe=qwen3-8b", "gpus=16", "parallel.tp=2"),
    "8b, tp 8": ("recipe=qwen3-8b", "gpus=16", "parallel.tp=8"),
    "experts": ("recipe=qwen3-30b-a3b", "gpus=8", "parallel.tp=2", "parallel.ep=4", "model.num_layers=4"),
}
key = partial(mode_key, "layerwise")
SETTINGS = ("parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=1", "train.recompute=full")


@cache
def config_of(case: str) -> RunConfig:
    return compose_run([*CASES[case], *SETTINGS, "cluster=h100-80g"], training=False).config


@cache
def study_of(case: str) -> Study:
    return study_run(*fit.resolve(config_of(case).setup))


@pytest.mark.parametrize("case", CASES)
def test_baselines_are_in_their_faster_mode(case: str) -> None:
    study = study_of(case)
    times = {mode: study.result(key(mode)).iteration_s for mode in get_args(MuonTpMode)}
    best = min(RELEASED_TP_MODES, key=lambda mode: times[mode])
    assert (study.strategies["layerwise"].tp_mode, study.result("layerwise").iteration_s) == (best, times[best])
    assert study.strategies["sc"].tp_mode in RELEASED_TP_MODES
    assert study.iteration_speedup("layerwise") == times[best] / study.result("canzona").iteration_s


@pytest.mark.parametrize("mode", get_args(MuonTpMode))
@pytest.mark.parametrize("case", CASES)
def test_a_mode_in_a_study_is_a_run_with_this_setting(case: str, mode: MuonTpMode) -> None:
    """Although the study simulates forward and backward once. The run has Megatron's matrices, with gate and up in
    one."""
    study = study_of(case)
    run = with_tp_mode(with_strategy(study.setup, "layerwise"), mode)
    found = simulate_run(run, study.layout, None)
    assert found != simulate_strategy(run, study.layout, "layerwise", study.plan.matrices)
    assert found == study.result(key(mode))
    assert found.events == study.result(key(mode)).events
    assert study.strategies[key(mode)].memory_bytes == estimate(run, study.layout).total


def test_modes_that_repeat_nothing_gain_more_with_more_tp_ranks() -> None:
    """The order is that of Megatron's issue 6676: duplicated 632, distributed 356, layer_sharded 157 ms."""
    gains = []
    for case in ("8b, tp 2", "8b, tp 8"):
        results = [study_of(case).result(key(mode)) for mode in get_args(MuonTpMode)]
        updates = [result.phases["matrix_update"] + result.phases["exchange"] for result in results]
        assert updates == sorted(updates, reverse=True)
        gains.append(updates[0] / updates[-1])
    assert 1 < gains[0] < 2 < gains[1] < 8


def test_experts_that_are_whole_on_a_rank_take_longer_in_distributed() -> None:
    """Megatron orthogonalises their longer sides."""
    study = study_of("experts")
    duplicated, distributed = (study.result(key(mode)).phases["matrix_update"] for mode in RELEASED_TP_MODES)
    assert distributed > duplicated
    assert study.strategies["layerwise"].tp_mode == "duplicated"


def test_one_tp_rank_and_other_optimizers_have_no_modes() -> None:
    tiny = ["recipe=tiny", "gpus=2"]
    for settings in (["parallel.tp=1"], ["parallel.tp=2", "optimizer=soap"]):
        study = study_run(*fit.resolve(compose_run([*tiny, *settings], training=False).config.setup))
        assert study.shown_strategies == tuple(name for name in study.strategies if "/" not in name)
        assert {strategy.tp_mode for strategy in study.strategies.values()} == {None}


def test_the_fastest_layout_of_a_baseline_is_searched_in_every_mode() -> None:
    config, layout = resolve(config_of("8b, tp 8"))
    best = fastest_with(config_of("8b, tp 8").setup, "layerwise", layout)
    assert best is not None
    assert best.tp_mode == "distributed"
    times = {
        mode: simulate_run(with_tp_mode(with_strategy(config.setup, "layerwise"), mode), layout, None).iteration_s
        for mode in RELEASED_TP_MODES
    }
    assert best.iteration_s <= times["distributed"] < times["duplicated"]


def test_only_what_fits_in_no_mode_is_left_out_of_a_summary() -> None:
    config = compose_run(["recipe=qwen3-8b", "gpus=64", "parallel.tp=2", *SETTINGS], training=False).config
    needs = {
        name: min(estimate(with_tp_mode(run, mode), layout).total for mode in RELEASED_TP_MODES)
        for setup, layout in [fit.resolve(config.setup)]
        for name in ("layerwise", "sc")
        for run in [with_strategy(setup, name)]
    }
    assert needs["layerwise"] < needs["sc"]
    between = replace(config.setup.cluster, memory_gib=(needs["sc"] - 1) / GIB, reserved_gib=0.0, headroom_gib=0.0)
    run = fit.resolve(replace(config.setup, cluster=between))
    whole, summary = study_run(*run), study_run(*run, baselines=SUMMARY, details=False)
    assert summary.strategies["sc"].simulated is None
    for name, strategy in summary.strategies.items():
        assert strategy.fits == whole.strategies[name].fits
        shown = replace(whole.strategies[name], loads=None) if name == "layerwise" else whole.strategies[name]
        assert strategy == shown or not strategy.fits
    for name in ("sc", "layerwise"):
        assert summary.iteration_speedup(name) == whole.iteration_speedup(name)
        assert (summary.iteration_speedup(name) is None) == (name == "sc")
