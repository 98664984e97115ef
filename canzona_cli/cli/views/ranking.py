"""The views of `canzona report --compare` for three or more runs, and of a finished sweep: groups of runs, with the
best one first."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import Curve, Curves, phase_bar, side_by_side, step_bars
from canzona_cli.cli.views.compare import RunPairView, setting_value
from canzona_cli.cli.views.document import Document, sections
from canzona_cli.cli.views.page import (
    Columns,
    GroupedTable,
    Page,
    Screen,
    column,
    note,
    paragraph,
    rows_table,
    section_head,
)
from canzona_cli.records.compare import compare_two, run_figures
from canzona_cli.records.groups import (
    JUDGED_SEEDS,
    SMOOTHED_STEPS,
    By,
    Ranking,
    losses_of,
)
from canzona_cli.records.statistics import MeanSpread
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import MISSING, count, duration, number, plural, size, step_time

_LONGEST_LABEL = 40
_MOST_NAMES = 4
"""The most runs that a remark names."""
_Form = Literal["full", "compact", "narrow", "narrowest"]
_FORMS: tuple[_Form, ...] = get_args(_Form)
"""The forms of the table, of which the first that fits is shown. full: with what the verdict says of each group.
narrow: the rates that were tried stand below the table. narrowest: without the spread of step times too."""
_SHOWN_SHARE = 5
"""Loss curves begin after the warm-up, and after a fifth of the steps. Also, they all begin where the last of them has
fallen to the highest loss in the second half of the steps: before that, losses fall so far that the ends of the curves
would lie on one another."""
_NOT_TOLD_APART = ("is not told apart from", "")
_WORSE = ("is better than", "")
_AT_THESE_RATES = ("is lower than", ", but only at the rates tried: a best rate is the lowest or highest of them")
_NOT_JUDGED = ("is lower than", f", without a verdict, which needs {JUDGED_SEEDS} shared seeds")
_HIGHER = (
    "is higher than",
    f" on the seeds that both have, without a verdict, which needs {JUDGED_SEEDS} shared seeds",
)
_NOTHING_SHARED = ("cannot be compared with", ", for want of a shared seed")
"""The verdicts on a group: what stands before and after its name."""
_loss = partial(number, spec=".4f")


@dataclass(frozen=True, kw_only=True)
class RankingView(Page):
    """A table with a line for each group, the verdict, and what the means leave out."""

    ranking: Ranking
    verbose: bool = False
    """True to list every run."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        ranking = self.ranking
        labels = group_labels(ranking)
        for form in _FORMS:
            table = GroupedTable(head=_head(ranking), labels=labels, groups=list(_columns(ranking, form)))
            if table.fits(screen.width):
                break
        yield table
        yield from map(note, _explanation(ranking, labels, form))
        if (verdict := verdict_text(ranking)) is not None and not screen.page:  # there, it is at the top
            yield Text()
            yield paragraph(verdict, "bold")
        if self.verbose:
            yield Text()
            yield _runs_table(ranking)
        for remark in _remarks(ranking, labels):
            yield paragraph(remark, "yellow", first="  ! ")


def _head(ranking: Ranking) -> str:
    """Returns the head of the column with the groups' names."""
    settings = ranking.lines[0].settings
    (key,) = settings if len(settings) == 1 else ("group",)
    return "optimizer" if key == "optimizer.name" else key.rpartition(".")[2]


def group_labels(ranking: Ranking) -> list[str]:
    """Returns the name of each line of a ranking: the values of its settings, or its first run's directory if they
    are too long or alike."""
    labels = [_label(line.settings) for line in ranking.lines]
    if labels == [""]:
        return ["all runs"]
    if len({*labels}) == len(labels) and all(0 < len(label) <= _LONGEST_LABEL for label in labels):
        return labels
    return run_names([line.runs[0] for line in ranking.lines])


def _label(settings: Mapping[str, object]) -> str:
    if len(settings) == 1:
        return "".join(map(setting_value, settings.values()))
    parts = []
    for key, value in settings.items():
        if value is not None:  # null where another optimizer has the setting
            name = "" if key == "optimizer.name" else f"{key.rpartition('.')[2]}="
            parts.append(name + setting_value(value))
    return ", ".join(parts)


