"""The pages of `canzona report`: one run from whatever it left, and runs side by side."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby

from rich.text import Text

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.settings import leaves
from canzona_cli.costs.memory import GIB, estimate
from canzona_cli.errors import ConfigError
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.plan_file import read_plan
from canzona_cli.report.compare import COLUMNS, ComparedView, SeveralView, run_names
from canzona_cli.report.html.charts import (
    MEMORY_PARTS,
    PHASE_PARTS,
    Bar,
    Curve,
    Lane,
    LoadMap,
    bars,
    curve_chart,
    curve_table,
    lanes_chart,
    load_maps,
    side_by_side,
)
from canzona_cli.report.html.document import (
    Document,
    Html,
    Mood,
    Section,
    facts,
    folded,
    joined,
    tag,
)
from canzona_cli.report.html.views import SCREEN, elements, sections, styled, words_table
from canzona_cli.report.run import BreakdownView, RunView
from canzona_cli.report.run_trace import clock_shifts, lanes, place_of
from canzona_cli.run.breakdown import Breakdown, Prediction
from canzona_cli.run.codec import load_if_sound
from canzona_cli.run.compare import Several, compared, run_figures
from canzona_cli.run.files import RunFiles, read_json
from canzona_cli.run.phases import IN_STEP, STREAMS, Interval
from canzona_cli.run.records import Event, RankTimeline, StageEvent, describe, load_timelines
from canzona_cli.run.summary import RunSummary
from canzona_cli.run.words import duration, json_text, number, plural, real, size, step_time

_MOST_RANKS = 8
"""The most ranks whose timelines are drawn."""
_MOST_EVENTS = 500
_MOODS: Mapping[str, Mood] = {"done": "good", "failed": "bad", "diverged": "bad"}


def run_page(summary: RunSummary) -> Document:
    """Everything that can be seen of a run."""
    files, config = RunFiles(summary.run_dir), summary.config
    layout = load_if_sound(files.layout, Layout)
    try:
        plan = read_plan(files.plan) if files.plan.exists() else None
    except ConfigError:  # the measurement stands without it
        plan = None
    parts = [
        *_faults(summary),
        Section(title="Summary", body=elements_of_rows(summary)),
        *_curves(summary),
        *breakdown_sections(summary.breakdown),
        *_loads(summary.breakdown, plan),
        *_memory(config, layout, plan, summary.breakdown),
        *_timeline(files, layout, None if summary.breakdown is None else summary.breakdown.planned),
        *_events(summary.events),
        *_settings(files, config),
    ]
    code = "" if summary.exit_code is None else f", exit code {summary.exit_code}"
    return Document(
        kind="canzona report",
        title=f"{summary.name or 'run'}: {summary.run_dir}",
        status=f"{summary.status}{code}",
        mood=_MOODS.get(summary.status, "odd"),
        top=tiles(summary),
        sections=parts,
    )


def tiles(summary: RunSummary) -> Html:
    """The figures of a run that everybody asks for first."""
    figures = run_figures(summary)
    rows = [tag("div", tag("dt", head), tag("dd", show(figures[name]))) for name, (head, show) in COLUMNS.items()]
    steps = f"{summary.step:,}" + ("" if summary.steps_planned is None else f" of {summary.steps_planned:,}")
    return tag("dl", tag("div", tag("dt", "steps"), tag("dd", steps)), *rows, class_="tiles")


def elements_of_rows(summary: RunSummary) -> Html:
    """The labelled lines of the terminal's report, and its notes."""
    rows = [(label, styled(value)) for label, value in RunView(summary=summary).rows()]
    if summary.go_on is not None:
        rows.append(("continue", tag("code", summary.go_on)))
    return joined([facts(rows), *(tag("p", note, class_="warning") for note in summary.notes)])


def _faults(summary: RunSummary) -> Iterator[Section]:
    """Errors of ranks, then warnings; nothing where there were none."""
    shown = []
    for result in summary.errors:
        error = result.error
        if error is None:
            continue
        heading = tag("p", tag("b", f"rank {result.rank}: {error.type}: "), error.message)
        more = folded("traceback", tag("pre", error.traceback)) if error.traceback else Html()
        shown.append(tag("div", heading, more, class_="error"))
    if summary.warnings:
        shown.append(tag("ul", *(tag("li", text) for text in summary.warnings)))
    if shown:
        yield Section(
            title="Faults", lead="errors in the order in which they happened, then warnings", body=joined(shown)
        )


