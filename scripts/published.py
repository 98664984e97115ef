#!/usr/bin/env python3
"""Prints published step times with their predictions, as Markdown.

    python scripts/published.py [--rows FILE] [--html FILE] [--json FILE] [--quick] [--gpu-check FILE ...]

An error is predicted / measured - 1; the error of a layout is the mean over its numbers of GPUs. "Left out" is the
error of a layout if the fitted numbers are fitted only to the other models. Exits 1 if a goal is missed, or if two
layouts of a model are predicted in the wrong order.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from published_rows import (
    ROWS,
    PredictedSeries,
    Published,
    compare,
    compare_orders,
    fitted_series,
    load_published,
    mean_absolute_error,
    run_of,
)

from canzona_cli.costs import model as model_time
from canzona_cli.costs.modules import ELEMENTWISE_PASSES
from canzona_cli.errors import CanzonaError
from canzona_cli.report.document import Document, Section
from canzona_cli.report.markup import Html, key, table_html, tag
from canzona_cli.report.tables import Table

GOALS = {"MAPE": 0.04, "worst layout": 0.08, "left out": 0.06, "memory": 0.04}
STEP = 0.03
"""The relative change of a fitted number for computing how predictions depend on it."""
RANGES = {"sustained_tflops": 0.05, "passes": 0.25, "speed_spread": 0.5}
"""The plausible relative change of each fitted number, which regularises the fit, because there are few rows."""
_SIDE = 420
"""The side of the scatter plot, in pixels."""
_BAND = 0.08
"""The error that two lines beside the diagonal mark."""
_COLOURS = 8
"""The number of CSS classes for colours in the page's style sheet."""
NOTHING_COMPARED = "No part of this check got as far as a time or a size to compare."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows like scripts/published.yaml")
    parser.add_argument("--html", type=Path, help="also write a page with the scatter plot")
    parser.add_argument("--json", type=Path, help="also write the figures")
    parser.add_argument("--quick", action="store_true", help='skip the fits for "left out"')
    parser.add_argument(
        "--gpu-check", type=Path, nargs="+", default=[], help="also print files of `canzona doctor --gpu-check`"
    )
    arguments = parser.parse_args()
    published = load_published(arguments.rows)
    compared = list(compare(published))
    counted = fitted_series(compared)
    left_out = {} if arguments.quick else errors_left_out(published, counted)
    figures = figures_of(counted, left_out)
    print("\n".join(tables(published, compared, left_out, figures)))
    for file in arguments.gpu_check:
        print("\n".join(["", *measured_here(json.loads(file.read_text(encoding="utf-8")))]))
    if arguments.html:
        arguments.html.write_text(published_page(compared, figures).text(), encoding="utf-8")
        print(f"\nPage: {arguments.html}")
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(compared, left_out, figures), indent=2) + "\n", encoding="utf-8")
    missed = [name for name, goal in GOALS.items() if figures.get(name, 0.0) > goal]
    wrong = [f"{a.series.name} and {b.series.name}" for a, b, right in compare_orders(compared) if not right]
    if missed or wrong:
        print(f"\nGoals missed: {', '.join([*missed, *(f'order of {pair}' for pair in wrong)])}")
    return int(bool(missed or wrong))


def figures_of(counted: Sequence[PredictedSeries], left_out: dict[str, float]) -> dict[str, float]:
    """Returns the summary figures by name, as shares (0.01 is 1%). `GOALS` has limits for some of them."""
    memory = [abs(row.memory_error) for layout in counted for row in layout.rows if row.memory_error is not None]
    return {
        "MAPE": mean_absolute_error(counted),
        "mean": math.fsum(layout.error for layout in counted) / len(counted),
        "worst layout": max(abs(layout.error) for layout in counted),
        "worst row": max(abs(row.error) for layout in counted for row in layout.rows),
        **({"left out": max(map(abs, left_out.values()))} if left_out else {}),
        **({"memory": max(memory)} if memory else {}),
    }