def _columns(ranking: Ranking, form: _Form) -> Iterator[Columns]:
    lines, seeds = ranking.lines, _seeds(ranking)
    rows = [
        (MISSING,) * 3 if best is None else (_loss(best.loss.mean), _loss(best.loss.spread), str(len(best.losses)))
        for best in (line.best for line in lines)
    ]
    losses = Columns(f"{ranking.by} loss" if form == "full" else ranking.by, ("mean", "spread", "seeds"), rows)
    yield losses.drop(*["spread"] * (max(seeds, default=0) < 2), *["seeds"] * (len(seeds) < 2))
    if form == "full" and ranking.verdict:
        above = [(_loss(each.gap), number(each.p, ".2g")) for each in ranking.verdict]
        without = [(MISSING,) * 2] * (len(lines) - 1 - len(above))
        above_best = Columns("above best", ("by", "p"), [("", ""), *above, *without])
        yield above_best.drop(*["p"] * all(each.p is None for each in ranking.verdict))
    for key in _rates_shown(ranking):
        name, tried = key.rpartition(".")[2], [line.tried(key) for line in lines]
        if max(map(len, tried)) == 1:
            yield column(name, [f"{rate:g}" for (rate,) in tried])
            continue
        best_rates = (
            MISSING if line.best is None else f"{line.best.rates[key]:g}{'!' if key in line.edges else ' '}"
            for line in lines
        )
        rates = Columns(name, ("best ", "tried"), [*zip(best_rates, map(_range, tried), strict=True)])
        yield rates.drop(*["tried"] * (form.startswith("narrow")))
    if any(line.step_s is not None for line in lines):
        times = (line.step_s for line in lines)
        yield column("step", [step_time(s and s.mean) if form == "narrowest" else _step(s) for s in times])
    if len(lines) > 1 and ranking.target is not None:
        reached = [(line, ranking.reached(line)) for line in lines]
        cells = [(duration(line.seconds_at(step)), count(line.tokens_at(step))) for line, step in reached]
        yield Columns(f"until {_loss(ranking.target)}", ("time", "tokens"), cells)


def _rates_shown(ranking: Ranking) -> tuple[str, ...]:
    """Returns the rates that have columns; none if the lines are named after their rates."""
    return ranking.rates if len(ranking.groups) > 1 else ()


def _seeds(ranking: Ranking) -> set[int]:
    """Returns the numbers of seeds of the best rates."""
    return {len(line.best.losses) for line in ranking.lines if line.best is not None}


def _step(seconds: MeanSpread | None) -> str:
    """Formats the seconds of a step: the mean, and the spread over runs as a share of it."""
    if seconds is None or seconds.spread is None:
        return step_time(None if seconds is None else seconds.mean)
    return f"{step_time(seconds.mean)} ±{100 * seconds.spread / seconds.mean:.0f}%"


def _range(tried: Sequence[float]) -> str:
    """Describes the values of a rate that were tried: `0.001..0.05`."""
    return f"{tried[0]:g}" if len(tried) == 1 else f"{tried[0]:g}..{tried[-1]:g}"


def _explanation(ranking: Ranking, labels: Sequence[str], form: _Form) -> Iterator[str]:
    """Yields the sentence that says what the numbers of the table are, and what has no room in it."""
    if ranking.step is None or ranking.reference is None:
        yield "there is no step at which all groups have a loss"
        return
    parts = [f"{_amount(ranking)}; {ranking.by} loss at step {ranking.step:,}, the last that all have"]
    if ranking.by == "training":
        parts.append(f"mean of {SMOOTHED_STEPS} logged steps, because there is no common validation")
    if max(seeds := _seeds(ranking)) > 1:
        parts.append(f"spread: standard deviation over {'' if len(seeds) > 1 else f'{max(seeds)} '}seeds")
    has_spread = any(line.step_s is not None and line.step_s.spread is not None for line in ranking.lines)
    if form != "narrowest" and has_spread:
        parts.append("±: standard deviation over runs")
    if any(group.unequal_seeds for group in ranking.groups):
        parts.append("best: by the seeds that all rates of a group have, if there are any")
    if len(ranking.lines) > 1:
        reference = labels[ranking.lines.index(ranking.reference)]
        parts.append(f"until {_loss(ranking.target)}: when the mean curve reaches the loss of {reference}")
    if judged := [each.seeds for each in ranking.verdict if each.p is not None]:
        span = f"{min(judged)} to {max(judged)}" if len({*judged}) > 1 else judged[0]
        holm = f" with {labels[0]}, adjusted for {len(judged)} comparisons (Holm)" * (len(judged) > 1)
        chosen = ", at best rates chosen on the same seeds" * any(len(group.trials) > 1 for group in ranking.lines)
        parts.append(f"p: paired t-test over {span} shared seeds{holm}{chosen}")
    yield "; ".join(parts)
    for key in _rates_shown(ranking) if form.startswith("narrow") else ():
        tried: dict[str, list[str]] = {}
        for label, line in zip(labels, ranking.lines, strict=True):
            tried.setdefault(_range(line.tried(key)), []).append(label)
        spans = (f"{span} by {_and(of)}" for span, of in tried.items())
        yield f"{key.rpartition('.')[2]} tried: {'; '.join(spans if len(tried) > 1 else tried)}"


