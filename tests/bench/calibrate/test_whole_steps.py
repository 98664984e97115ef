"""Factors of whole steps make a profile say what steps took; a calibration without them says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.calibrate import calibrate
from canzona_cli.bench.calibrate.calibrate import Calibration, ShortBenches, with_steps
from canzona_cli.bench.calibrate.profile import factors
from canzona_cli.bench.results import BenchResult
from canzona_cli.config.compose import compose_run
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.core.simulate.predict import simulate_run
from tests.bench.benches import bench, with_measured
from tests.bench.calibrate.calibrations import MEASUREMENTS, RECORD, calibration, cut_off, number, run

PARTS = bench(("canzona", "sc", "adamw"))
"""Predicted: matrix updates 1.1 times what was measured, everything else 0.95 times."""


def test_a_factor_is_measured_over_predicted_of_whom_it_stands_for() -> None:
    computing, phases = factors([PARTS])
    assert computing == pytest.approx(1 / 0.95, rel=1e-3)
    assert phases["matrix_update"] == phases["megatron/matrix_update"] == pytest.approx(1 / 1.1, rel=1e-3)
    for phase in ("exchange", "adamw_update", "megatron/adamw_update"):
        assert phases[phase] == pytest.approx(1 / 0.95, rel=1e-3)
    # The last of the ranks that wait for one another there: 0.9 of their mean.
    assert phases["norm_clip"] == pytest.approx(0.9 / 0.95, rel=1e-3)
    assert "megatron/exchange" not in phases, "this sc has none"


def test_several_benches_count_by_their_time() -> None:
    slow = bench(("canzona", "sc", "adamw"), scale=3.0)
    doubled = with_measured(slow, "canzona", phases={
        name: replace(seconds, mean_s=2 * seconds.mean_s)
        for name, seconds in slow.strategies["canzona"].measured.phases.items()
    })  # fmt: skip
    computing, phases = factors([PARTS, doubled])
    assert computing == pytest.approx(1 / 0.95, rel=1e-3), "of data-parallel ranks alone"
    assert phases["matrix_update"] == pytest.approx((1 + 3 * 2) / (1 + 3) / 1.1, rel=1e-3)


def test_who_waits_for_gradients_was_computing_less_than_the_others() -> None:
    """Ranks that share cores get them unevenly: what the last one computes longer, the others wait."""
    uneven = PARTS
    for name in calibrate.BENCHED:
        phases = dict(uneven.strategies[name].measured.phases)
        for phase, more in (("backward", -0.04), ("grad_reduce", 0.04)):
            phases[phase] = replace(phases[phase], mean_s=phases[phase].mean_s + more)
        uneven = with_measured(uneven, name, phases=phases)
    computing, others = factors([uneven])
    assert computing == pytest.approx(factors([PARTS])[0], rel=1e-3)
    assert not {"grad_reduce", "param_gather"} & others.keys()


def test_ranks_are_benched_as_crowded_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "cores", lambda: 2)
    found = {}
    for gpus, cluster in ((1, "cpu"), (3, "cpu"), (8, "cpu"), (8, "h100-80g")):
        config = compose_run(["recipe=tiny", f"gpus={gpus}", f"cluster={cluster}"], training=False).config
        found[gpus, cluster] = ShortBenches((), config, Path("x.yaml"), lambda line: None).ranks
    assert list(found.values()) == [1, 2, 4, 2]


class _Benches(ShortBenches):
    """Benches with another recipe's numbers."""

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


def test_whole_steps_scale_what_the_profile_said() -> None:
    before, written = cut_off(), list[Calibration]()
    steps = _Benches([PARTS, PARTS])
    found = with_steps(before, steps, written.append)
    assert steps.asked == [(steps.ranks, 1), (steps.ranks, 2)]
    assert found.profile.pass_factors[0] == pytest.approx(before.profile.pass_factors[0] / 0.95, rel=1e-3)
    assert found.profile.step_factors == factors([PARTS])[1]
    assert found.profile.measured_on["fitted_on"] == "TP2 DP2", "the layout of these benches, all the same"
    assert written == [found]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (EnvironmentProblem(Problem(key="x", reason="is full")), "failed", 70),
    ],
)
def test_without_whole_steps_a_calibration_is_marked(error: BaseException, status: str, code: int) -> None:
    before, written = cut_off(), list[Calibration]()
    found = with_steps(before, _Benches([error]), written.append)
    assert (found.outcome.status, found.outcome.exit_code) == (status, code)
    assert found.profile.not_measured == (*before.profile.not_measured, "steps")
    assert (found.profile.step_factors, found.profile.pass_factors) == ({}, before.profile.pass_factors)
    assert written == [found]


def test_a_bench_that_fails_takes_nothing_from_the_one_before_it() -> None:
    before, written = cut_off(), list[Calibration]()
    error = EnvironmentProblem(Problem(key="x", reason="is full"))
    found = with_steps(before, _Benches([PARTS, error]), written.append)
    whole = with_steps(before, _Benches([PARTS, PARTS]), written.append).profile
    assert (found.outcome.status, found.outcome.exit_code) == ("failed", 70)
    assert found.outcome.message.startswith("bench of complete steps with TP 2: "), "which part it was"
    assert found.profile.not_measured == (*before.profile.not_measured, "steps")
    assert replace(found.profile, measured_on=whole.measured_on) == whole
    assert written[0] == found


def test_no_measurement_of_a_calibration_is_beyond_another_one() -> None:
    """Products of a moment when the processor was slow, passes of a faster one: a profile of both is possible, one with
    a number typed over it is not."""
    slow = replace(RECORD, measurements=tuple(
        number(m.quantity, m.spread.median / 20, *m.key) if m.quantity == "matmul_tflops" else m
        for m in MEASUREMENTS
    ))  # fmt: skip
    faster = bench(("canzona", "sc", "adamw"), scale=0.5)
    faster = replace(faster, strategies={
        name: replace(one, predicted=PARTS.strategies[name].predicted) for name, one in faster.strategies.items()
    })  # fmt: skip
    found = with_steps(calibration(slow), _Benches([faster, faster]), lambda _: None).profile
    typed = replace(found, pass_factors=(0.001, 0.001), module_us=(0.0, 0.0))
    config, layout = run("optimizer=adamw")
    for size in (1, 8, 64):
        mesh = replace(layout, micro_batch_size=size, global_batch_size=size * layout.dp)
        simulate_run(replace(config, cluster=found).setup, mesh, None)
        with pytest.raises(ConfigError, match="makes model FLOP utilisation"):
            simulate_run(replace(config, cluster=typed).setup, mesh, None)


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