def errors_left_out(published: Published, counted: Sequence[PredictedSeries]) -> dict[str, float]:
    """Returns, by name, the error of each series if the three numbers in `RANGES` are fitted only to the series of
    other models.

    The fit minimises the squares of log(predicted / measured), with predictions linearised in the logarithms of the
    three numbers.
    """
    names = [layout.series.name for layout in counted]
    base = np.log([1 + layout.error for layout in counted])
    series = counted[0].series
    config, _ = run_of(series, published.models[series.model], min(series.step_s))
    profile = config.cluster
    assert profile.sustained_tflops is not None
    slopes = []
    for varied in (
        lambda: compare(published, {"sustained_tflops": (profile.sustained_tflops or 0.0) * (1 + STEP)}),
        lambda: _with_passes(published, 1 + STEP),
        lambda: compare(published, {"speed_spread": profile.speed_spread * (1 + STEP)}),
    ):
        errors = {layout.series.name: layout.error for layout in varied()}
        slopes.append((np.log([1 + errors[name] for name in names]) - base) / math.log1p(STEP))
    jacobian = np.stack(slopes, axis=1)
    penalty = np.diag([0.02 / spread for spread in RANGES.values()])  # an error of 2% weighs as much as a full range
    left_out: dict[str, float] = {}
    for model in dict.fromkeys(layout.series.model for layout in counted):
        fitted = np.array([layout.series.model != model for layout in counted])
        matrix = np.concatenate([jacobian[fitted], penalty])
        change = np.linalg.lstsq(matrix, np.concatenate([-base[fitted], np.zeros(len(penalty))]), rcond=None)[0]
        for index in np.flatnonzero(~fitted):
            left_out[names[index]] = math.expm1(base[index] + jacobian[index] @ change)
    return left_out


def _with_passes(published: Published, factor: float) -> list[PredictedSeries]:
    with scaled_passes(factor):
        return list(compare(published))


@contextmanager
def scaled_passes(factor: float) -> Iterator[None]:
    """Multiplies the predicted time of elementwise work in Transformer Engine's layers by `factor`, inside a `with`
    block."""
    before = ELEMENTWISE_PASSES[True]
    caches = (model_time.stage_time, model_time._pieces)
    try:
        ELEMENTWISE_PASSES[True] = before * factor
        for cache in caches:
            cache.cache_clear()
        yield
    finally:
        ELEMENTWISE_PASSES[True] = before
        for cache in caches:
            cache.cache_clear()


def tables(
    published: Published, compared: Sequence[PredictedSeries], left_out: dict[str, float], figures: dict[str, float]
) -> Iterator[str]:
    heads = [
        "model",
        "layout",
        "GPUs",
        "measured s",
        "predicted s",
        "error",
        "left out",
        "drift measured / predicted",
        "memory",
    ]
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for layout in compared:
        first, last = layout.rows[0], layout.rows[-1]
        span = f"{first.gpus:,}" if first is last else f"{first.gpus:,} to {last.gpus:,}"
        measured, predicted = (
            f"{values[0]:.4g}" if values[0] == values[-1] else f"{values[0]:.4g} to {values[-1]:.4g}"
            for values in ([row.measured_s for row in layout.rows], [row.predicted_s for row in layout.rows])
        )
        series = layout.series
        drift = "" if first is last else " / ".join(f"{share:+.1%}" for share in layout.drift)
        memory = ", ".join(f"{row.memory_error:+.1%}" for row in layout.rows if row.memory_error is not None)
        without = f"{left_out[series.name]:+.1%}" if series.name in left_out else ""
        name = series.name + ("" if series.why_not_fitted is None else " *")
        yield (
            f"| {name} | {series.layout}, sequence {series.seq_length:,} | {span} | {measured} | {predicted} "
            f"| {layout.error:+.1%} | {without} | {drift} | {memory} |"
        )
    yield ""
    rows = sum(len(layout.rows) for layout in fitted_series(compared))
    shown = (
        f"{name} {value:{'+' if name == 'mean' else ''}.1%}" + (f" (goal {GOALS[name]:.0%})" if name in GOALS else "")
        for name, value in figures.items()
    )
    yield f"{rows} steps in {len(fitted_series(compared))} series. {', '.join(shown)}"
    if with_experts := fitted_series(compared, experts=True):
        worst = max(abs(layout.error) for layout in with_experts)
        yield (
            f"Models with experts, the only ones to which the costs of experts are fitted: {len(with_experts)} series. "
            f"MAPE {mean_absolute_error(with_experts):.1%}, worst layout {worst:.1%}"
        )
    for layout in compared:
        if layout.series.why_not_fitted:
            yield f"* {layout.series.name}, not counted: {layout.series.why_not_fitted}"
    pairs = list(compare_orders(compared))
    yield f"Pairs of layouts of a model in the right order: {sum(right for *_, right in pairs)} of {len(pairs)}"
    others = [series for series in published.series if not series.predicted]
    if others:
        steps = sum(len(series.step_s) for series in others)
        yield f"Not predicted, because canzona does not train in fp8: {steps} steps"
    for claim in published.claims:
        yield f"Published without a layout that canzona has: {claim.name} {claim.figure} ({claim.source})"


