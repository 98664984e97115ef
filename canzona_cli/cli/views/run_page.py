"""The page of `canzona report --html`. Parts whose files the run does not have, such as a plan, are left
out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import (
    MEMORY,
    Bar,
    Bars,
    Curve,
    Curves,
    Lane,
    Lanes,
    LoadMaps,
    loss_curve,
    planned_lanes,
    side_by_side,
)
from canzona_cli.cli.views.document import Document, Mood, sections
from canzona_cli.cli.views.page import (
    Cell,
    Html,
    Table,
    fact_list,
    foldable,
    note,
    remarks,
    section_head,
    table_html,
    tag,
)
from canzona_cli.cli.views.run import BreakdownView, RunView
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import leaves, override_text
from canzona_cli.core.costs.memory import GIB
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.phases import Interval
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.records.breakdown import Breakdown
from canzona_cli.records.compare import run_figures
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.records import Event, RankTimeline, StageEvent, describe, load_timelines
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import MISSING, duration, json_text, number, plural, size, step_time

_MOST_RANKS = 8
"""The most ranks whose timelines are drawn."""
_MOST_EVENTS = 500
_MOODS: Mapping[str, Mood] = {"done": "good", "failed": "bad", "diverged": "bad"}


def run_page(summary: RunSummary) -> Document:
    """Returns the page of a run. The plan, timelines and environment are read from the run directory, if they
    exist."""
    files, config, layout, breakdown = RunFiles(summary.run_dir), summary.config, summary.layout, summary.breakdown
    plan, notes = None, [*summary.notes]
    try:
        plan = read_plan(files.plan) if files.plan.exists() else None
    except ConfigError as error:  # the page is still useful without the plan
        notes += [f"no plan: {files.plan.name} {problem.reason}" for problem in error.problems]
    parts = [
        *_faults(summary),
        *_loss(summary),
        section_head("Summary", ""),
        _tiles(summary),
        *RunView(summary=summary).figures(),
        *remarks(notes),
        *_curves(summary),
        *([] if breakdown is None else [BreakdownView(breakdown=breakdown)]),
        *_loads(layout, breakdown, plan),
        *_memory(config, layout, plan, breakdown),
        *_timeline(files, layout, None if breakdown is None else breakdown.shown_plan),
        *_events(summary.events),
        *_settings(files, config),
    ]
    exit_code_text = "" if summary.exit_code is None else f", exit code {summary.exit_code}"
    return Document(
        kind="canzona report",
        title=f"{summary.name or 'run'}: {summary.run_dir}",
        status=f"{summary.status}{exit_code_text}",
        mood=_MOODS.get(summary.status, "odd"),
        sections=sections(parts),
    )


def _tiles(summary: RunSummary) -> Html:
    """Returns the tiles with the main figures of a run."""
    figures = run_figures(summary)
    steps = f"{summary.step:,}" + ("" if summary.steps_planned is None else f" of {summary.steps_planned:,}")
    tiles = {
        "steps": steps,
        "loss": number(figures["loss"], ".4f"),
        "validation": number(figures["best_validation"], ".4f"),
        "step time": step_time(figures["step_s"]),
        "tokens/s": number(figures["tokens_per_s"], ",.0f"),
        "MFU": number(figures["mfu"], ".1%"),
        "memory": size(figures["peak_memory_bytes"]),
    }
    return fact_list([(name, value) for name, value in tiles.items() if value != MISSING], class_="tiles")


def _faults(summary: RunSummary) -> Iterator[RenderableType]:
    """Yields the errors of ranks, then the warnings; without either, the page has no such section."""
    yield section_head("Faults", ", errors in chronological order, then warnings")
    for result in summary.errors:
        if (error := result.error) is not None:
            heading = tag("p", tag("b", f"rank {result.rank}: {error.type}: "), error.message)
            more = [foldable("traceback", tag("pre", error.traceback))] if error.traceback else []
            yield tag("div", heading, *more, class_="error")
    if summary.warnings:
        yield tag("ul", *(tag("li", text) for text in summary.warnings))


def _loss(summary: RunSummary) -> Iterator[RenderableType]:
    sets = {f"validation on {name}": points for name, points in summary.set_validations.items()}
    validations = {"validation": summary.validations, **sets}
    curves = [
        Curve(name="training", points=summary.losses),
        *(loss_curve(name, points) for name, points in validations.items()),
    ]
    yield section_head("Loss", ", nats per token, mean over the global batch; validation always on the same samples")
    yield Curves(title="loss", curves=curves)


def _curves(summary: RunSummary) -> Iterator[RenderableType]:
    small_charts = []
    for title, name, spec in (
        ("gradient norm before clipping", "grad_norm", ".4g"),
        ("learning rate", "lr", ".3g"),
        ("learning rate of AdamW", "adamw_lr", ".3g"),
        ("balancing loss", "balancing_loss", ".4g"),
        ("tokens of the busiest expert, over the mean", "expert_load", ".3g"),
        ("tokens/s, all ranks", "tokens_per_s", ",.0f"),
    ):
        values = [(metrics.step, getattr(metrics, name)) for metrics in summary.metrics]
        points = [(step, value) for step, value in values if value is not None]
        if points:
            curve = Curve(name=title, points=points)
            small_charts.append(Curves(title=title, curves=[curve], height=110, show=partial(number, spec=spec)))
    yield section_head("Curves", "")
    yield side_by_side(*small_charts)


def _loads(layout: Layout | None, breakdown: Breakdown | None, plan: Plan | None) -> Iterator[RenderableType]:
    """Yields the measured and planned load maps of matrix updates for the pipeline stage with the slowest
    rank. Planned loads are seconds of the profile: beside measured loads they are shown only if the profile
    describes the machine."""
    planned = {} if plan is None else {stage: plan.loads(stage) for stage in range(plan.subject.layout.pp)}
    measured = {} if breakdown is None else _measured_loads(breakdown)
    if measured and breakdown is not None and breakdown.shown_plan is None:
        planned = {}
    loads_by_stage: Mapping[int, Sequence[float]] = measured or planned
    if layout is None or not loads_by_stage:
        return
    slowest = max(loads_by_stage, key=lambda stage: max(loads_by_stage[stage]))
    both = {"measured": measured, "planned": planned}
    maps = {title: loads[slowest] for title, loads in both.items() if loads}
    stage = f", pipeline stage {slowest}" if len(loads_by_stage) > 1 else ""
    lead = f", matrix update time of every rank in one step{stage}; colour: time relative to the mean"
    yield section_head("Load map", lead)
    yield LoadMaps(maps=maps, hosts=layout.tp)


def _measured_loads(breakdown: Breakdown) -> dict[int, list[float]]:
    """Returns the seconds that each rank spent on matrix updates, by pipeline stage; empty if ranks are
    missing, or if no rank updated a matrix."""
    layout = breakdown.layout
    seconds = {times.rank: times.phases.get("matrix_update", 0.0) for times in breakdown.ranks}
    cells = layout.tp * layout.owners
    if len(seconds) != layout.pp * cells or not any(seconds.values()):
        return {}
    return {stage: [seconds[stage * cells + cell] for cell in range(cells)] for stage in range(layout.pp)}


def _memory(
    config: RunConfig | None, layout: Layout | None, plan: Plan | None, breakdown: Breakdown | None
) -> Iterator[RenderableType]:
    if config is None or layout is None:
        return
    account = memory_of(config.setup, layout, plan)
    parts = [(name, float(account.parts[name])) for name in MEMORY if account.parts.get(name)]
    # Next to a much larger capacity, the parts would be too narrow to see.
    limit = account.capacity if account.capacity <= 4 * account.total else None
    total = f"{size(account.total)} of {size(account.capacity)}"
    rows = [Bar(label="planned", parts=parts, value=total, limit=limit)]
    peak = None if breakdown is None else breakdown.peak_memory_bytes
    if peak is not None:
        measured = f"{size(peak.max)} at the peak"
        rows.append(Bar(label="measured", parts=[("measured_peak", peak.max)], value=measured))
    scale = max(limit or 0.0, *(sum(amount for _, amount in row.parts) for row in rows))
    yield section_head("Memory", f", of the fullest rank, which may use {account.capacity / GIB:.1f} GiB")
    yield Bars(rows=rows, scale=scale, inks=MEMORY, show=size, amounts=True)
    if peak is not None and breakdown is not None and breakdown.device == "cpu":
        yield note("On CPU ranks, the measured peak is the whole process, including Python and torch.")


def _timeline(files: RunFiles, layout: Layout | None, planned: Prediction | None) -> Iterator[RenderableType]:
    """Yields the first ranks' measured timelines of the last step, and the planned timeline below them."""
    try:
        ranks = load_timelines(files)
    except ConfigError as error:
        yield section_head("Timeline", "")
        yield from remarks(problem.reason for problem in error.problems)
        return
    shown = [rank for rank in ranks if rank.steps][:_MOST_RANKS]
    if not shown:
        return
    hidden = len(ranks) - len(shown)
    more = f"; {plural(hidden, 'more rank')} in timeline/" if hidden else ""
    yield section_head("Timeline", f", phases of each rank over time; each axis has its own scale{more}")
    yield tag("h3", f"measured, step {shown[0].steps[-1].number}")
    yield _measured_lanes(shown, layout)
    if planned is not None and planned.events:
        yield tag("h3", f"planned, profile {planned.profile}")
        end_s = max(event.end_s for event in planned.events)
        yield Lanes(rows=planned_lanes(planned.events), end_s=end_s)