def validation_curve(name: str, points: Sequence[tuple[int, float | None]]) -> Curve:
    """Draws the validation losses that are finite."""
    finite = [(step, loss) for step, loss in points if loss is not None]
    return Curve(name=name, points=finite, dots=len(finite) < 100)


def _curves(summary: RunSummary) -> Iterator[Section]:
    training = Curve(name="training", points=summary.losses)
    sets = {f"validation on {name}": points for name, points in summary.set_validations.items()}
    validations = (
        validation_curve(name, points) for name, points in {"validation": summary.validations, **sets}.items()
    )
    both = [curve for curve in (training, *validations) if curve.points]
    if not both:
        return
    small = [
        curve_chart(title, [Curve(name=title, points=points)], height=110, show=partial(number, spec=spec))
        for title, name, spec in (
            ("gradient norm before clipping", "grad_norm", ".4g"),
            ("learning rate", "lr", ".3g"),
            ("tokens/s, all ranks", "tokens_per_s", ",.0f"),
        )
        if (points := [(line.step, value) for line in summary.metrics if (value := getattr(line, name)) is not None])
    ]
    table = curve_table(both, show=lambda value: number(value, ".4f"))
    yield Section(
        title="Loss",
        lead="nats per token, mean over the global batch; validation always on the same samples",
        body=joined([curve_chart("loss", both), folded("the numbers", table), side_by_side(*small)]),
    )


def breakdown_sections(breakdown: Breakdown | None) -> Iterator[Section]:
    """Measured above planned, and the terminal's table."""
    if breakdown is None:
        return
    planned = breakdown.planned
    rows = [breakdown_bar("measured", breakdown)]
    if planned is not None:
        shown = [(name, planned.phases.get(name, 0.0)) for name in IN_STEP]
        rows.append(Bar(label="planned", parts=shown, value=step_time(planned.iteration_s), faint=True))
    scale = max(sum(seconds for _, seconds in row.parts) for row in rows)
    picture = bars(rows, PHASE_PARTS, scale=scale)
    yield from sections([BreakdownView(breakdown=breakdown)], pictures={"Step-time breakdown": picture})


def breakdown_bar(label: str, breakdown: Breakdown) -> Bar:
    """A measured step, mean over ranks."""
    phases = {name: phase.mean_s for name, phase in breakdown.phases.items() if phase is not None}
    parts = [(name, phases.get(name, 0.0)) for name in IN_STEP]
    return Bar(label=label, parts=parts, value=step_time(breakdown.step.mean_s))


def _loads(breakdown: Breakdown | None, plan: Plan | None) -> Iterator[Section]:
    """Seconds of matrix updates of each rank, of the pipeline stage that takes longest."""
    measured: dict[int, float] = {}
    if breakdown is not None:
        measured = {times.rank: times.phases.get("matrix_update", 0.0) for times in breakdown.ranks}
    layout = None if breakdown is None else breakdown.layout
    hosts, cells = (1, 0) if layout is None else (layout.tp, layout.tp * layout.owners)
    stages = range(0 if layout is None else layout.pp)
    whole = cells > 0 and len(measured) == len(stages) * cells and any(measured.values())
    by_stage = {stage: [measured[stage * cells + cell] for cell in range(cells)] for stage in stages} if whole else {}
    if plan is not None:
        hosts, stages = plan.subject.layout.tp, range(plan.subject.layout.pp)
    planned = {stage: plan.loads(stage) for stage in stages} if plan is not None else {}
    slowest = max(by_stage or planned, key=lambda stage: max((by_stage or planned)[stage]), default=None)
    if slowest is None:
        return
    maps = [
        LoadMap(title=title, loads=loads[slowest])
        for title, loads in (("measured", by_stage), ("planned", planned))
        if loads
    ]
    stage = f", pipeline stage {slowest}" if len(stages) > 1 else ""
    yield Section(
        title="Load map",
        lead=f"matrix updates of every rank in one step{stage}; colour: a rank's time over the mean",
        body=load_maps(maps, hosts=hosts),
    )


