"""The views of `canzona report --compare` for three or more runs, and of a finished sweep: groups of runs, with the
best one first."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import phase_bar, step_bars
from canzona_cli.cli.views.compare import RunPairView, setting_value
from canzona_cli.cli.views.curves import Curve, Curves, side_by_side
from canzona_cli.cli.views.document import Document, elements, sections
from canzona_cli.cli.views.page import Page, Screen, note, paragraph, section_head
from canzona_cli.cli.views.tables import Columns, GroupedTable, column
from canzona_cli.records.compare import compare_two, run_figures
from canzona_cli.records.groups import (
    JUDGED_SEEDS,
    SMOOTHED_STEPS,
    By,
    Ranking,
    losses_of,
    tokens_per_step,
)
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import MISSING, count, duration, finite_or_none, number, plural, size, step_time

_LONGEST_LABEL = 40
_MOST_NAMES = 4
"""The most runs that a remark names."""
_SHOWN_SHARE = 5
"""Loss curves begin after the warm-up, and after a fifth of the steps: before that, losses fall so far that the ends of
the curves would lie on one another."""
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
        yield GroupedTable(head=_head(ranking), labels=labels, groups=list(_columns(ranking)))
        yield from map(note, _explanation(ranking))
        if (verdict := verdict_text(ranking)) is not None:
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
    are too long."""
    labels = [_label(line.settings) for line in ranking.lines]
    if all(0 < len(label) <= _LONGEST_LABEL for label in labels):
        return labels
    return run_names([line.runs[0] for line in ranking.lines])


def _label(settings: Mapping[str, object]) -> str:
    if len(settings) == 1:
        return "".join(map(setting_value, settings.values()))
    parts = []
    for key, value in settings.items():
        if value is not None:  # null where another optimizer has the setting
            parts.append(setting_value(value) if key == "optimizer.name" else f"{key.rpartition('.')[2]}={value}")
    return ", ".join(parts)


def _columns(ranking: Ranking) -> Iterator[Columns]:
    lines, target = ranking.lines, ranking.target
    bests = [line.best for line in lines]
    for key in ranking.rates if len(ranking.groups) > 1 else ():  # otherwise, the lines are named after their rates
        name, tried = key.rpartition(".")[2], [line.tried(key) for line in lines]
        if max(map(len, tried)) == 1:
            yield column(name, [f"{rate:g}" for (rate,) in tried])
            continue
        best_rates = (
            MISSING if line.best is None else f"{line.best.rates[key]:g}{'!' if key in line.edges else ' '}"
            for line in lines
        )
        yield Columns(name, ("tried", "best "), [*zip(map(_range, tried), best_rates, strict=True)])
    losses = [MISSING if best is None else _loss(best.mean) for best in bests]
    spreads = [None if best is None else best.spread for best in bests]
    if any(spread is not None for spread in spreads):
        seeds = [MISSING if best is None else str(len(best.losses)) for best in bests]
        rows = [*zip(losses, map(_loss, spreads), seeds, strict=True)]
        yield Columns(f"{ranking.by} loss", ("mean", "spread", "seeds"), rows)
    else:
        yield column(ranking.by, losses)
    if any(line.step_s is not None for line in lines):
        yield column("step", [step_time(line.step_s) for line in lines])
    if target is not None and len(lines) > 1:
        reached = [ranking.reached(line) for line in lines]
        cells = [("", "") if at is None else (duration(at.seconds), count(at.tokens)) for at in reached]
        yield Columns(f"until {_loss(target)}", ("time", "tokens"), cells)


def _range(tried: Sequence[float]) -> str:
    """Describes the values of a rate that were tried: `0.001..0.05`."""
    return f"{tried[0]:g}" if len(tried) == 1 else f"{tried[0]:g}..{tried[-1]:g}"


def _explanation(ranking: Ranking) -> Iterator[str]:
    """Yields the sentence that says what the numbers of the table are."""
    if ranking.step is None or ranking.target is None:
        yield "there is no step at which all groups have a loss"
        return
    runs = plural(len(ranking.comparison.runs), "run")
    parts = [f"{runs}; {ranking.by} loss at step {ranking.step:,}, the last that all have"]
    if ranking.by == "training":
        parts.append(f"mean of {SMOOTHED_STEPS} logged steps, because there is no common validation")
    if any(line.best is not None and line.best.spread is not None for line in ranking.lines):
        parts.append("spread: standard deviation over seeds")
    if len(ranking.lines) > 1:
        parts.append(f"until {_loss(ranking.target)}: when the mean curve reaches the loss of the last line")
    yield "; ".join(parts)


def verdict_text(ranking: Ranking) -> str | None:
    """Returns the sentence that compares the first two groups, or says what is missing; None if there are no two
    groups with losses."""
    verdict = ranking.verdict
    if verdict is None:
        return None
    best, second = group_labels(ranking)[:2]
    seeds, lower = plural(verdict.seeds, "shared seed"), f"{best} is lower than {second} by {_loss(verdict.gap)}"
    if verdict.p is None:
        return f"{lower}; no verdict: {seeds}, and a verdict needs {JUDGED_SEEDS}"
    test = f"over {seeds} (paired t-test, p = {number(verdict.p, '.2g')})"
    if verdict.better:
        return f"{best} is better than {second}: lower by {_loss(verdict.gap)} {test}"
    return f"no verdict: {best} and {second} differ by {_loss(verdict.gap)}, no more than seeds do, {test}"


