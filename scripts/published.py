#!/usr/bin/env python3
"""Prints published step times with their predictions, as Markdown.

    python scripts/published.py [--rows FILE]

An error is predicted / measured - 1; the error of a layout is the mean over its numbers of GPUs. Summaries keep rows to
which a number was fitted apart from all others. Exits 1 if a goal is missed, or if two layouts of a model are predicted
in the wrong order.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from published_rows import (
    ROWS,
    PredictedSeries,
    PricedRow,
    Published,
    compare,
    compare_orders,
    counted_series,
    load_published,
    mean_absolute_error,
    price_rows,
    run_of,
    summary,
)

from canzona_cli.core.costs import model as model_time
from canzona_cli.core.costs.modules import ELEMENTWISE_PASSES
from canzona_cli.core.errors import CanzonaError

GOALS = {
    "MAPE": 0.04,
    "worst layout": 0.08,
    "FP8 MAPE": 0.06,
    "FP8 worst": 0.09,
    "fitted FP8 MAPE": 0.04,
    "fitted FP8 worst": 0.07,
    "refit": 0.02,
    "memory": 0.08,
    "optimizer MAPE": 0.1,
}
STEP = 0.03
"""The relative change of a fitted number for computing how predictions depend on it."""
RANGES = {"sustained_tflops": 0.05, "passes": 0.25, "speed_spread": 0.5}
"""The plausible relative change of each fitted number, which regularises the fit, because there are few rows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows like scripts/published.yaml")
    arguments = parser.parse_args()
    published = load_published(arguments.rows)
    compared = list(compare(published))
    optimizer = list(price_rows(published.kernels, published.steps))
    refit = refitted(published, compared)
    figures = figures_of(compared, optimizer, refit)
    print("\n".join([*tables(published, compared, refit, figures), "", *optimizer_tables(optimizer)]))
    missed = [name for name, goal in GOALS.items() if figures.get(name, 0.0) > goal]
    counted = [layout for layout in compared if layout.series.why_not_counted is None]
    wrong = [f"{a.series.name} and {b.series.name}" for a, b, right in compare_orders(counted) if not right]
    if missed or wrong:
        print(f"\nGoals missed: {', '.join([*missed, *(f'order of {pair}' for pair in wrong)])}")
    return int(bool(missed or wrong))


def figures_of(compared: Sequence[PredictedSeries], optimizer: Sequence[PricedRow], refit: "Refit") -> dict[str, float]:
    """Returns the summary figures by name, as shares (0.01 is 1%), of series and rows to which nothing was fitted.
    `GOALS` has limits for some of them."""
    tests = counted_series(compared)
    memory = [abs(row.memory_error) for layout in compared for row in layout.rows if row.memory_error is not None]
    mean_error, *_ = summary([row for row in optimizer if row.counted])
    return {
        "MAPE": mean_absolute_error(tests),
        "mean": math.fsum(layout.error for layout in tests) / len(tests),
        "worst layout": max(abs(layout.error) for layout in tests),
        "worst row": max(abs(row.error) for layout in tests for row in layout.rows),
        **_fp8_figures("FP8", counted_series(compared, precision="fp8")),
        **_fp8_figures("fitted FP8", counted_series(compared, precision="fp8", fitted=True)),
        "refit": refit.most_changed,
        "memory": max(memory),
        "optimizer MAPE": mean_error,
    }


def _fp8_figures(name: str, series: Sequence[PredictedSeries]) -> dict[str, float]:
    if not series:
        return {}
    return {
        f"{name} MAPE": mean_absolute_error(series),
        f"{name} worst": max(abs(layout.error) for layout in series),
    }


@dataclass(frozen=True, kw_only=True)
class Refit:
    """The numbers in `RANGES` if they are fitted only to the dense series that are marked as fitted."""

    values: Mapping[str, float]
    profile: Mapping[str, float]
    """The numbers that predictions are made with."""
    most_changed: float
    """The largest relative change of the prediction of any other series."""


def refitted(published: Published, compared: Sequence[PredictedSeries]) -> Refit:
    """Fits the three numbers to the dense series that are marked as fitted.

    The fit minimises the squares of log(predicted / measured), with predictions linearised in the logarithms of the
    three numbers.
    """
    counted = [*counted_series(compared, fitted=True), *counted_series(compared)]
    names = [layout.series.name for layout in counted]
    base = np.log([1 + layout.error for layout in counted])
    series = counted[0].series
    config, _ = run_of(series, published.models[series.model], min(series.step_s))
    cluster = config.cluster
    assert cluster.sustained_tflops is not None
    profile = {
        "sustained_tflops": cluster.sustained_tflops,
        "passes": ELEMENTWISE_PASSES[True],
        "speed_spread": cluster.speed_spread,
    }
    slopes = []
    for name, value in profile.items():
        varied = (
            with_passes(published, 1 + STEP) if name == "passes" else compare(published, {name: value * (1 + STEP)})
        )
        errors = {layout.series.name: layout.error for layout in varied}
        slopes.append((np.log([1 + errors[name] for name in names]) - base) / math.log1p(STEP))
    jacobian = np.stack(slopes, axis=1)
    penalty = np.diag([0.02 / spread for spread in RANGES.values()])  # an error of 2% weighs as much as a full range
    fitted = np.array([layout.series.fitted for layout in counted])
    matrix = np.concatenate([jacobian[fitted], penalty])
    change = np.linalg.lstsq(matrix, np.concatenate([-base[fitted], np.zeros(len(penalty))]), rcond=None)[0]
    return Refit(
        values={name: value * math.exp(by) for (name, value), by in zip(profile.items(), change, strict=True)},
        profile=profile,
        most_changed=float(np.abs(np.expm1(jacobian[~fitted] @ change)).max()),
    )


