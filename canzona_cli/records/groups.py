"""Ranks groups of runs: which optimizer, or which other setting, has the lowest loss at its best learning rates.

Runs that differ only in learning rates, in seeds and in what follows from other settings are one group.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal

from canzona_cli.core.setup import ScheduleConfig
from canzona_cli.core.simulate.possible import BATCH, MESH
from canzona_cli.records.compare import VERSION, RunComparison, run_figures, runs_json
from canzona_cli.records.records import FAILURES
from canzona_cli.records.statistics import SIGNIFICANCE, paired_p
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
MIN_LR: Final = "optimizer.min_lr"
_WITHOUT_EFFECT: Final = {
    *(LR, ADAMW_LR, "optimizer.lrs", "optimizer.min_lr_ratio", "optimizer.adamw_lr_ratio", "train.seed"),
    *("name", "description", "data.cache_dir", "train.batch_tokens", "train.eval_interval"),
    *("train.sample_every", "train.sample_prompt"),
}
"""Settings that change no group: learning rates, the seed, names, and what is written when."""
_WITH_EFFECT: Final = {
    "cluster": ("cluster.name", "cluster.transformer_engine"),
    "checkpoint": ("checkpoint.weights_from", "checkpoint.resume"),
    "run": (),
}
"""The settings of these sections that make groups; their other settings describe the machine, or say what is kept."""
_DERIVED: Final = {
    MIN_LR,
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
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two seeds."""
        return statistics.stdev(self.losses.values()) if len(self.losses) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs that differ only in learning rates and seeds."""

    settings: Mapping[str, object]
    """The settings by which the groups differ; empty if a configuration could not be read."""
    trials: tuple[Trial, ...]

    @property
    def runs(self) -> list[RunSummary]:
        return [run for trial in self.trials for run in trial.runs]

    @cached_property
    def best(self) -> Trial | None:
        """The learning rates with the lowest mean loss; None if no run reached the common step."""
        return min((trial for trial in self.trials if trial.losses), key=lambda trial: trial.mean, default=None)

    def tried(self, key: str) -> list[float]:
        """Returns the values of a rate, in rising order. A rate at which all runs failed was tried too."""
        return sorted({trial.rates[key] for trial in self.trials})

    @property
    def edges(self) -> Mapping[str, Edge]:
        """The rates whose best value is the lowest or the highest of several: the optimum may be beyond it."""
        edges: dict[str, Edge] = {}
        for key, value in {} if self.best is None else self.best.rates.items():
            tried = self.tried(key)
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                edges[key] = "lowest" if value == tried[0] else "highest"
        return edges

    @property
    def step_s(self) -> float | None:
        """The median of the runs' seconds per step."""
        seconds = [
            s for run in self.runs if run.status not in FAILURES and (s := run_figures(run)["step_s"]) is not None
        ]
        return statistics.median(seconds) if seconds else None

    @property
    def tokens_per_step(self) -> float | None:
        """The tokens per step of the first run that logged any."""
        lines = (run.metrics[-1] for run in self.runs if run.metrics)
        return next((line.tokens / line.step for line in lines if line.tokens is not None), None)


def product(steps: float | None, per_step: float | None) -> float | None:
    """Multiplies numbers that may be unknown."""
    return None if steps is None or per_step is None else steps * per_step


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The difference between the best and the second group, each at its best learning rates."""

    gap: float
    """The second group's loss minus the best one's: the mean over shared seeds or, without any, of the means."""
    seeds: int
    """The number of shared seeds."""
    p: float | None
    """The probability of such a difference if both groups are equally good, by the paired t-test over shared seeds.
    None with fewer than `JUDGED_SEEDS`."""
    at_edge: bool
    """True if a best rate of either group is the lowest or the highest tried, so that another could be better."""

    @property
    def better(self) -> bool | None:
        """True if the best group is better than the second at the rates tried; None if there are too few seeds to judge
        that."""
        return None if self.p is None else self.p < SIGNIFICANCE and self.gap > 0


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
    def target(self) -> float | None:
        """The loss of the worst group at the common step."""
        return max((line.best.mean for line in self.lines if line.best is not None), default=None)

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
    def verdict(self) -> Verdict | None:
        """The verdict on the first two groups; None if there are no two groups with losses."""
        bests = [line.best for line in self.lines if line.best is not None]
        if len(bests) < 2:
            return None
        best, second = bests[:2]
        differences = [second.losses[seed] - best.losses[seed] for seed in best.losses.keys() & second.losses.keys()]
        return Verdict(
            gap=statistics.fmean(differences) if differences else second.mean - best.mean,
            seeds=len(differences),
            p=paired_p(differences) if len(differences) >= JUDGED_SEEDS else None,
            at_edge=len(self.groups) > 1 and any(group.edges for group in self.groups[:2]),
        )

    @property
    def left_out(self) -> list[RunSummary]:
        """The runs that are in no mean, because they failed or have no loss at the common step."""
        averaged = {run.run_dir for group in self.groups for trial in group.trials for run in trial.averaged}
        return [run for run in self.comparison.runs if run.run_dir not in averaged]

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json` for three runs or more. New keys do not change `version`; any other
        change raises it."""
        verdict = self.verdict
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in ("by", "step", "target")},
            "verdict": None if verdict is None else {**vars(verdict), "better": verdict.better},
            "groups": [self._group_json(line) for line in self.lines],
            "left_out": [str(run.run_dir) for run in self.left_out],
            "runs": runs_json(self.comparison),
        }

    def _group_json(self, line: Group) -> dict[str, object]:
        best, reached = line.best, self.reached(line)
        return {
            "settings": line.settings,
            "rates_tried": {key: line.tried(key) for key in self.rates},
            "best_rates": None if best is None else best.rates,
            "edges": line.edges,
            "loss": None if best is None else {"mean": best.mean, "spread": best.spread, "by_seed": best.losses},
            "step_s": line.step_s,
            "reached": {
                "step": reached,
                "seconds": product(reached, line.step_s),
                "tokens": product(reached, line.tokens_per_step),
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
    return sorted(groups, key=lambda group: (group.best is None, 0.0 if group.best is None else group.best.mean))


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
    with_rates = [*keys, *({LR, ADAMW_LR} & differing.keys())]
    derived = [
        key
        for key in differing
        if key in _DERIVED and _differs_within(key, with_rates if key == MIN_LR else keys, differing)
    ]
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