def measured_here(check: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of the simulated and measured values in a file of `canzona doctor --gpu-check`."""
    yield f"{check['gpus']} x {check['gpu']}, torch {check['torch']}, canzona {check['canzona']}:"
    yield ""
    rows = [row for part in check["parts"] for row in part["comparisons"]]
    if not rows:
        yield NOTHING_COMPARED
        return
    yield "| | simulated | measured | error |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        simulated, measured, unit = row["simulated"], row["measured"], row["unit"]
        error = f"{simulated / measured - 1:+.1%}" if measured else ""
        yield f"| {row['what'].strip()} | {simulated:.4g} {unit} | {measured:.4g} {unit} | {error} |"


def as_json(
    compared: Sequence[PredictedSeries], left_out: dict[str, float], figures: dict[str, float]
) -> dict[str, object]:
    return {
        "figures": figures,
        "left_out": left_out,
        "series": [
            {
                "name": layout.series.name,
                "layout": layout.series.layout,
                "counted": layout.series.why_not_fitted is None,
                "source": layout.series.source,
                "error": layout.error,
                "rows": [asdict(row) for row in layout.rows],
            }
            for layout in compared
        ],
    }


def published_page(compared: Sequence[PredictedSeries], figures: Mapping[str, float]) -> Document:
    """Makes a page with a scatter plot and a table of all steps.

    Args:
        figures: the summary figures, which are shown above the plot.
    """
    shown = ", ".join(f"{name} {value:.1%}" for name, value in figures.items())
    table = Table("model", "layout", "GPUs", "measured s", "predicted s", "error", "not counted", "source")
    for layout in compared:
        for row in layout.rows:
            table.add_row(
                layout.series.name,
                layout.series.layout,
                f"{row.gpus:,}",
                f"{row.measured_s:.4g}",
                f"{row.predicted_s:.4g}",
                f"{row.error:+.1%}",
                layout.series.why_not_fitted or "",
                f"{layout.series.source}, {layout.series.date}",
            )
    return Document(
        kind="make published",
        title="Published step times",
        sections=[
            Section(title="Predicted against measured", lead=f"seconds per step; {shown}", body=scatter(compared)),
            Section(title="Numbers", body=table_html(table)),
        ],
    )


def scatter(compared: Sequence[PredictedSeries]) -> Html:
    """Draws a dot for each step on logarithmic axes, the diagonal, and a band of 8% around the diagonal."""
    values = [value for layout in compared for row in layout.rows for value in (row.measured_s, row.predicted_s)]
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
    for colour, layout in enumerate(compared):
        look = f"dot c{colour % _COLOURS}"
        for row in layout.rows:
            times = f"{row.predicted_s:.4g} s predicted, {row.measured_s:.4g} s measured"
            name = f"{layout.series.name}, {row.gpus:,} GPUs: {times}"
            where = {"cx": round(place(row.measured_s), 1), "cy": round(_SIDE - place(row.predicted_s), 1)}
            lines.append(tag("circle", tag("title", name), **where, r=4, class_=look))
    legend = (key(f"c{colour % _COLOURS}", layout.series.name) for colour, layout in enumerate(compared))
    picture = tag(
        "svg",
        *lines,
        class_="plot",
        width=_SIDE,
        height=_SIDE + 26,
        role="img",
        aria_label="Predicted against measured seconds per step",
    )
    caption = tag("figcaption", tag("b", "horizontal: measured; vertical: predicted; lines: equal and 8% off"), *legend)
    return tag("figure", caption, picture, class_="chart")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CanzonaError as error:
        sys.exit("\n".join(f"{problem.key}: {problem.reason}" for problem in error.problems))
