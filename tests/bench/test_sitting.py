"""A strategy's figures from every rank's steps: the steps that are left out, and the rank that counts."""

from pathlib import Path

import pytest

from canzona_cli.bench.results import Samples, StepSample, Turns, read_samples, summarise, write_samples
from canzona_cli.records.files import RunFiles


def step(step_s: float, *, update: float = 0.0, norm: float = 0.0, exchange: float = 0.0) -> StepSample:
    phases = {"norm_clip": norm, "exchange": exchange, "matrix_update": update, "forward": 0.25}
    return StepSample(step_s=step_s, processor_s=2 * step_s, phases=phases)


def samples(*ranks: tuple[StepSample, ...]) -> Samples:
    return Samples(losses=tuple(float(n) for n in range(len(ranks[0]))), tensor_bytes=(7, 9), ranks=ranks)


def test_the_warm_up_and_the_first_step_of_each_turn_are_left_out() -> None:
    times = [9.0, 8.0, 7.0, 6.0, 1.0, 3.0, 5.0, 2.0, 4.0]  # three turns of three, the first to warm up
    found = summarise(samples(tuple(map(step, times))), warm_up_rounds=1, steps_per_turn=3)
    assert found.iteration_s == (2.0, 3.0)
    assert found.processor_s == (4.0, 6.0)
    assert found.losses == tuple(map(float, range(9)))
    assert found.tensor_bytes == (7, 9)


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    ranks = ((step(9.0), step(2.0), step(6.0)), (step(9.0), step(4.0), step(5.0)))
    found = summarise(samples(*ranks), warm_up_rounds=0, steps_per_turn=3)
    assert found.iteration_s == (5.0,)  # (4 + 6) / 2
    assert found.processor_s == (17.0,)  # both ranks: (12 + 22) / 2


def test_the_optimizer_step_is_the_busiest_ranks_update_and_the_last_ranks_norm() -> None:
    # Rank 1 comes late to the norm: rank 0's time there is mostly waiting, and none of the optimizer's.
    early, late = step(5.0, update=1.0, exchange=0.5, norm=2.0), step(5.0, update=3.0, exchange=0.25, norm=0.125)
    found = summarise(samples((early, early), (late, late)), warm_up_rounds=0, steps_per_turn=2)
    assert found.optimizer_s == (3.375,)
    assert found.load_balance == pytest.approx(1.5)
    assert found.update_s == (1.0, 3.0)
    update = found.phases["matrix_update"]
    assert (update.min_s, update.mean_s, update.max_s) == (1.0, 2.0, 3.0)


def test_without_matrices_the_load_is_balanced() -> None:
    assert summarise(samples((step(1.0), step(1.0))), warm_up_rounds=0, steps_per_turn=2).load_balance == 1.0


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    found = {"sc": samples((step(0.1), step(1 / 3)), (step(2.0), step(1e-9)))}
    write_samples(RunFiles(tmp_path), found)
    assert read_samples(RunFiles(tmp_path)) == found


def test_each_round_starts_with_the_next_strategy(tmp_path: Path) -> None:
    Turns(names=("canzona", "sc", "adamw"), rounds=4, steps_per_turn=3).write(RunFiles(tmp_path))
    turns = Turns.read(RunFiles(tmp_path))
    assert [turns.order(number)[0] for number in range(turns.rounds)] == ["canzona", "sc", "adamw", "canzona"]
    assert turns.order(1) == ("sc", "adamw", "canzona")
