"""Computes quartiles, speed-ups and means over ranks, with the standard library only."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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

    def overlaps(self, other: "Quartiles") -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The ratio of two strategies' times, from interleaved rounds of one session."""

    ratio: Quartiles
    """The quartiles of the rounds' ratios, slower over faster."""
    distinct: bool
    """True if the interquartile ranges of the two times do not overlap; otherwise no speed-up may be
    claimed."""

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> "Speedup":
        """Computes the speed-up from the times of the same rounds."""
        ratios = [slow / fast for slow, fast in zip(slower, faster, strict=True)]
        return cls(ratio=Quartiles.of(ratios), distinct=not Quartiles.of(slower).overlaps(Quartiles.of(faster)))


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
