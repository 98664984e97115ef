"""`canzona bench --html`: a comparison, a sweep or a simulation; and the page of published step times."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from canzona_cli.bench.published import PredictedSeries
from canzona_cli.bench.results import BenchResult, StrategyBench
from canzona_cli.bench.simulated import Simulation
from canzona_cli.report.bench import MIB, BenchView, order
from canzona_cli.report.bench_sweep import (
    HEADS,
    TITLES,
    Point,
    SimulationView,
    SweepRow,
    SweepView,
    subject,
    sweep_rows,
)
from canzona_cli.report.html.charts import (
    CURVE_COLOURS,
    PHASE_PARTS,
    Bar,
    Curve,
    LoadMap,
    bars,
    curve_chart,
    load_maps,
    side_by_side,
)
from canzona_cli.report.html.document import Document, Html, Section, tag
from canzona_cli.report.html.views import SCREEN, sections, words_table
from canzona_cli.report.page import Page
from canzona_cli.run.phases import IN_STEP, STRATEGIES
from canzona_cli.run.words import number, step_time
from canzona_cli.simulate.compare import Study


def bench_page(view: BenchView) -> Document:
    """Strategies next to each other, and what every rank did."""
    result = view.result
    page = _page("canzona bench", view, {"Step": _steps(result)})
    return replace(page, sections=[*page.sections, *_loads(result), *_memory(result)])


def sweep_page(view: SweepView) -> Document:
    """One setting at several values."""
    rows = list(sweep_rows(view.results))
    numeric = [row for row in rows if row.value.replace(".", "", 1).isdecimal()]  # not the C_max that the planner finds
    picture = _sweep_curves(view, numeric) if numeric else _sweep_bars(rows)
    return _page("canzona bench --sweep", view, {TITLES[view.kind]: picture})


def simulation_page(view: SimulationView) -> Document:
    """Sizes over numbers of GPUs; a picture for each size."""
    simulation = view.simulation
    pictures = {recipe: _scaling(simulation, recipe) for recipe in simulation.recipes}
    return _page("canzona bench --simulate", view, pictures, after=", ")


def _page(kind: str, view: Page, pictures: Mapping[str, Html], *, after: str = ": ") -> Document:
    """`after` stands behind the first words of the title."""
    head, *rest = sections(view.parts(SCREEN), pictures=pictures)
    return Document(kind=kind, title=f"{head.title}{after}{head.lead}", top=head.body, sections=rest)


def _steps(result: BenchResult) -> Html:
    return _step_bars((name, result.strategies[name]) for name in order(result))


def _step_bars(steps: Iterable[tuple[str, StrategyBench]]) -> Html:
    """Two bars for each step, by its label: measured, and below it predicted."""
    rows: list[Bar] = []
    for label, step in steps:
        measured, predicted = step.measured, step.predicted
        for text, phases, total, faint in (
            (label, measured.means, median(measured.iteration_s), False),
            (f"{label}, predicted", predicted.phases, predicted.iteration_s, True),
        ):
            parts = [(phase, phases.get(phase, 0.0)) for phase in IN_STEP]
            rows.append(Bar(label=text, parts=parts, value=step_time(total), faint=faint))
    return bars(rows, PHASE_PARTS, scale=max(sum(seconds for _, seconds in row.parts) for row in rows))


def _sweep_bars(rows: Sequence[SweepRow]) -> Html:
    """Two bars for each value and strategy: values that are no numbers have no axis."""
    return _step_bars((f"{row.value} {row.strategy}", row.result.strategies[row.strategy]) for row in rows)


def _sweep_curves(view: SweepView, rows: Sequence[SweepRow]) -> Html:
    """Optimizer step, iteration, and what the setting is about;
    a measured and a predicted curve for each strategy."""
    quantities: list[tuple[str, Callable[[SweepRow], Point | None]]] = [
        ("optimizer step, ms", lambda row: row.optimizer),
        ("iteration, ms", lambda row: row.iteration),
        subject(view.kind, rows),
    ]
    charts = []
    for title, quantity in quantities:
        curves: list[Curve] = []
        for name in dict.fromkeys(row.strategy for row in rows):
            points = [(float(row.value), point) for row in rows if row.strategy == name and (point := quantity(row))]
            measured = [(value, point.measured.median) for value, point in points]
            curves.append(Curve(name=name, points=measured, dots=True))
            predicted = [(value, point.predicted) for value, point in points]
            curves.append(Curve(name=f"{name}, predicted", points=predicted, dots=True, dashed=True))
        axes: Literal["linear", "log x"] = "log x" if view.kind in ("c_max", "gpus") else "linear"
        charts.append(curve_chart(title, curves, height=160, axes=axes, x=HEADS[view.kind]))
    return side_by_side(*charts)


def _memory(result: BenchResult) -> list[Section]:
    """Tensors that each rank holds, a curve for each strategy."""
    curves = [
        Curve(name=name, points=[*enumerate(amount / MIB for amount in held)], dots=True)
        for name in order(result)
        if (held := result.strategies[name].measured.tensor_bytes)
    ]
    chart = curve_chart("MiB of tensors", curves, height=160, x="rank")
    return [Section(title="Memory of every rank", lead="measured, without activations", body=chart)] if chart else []


def _loads(result: BenchResult) -> list[Section]:
    cells = result.layout.tp * result.layout.owners
    maps = [
        LoadMap(title=name, loads=loads)
        for name in order(result)
        if len(loads := result.strategies[name].measured.update_s) == cells and any(loads)
    ]
    lead = "matrix updates of every rank in one step, measured; colour: a rank's time over the mean"
    return [Section(title="Load map", lead=lead, body=load_maps(maps, hosts=result.layout.tp))] if maps else []


def _scaling(simulation: Simulation, recipe: str) -> Html:
    """Curves over the number of GPUs, a strategy each."""
    studies = {cell.gpus: cell.study for cell in simulation.of(recipe) if cell.study is not None}

    def chart(
        title: str, value: Callable[[Study, str], float | None], *names: str, axes: Literal["log x", "log"] = "log"
    ) -> Html:
        curves = [
            Curve(
                name=name,
                points=[(gpus, y) for gpus, study in studies.items() if (y := value(study, name)) is not None],
                dots=True,
                hollow=[gpus for gpus, study in studies.items() if not study.strategies[name].fits],
            )
            for name in names
        ]
        return curve_chart(
            title, curves, height=160, axes=axes, x="GPUs", show=lambda y: number(y, ",.0f" if y >= 100 else ".3g")
        )

    matrix = [name for name in STRATEGIES if name != "adamw"]
    return side_by_side(
        chart("iteration, s (hollow: does not fit)", lambda study, name: study.result(name).iteration_s, *STRATEGIES),
        chart("optimizer step, ms", lambda study, name: 1e3 * study.result(name).optimizer_s, *STRATEGIES),
        chart("iteration, times AdamW's", _times_adamw, *matrix, axes="log x"),
    )


def _times_adamw(study: Study, name: str) -> float | None:
    share = study.overhead(name)
    return None if share is None else 1 + share


_SIDE = 420
"""Pixels of the scatter."""
_BAND = 0.08
"""The error that two lines beside the diagonal mark."""


def published_page(compared: Sequence[PredictedSeries], figures: Mapping[str, float]) -> Document:
    """A scatter and a table of every step.

    Args:
        figures: names and shares, shown above.
    """
    shown = ", ".join(f"{name} {value:.1%}" for name, value in figures.items())
    rows = [
        (
            one.series.name,
            one.series.layout,
            f"{row.gpus:,}",
            f"{row.measured_s:.4g}",
            f"{row.predicted_s:.4g}",
            f"{row.error:+.1%}",
            "" if one.series.why_not_fitted is None else one.series.why_not_fitted,
            f"{one.series.source}, {one.series.date}",
        )
        for one in compared
        for row in one.rows
    ]
    heads = ("model", "layout", "GPUs", "measured s", "predicted s", "error", "not counted", "source")
    return Document(
        kind="make published",
        title="Published step times",
        sections=[
            Section(title="Predicted against measured", lead=f"seconds of a step; {shown}", body=scatter(compared)),
            Section(title="Numbers", body=words_table(heads, rows)),
        ],
    )


def scatter(compared: Sequence[PredictedSeries]) -> Html:
    """A dot for each step on logarithmic axes, the diagonal, and a band of 8% around it."""
    values = [value for one in compared for row in one.rows for value in (row.measured_s, row.predicted_s)]
    low, high = math.log(min(values) / 1.2), math.log(max(values) * 1.2)

    def place(seconds: float) -> float:
        return _SIDE * (math.log(seconds) - low) / (high - low)

    lines: list[Html] = []
    for shift in (-_BAND, 0.0, _BAND):
        by = _SIDE * math.log1p(shift) / (high - low)
        line = {"x1": 0, "y1": round(_SIDE - by, 1), "x2": _SIDE, "y2": round(-by, 1)}
        lines.append(tag("line", **line, class_="grid", stroke_width=1 if shift else 3))
    for seconds in (0.5, 1, 2, 5, 10, 20, 50):
        if low < math.log(seconds) < high:
            at = round(place(seconds), 1)
            lines.append(tag("text", f"{seconds:g}", x=at, y=_SIDE + 18, class_="tick"))
            lines.append(tag("text", f"{seconds:g}", x=-8, y=round(_SIDE - at, 1), class_="tick value"))
    for colour, one in enumerate(compared):
        look = f"dot c{colour % CURVE_COLOURS}"
        for row in one.rows:
            times = f"{row.predicted_s:.4g} s predicted, {row.measured_s:.4g} measured"
            name = f"{one.series.name}, {row.gpus:,} GPUs: {times}"
            where = {"cx": round(place(row.measured_s), 1), "cy": round(_SIDE - place(row.predicted_s), 1)}
            lines.append(tag("circle", tag("title", name), **where, r=4, class_=look))
    legend = (
        tag("span", tag("span", class_=f"key c{colour % CURVE_COLOURS}"), one.series.name)
        for colour, one in enumerate(compared)
    )
    picture = tag(
        "svg",
        *lines,
        class_="plot",
        width=_SIDE,
        height=_SIDE + 26,
        role="img",
        aria_label="Predicted seconds of a step against measured ones",
    )
    caption = tag("figcaption", tag("b", "measured across, predicted up; lines: equal, and 8% off"), *legend)
    return tag("figure", caption, picture, class_="chart")