def with_passes(published: Published, factor: float) -> list[PredictedSeries]:
    """Predicts every series with the time of elementwise work in Transformer Engine's layers multiplied by `factor`."""
    before = ELEMENTWISE_PASSES[True]
    caches = (model_time.stage_time, model_time._pieces)
    try:
        ELEMENTWISE_PASSES[True] = before * factor
        for cache in caches:
            cache.cache_clear()
        return list(compare(published))
    finally:
        ELEMENTWISE_PASSES[True] = before
        for cache in caches:
            cache.cache_clear()


def tables(
    published: Published, compared: Sequence[PredictedSeries], refit: Refit, figures: dict[str, float]
) -> Iterator[str]:
    yield "| model | layout | GPUs | measured s | predicted s | error | drift measured / predicted | memory | |"
    yield "| --- " * 9 + "|"
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
        yield (
            f"| {series.name} | {series.layout}, sequence {series.seq_length:,} | {span} | {measured} | {predicted} "
            f"| {layout.error:+.1%} | {drift} | {memory} | {_mark(series.fitted, series.why_not_counted)} |"
        )
    yield ""
    yield f"Dense models. {_summary(counted_series(compared))}"
    yield f"Dense models, fitted series. {_summary(counted_series(compared, fitted=True))}"
    for fitted, words in ((False, ""), (True, ", with which in sight their sustained rate was chosen")):
        if fp8 := counted_series(compared, precision="fp8", fitted=fitted):
            yield f"Dense models in FP8{words}. {_summary(fp8)}"
    yield f"Models with experts. {_summary(counted_series(compared, experts=True))}"
    yield f"Models with experts, fitted series. {_summary(counted_series(compared, fitted=True, experts=True))}"
    peaks = sum(row.memory_error is not None for layout in compared for row in layout.rows)
    yield f"Peak memory, to which nothing was fitted: {peaks} runs, at most {figures['memory']:.1%} off"
    values, profile = (
        f"{numbers['sustained_tflops']:.0f} TFLOP/s, {numbers['passes']:.2f} and {numbers['speed_spread']:.2%}"
        for numbers in (refit.values, refit.profile)
    )
    yield (
        f"Fitted to the fitted dense series alone, the three numbers would be {values} instead of {profile}, and "
        f"the other predictions of dense models would change by at most {refit.most_changed:.1%}"
    )
    yield "Goals: " + ", ".join(
        f"{name} {figures[name]:.1%} of {goal:.0%}" for name, goal in GOALS.items() if name in figures
    )
    for layout in compared:
        if layout.series.why_not_counted:
            yield f"* {layout.series.name}, not counted: {layout.series.why_not_counted}"
    pairs = list(compare_orders(compared))
    yield (
        f"Pairs of layouts of a model in the right order, rows marked * included: "
        f"{sum(right for *_, right in pairs)} of {len(pairs)}"
    )
    for claim in published.claims:
        yield f"Published without what a prediction needs: {claim.name} {claim.figure} ({claim.source})"


def _mark(fitted: bool, why_not_counted: str | None) -> str:
    if why_not_counted is not None:
        return "*"
    return "fitted" if fitted else ""


def _summary(layouts: Sequence[PredictedSeries]) -> str:
    """Summarises the errors of series."""
    errors = [layout.error for layout in layouts]
    rows = [row.error for layout in layouts for row in layout.rows]
    return (
        f"{len(rows)} steps in {len(layouts)} series: mean absolute error of a series "
        f"{mean_absolute_error(layouts):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}; of a single step from "
        f"{min(rows):+.1%} to {max(rows):+.1%}"
    )


def optimizer_tables(rows: Sequence[PricedRow]) -> Iterator[str]:
    """Yields the tables of kernels and steps of matrix optimizers, and their summaries."""
    yield "| what | GPU | matrices | measured ms | predicted ms | error | |"
    yield "| --- " * 7 + "|"
    for row in rows:
        yield (
            f"| {row.name} | {row.gpu} | {row.what} | {row.measured_ms:.4g} | {row.predicted_ms:.4g} "
            f"| {row.error:+.1%} | {_mark(row.fitted, row.why_not_counted)} |"
        )
    yield ""
    counted, fitted = [row for row in rows if row.counted], [row for row in rows if row.fitted]
    for words, chosen in (("to which nothing was fitted", counted), ("fitted", fitted)):
        mean, least, most = summary(chosen)
        yield (
            f"Kernels and steps of optimizers, {words}: {len(chosen)} times, mean absolute error {mean:.1%}, "
            f"from {least:+.1%} to {most:+.1%}"
        )
    yield from dict.fromkeys(
        f"* {row.name}, on {row.gpu}, not counted: {row.why_not_counted}" for row in rows if row.why_not_counted
    )
    yield from (f"{row.name}, on {row.gpu}: {row.note}" for row in rows if row.note)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CanzonaError as error:
        sys.exit("\n".join(f"{problem.key}: {problem.reason}" for problem in error.problems))