def _measured_lanes(ranks: Sequence[RankTimeline], layout: Layout | None) -> Lanes:
    """Returns the lanes of the last step. Clocks of several machines have nothing in common, so all ranks end the
    step at the same time: it ends with an all-reduce of the loss over all of them."""
    length_s = max(rank.steps[-1].end_s - rank.steps[-1].start_s for rank in ranks)
    rows: list[Lane] = []
    for rank in ranks:
        step, shift_s = rank.steps[-1], length_s - rank.steps[-1].end_s
        coordinates = "" if layout is None else f" ({_place_of(rank.rank, layout)})"
        rows.append(Lane(label=f"rank {rank.rank}{coordinates}", intervals=_shift(step.phases, shift_s), begins=True))
        transfers = lanes(step.transfers)
        rows += [Lane(label="in flight", intervals=_shift(lane, shift_s)) for lane in transfers[:2]]
    return Lanes(rows=rows, end_s=length_s)


def lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Distributes intervals over as few tracks as possible, so that the intervals of a track do not
    overlap."""
    rows: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda part: (part.start_s, part.end_s)):
        free = next((lane for lane in rows if lane[-1].end_s <= interval.start_s), None)
        if free is None:
            rows.append([interval])
        else:
            free.append(interval)
    return rows


def _place_of(rank: int, layout: Layout) -> str:
    """Returns a rank's coordinates, such as `TP 1, DP 0`; `alone` for the only rank. TP varies fastest, then
    CP, DP and PP, as in Megatron."""
    coordinates, rest = [], rank
    for name, ranks in (("TP", layout.tp), ("CP", layout.cp), ("DP", layout.dp), ("PP", layout.pp)):
        if ranks > 1:
            coordinates.append(f"{name} {rest % ranks}")
        rest //= ranks
    return ", ".join(coordinates) or "alone"


def _shift(intervals: Iterable[Interval], by_s: float) -> list[Interval]:
    return [Interval(name=part.name, start_s=part.start_s + by_s, end_s=part.end_s + by_s) for part in intervals]


def _events(events: Sequence[Event]) -> Iterator[RenderableType]:
    timed = [(event.time, event) for event in events if event.time is not None]
    timed.sort(key=lambda item: item[0])
    rows = []
    for time, event in timed:
        note = describe(event)
        name = event.stage if isinstance(event, StageEvent) else event.event
        text = note.text if note is not None else getattr(event, "detail", "")
        name_text = Text(name, style="yellow" if note is not None and note.warning else "")
        rows.append((duration(time - timed[0][0]), name_text, text))
    if rows:
        hidden = len(rows) - _MOST_EVENTS
        more = f"; {plural(hidden, 'earlier event')} in events.jsonl" if hidden > 0 else ""
        yield section_head("Events", f", of all launches in this directory{more}")
        yield _folded_table(plural(len(rows), "event"), ("after", "what", "detail"), rows[-_MOST_EVENTS:])


def _settings(files: RunFiles, config: RunConfig | None) -> Iterator[RenderableType]:
    yield section_head("Settings", ", as resolved; `canzona train recipe=RUN/config.yaml` repeats the run")
    if config is not None:
        values = dict(leaves(asdict(config)))
        top_level = [key for key in values if "." not in key]
        in_sections = [key for key in values if "." in key]
        for section, keys in groupby([*top_level, *in_sections], key=lambda key: key.rpartition(".")[0]):
            rows = [(key, _value_text(values[key])) for key in keys]
            yield _folded_table(section or "recipe", ("setting", "value"), rows)
    environment = read_json(files.environment) or {}
    rows = [(key, _value_text(value)) for key, value in environment.items() if key != "time"]
    if rows:
        yield _folded_table("machine and versions", ("fact", "value"), rows)


def _value_text(value: object) -> Text:
    return Text(json_text(value) if isinstance(value, dict | list | tuple) else override_text(value))


def _folded_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Html:
    """Returns a table that is hidden until the reader opens it; the first cell of a row is its label."""
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    return foldable(title, table_html(table))