def _memory(
    config: RunConfig | None, layout: Layout | None, plan: Plan | None, breakdown: Breakdown | None
) -> Iterator[Section]:
    if config is None or layout is None:
        return
    account = estimate(config, layout) if plan is None else plan_memory(config, layout, plan)
    parts = [(name, float(account.parts[name])) for name in MEMORY_PARTS if account.parts.get(name)]
    total = f"{size(account.total)} of {size(account.capacity)}"
    rows = [Bar(label="planned", parts=parts, value=total, limit=account.capacity)]
    peak = None if breakdown is None else breakdown.peak_memory_bytes
    note = Html()
    if breakdown is not None and peak is not None:
        rows.append(Bar(label="measured", parts=[("measured", peak.max)], value=f"{size(peak.max)} at the peak"))
        if breakdown.device == "cpu":
            note = tag(
                "p", "On CPU ranks the measured peak is the whole process, Python and torch included.", class_="note"
            )
    scale = max(account.capacity, *(sum(amount for _, amount in row.parts) for row in rows))
    if account.capacity > 4 * account.total:  # else everything would be a line at the left end
        rows[0] = Bar(label="planned", parts=parts, value=total)
        scale = max(sum(amount for _, amount in row.parts) for row in rows)
    table = words_table(("part", "planned"), [(MEMORY_PARTS[name].name, size(amount)) for name, amount in parts])
    yield Section(
        title="Memory",
        lead=f"of the fullest rank; it may use {account.capacity / GIB:.1f} GiB",
        body=joined([bars(rows, MEMORY_PARTS, scale=scale, show=size), note, folded("the numbers", table)]),
    )


def _timeline(files: RunFiles, layout: Layout | None, planned: Prediction | None) -> Iterator[Section]:
    """The last step of the first ranks, moment by moment, and the planned one below it."""
    try:
        ranks = load_timelines(files)
    except ConfigError as error:
        text = "; ".join(problem.reason for problem in error.problems)
        yield Section(title="Timeline", body=tag("p", text, class_="warning"))
        return
    shown = [rank for rank in ranks if rank.steps][:_MOST_RANKS]
    if not shown:
        return
    rows, end = _measured_lanes(shown, layout)
    more = f"; {len(ranks) - len(shown)} more ranks are in `canzona report --trace`" if len(ranks) > len(shown) else ""
    last = shown[0].steps[-1].number
    body = [tag("h3", f"measured, step {last}"), lanes_chart(rows, end_s=end)]
    if planned is not None and planned.events:
        lanes_planned = [*_planned_lanes(planned)]
        body += [tag("h3", f"planned, profile {planned.profile}")]
        body += [lanes_chart(lanes_planned, end_s=max(event.end_s for event in planned.events))]
    yield Section(
        title="Timeline", lead=f"what each rank does when; each axis has its own length{more}", body=joined(body)
    )


def _measured_lanes(ranks: Sequence[RankTimeline], layout: Layout | None) -> tuple[list[Lane], float]:
    shifts = clock_shifts(ranks)
    begin = min(rank.steps[-1].start_s + shifts[rank.clock] for rank in ranks)
    end = max(rank.steps[-1].end_s + shifts[rank.clock] for rank in ranks) - begin
    rows: list[Lane] = []
    for rank in ranks:
        step, shift = rank.steps[-1], shifts[rank.clock] - begin
        place = "" if layout is None else f" ({place_of(rank.rank, layout)})"
        rows.append(Lane(label=f"rank {rank.rank}{place}", intervals=_shifted(step.phases, shift), begins=True))
        flying = lanes(step.transfers)
        rows += [Lane(label="in flight", intervals=_shifted(lane, shift)) for lane in flying[:2]]
    return rows, end


def _shifted(intervals: Iterable[Interval], by_s: float) -> list[Interval]:
    return [Interval(name=one.name, start_s=one.start_s + by_s, end_s=one.end_s + by_s) for one in intervals]


def _planned_lanes(planned: Prediction) -> Iterator[Lane]:
    for rank in dict.fromkeys(event.rank for event in planned.events):
        for stream, name in STREAMS.items():
            events = [
                Interval(name=event.phase, start_s=event.start_s, end_s=event.end_s)
                for event in planned.events
                if (event.rank, event.stream) == (rank, stream)
            ]
            if events:
                yield Lane(label=f"rank {rank}: {name}", intervals=events, begins=stream == "compute")


