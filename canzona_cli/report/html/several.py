"""`canzona report --compare --html`: runs side by side."""

from canzona_cli.report.html.bars import PHASE_PARTS, bars
from canzona_cli.report.html.curves import Curve, curve_chart, curve_table, side_by_side
from canzona_cli.report.html.document import Document, Section
from canzona_cli.report.html.elements import Html, folded, joined, scrolling
from canzona_cli.report.html.run import breakdown_bar, validation_curve
from canzona_cli.report.html.views import SCREEN, elements
from canzona_cli.report.run import ComparedView
from canzona_cli.report.several import SeveralView, run_names
from canzona_cli.run.compare import Several, compared, run_figures
from canzona_cli.run.words import number, plural, real


def several_page(several: Several) -> Document:
    """Their figures, losses over each other, steps below each other; of two runs, every difference."""
    names = run_names(several.runs)
    found = [Section(title="Runs", lead="the best one stands out", body=elements([SeveralView(several=several)]))]
    training = [Curve(name=name, points=run.losses) for name, run in zip(names, several.runs, strict=True)]
    validation = [validation_curve(name, run.validations) for name, run in zip(names, several.runs, strict=True)]
    for title, all_curves in (("Training loss", training), ("Validation loss", validation)):
        curves = [curve for curve in all_curves if curve.points]
        if curves:
            table = curve_table(curves, show=lambda value: number(value, ".4f"))
            body = joined([curve_chart(title.lower(), curves), folded("the numbers", scrolling(table))])
            found.append(Section(title=title, lead="nats per token", body=body))
    by_value = [_losses_by(key, values, several) for key, values in _numeric(several).items()]
    if by_value:
        title = "Loss by setting"
        found.append(Section(title=title, lead="each setting in which the runs differ", body=side_by_side(*by_value)))
    measured = [(name, run.breakdown) for name, run in zip(names, several.runs, strict=True)]
    rows = [breakdown_bar(name, breakdown) for name, breakdown in measured if breakdown is not None]
    if rows:
        scale = max(sum(seconds for _, seconds in row.parts) for row in rows)
        found.append(
            Section(
                title="Step", lead="measured, mean over ranks, on one scale", body=bars(rows, PHASE_PARTS, scale=scale)
            )
        )
    if len(several.runs) == 2:
        parts = ComparedView(compared=compared(several)).parts(SCREEN)
        lead = "B / A is above 1 where run B takes more; A is the first run"
        found.append(Section(title="Differences", lead=lead, body=elements(parts)))
    return Document(kind="canzona report --compare", title=plural(len(names), "run"), sections=found)


def _numeric(several: Several) -> dict[str, list[float]]:
    """The settings in which the runs differ by a number, and each run's value."""
    numeric = {
        key: [number for value in values if (number := real(value)) is not None]
        for key, values in several.settings.items()
    }
    return {key: values for key, values in numeric.items() if len(values) == len(several.runs)}


def _losses_by(key: str, values: list[float], several: Several) -> Html:
    """What each value of a setting came to."""
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
