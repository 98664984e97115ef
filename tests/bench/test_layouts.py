"""The parts of a tuning before anything starts, and the recipe it ends with."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.layouts import SETTLING_STEPS, Tuning, prepare, tuned_recipe
from canzona_cli.bench.lineup import entrant_name
from canzona_cli.calibrate.calibrate import profile_text
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.search import candidates
from canzona_cli.config.compose import compose_run
from canzona_cli.errors import ConfigError
from tests.bench.test_layout_results import one, result
from tests.calibrate.calibrations import calibration

TINY = ("recipe=tiny", "gpus=2", "model.num_layers=2")


def prepared(*overrides: str, count: int | None = 2) -> Tuning:
    return prepare([*TINY, *overrides], count=count, rounds=2, steps=1)


def test_the_fastest_by_simulation_are_measured_and_what_a_run_gets_is_among_them() -> None:
    tuning = prepared()
    own = entrant_name(resolve(compose_run(TINY).config)[1])
    assert tuning.chosen == own
    assert own in tuning.entrants
    assert 2 <= len(tuning.entrants) <= 3
    times = [found.predicted.iteration_s / found.layout.global_batch_size for found in tuning.entrants.values()]
    assert times == sorted(times)
    assert tuning.legal == len([found for found in candidates(compose_run(TINY).config) if found.fits]) > 10


def test_all_are_every_layout_that_what_is_typed_allows() -> None:
    typed = ("train.micro_batch_size=2", "train.recompute=none", "parallel.cp=1")
    tuning = prepared(*typed, count=None)
    legal = {entrant_name(found.layout) for found in candidates(compose_run([*TINY, *typed]).config)}
    assert set(tuning.entrants) == legal
    assert {(found.layout.tp, found.layout.pp, found.layout.dp) for found in tuning.entrants.values()} == {
        (1, 1, 2),
        (2, 1, 1),
        (1, 2, 1),
    }


def test_each_trains_the_runs_own_batch_at_its_own_rates_in_its_own_layout() -> None:
    config = compose_run(TINY).config
    for name, found in prepared().entrants.items():
        run = found.config
        assert entrant_name(resolve(run)[1]) == name, "what a worker makes of the configuration"
        assert found.layout.global_batch_size * run.train.seq_length == config.train.batch_tokens
        assert (run.train.steps, run.schedule.decay_steps) == (3 + SETTLING_STEPS, config.train.steps)
        assert found.plan is not None


def test_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(["recipe=tiny", "gpus=0"], count=0, rounds=0, steps=1)
    assert {problem.key for problem in caught.value.problems} == {"--candidates", "--rounds", "gpus"}
    with pytest.raises(ConfigError) as caught:
        prepare(["recipe=tiny", "gpus=16"], count=1, rounds=1, steps=1)
    assert [problem.key for problem in caught.value.problems] == ["gpus"]


def test_a_plan_that_suits_no_layout_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        prepared("engine.plan=absent.json")
    assert [problem.key for problem in caught.value.problems] == ["engine.plan"]


def test_the_recipe_trains_the_layout_that_was_fastest_and_leaves_the_rest_open(tmp_path: Path) -> None:
    profile = tmp_path / "here.yaml"
    profile.write_text(profile_text(calibration()), encoding="utf-8")
    config = compose_run([*TINY, f"cluster={profile}", "cluster.step_factors.exchange=1.5"]).config
    slow, *_, last = (found.layout for found in candidates(config))
    fast = replace(last, recompute="none")
    measured = result(one(slow, 2.0, predicted=1.0), one(fast, 1.0, predicted=1.5), chosen=slow)
    file = tmp_path / "mine.yaml"
    file.write_text(tuned_recipe(config, measured, name="mine"), encoding="utf-8")
    again = compose_run([f"recipe={file}"]).config
    assert resolve(again)[1] == fast
    assert (again.name, again.gpus) == ("mine", config.gpus)
    assert (again.schedule, again.run, again.optimizer) == (config.schedule, config.run, config.optimizer)
    assert again.cluster == config.cluster, "a measured profile with its tables"
    assert "1 s per step" in file.read_text(encoding="utf-8")
