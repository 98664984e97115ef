"""Factors of whole steps make a profile say what steps took; a calibration without them says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.results import BenchResult
from canzona_cli.calibrate import whole_steps
from canzona_cli.calibrate.calibrate import Calibration
from canzona_cli.calibrate.whole_steps import ShortBenches, crowded_by, factors, with_steps
from canzona_cli.config.compose import compose_run
from canzona_cli.errors import EnvironmentProblem, Problem
from tests.bench.benches import bench, predicted, with_measured
from tests.calibrate.calibrations import cut_off

PARTS = bench(("canzona", "sc", "adamw"))
"""Predicted: matrix updates 1.1 times what was measured, everything else 0.95 times."""


def test_a_factor_is_measured_over_predicted_of_whom_it_stands_for() -> None:
    found = factors([PARTS])
    assert found.forward == found.backward == pytest.approx(1 / 0.95, rel=1e-3)
    assert found.phases["matrix_update"] == found.phases["megatron/matrix_update"] == pytest.approx(1 / 1.1, rel=1e-3)
    for phase in ("exchange", "adamw_update", "megatron/adamw_update", "param_gather", "megatron/grad_reduce"):
        assert found.phases[phase] == pytest.approx(1 / 0.95, rel=1e-3)
    # The last of the ranks that wait for one another there: 0.9 of their mean.
    assert found.phases["norm_clip"] == pytest.approx(0.9 / 0.95, rel=1e-3)
    assert "megatron/exchange" not in found.phases, "this sc has none"


def test_several_benches_count_by_their_time() -> None:
    slow = bench(("canzona", "sc", "adamw"), scale=3.0)
    doubled = with_measured(slow, "canzona", phases={
        name: replace(seconds, mean_s=2 * seconds.mean_s)
        for name, seconds in slow.strategies["canzona"].measured.phases.items()
    })  # fmt: skip
    found = factors([PARTS, doubled])
    assert found.forward == pytest.approx(1 / 0.95, rel=1e-3), "of data-parallel ranks alone"
    assert found.phases["matrix_update"] == pytest.approx((1 + 3 * 2) / (1 + 3) / 1.1, rel=1e-3)


def test_crowding_is_what_the_usual_strategy_took_longer_and_never_a_gain() -> None:
    late = replace(PARTS, strategies={
        name: replace(found, predicted=replace(found.predicted, iteration_s=found.predicted.iteration_s / 2))
        for name, found in PARTS.strategies.items()
    })  # fmt: skip
    error = sorted(1 / (1 + late.iteration_error(name)) for name in late.strategies)[1]
    assert crowded_by(late) == pytest.approx(error, rel=1e-3)
    early = replace(PARTS, strategies={
        name: replace(found, predicted=predicted(name, scale=3.0))  # type: ignore[arg-type]
        for name, found in PARTS.strategies.items()
    })  # fmt: skip
    assert crowded_by(early) == 1.0


def test_on_gpus_nobody_is_crowded_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_steps, "cores", lambda: 1)
    crowds = {}
    for cluster in ("cpu", "h100-80g"):
        config = compose_run(["recipe=tiny", "gpus=2", f"cluster={cluster}"], training=False).config
        benches = ShortBenches((), config, Path("x.yaml"), lambda line: None)
        crowds[cluster] = benches.ranks, benches.crowd
    assert crowds == {"cpu": (1, 2), "h100-80g": (2, 0)}


class _Benches(ShortBenches):
    """Of another recipe's numbers."""

    def __init__(self, results: list[BenchResult | BaseException]) -> None:
        super().__init__((), compose_run(["recipe=tiny", "gpus=64", "cluster.gpus_per_node=64"]).config, Path("x.yaml"),
                         lambda line: None)  # fmt: skip
        self._results = results
        self.asked: list[tuple[int, int]] = []

    def bench(self, ranks: int, tp: int) -> BenchResult:
        self.asked.append((ranks, tp))
        result = self._results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result


def test_whole_steps_scale_what_the_profile_said_and_crowding_is_measured_on_top() -> None:
    before, written = cut_off(), list[Calibration]()
    steps = _Benches([PARTS, PARTS, PARTS])
    found = with_steps(before, steps, written.append)
    assert steps.asked[:2] == [(steps.ranks, 1), (steps.ranks, steps.ranks)]
    assert steps.asked[2:] == [(steps.crowd, 1)], "ranks that outnumber the cores"
    assert found.profile.forward_factor == pytest.approx(before.profile.forward_factor / 0.95, rel=1e-3)
    assert found.profile.step_factors == dict(factors([PARTS]).phases)
    assert found.profile.measured_on["fitted_on"] == "TP2 DP2", "the layout of these benches, all the same"
    assert [one.profile.step_factors for one in written] == [found.profile.step_factors] * 2
    assert (written[0].profile.crowding, written[1]) == (1.0, found)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (EnvironmentProblem(Problem(key="x", reason="is full")), "failed", 70),
    ],
)
def test_without_whole_steps_a_calibration_is_marked(error: BaseException, status: str, code: int) -> None:
    before, written = cut_off(), list[Calibration]()
    found = with_steps(before, _Benches([PARTS, error]), written.append)
    assert (found.outcome.status, found.outcome.exit_code) == (status, code)
    assert found.profile.not_measured == (*before.profile.not_measured, "steps")
    assert (found.profile.step_factors, found.profile.forward_factor) == ({}, before.profile.forward_factor)
    assert written == [found]


def test_the_benches_keep_the_users_model_and_set_their_own_mesh() -> None:
    overrides = [
        "recipe=tiny",
        "gpus=8",
        "parallel.tp=4",
        "optimizer=soap",
        "model.num_layers=2",
        "train.seq_length=64",
    ]
    steps = ShortBenches(overrides, compose_run(overrides).config, Path("here.yaml"), lambda line: None)
    own = compose_run([override for override in steps.overrides if not override.startswith("cluster=")]).config
    assert (own.optimizer.name, own.model.num_layers, own.train.seq_length) == ("muon", 2, 64)
    assert own.parallel.tp is None