def _events(events: Sequence[Event]) -> Iterator[Section]:
    timed = sorted((event for event in events if event.time is not None), key=lambda event: event.time or 0.0)
    rows = []
    for event in timed:
        note = describe(event)
        what = event.stage if isinstance(event, StageEvent) else event.event
        text = note.text if note is not None else getattr(event, "detail", "")
        mark = Text(what, style="yellow" if note is not None and note.warning else "")
        rows.append((duration((event.time or 0.0) - (timed[0].time or 0.0)), mark, text))
    if rows:
        left_out = len(rows) - _MOST_EVENTS
        lead = f"; {plural(left_out, 'earlier event')} in events.jsonl" if left_out > 0 else ""
        table = words_table(("after", "what", "detail"), rows[-_MOST_EVENTS:])
        yield Section(
            title="Events",
            lead=f"of all launches in this directory{lead}",
            body=folded(plural(len(rows), "event"), table),
        )


def _settings(files: RunFiles, config: RunConfig | None) -> Iterator[Section]:
    shown = []
    if config is not None:
        flat = dict(leaves(asdict(config)))
        for section, keys in groupby(sorted(flat, key=lambda key: "." in key), key=lambda key: key.rpartition(".")[0]):
            rows = [(key, _setting(flat[key])) for key in keys]
            shown.append(folded(section or "run", words_table(("setting", "value"), rows)))
    about = read_json(files.environment) or {}
    rows = [(key, _setting(value)) for key, value in about.items() if key != "time"]
    if rows:
        shown.append(folded("machine and versions", words_table(("fact", "value"), rows)))
    if shown:
        lead = "resolved; `recipe=RUN/config.yaml` repeats the run"
        yield Section(title="Settings", lead=lead, body=joined(shown))


def _setting(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return json_text(value) if isinstance(value, dict | list | tuple) else f"{value}"


def several_page(several: Several) -> Document:
    """Their figures, losses over each other, steps below each other; of two runs, every difference."""
    names = run_names(several.runs)
    shown = [Section(title="Runs", lead="the best one stands out", body=elements([SeveralView(several=several)]))]
    training = [Curve(name=name, points=run.losses) for name, run in zip(names, several.runs, strict=True)]
    validation = [validation_curve(name, run.validations) for name, run in zip(names, several.runs, strict=True)]
    for title, all_curves in (("Training loss", training), ("Validation loss", validation)):
        curves = [curve for curve in all_curves if curve.points]
        if curves:
            table = curve_table(curves, show=lambda value: number(value, ".4f"))
            body = joined([curve_chart(title.lower(), curves), folded("the numbers", table)])
            shown.append(Section(title=title, lead="nats per token", body=body))
    by_value = [_losses_by(key, values, several) for key, values in _numeric(several).items()]
    if by_value:
        title = "Loss by setting"
        shown.append(Section(title=title, lead="each setting in which the runs differ", body=side_by_side(*by_value)))
    measured = [(name, run.breakdown) for name, run in zip(names, several.runs, strict=True)]
    rows = [breakdown_bar(name, breakdown) for name, breakdown in measured if breakdown is not None]
    if rows:
        scale = max(sum(seconds for _, seconds in row.parts) for row in rows)
        shown.append(
            Section(
                title="Step", lead="measured, mean over ranks, on one scale", body=bars(rows, PHASE_PARTS, scale=scale)
            )
        )
    if len(several.runs) == 2:
        parts = ComparedView(compared=compared(several)).parts(SCREEN)
        lead = "B / A is above 1 where run B takes more; A is the first run"
        shown.append(Section(title="Differences", lead=lead, body=elements(parts)))
    return Document(kind="canzona report --compare", title=plural(len(names), "run"), sections=shown)


def _numeric(several: Several) -> dict[str, list[float]]:
    """The settings in which the runs differ by a number, and each run's value."""
    numeric = {
        key: [number for value in values if (number := real(value)) is not None]
        for key, values in several.settings.items()
    }
    return {key: values for key, values in numeric.items() if len(values) == len(several.runs)}


def _losses_by(key: str, values: list[float], several: Several) -> Html:
    """Lists the loss that each value of a setting came to."""
    figures = [run_figures(run) for run in several.runs]
    curves = [
        Curve(
            name=name,
            points=sorted(
                (value, loss) for value, run in zip(values, figures, strict=True) if (loss := run[figure]) is not None
            ),
            dots=True,
        )
        for name, figure in (("lowest validation loss", "best_validation"), ("last training loss", "loss"))
    ]
    spread = min(values) > 0 and max(values) / min(values) > 5
    return curve_chart(f"loss by {key}", curves, axes="log x" if spread else "linear", x=key)
