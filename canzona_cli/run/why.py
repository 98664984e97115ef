"""Why a step took longer or shorter than planned: the phase that differs most, and the likely cause, in words. Pure.

It judges by what the phases and ranks show and knows no more: a cause it names is the usual one for that picture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_cli.run.phases import IN_STEP, PHASES
from canzona_cli.run.statistics import OverRanks
from canzona_cli.run.words import milliseconds, plural

_COMPUTE = ("forward", "backward", "matrix_update", "adamw_update")
_HIDES = {"grad_reduce": "the backward pass", "exchange": "matrix updates", "param_gather": "the forward pass"}
NEGLIGIBLE = 0.05
"""Of the step: where no phase differs by more, the step is as planned."""
_MUCH = 1.25
"""Times as long: what counts as longer rather than as scatter."""
_EXPLAINS = 0.5
"""Of the difference to the plan: a cause that brings less is not the one."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """The phase with the largest difference between measured and planned, and the likely cause."""

    phase: str
    measured_s: float
    predicted_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """A measured step next to its prediction."""

    measured: Mapping[str, OverRanks]
    """By phase; `_total`s may be among them."""
    predicted: Mapping[str, float]
    """Seconds by phase, mean over ranks; a phase that is missing takes no time."""
    ranks: Sequence[Mapping[str, float]] = ()
    """By rank, its seconds by phase; without them no rank is named."""
    calibrated: bool
    """Whether the prediction rests on a profile that was measured."""
    cores: int | None
    """Cores that the ranks of one machine share; None where each rank has a device of its own."""
    world_size: int
    tp: int
    load_balance: float | None = None
    """Planned, of matrix updates: max over mean of the ranks."""

    def why(self) -> Why | None:
        """What tells most about the difference between the two; None without a measured step."""
        phases = [name for name in IN_STEP if name in self.measured or self.predicted.get(name)]
        step = sum(self.measured[name].mean_s for name in phases if name in self.measured)
        if step <= 0:
            return None
        worst = max(phases, key=lambda name: abs(self.took(name) - self.planned(name)))
        took, planned = self.took(worst), self.planned(worst)
        if abs(took - planned) <= NEGLIGIBLE * step:
            text = f"as planned: no phase differs by more than {100 * NEGLIGIBLE:.0f}% of the step"
        else:
            name = PHASES[worst].subject
            text = f"{name} took {milliseconds(took)} ms, planned {milliseconds(planned)} ms: {self.cause(worst)}"
        return Why(phase=worst, measured_s=took, predicted_s=planned, text=text)

    def took(self, phase: str) -> float:
        return self.measured[phase].mean_s if phase in self.measured else 0.0

    def planned(self, phase: str) -> float:
        return self.predicted.get(phase, 0.0)

    def cause(self, phase: str) -> str:
        longer = self.took(phase) > self.planned(phase)
        traded = self._traded(phase)
        if traded is not None:
            return traded
        factor = self._common_factor(longer)
        if phase in _COMPUTE:
            straggler = self._straggler(phase) if longer else None
            if straggler is not None:
                return straggler
            if factor is not None:
                return f"all computation took {factor:.2g} times the plan, {self._rates(longer)}"
            return (self._in_step(phase) if longer else None) or self._rates(longer)
        if not longer:
            return self._less(phase)
        if phase == "data":
            return "the step waits for its input (a slow disk, or the corpus is not cached)"
        if phase in _HIDES:
            return self._exposed(phase)
        waiting = self._waiting(phase)
        if waiting is not None:
            return waiting
        if phase == "pipeline":
            return "stages are less balanced than planned"
        if phase == "norm_clip":
            return f"gradients are read and scaled more slowly than planned{self._crowded() or self._uncalibrated()}"
        return f"work that the plan does not count (Python, launches){self._crowded()}"

    def _traded(self, phase: str) -> str | None:
        """What one of the two took less, the other took more: a rank without a core of its own waits in its exchange
        while another one updates, and the prediction counts sharing a core as updating slowly."""
        both = ("matrix_update", "exchange")
        if phase not in both or self.cores is None or self.world_size <= self.cores:
            return None
        took, planned = (sum(of(name) for name in both) for of in (self.took, self.planned))
        if not planned or abs(took - planned) > _EXPLAINS * abs(self.took(phase) - self.planned(phase)):
            return None
        return (
            f"{self.world_size} ranks share {plural(self.cores, 'core')}, and while one updates another waits in its "
            f"exchange; the two together took {milliseconds(took)} ms, planned {milliseconds(planned)} ms"
        )

    def _common_factor(self, longer: bool) -> float | None:
        """How much longer all compute phases took, where it is about the same for each of them."""
        large = NEGLIGIBLE * sum(self.predicted.get(name, 0.0) for name in IN_STEP)
        ratios = [self.took(name) / self.planned(name) for name in _COMPUTE if self.planned(name) > large]
        if len(ratios) < 2 or min(ratios) <= 0 or max(ratios) > 1.6 * min(ratios):
            return None
        apart = min(ratios) > 1.1 if longer else max(ratios) < 1 / 1.1
        took = sum(self.took(name) for name in _COMPUTE if self.planned(name) > large)
        return took / sum(self.planned(name) for name in _COMPUTE if self.planned(name) > large) if apart else None

    def _in_step(self, phase: str) -> str | None:
        """Passes far more out of plan than updates, which nobody waits in: TP ranks go through passes together, so that
        a slow one does not show."""
        if self.tp == 1 or phase not in ("forward", "backward"):
            return None
        if not self.planned(phase) or not self.planned("matrix_update"):
            return None
        passes, updates = (self.took(name) / self.planned(name) for name in (phase, "matrix_update"))
        if passes <= 2 * updates:
            return None
        return (
            f"that is {passes:.2g} times, and updates took {updates:.2g} times theirs, so it is not the pace of "
            "processors: TP ranks wait for one another in it, or the profile is wrong about it"
        )

    def _straggler(self, phase: str) -> str | None:
        """One rank that takes much longer than the mean of the others, and so lifts the mean of all."""
        spread = self.measured[phase]
        others = (spread.mean_s * self.world_size - spread.max_s) / max(1, self.world_size - 1)
        excess = self.took(phase) - self.planned(phase)
        if self.world_size == 1 or spread.max_s <= _MUCH * others or spread.mean_s - others < _EXPLAINS * excess:
            return None
        slow = self._extreme(phase, most=True)
        who = "one rank" if slow is None else f"rank {slow}"
        if phase == "matrix_update" and not self._slow_elsewhere(slow):
            balance = spread.max_s / spread.mean_s
            if self.load_balance is None or balance <= 1.1 * self.load_balance:
                return None
            return f"load balance is {balance:.2f}, planned {self.load_balance:.2f}; {who} has the most to do"
        ratio = f"{spread.max_s / others:.2g} times as long as the others" if others > 0 else "all of it"
        return f"{who} takes {ratio}: it is slower or busier than they are"

    def _slow_elsewhere(self, rank: int | None) -> bool:
        """Whether the rank is slow in the model's passes too: then it is the rank, not its share of the updates."""
        if rank is None:
            return False
        passes = ("forward", "backward")
        own = sum(self.ranks[rank].get(name, 0.0) for name in passes)
        return own > 1.15 * sum(self.took(name) for name in passes)

    def _exposed(self, phase: str) -> str:
        total = f"{phase}_total"
        waiting = self._waiting(phase)
        if total in self.measured and self.planned(total) and self.took(total) <= _MUCH * self.planned(total):
            why = self._crowded() or ", which ended before it or began too late"
            return f"it took as long as planned in all, but did not hide under {_HIDES[phase]}{why}"
        if waiting is not None:
            return waiting
        return f"communication is slower than the profile says{self._crowded() or self._uncalibrated()}"

    def _waiting(self, phase: str) -> str | None:
        """Ranks that are early wait in a collective for the one that comes last and waits least."""
        spread = self.measured[phase]
        if spread.mean_s - spread.min_s < _EXPLAINS * (self.took(phase) - self.planned(phase)):
            return None
        late = self._extreme(phase, most=False)
        who = "the rank that comes last" if late is None else f"rank {late}, which comes last"
        return f"ranks wait here for {who} ({milliseconds(spread.min_s)} to {milliseconds(spread.max_s)} ms)"

    def _less(self, phase: str) -> str:
        if phase in _HIDES:
            return f"more of it hides under {_HIDES[phase]} than planned, or the link is faster than the profile says"
        if phase in ("norm_clip", "other", "pipeline"):
            return "ranks wait less for one another than planned"
        return f"the profile is too cautious{self._uncalibrated()}"

    def _rates(self, longer: bool) -> str:
        if not self.calibrated:
            speed = "slower" if longer else "faster"
            return f"this machine is {speed} than the profile, which was not measured on it (`canzona calibrate` does)"
        if longer:
            return (
                f"the machine is slower than when its profile was measured (other load, a lower clock){self._crowded()}"
            )
        return "the machine is faster than when its profile was measured (less load, a higher clock)"

    def _crowded(self) -> str:
        if self.cores is None or self.world_size <= self.cores:
            return ""
        return f"; {plural(self.world_size, 'rank')} share {plural(self.cores, 'core')}"

    def _uncalibrated(self) -> str:
        return "" if self.calibrated else "; the profile was not measured here (`canzona calibrate` does)"

    def _extreme(self, phase: str, *, most: bool) -> int | None:
        if not self.ranks:
            return None
        order = sorted(range(len(self.ranks)), key=lambda rank: self.ranks[rank].get(phase, 0.0))
        return order[-1] if most else order[0]
