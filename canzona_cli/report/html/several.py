"""`canzona report --compare --html`: runs side by side."""

from canzona_cli.report.html.bars import PHASE_PARTS, bars
from canzona_cli.report.html.curves import Curve, curve_chart, curve_table
from canzona_cli.report.html.document import Document, Section
from canzona_cli.report.html.elements import folded, joined, scrolling
from canzona_cli.report.html.run import breakdown_bar, validation_curve
from canzona_cli.report.html.views import SCREEN, elements
from canzona_cli.report.run import ComparedView
from canzona_cli.report.several import SeveralView, run_names
from canzona_cli.run.compare import Several, compared
from canzona_cli.run.words import number, plural


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