def _remarks(ranking: Ranking, labels: Sequence[str]) -> Iterator[str]:
    """Yields what the best rates and the means do not say: rates at an edge, other runs, notes."""
    for label, group in zip(labels if len(ranking.groups) > 1 else [""], ranking.groups, strict=True):
        for key, edge in group.edges.items():
            beyond = "below" if edge == "lowest" else "above"
            whose = f"{label}: " if label else ""
            yield f"{whose}the best {key.rpartition('.')[2]} is the {edge} tried; the optimum may be {beyond} it"
    tokens = [amount for line in ranking.lines if (amount := tokens_per_step(line)) is not None]
    if ranking.step is not None and len({*tokens}) > 1:
        least, most = (count(ranking.step * amount) for amount in (min(tokens), max(tokens)))
        yield f"steps differ in tokens: at step {ranking.step:,}, groups had trained on {least} to {most} tokens"
    names = dict(zip((run.run_dir for run in ranking.comparison.runs), run_names(ranking.comparison.runs), strict=True))
    for reason, runs in ranking.left_out.items():
        text = "without a loss at that step" if reason == "behind" else reason
        yield f"{plural(len(runs), 'run')} {text}, in no mean: {_listed([names[run.run_dir] for run in runs])}"
    notes: dict[str, list[str]] = {}
    for run in ranking.comparison.runs:
        for text in run.notes:
            notes.setdefault(text.replace(str(run.run_dir), "RUN_DIR"), []).append(names[run.run_dir])
    for text, having in notes.items():
        yield f"{_listed(having)}: {text}"


def _listed(names: Sequence[str]) -> str:
    hidden = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def _runs_table(ranking: Ranking) -> GroupedTable:
    """Returns a table with a line for each run, group after group."""
    rows = [(label, run) for label, line in zip(group_labels(ranking), ranking.lines, strict=True) for run in line.runs]
    runs = [run for _, run in rows]
    at_step = (None if ranking.step is None else losses_of(run, ranking.by).get(ranking.step) for run in runs)
    figures = [*map(run_figures, runs)]
    columns = {
        "group": [label for label, _ in rows],
        "seed": [MISSING if run.config is None else str(run.config.train.seed) for run in runs],
        "status": [run.status for run in runs],
        "steps": [f"{run.step:,}" for run in runs],
        ranking.by: [*map(_loss, at_step)],
        "last loss": [_loss(figure["loss"]) for figure in figures],
        "step": [step_time(figure["step_s"]) for figure in figures],
        "memory": [size(figure["peak_memory_bytes"]) for figure in figures],
    }
    styles = ["" if run.status == "done" else "yellow" for run in runs]
    groups = [column(head, cells) for head, cells in columns.items()]
    return GroupedTable(head="run", labels=run_names(runs), groups=groups, styles=styles)


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the directory of each run, relative to the nearest directory that contains all of them."""
    paths = [run.run_dir.absolute() for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def comparison_page(ranking: Ranking) -> Document:
    """Returns the page of a comparison: loss curves, groups, losses by learning rate and step times; for two runs,
    also all differences."""
    verdict = verdict_text(ranking)
    return Document(
        kind="canzona report --compare",
        title=plural(len(ranking.comparison.runs), "run"),
        top=elements([] if verdict is None else [paragraph(verdict)]),
        sections=sections(_page_parts(ranking)),
    )


def _page_parts(ranking: Ranking) -> Iterator[RenderableType]:
    labels = group_labels(ranking)
    at_best = (
        ", nats per token; each group at its best learning rates" if len(ranking.groups) > 1 else ", nats per token"
    )
    yield section_head("Loss", at_best)
    yield side_by_side(*(_loss_curves(ranking, labels, by) for by in ("validation", "training")))
    yield section_head("Groups", ", with the best one first")
    yield RankingView(ranking=ranking)
    yield section_head("Loss by setting", f": {ranking.by} loss at step {ranking.step}, mean over seeds")
    yield side_by_side(*_losses_by_setting(ranking))
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
    begin = max(last // _SHOWN_SHARE, *warmups)
    curves = []
    for label, name, _, losses in drawn:
        points = [(step, loss) for step, loss in losses.items() if step >= begin]
        curves.append(Curve(name=name, points=points, group=label, dots=len(points) < 100))
    smoothed = f", mean of {SMOOTHED_STEPS} steps" if by == "training" else ""
    return Curves(title=f"{by} loss{smoothed}, from step {begin:,}", curves=curves, numbers=_loss, show=_loss)


def _losses_by_setting(ranking: Ranking) -> Iterator[Curves]:
    """Draws the loss over each learning rate and each numeric setting that was swept, with a line for each combination
    of the other settings, at their best learning rates."""
    lines: dict[str, dict[str, dict[float, float]]] = {}
    for group in ranking.groups:
        for trial in (trial for trial in group.trials if trial.losses):
            for key, value in {**trial.rates, **group.settings}.items():
                others = _label({name: other for name, other in group.settings.items() if name != key})
                if (x := finite_or_none(value)) is not None:
                    losses = lines.setdefault(key, {}).setdefault(others, {})
                    losses[x] = min(trial.mean, losses.get(x, trial.mean))
    for key, by_line in lines.items():
        if max(map(len, by_line.values())) > 1:
            curves = [
                Curve(name=name or "loss", points=sorted(losses.items()), dots=True) for name, losses in by_line.items()
            ]
            values = [x for losses in by_line.values() for x in losses]
            wide_range = min(values) > 0 and max(values) / min(values) > 5
            title = f"loss by {key}"
            yield Curves(title=title, curves=curves, axes="log x" if wide_range else "linear", x=key, show=_loss)