def verdict_text(ranking: Ranking) -> str | None:
    """Returns the sentence that says which groups are not told apart from the best one and which are worse, or what is
    missing; None if there are no two groups with losses."""
    if not (verdict := ranking.verdict):
        return None
    best, *others = _full_names(ranking)
    cases: dict[tuple[str, str], list[str]] = {}
    for label, line, each in zip(others, ranking.lines[1:], verdict, strict=False):
        if not each.seeds:
            cases.setdefault(_NOTHING_SHARED, []).append(label)
            continue
        judged = plural(each.seeds, "shared seed") if each.p is None else f"p = {number(each.p, '.2g')}"
        worse = _AT_THESE_RATES if ranking.only_at_rates(line) else _WORSE
        not_judged = _NOT_JUDGED if each.gap >= 0 else _HIGHER
        case = not_judged if each.higher is None else worse if each.higher else _NOT_TOLD_APART
        cases.setdefault(case, []).append(f"{label} (by {_loss(abs(each.gap))}, {judged})")
    so_far = "so far, " if ranking.comparison.progress is not None else ""
    return so_far + "; ".join(f"{best} {verb} {_and(labels)}{caveat}" for (verb, caveat), labels in cases.items())


def _full_names(ranking: Ranking) -> list[str]:
    """Returns the name of each line with the setting that it is a value of, such as `lr 0.01`."""
    named = "" if (head := _head(ranking)) in ("optimizer", "group") else f"{head} "
    return [f"{named}{label}" for label in group_labels(ranking)]


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _remarks(ranking: Ranking, labels: Sequence[str]) -> Iterator[str]:
    """Yields what the best rates and the means do not say: runs to come, rates at an edge, other runs, notes."""
    if (progress := ranking.comparison.progress) is not None:
        yield progress
    at_edge: dict[str, list[str]] = {}
    for label, group in zip(labels if len(ranking.groups) > 1 else ["all runs"], ranking.groups, strict=True):
        for key, edge in group.edges.items():
            beyond = "below" if edge == "lowest" else "above"
            text = f"the best {key.rpartition('.')[2]} is the {edge} tried; the optimum may be {beyond} it"
            at_edge.setdefault(text, []).append(label)
    yield from (f"{', '.join(names)}: {text}" for text, names in at_edge.items())
    tokens = [amount for line in ranking.lines if (amount := line.tokens_at(ranking.step)) is not None]
    if ranking.step is not None and len({*tokens}) > 1:
        least, most = count(min(tokens)), count(max(tokens))
        yield f"steps differ in tokens: at step {ranking.step:,}, groups had trained on {least} to {most} tokens"
    if left_out := ranking.left_out:
        names = [f"{run.run_dir.name} ({run.status}, step {run.step:,})" for run in left_out]
        yield f"{plural(len(left_out), 'run')} in no mean: {_listed(names)}"
    notes: dict[str, list[str]] = {}
    for run in (run for run in ranking.comparison.runs if run.status == "done"):
        for text in run.notes:
            notes.setdefault(text.replace(str(run.run_dir), "RUN_DIR"), []).append(run.run_dir.name)
    for text, having in notes.items():
        yield f"{_listed(having)}: {text}"


