"""Ranks groups of runs: which optimizer, or which other setting, has the lowest loss at its best learning rates, and
which are not told apart from it.

Runs that differ only in learning rates, in seeds and in what follows from other settings are one group.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Final, Literal

from canzona_cli.core.setup import ScheduleConfig
from canzona_cli.core.simulate.possible import BATCH, MESH
from canzona_cli.records.compare import VERSION, RunComparison, run_figures, runs_json
from canzona_cli.records.records import FAILURES
from canzona_cli.records.statistics import SIGNIFICANCE, MeanSpread, holm, paired_p
from canzona_cli.records.summary import RunSummary

By = Literal["validation", "training"]
"""The loss by which groups are ranked."""
Edge = Literal["lowest", "highest"]
JUDGED_SEEDS: Final = 3
"""The smallest number of shared seeds from which a difference is judged. A mean of three differences must be 4.3 times
its standard error to be significant."""
SMOOTHED_STEPS: Final = 10
"""The number of logged steps over which training losses are averaged."""
LR: Final = "optimizer.lr"
ADAMW_LR: Final = "optimizer.adamw_lr"
_WITHOUT_EFFECT: Final = {
    *(LR, ADAMW_LR, "optimizer.lrs", "optimizer.adamw_lr_ratio", "train.seed"),
    *("name", "description", "train.batch_tokens", "train.eval_interval"),
}
"""Settings that change no group: learning rates, the seed, names, and what is written when."""
_WITH_EFFECT: Final = {
    "cluster": ("cluster.name", "cluster.transformer_engine"),
    "checkpoint": ("checkpoint.weights_from", "checkpoint.resume"),
    "run": (),
}
"""The settings of these sections that make groups; their other settings describe the machine, or say what is kept."""
_DERIVED: Final = {
    *(f"parallel.{name}" for name in MESH),
    *(f"train.{name}" for name in BATCH),
    *(f"schedule.{field.name}" for field in fields(ScheduleConfig) if field.name != "decay"),
}
"""Settings that a run fills in from the others where the user leaves them null."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The runs of a group with the same learning rates."""

    rates: Mapping[str, float]
    """The value of each rate that was varied, by its key."""
    runs: tuple[RunSummary, ...]
    losses: Mapping[int, float]
    """The loss at the common step by seed, of the runs that reached it and did not fail."""
    averaged: tuple[RunSummary, ...]
    """The runs whose losses these are."""

    @property
    def loss(self) -> MeanSpread:
        """The loss over seeds, of which there is at least one."""
        return MeanSpread.of(self.losses.values())


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs that differ only in learning rates and seeds."""

    settings: Mapping[str, object]
    """The settings by which the groups differ; empty if a configuration could not be read."""
    trials: tuple[Trial, ...]

    @property
    def runs(self) -> list[RunSummary]:
        return [run for trial in self.trials for run in trial.runs]

    @property
    def _measured(self) -> list[Trial]:
        """The trials that have losses."""
        return [trial for trial in self.trials if trial.losses]

    @property
    def common_seeds(self) -> set[int]:
        """The seeds that all learning rates have that have losses."""
        seeds = [set(trial.losses) for trial in self._measured]
        return seeds[0].intersection(*seeds) if seeds else set()

    @property
    def unequal_seeds(self) -> bool:
        """True if learning rates have different seeds."""
        return len({tuple(trial.losses) for trial in self._measured}) > 1

    @cached_property
    def best(self) -> Trial | None:
        """The learning rates with the lowest mean loss over the seeds that all have or, if there are none, over the
        seeds of each; None if no run reached the common step."""
        seeds = self.common_seeds
        return min(
            self._measured,
            key=lambda trial: statistics.fmean(trial.losses[seed] for seed in seeds or trial.losses),
            default=None,
        )

    def tried(self, key: str) -> list[float]:
        """Returns the values of a rate, in rising order. A rate at which all runs failed was tried too."""
        return sorted({trial.rates[key] for trial in self.trials})

    @property
    def edges(self) -> Mapping[str, Edge]:
        """The rates whose best value is the lowest or the highest of several: the optimum may be beyond it. A rate
        whose runs have not come to the common step says nothing yet."""
        known = [trial for trial in self.trials if trial.losses or any(run.status in FAILURES for run in trial.runs)]
        edges: dict[str, Edge] = {}
        for key, value in {} if self.best is None else self.best.rates.items():
            tried = sorted({trial.rates[key] for trial in known})
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                edges[key] = "lowest" if value == tried[0] else "highest"
        return edges

    @property
    def step_s(self) -> MeanSpread | None:
        """The seconds per step, over the runs that did not fail."""
        seconds = [
            s for run in self.runs if run.status not in FAILURES and (s := run_figures(run)["step_s"]) is not None
        ]
        return MeanSpread.of(seconds) if seconds else None

    def seconds_at(self, step: float | None) -> float | None:
        """Returns the seconds of the first steps, whose number may be unknown: the mean over the runs that did not fail
        and logged as many."""
        seconds = (None if step is None or run.status in FAILURES else run.seconds_at(step) for run in self.runs)
        known = [each for each in seconds if each is not None]
        return statistics.fmean(known) if known else None

    def tokens_at(self, step: float | None) -> float | None:
        """Returns the tokens of the first steps, whose number may be unknown, in the first run that logged as many."""
        tokens = (None if step is None else run.tokens_at(step) for run in self.runs)
        return next((amount for amount in tokens if amount is not None), None)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much higher the loss of a group is than that of the best one, each at its best learning rates."""

    gap: float
    """The difference: the mean over shared seeds or, without any, of the means."""
    seeds: int
    """The number of shared seeds."""
    p: float | None
    """The probability of such a difference if both groups are equally good, by the paired t-test over shared seeds,
    adjusted by Holm's method for the number of groups that are compared with the best one. None with fewer than
    `JUDGED_SEEDS` seeds."""

    @property
    def higher(self) -> bool | None:
        """True if the group's loss is higher; False if it is not told apart from the best one; None if there are
        too few seeds to judge that."""
        return None if self.p is None else self.p < SIGNIFICANCE and self.gap > 0


