"""The result of `canzona tune`: layouts of one run, measured and predicted,
and how wrong predictions were. No torch.

Errors are relative to what was measured: predicted / measured - 1. MAPE is the mean of their absolute values.
Times are seconds of a step of the slowest rank; layouts are compared per sequence, for their batches may
differ.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from canzona_cli.bench.results import Measured, Predicted
from canzona_cli.config.schema import Device, Layout
from canzona_cli.run.phases import IN_STEP
from canzona_cli.run.statistics import Quartiles
from canzona_cli.run.words import layout_code

APART = 0.10
"""Layouts whose measured times differ by more must be predicted in that order."""
LEAST_SHARE = 0.01
"""The share of a step below which a phase's error is noise."""


def layout_name(layout: Layout) -> str:
    """`tp2-pp1-cp1-dp2-mb4-none`, `tp1-pp2-vpp2-...`: for files, and for every layout of a run another."""
    chunks = {"vpp": layout.vpp} if layout.vpp > 1 else {}
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        **chunks,
        "cp": layout.cp,
        "dp": layout.dp,
        "mb": layout.micro_batch_size,
    }
    return "-".join([*(f"{name}{size}" for name, size in sizes.items()), layout.recompute])


@dataclass(frozen=True, kw_only=True)
class LayoutBench:
    """One layout, measured and predicted."""

    layout: Layout
    measured: tuple[Measured, ...]
    """One entry for each round, with one value of everything it has by round."""
    predicted: Predicted
    fitted: bool
    """True where the profile was fitted to steps of these very axes."""

    @property
    def iteration_s(self) -> tuple[float, ...]:
        """The seconds of a step in each round."""
        return tuple(seconds for turn in self.measured for seconds in turn.iteration_s)

    @property
    def median_s(self) -> float:
        return Quartiles.of(self.iteration_s).median

    @property
    def per_sequence_s(self) -> float:
        return self.median_s / self.layout.global_batch_size

    @property
    def predicted_per_sequence_s(self) -> float:
        return self.predicted.iteration_s / self.layout.global_batch_size

    @property
    def error(self) -> float:
        return self.predicted.iteration_s / self.median_s - 1

    @cached_property
    def phases(self) -> dict[str, float]:
        """Measured seconds of each phase of the step: mean over ranks, median over rounds."""
        return {
            phase: statistics.median(turn.means.get(phase, 0.0) for turn in self.measured)
            for phase in IN_STEP
            if any(phase in turn.phases for turn in self.measured)
        }

    def phase_error(self, phase: str) -> float | None:
        """None where too little of the step is spent there."""
        seconds = self.phases.get(phase, 0.0)
        if seconds < LEAST_SHARE * self.median_s:
            return None
        return self.predicted.phases.get(phase, 0.0) / seconds - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of the step, or of one phase, over several layouts."""

    layouts: int
    """The number of layouts that have it."""
    mape: float
    mean: float
    """The mean of the errors with their signs: above 0 where predictions are too long."""
    worst: float
    """The largest, with its sign."""
    worst_layout: str
    share: float
    """Its share of the measured steps, mean over these layouts."""

    @classmethod
    def of(cls, predictions: Sequence[tuple[LayoutBench, float, float]]) -> "Errors":
        """Collects each layout's error and its share of the step; at least one layout."""
        worst, error, _ = max(predictions, key=lambda one: abs(one[1]))
        return cls(
            layouts=len(predictions),
            mape=statistics.fmean(abs(error) for _, error, _ in predictions),
            mean=statistics.fmean(error for _, error, _ in predictions),
            worst=error,
            worst_layout=layout_name(worst.layout),
            share=statistics.fmean(share for *_, share in predictions),
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The accuracy of predictions on layouts that no number of the profile was fitted to."""

    step: Errors
    phases: Mapping[str, Errors]
    pairs: int
    """The number of pairs of layouts whose times are more than `APART` apart."""
    in_order: int
    """The number of these pairs that were predicted in the measured order."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """Layouts of one run that took turns."""

    VERSION: ClassVar[int] = 1

    recipe: str
    overrides: tuple[str, ...]
    optimizer: str
    gpus: int
    device: Device
    profile: str
    """Name of the cluster profile the predictions rest on."""
    calibrated: bool
    fitted_on: str
    """The axes whose steps the profile was fitted to; empty where it was not."""
    machine: Mapping[str, str | int | float]
    rounds: int
    steps: int
    """Measured in each turn, after `warm_up_steps`."""
    warm_up_steps: int
    legal: int
    """The number of layouts that are possible and fit."""
    everything: bool
    """All of them were measured."""
    chosen: str
    """The layout that a run gets without tuning: the fastest by the simulator."""
    layouts: Mapping[str, LayoutBench]
    """The layouts by `layout_name`, the fastest by prediction first; at least one."""
    failed: Mapping[str, str]
    """The reason why a turn of a layout ended early, by its name; it is not among `layouts`."""
    notes: tuple[str, ...] = ()

    @cached_property
    def best(self) -> str:
        """The fastest as measured."""
        return min(self.layouts, key=lambda name: self.layouts[name].per_sequence_s)

    def slower(self, name: str) -> float:
        """Returns by how much a layout is slower than the fastest, as measured; 0.03 is three per cent."""
        return self.layouts[name].per_sequence_s / self.layouts[self.best].per_sequence_s - 1

    @property
    def certain(self) -> bool:
        """True where the fastest is clearly apart from the simulator's choice, or is that choice."""
        if self.best == self.chosen or self.chosen not in self.layouts:
            return self.best == self.chosen
        both = (self.layouts[name] for name in (self.best, self.chosen))
        best, chosen = (Quartiles.of([s / one.layout.global_batch_size for s in one.iteration_s]) for one in both)
        return not best.overlaps(chosen)

    @cached_property
    def accuracy(self) -> Accuracy | None:
        """None where all layouts were fitted on."""
        unseen = [one for one in self.layouts.values() if not one.fitted]
        if not unseen:
            return None
        phases = {phase: list(_phase_errors(unseen, phase)) for phase in IN_STEP}
        orders = [
            (slower.predicted_per_sequence_s > faster.predicted_per_sequence_s)
            for faster, slower in (sorted(two, key=_per_sequence_s) for two in itertools.combinations(unseen, 2))
            if slower.per_sequence_s / faster.per_sequence_s - 1 > APART
        ]
        return Accuracy(
            step=Errors.of([(one, one.error, 1.0) for one in unseen]),
            phases={phase: Errors.of(errors) for phase, errors in phases.items() if errors},
            pairs=len(orders),
            in_order=sum(orders),
        )


def content_of(result: TuneResult, recipe: str | None) -> dict[str, object]:
    """Returns what `--json` prints and tune.json holds: the figures, and under `result` all they come from.

    Args:
        recipe: the file that was written.
    """
    return {
        "version": result.VERSION,
        "recipe": result.recipe,
        "recipe_file": recipe,
        "best": result.best,
        "chosen": result.chosen,
        "chosen_slower": result.slower(result.chosen) if result.chosen in result.layouts else None,
        "certain": result.certain,
        "legal": result.legal,
        "failed": dict(result.failed),
        "notes": list(result.notes),
        "layouts": {
            name: {
                "layout": asdict(one.layout),
                "measured_s": one.median_s,
                "predicted_s": one.predicted.iteration_s,
                "error": one.error,
                "slower": result.slower(name),
                "fitted": one.fitted,
                "phases": {
                    phase: {"measured_s": seconds, "predicted_s": one.predicted.phases.get(phase, 0.0)}
                    for phase, seconds in one.phases.items()
                },
            }
            for name, one in result.layouts.items()
        },
        "accuracy": None if result.accuracy is None else asdict(result.accuracy),
        "result": asdict(result),
    }


def was_fitted(layout: Layout, fitted_on: str) -> bool:
    """Returns True where a profile was fitted to steps of these axes."""
    return layout_code(layout) in fitted_on.split(", ")


def _phase_errors(layouts: Sequence[LayoutBench], phase: str) -> Iterator[tuple[LayoutBench, float, float]]:
    for one in layouts:
        error = one.phase_error(phase)
        if error is not None:
            yield one, error, one.phases[phase] / one.median_s


def _per_sequence_s(one: LayoutBench) -> float:
    return one.per_sequence_s
