"""Computes quartiles, speed-ups, tests of differences and means over ranks, with the standard library only."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.records.words import plural


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The median and quartiles of a series; all three are equal for a single value."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Computes the quartiles of at least one value, by linear interpolation."""
        if len(values) == 1:
            return cls(low=values[0], median=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low=low, median=median, high=high)

    @property
    def relative(self) -> float:
        """The interquartile range over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True)
class MeanSpread:
    """The mean and the standard deviation of a series."""

    mean: float
    spread: float | None
    """The standard deviation; None for a single value."""

    @classmethod
    def of(cls, values: Collection[float]) -> "MeanSpread":
        """Summarises at least one value."""
        return cls(mean=statistics.fmean(values), spread=statistics.stdev(values) if len(values) > 1 else None)


JUDGED_ROUNDS = 5
"""The smallest number of rounds from which a difference is judged. From two rounds, a mean must be 12.7 times its
standard error to be significant, from five 2.8 times, and from many twice."""
SIGNIFICANCE = 0.05
"""The probability with which two equal times are called different."""
NOT_SIGNIFICANT = "with equal times, rounds would differ as much with a probability above 5% (paired t-test)"


def no_verdict(rounds: int) -> str:
    """Returns the sentence that says why nothing is said about the significance of a difference."""
    return (
        f"{plural(rounds, 'round')}: no verdict on significance, which needs {JUDGED_ROUNDS}: --rounds {JUDGED_ROUNDS}"
    )


def two_sided_p(t: float, degrees: int) -> float:
    """Returns the probability that the absolute value of Student's t, with this many degrees of freedom, is at
    least `t`. By the finite series for whole degrees (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(degrees))
    cosine = math.cos(angle)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for power in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if degrees % 2 else inside))


def _p_of_mean(mean: float, error: float, degrees: int) -> float:
    """Returns the two-sided probability of a mean with this standard error, if the true mean is 0."""
    if not error:
        return 0.0 if mean else 1.0
    return two_sided_p(mean / error, degrees)


def paired_p(differences: Sequence[float]) -> float:
    """Returns the probability that the mean of at least two pairs' differences is at least this far from 0 if their
    true mean is 0, by the paired t-test (Student 1908)."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return _p_of_mean(statistics.fmean(differences), error, len(differences) - 1)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Adjusts the probabilities of several tests: if those below a level are called significant, any of them is
    so by chance with at most this probability (Holm 1979)."""
    adjusted, highest = [1.0] * len(probabilities), 0.0
    for done, index in enumerate(sorted(range(len(adjusted)), key=probabilities.__getitem__)):
        highest = max(highest, min(1.0, (len(adjusted) - done) * probabilities[index]))
        adjusted[index] = highest
    return adjusted


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The ratio of two strategies' times, from interleaved rounds of one session."""

    ratio: Quartiles
    """The quartiles of the rounds' ratios, slower over faster."""
    p: float | None
    """The probability of a mean log ratio at least this far from 0 if both times are equal. None with fewer
    than `JUDGED_ROUNDS` rounds."""

    @property
    def distinct(self) -> bool | None:
        """True if the times differ significantly; otherwise no speed-up may be claimed. None if there are too few
        rounds to judge that."""
        return None if self.p is None else self.p < SIGNIFICANCE

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> "Speedup":
        """Computes the speed-up from the times of the same rounds.

        They are compared by the paired t-test on the logarithms of the rounds' ratios (for few timings: Georges,
        Buytaert and Eeckhout, OOPSLA 2007). Whatever slows a complete round down cancels in its ratio, and unlike rank
        tests, whose smallest p at five pairs is 0.0625, this test can decide at five.
        """
        ratios = [slow / fast for slow, fast in zip(slower, faster, strict=True)]
        p = paired_p([math.log(ratio) for ratio in ratios]) if len(ratios) >= JUDGED_ROUNDS else None
        return cls(ratio=Quartiles.of(ratios), p=p)


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    """The seconds of one phase: minimum, mean and maximum over ranks."""

    min_s: float
    mean_s: float
    max_s: float

    @classmethod
    def of(cls, by_rank: Sequence[float]) -> "OverRanks":
        """Summarises the seconds of at least one rank."""
        return cls(min_s=min(by_rank), mean_s=statistics.fmean(by_rank), max_s=max(by_rank))


def mean_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each phase's mean seconds over the steps of one rank, with 0 for a step without the phase."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in names}


def by_phase(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Lists each phase's seconds over all ranks, with 0 for a rank without the phase."""
    names = dict.fromkeys(name for phases in ranks for name in phases)
    return {name: [phases.get(name, 0.0) for phases in ranks] for name in names}


def load_balance(by_rank: Sequence[float]) -> float:
    """Returns the maximum over the mean of the ranks' work. 1.0 is perfect, and is also the value without any
    work."""
    return max(by_rank) / statistics.fmean(by_rank) if any(by_rank) else 1.0