def _listed(names: Sequence[str]) -> str:
    hidden = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def _runs_table(ranking: Ranking) -> GroupedTable:
    """Returns a table with a line for each run, group after group."""
    rows = []
    for label, line in zip(group_labels(ranking), ranking.lines, strict=True):
        for name, run in zip(run_names(line.runs), line.runs, strict=True):
            loss = None if ranking.step is None else losses_of(run, ranking.by).get(ranking.step)
            figures = run_figures(run)
            last = (step_time(figures["step_s"]), size(figures["peak_memory_bytes"]))
            rows.append((name, (label, run.status, f"{run.step:,}", _loss(loss), *last)))
    return rows_table(["group", "status", "steps", ranking.by, "step", "memory"], rows, head="run", needed=5)


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the directory of each run, relative to the nearest directory that contains all of them."""
    paths = [run.run_dir.absolute() for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def comparison_page(ranking: Ranking) -> Document:
    """Returns the page of a comparison: loss curves, groups, losses by learning rate and step times; for two runs,
    also all differences."""
    return Document(
        kind="canzona report --compare",
        title=_headline(ranking),
        lead=verdict_text(ranking) or "",
        sections=sections(_page_parts(ranking)),
    )


def _amount(ranking: Ranking) -> str:
    """Returns the number of runs, `13 of 30 runs` if a sweep has not begun all of them."""
    runs, not_begun = len(ranking.comparison.runs), len(ranking.comparison.not_begun)
    return f"{runs:,} of {plural(runs + not_begun, 'run')}" if not_begun else plural(runs, "run")


def _headline(ranking: Ranking) -> str:
    """Returns the number of runs and, if groups are compared, the best one with its loss."""
    runs, best = _amount(ranking), ranking.lines[0].best
    if best is None or not ranking.verdict:
        return runs
    return f"{runs}: {_full_names(ranking)[0]} has the lowest {ranking.by} loss, {_loss(best.loss.mean)}"


def _page_parts(ranking: Ranking) -> Iterator[RenderableType]:
    labels = group_labels(ranking)
    yield section_head("Loss", ", nats per token; the runs at each group's best learning rates")
    yield side_by_side(*(_loss_curves(ranking, labels, by) for by in ("validation", "training")))
    yield section_head("Groups", ", with the best one first")
    yield RankingView(ranking=ranking)
    yield section_head("Loss by learning rate", f": {ranking.by} loss at step {ranking.step}, mean over seeds")
    yield side_by_side(*_losses_by_rate(ranking, labels))
    bars = []
    for label, line in zip(labels, ranking.lines, strict=True):
        if (breakdown := next((run.breakdown for run in line.runs if run.breakdown is not None), None)) is not None:
            bars.append(phase_bar(label, breakdown.means, breakdown.step.mean_s))
    if bars:
        yield section_head("Step", ", measured, mean over ranks, on one scale; the first run of each group")
        yield step_bars(bars)
    yield section_head("Runs", "")
    yield _runs_table(ranking)
    if len(ranking.comparison.runs) == 2:
        yield section_head("Differences", ": A is the first run; B / A is above 1 if run B has the larger value")
        yield RunPairView(compared=compare_two(ranking.comparison))


def _loss_curves(ranking: Ranking, labels: Sequence[str], by: By) -> Curves:
    """Draws the ends of the losses of every run at its group's best learning rates, in the colours of the groups."""
    drawn = []
    for label, line in zip(labels, ranking.lines, strict=True):
        runs = line.runs if line.best is None else line.best.averaged
        names = [label] if len(runs) == 1 else run_names(runs)
        drawn += [(label, name, run, losses_of(run, by)) for name, run in zip(names, runs, strict=True)]
    last = max((step for *_, losses in drawn for step in losses), default=0)
    warmups = (run.config.schedule.warmup_steps or 0 for _, _, run, _ in drawn if run.config is not None)
    begin = max([last // _SHOWN_SHARE, *warmups])
    second_half = [loss for *_, losses in drawn for step, loss in losses.items() if step >= max(begin, last // 2)]
    highest = max(second_half, default=math.inf)
    low = [[step for step, loss in losses.items() if step >= begin and loss <= highest] for *_, losses in drawn]
    begin = max((steps[0] for steps in low if steps), default=begin)
    curves = []
    for label, name, _, losses in drawn:
        points = [(step, loss) for step, loss in losses.items() if step >= begin]
        curves.append(Curve(name=name, points=points, group=label, dots=by == "validation" and len(points) < 100))
    smoothed = f", mean of {SMOOTHED_STEPS} steps" if by == "training" else ""
    return Curves(title=f"{by} loss{smoothed}, from step {begin:,}", curves=curves, show=_loss)


def _losses_by_rate(ranking: Ranking, labels: Sequence[str]) -> Iterator[Curves]:
    """Draws the loss over each learning rate that was varied, at the best value of the other rate."""
    for key in ranking.rates:
        curves = []
        for label, group in zip(labels if len(ranking.groups) > 1 else ["loss"], ranking.groups, strict=True):
            trials = sorted((trial for trial in group.trials if trial.losses), key=lambda trial: -trial.loss.mean)
            points = {
                trial.rates[key]: trial.loss.mean for trial in trials
            }  # the lowest loss of each value is the last
            curves.append(Curve(name=label, points=sorted(points.items()), dots=True))
        if any(len(curve.points) > 1 for curve in curves):
            yield Curves(title=f"loss by {key}", curves=curves, axes="log x", x=key, show=_loss)