def differences(best: Mapping[int, float], others: Iterable[Mapping[int, float]]) -> list[Difference]:
    """Compares the losses of groups with those of the best one, all by seed."""
    gaps = [([losses[seed] - best[seed] for seed in best.keys() & losses.keys()], losses) for losses in others]
    adjusted = iter(holm([paired_p(pairs) for pairs, _ in gaps if len(pairs) >= JUDGED_SEEDS]))
    return [
        Difference(
            gap=statistics.fmean(pairs or losses.values()) - (0.0 if pairs else statistics.fmean(best.values())),
            seeds=len(pairs),
            p=next(adjusted) if len(pairs) >= JUDGED_SEEDS else None,
        )
        for pairs, losses in gaps
    ]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Groups of runs, with the lowest loss first."""

    comparison: RunComparison
    by: By
    step: int | None
    """The last step at which every line that has losses has one; None if there is no such step."""
    rates: tuple[str, ...]
    """The keys of the learning rates that differ."""
    groups: tuple[Group, ...]

    @cached_property
    def lines(self) -> tuple[Group, ...]:
        """What is ranked: the groups or, if only learning rates were varied, these rates."""
        if len(self.groups) > 1 or not self.rates:
            return self.groups
        (group,) = self.groups
        return tuple(_sorted(Group(settings=trial.rates, trials=(trial,)) for trial in group.trials))

    @cached_property
    def reference(self) -> Group | None:
        """The line whose loss at the common step the others have to reach: that of AdamW if there is one, otherwise the
        worst one; None if no line has a loss."""
        measured = [line for line in self.lines if line.best is not None]
        adamw = [line for line in measured if line.settings.get("optimizer.name") == "adamw"]
        return adamw[0] if len(adamw) == 1 else measured[-1] if measured else None

    @property
    def target(self) -> float | None:
        """The loss of `reference` at the common step."""
        line = self.reference
        return None if line is None or line.best is None else line.best.loss.mean

    def mean_curve(self, line: Group) -> list[tuple[int, float]]:
        """Returns the (step, loss) pairs of a group: the mean over the seeds at its best learning rates."""
        curves = [losses_of(run, self.by) for run in (line.best.averaged if line.best is not None else ())]
        steps = sorted(set[int]().union(*curves).intersection(*curves))
        return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]

    def reached(self, line: Group) -> float | None:
        """Returns the step at which a group's mean curve reached the target, interpolated between two losses; None if
        it did not."""
        return None if self.target is None else first_step_at(self.mean_curve(line), self.target)

    @cached_property
    def verdict(self) -> list[Difference]:
        """The differences of the lines that have losses from the first one, in their order."""
        best, *others = (line.best.losses if line.best is not None else {} for line in self.lines)
        return differences(best, filter(None, others)) if best else []

    def only_at_rates(self, line: Group) -> bool:
        """Returns True if a best rate of a line or of the first one is the lowest or the highest tried, so that
        another rate could change their difference."""
        return len(self.groups) > 1 and bool(line.edges or self.lines[0].edges)

    @property
    def left_out(self) -> list[RunSummary]:
        """The runs that are in no mean, because they failed or have no loss at the common step."""
        averaged = {run.run_dir for group in self.groups for trial in group.trials for run in trial.averaged}
        return [run for run in self.comparison.runs if run.run_dir not in averaged]

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json` for three runs or more. New keys do not change `version`; any other
        change raises it."""
        lines = zip_longest(self.lines, [None, *self.verdict])
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in ("by", "step", "target")},
            "reference": None if self.reference is None else self.reference.settings,
            "groups": [self._group_json(line, difference) for line, difference in lines],
            "left_out": [str(run.run_dir) for run in self.left_out],
            "not_begun": [str(path) for path in self.comparison.not_begun],
            "runs": runs_json(self.comparison),
        }

    def _group_json(self, line: Group, difference: Difference | None) -> dict[str, object]:
        best, reached = line.best, self.reached(line)
        return {
            "settings": line.settings,
            "rates_tried": {key: line.tried(key) for key in self.rates},
            "best_rates": None if best is None else best.rates,
            "edges": line.edges,
            "loss": None if best is None else {**vars(best.loss), "by_seed": best.losses},
            "above_best": None if difference is None else {**vars(difference), "higher": difference.higher},
            "step_s": None if line.step_s is None else vars(line.step_s),
            "reached": {
                "step": reached,
                "seconds": line.seconds_at(reached),
                "tokens": line.tokens_at(reached),
            },
            "runs": [str(run.run_dir) for run in line.runs],
        }


