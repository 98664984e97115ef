"""Medians, quartiles, means over ranks, and when two measurements differ enough to be compared. No torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Median and quartiles of a series; all equal where there is one value."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Quartiles by linear interpolation between the values, which are at least one."""
        if len(values) == 1:
            return cls(low=values[0], median=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low=low, median=median, high=high)

    @property
    def relative(self) -> float:
        """Interquartile range over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def overlaps(self, other: "Quartiles") -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The ratio of two strategies' times, measured in turns in one session."""

    ratio: Quartiles
    """Quartiles of the ratios round by round."""
    distinct: bool
    """True where the interquartile ranges of the two times are apart; else no speed-up may be claimed."""

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> "Speedup":
        """Times by round, of the same rounds."""
        ratios = [theirs / ours for theirs, ours in zip(slower, faster, strict=True)]
        return cls(ratio=Quartiles.of(ratios), distinct=not Quartiles.of(slower).overlaps(Quartiles.of(faster)))


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    """Seconds of one phase: least, mean and most over ranks."""

    min_s: float
    mean_s: float
    max_s: float

    @classmethod
    def of(cls, by_rank: Sequence[float]) -> "OverRanks":
        """Summarises each rank's seconds, at least one."""
        return cls(min_s=min(by_rank), mean_s=statistics.fmean(by_rank), max_s=max(by_rank))


def mean_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each phase's mean seconds over one rank's steps; a step without the phase counts as 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in names}


def by_phase(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Turns each rank's phases into each phase's seconds by rank; 0 for a rank without the phase."""
    names = dict.fromkeys(name for phases in ranks for name in phases)
    return {name: [phases.get(name, 0.0) for phases in ranks] for name in names}


def load_balance(by_rank: Sequence[float]) -> float:
    """Max over mean of the ranks' work: 1.0 is perfect, and the value where nobody has any."""
    return max(by_rank) / statistics.fmean(by_rank) if any(by_rank) else 1.0
