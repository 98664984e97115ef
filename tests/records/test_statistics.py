"""Differences are judged by a paired test, from five rounds on: it errs as often as it says, and misses little."""

import random
from collections.abc import Callable

import pytest

from canzona_cli.records.statistics import (
    JUDGED_ROUNDS,
    SIGNIFICANCE,
    Quartiles,
    Speedup,
    holm,
    no_verdict,
    paired_p,
    two_sided_p,
)

TRIALS = 4000
TOLERANCE = 0.013
"""Almost four standard deviations of a share of 5% in as many trials."""
Noise = Callable[[random.Random], float]
"""A factor on the time of one turn."""
NOISES: dict[str, Noise] = {
    "normal": lambda generator: generator.lognormvariate(0.0, 0.02),
    # One turn in ten takes up to 30% longer, because something else ran on the machine.
    "disturbed": lambda generator: (
        generator.lognormvariate(0.0, 0.01) * (1 + 0.3 * generator.random() * (generator.random() < 0.1))
    ),
}


def times(generator: random.Random, noise: Noise, rounds: int, ratio: float) -> tuple[list[float], list[float]]:
    """Returns the times of two strategies whose rounds are slowed down together, by up to half."""
    of_round = [1 + generator.random() / 2 for _ in range(rounds)]
    slower, faster = ([scale * slow * noise(generator) for slow in of_round] for scale in (ratio, 1.0))
    return slower, faster


def share_distinct(noise: Noise, rounds: int, ratio: float, trials: int = TRIALS) -> float:
    generator = random.Random(1)
    verdicts = [Speedup.of(*times(generator, noise, rounds, ratio)).distinct for _ in range(trials)]
    assert None not in verdicts
    return sum(map(bool, verdicts)) / trials


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (10, 2.228), (30, 2.042)],
)
def test_probabilities_are_those_of_the_tables(degrees: int, t: float) -> None:
    """The critical values of 5% on two sides, as they are printed in any table of Student's distribution."""
    assert two_sided_p(t, degrees) == pytest.approx(0.05, abs=3e-5)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)
    assert (two_sided_p(0.0, degrees), two_sided_p(1e9, degrees)) == pytest.approx((1.0, 0.0), abs=1e-8)


@pytest.mark.parametrize(
    ("pairs", "t", "p"),
    [(3, 2.920, 0.1), (3, 4.303, 0.05), (3, 9.925, 0.01), (5, 2.132, 0.1), (5, 2.776, 0.05), (5, 4.604, 0.01)],
)
def test_pairs_whose_mean_is_a_quantile_of_the_tables_have_its_probability(pairs: int, t: float, p: float) -> None:
    """Pairs with a standard deviation of 1 around a mean of t standard errors."""
    spread = {3: [-1.0, 0.0, 1.0], 5: [-1.0, -1.0, 0.0, 1.0, 1.0]}[pairs]
    mean = t / pairs**0.5
    assert paired_p([mean + each for each in spread]) == pytest.approx(p, rel=2e-3)
    assert paired_p([-mean - each for each in spread]) == pytest.approx(p, rel=2e-3)


def test_students_own_pairs_have_the_probability_he_gave() -> None:
    """Two soporifics on ten patients, "The probable error of a mean", Biometrika 1908: odds of 666 to 1 on one side."""
    gained = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert paired_p(gained) / 2 == pytest.approx(1 / 667, rel=0.1)


@pytest.mark.parametrize("rounds", [JUDGED_ROUNDS, 8])
def test_equal_times_are_called_different_as_rarely_as_promised(rounds: int) -> None:
    assert share_distinct(NOISES["normal"], rounds, 1.0) == pytest.approx(SIGNIFICANCE, abs=TOLERANCE)


@pytest.mark.parametrize("rounds", [JUDGED_ROUNDS, 8])
def test_single_disturbed_turns_make_it_no_bolder(rounds: int) -> None:
    assert share_distinct(NOISES["disturbed"], rounds, 1.0) < SIGNIFICANCE + TOLERANCE


def test_differences_of_twice_the_noise_are_found() -> None:
    """5%, where ratios scatter by 2.8%: in 81% of 4,000 benches of five rounds and 99% of eight, although complete
    rounds differ by half."""
    five, eight = (share_distinct(NOISES["normal"], rounds, 1.05, 1000) for rounds in (JUDGED_ROUNDS, 8))
    assert five > 0.75
    assert eight > 0.97


@pytest.mark.parametrize("rounds", range(1, JUDGED_ROUNDS))
def test_few_rounds_have_numbers_and_no_verdict(rounds: int) -> None:
    """However clear they look."""
    found = Speedup.of([2.0] * rounds, [1.0] * rounds)
    assert (found.distinct, found.p, found.ratio) == (None, None, Quartiles.of([2.0] * rounds))
    assert no_verdict(rounds).startswith(f"{rounds} round")


def test_rounds_without_any_noise_are_judged_too() -> None:
    same, other = [1.0] * 5, [1.5] * 5
    assert (Speedup.of(same, same).distinct, Speedup.of(other, same).distinct) == (False, True)


def test_probabilities_of_several_tests_are_adjusted_step_by_step() -> None:
    """The first of n counts n times, the next n - 1 times; the order of the probabilities is kept."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_several_true_nulls_are_rejected_as_rarely_as_one() -> None:
    """Of four tests whose nulls hold, any is called significant in 1 - (1 - 0.05 / 4)^4 = 4.9% of trials. Unadjusted,
    it would be 1 - 0.95^4 = 18.5%."""
    generator = random.Random(1)
    claimed = [min(holm([generator.random() for _ in range(4)])) < SIGNIFICANCE for _ in range(TRIALS)]
    assert sum(claimed) / TRIALS == pytest.approx(0.049, abs=TOLERANCE)