def rank(comparison: RunComparison) -> Ranking:
    """Groups the runs of a comparison and ranks the groups."""
    runs, varied = comparison.runs, _varied_by_hand(comparison.settings)
    readable = all(run.config is not None for run in runs)
    members: dict[str, tuple[dict[str, object], list[RunSummary]]] = {}
    for index, run in enumerate(runs):
        settings = {key: comparison.settings[key][index] for key in varied}
        members.setdefault(repr(settings) if readable else str(index), (settings, []))[1].append(run)
    grouped = [group for _, group in members.values()]
    rates = _rates_varied(comparison) if readable else ()
    parts = grouped if len(grouped) > 1 else [*_by_rates(grouped[0], rates).values()]
    by: By = "training" if _common_step(parts, "validation") is None else "validation"
    step = _common_step(parts, by)
    groups = (Group(settings=settings, trials=_trials(group, rates, by, step)) for settings, group in members.values())
    return Ranking(comparison=comparison, by=by, step=step, rates=rates, groups=tuple(_sorted(groups)))


def first_step_at(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Returns the step at which a curve of (step, loss) pairs first falls to a loss, interpolated between two pairs;
    None if it does not."""
    index = next((index for index, (_, loss) in enumerate(curve) if loss <= target), None)
    if not index:
        return None if index is None else curve[0][0]
    (before, above), (step, loss) = curve[index - 1 : index + 1]
    return before + (above - target) / (above - loss) * (step - before)


def losses_of(run: RunSummary, by: By) -> dict[int, float]:
    """Returns a run's finite losses by step: validation losses, or training losses, each averaged with those of the
    logged steps before it (`SMOOTHED_STEPS`)."""
    if by == "validation":
        return {step: loss for step, loss in run.validations if loss is not None}
    sums = list(accumulate((loss for _, loss in run.losses), initial=0.0))
    begins = (max(0, end - SMOOTHED_STEPS) for end in range(1, len(sums)))
    pairs = zip(run.losses, enumerate(begins, 1), strict=True)
    return {step: (sums[end] - sums[begin]) / (end - begin) for (step, _), (end, begin) in pairs}


def _common_step(groups: Sequence[Sequence[RunSummary]], by: By) -> int | None:
    """Returns the last step after the first at which every group that has losses has one; None if there is none. Runs
    that failed are not counted."""
    finished = ([run for run in group if run.status not in FAILURES] for group in groups)
    steps = ({step for run in group for step in losses_of(run, by) if step} for group in finished)
    reached = [of_group for of_group in steps if of_group]
    return max(set.intersection(*reached), default=None) if reached else None


def _sorted(groups: Iterable[Group]) -> list[Group]:
    """Sorts groups by their loss; groups without one come last."""
    return sorted(groups, key=lambda group: (group.best is None, 0.0 if group.best is None else group.best.loss.mean))


def _varied_by_hand(differing: Mapping[str, Sequence[object]]) -> list[str]:
    """Returns the settings that make groups. Settings of an optimizer or a model count only if they differ between
    runs with the same one, and derived settings only if they differ between runs that agree in all others."""
    keys = []
    for key in differing:
        section = key.partition(".")[0]
        if key in _WITH_EFFECT.get(section, (key,)) and key not in _WITHOUT_EFFECT | _DERIVED:
            names = {f"{section}.name"} & (differing.keys() - {key})
            if not names or _differs_within(key, names, differing):
                keys.append(key)
    derived = [key for key in differing if key in _DERIVED and _differs_within(key, keys, differing)]
    # What all groups are named after comes first.
    return sorted([*keys, *derived], key=lambda key: not key.endswith(".name"))


def _differs_within(key: str, others: Collection[str], differing: Mapping[str, Sequence[object]]) -> bool:
    """Returns True if a setting differs between two runs that have the same values of other settings."""
    first: dict[tuple[str, ...], object] = {}
    for index, value in enumerate(differing[key]):
        context = tuple(repr(differing[other][index]) for other in others)
        if first.setdefault(context, value) != value:
            return True
    return False


def _rates_varied(comparison: RunComparison) -> tuple[str, ...]:
    """Returns the learning rates that differ; that of AdamW only if it does not follow from the other one."""
    pairs = {(rates[LR], rates[ADAMW_LR]) for run in comparison.runs if (rates := _rates_of(run))}
    lrs = {lr for lr, _ in pairs}
    return (LR,) * (len(lrs) > 1) + (ADAMW_LR,) * (len(pairs) > len(lrs))


def _rates_of(run: RunSummary) -> dict[str, float]:
    """Returns a run's peak learning rates; empty if its configuration could not be read."""
    optimizer = None if run.config is None else run.config.optimizer
    return {} if optimizer is None else {LR: optimizer.lr, ADAMW_LR: optimizer.adamw_rates.lr}


def _by_rates(group: Sequence[RunSummary], rates: Sequence[str]) -> dict[tuple[float, ...], list[RunSummary]]:
    """Divides the runs of a group by their learning rates."""
    members: dict[tuple[float, ...], list[RunSummary]] = {}
    for run in group:
        members.setdefault(tuple(_rates_of(run)[key] for key in rates), []).append(run)
    return members


def _trials(group: Sequence[RunSummary], rates: Sequence[str], by: By, step: int | None) -> tuple[Trial, ...]:
    """Returns the trials of a group, with their losses at the common step."""
    trials = []
    for values_of_rates, runs in sorted(_by_rates(group, rates).items()):
        by_seed: dict[int, list[float]] = {}
        averaged = []
        for run in runs:
            loss = None if step is None or run.status in FAILURES else losses_of(run, by).get(step)
            if loss is not None:
                by_seed.setdefault(0 if run.config is None else run.config.train.seed, []).append(loss)
                averaged.append(run)
        trials.append(
            Trial(
                rates=dict(zip(rates, values_of_rates, strict=True)),
                runs=tuple(runs),
                losses={seed: statistics.fmean(losses) for seed, losses in sorted(by_seed.items())},
                averaged=tuple(averaged),
            )
        )
    return tuple(trials)
