"""The page of published step times: measured against predicted, and the numbers."""

import math
from collections.abc import Mapping, Sequence

from canzona_cli.bench.published import PredictedSeries
from canzona_cli.report.html.curves import COLOURS
from canzona_cli.report.html.document import Document, Section
from canzona_cli.report.html.elements import Html, plain_table, tag

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
            "" if one.series.why_not_fitted is None else "not counted: " + one.series.why_not_fitted,
            f"{one.series.source}, {one.series.date}",
        )
        for one in compared
        for row in one.rows
    ]
    heads = ("model", "layout", "GPUs", "measured s", "predicted s", "error", "", "source")
    return Document(
        kind="make published",
        title="Published step times",
        sections=[
            Section(title="Predicted against measured", lead=f"seconds of a step; {shown}", body=scatter(compared)),
            Section(title="Numbers", body=plain_table(heads, rows, class_="numbers")),
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
    for number, one in enumerate(compared):
        look = f"dot c{number % COLOURS}"
        for row in one.rows:
            times = f"{row.predicted_s:.4g} s predicted, {row.measured_s:.4g} measured"
            name = f"{one.series.name}, {row.gpus:,} GPUs: {times}"
            where = {"cx": round(place(row.measured_s), 1), "cy": round(_SIDE - place(row.predicted_s), 1)}
            lines.append(tag("circle", tag("title", name), **where, r=4, class_=look))
    legend = (
        tag("span", tag("span", class_=f"key c{number % COLOURS}"), one.series.name)
        for number, one in enumerate(compared)
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
