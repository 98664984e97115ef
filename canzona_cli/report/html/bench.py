"""`canzona bench --html`: a comparison, a sweep or a simulation, with its pictures drawn."""

from collections.abc import Callable, Mapping
from statistics import median

from canzona_cli.bench.results import BenchResult
from canzona_cli.bench.simulated import Simulation
from canzona_cli.report.bench import BenchView, order
from canzona_cli.report.bench_simulated import SimulationView
from canzona_cli.report.bench_sweep import SweepView
from canzona_cli.report.html.bars import PHASE_PARTS, Bar, bars
from canzona_cli.report.html.curves import Curve, curve_chart, side_by_side
from canzona_cli.report.html.document import Document, Section
from canzona_cli.report.html.elements import Html
from canzona_cli.report.html.maps import LoadMap, load_maps
from canzona_cli.report.html.views import SCREEN, sections
from canzona_cli.report.page import Page
from canzona_cli.run.phases import IN_STEP, STRATEGIES
from canzona_cli.run.words import number, step_time
from canzona_cli.simulate.study import Study


def bench_page(view: BenchView) -> Document:
    """Strategies next to each other, and what every rank did."""
    result = view.result
    page = _page("canzona bench", view, {"Step": _steps(result)})
    return Document(kind=page.kind, title=page.title, top=page.top, sections=[*page.sections, *_loads(result)])


def sweep_page(view: SweepView) -> Document:
    """One setting at several values."""
    return _page("canzona bench --sweep", view, {})


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
    rows: list[Bar] = []
    for name in order(result):
        found = result.strategies[name]
        measured, planned = median(found.measured.iteration_s), found.predicted.iteration_s
        for label, phases, total, faint in (
            (name, found.measured.means, measured, False),
            (f"{name}, predicted", found.predicted.phases, planned, True),
        ):
            parts = [(phase, phases.get(phase, 0.0)) for phase in IN_STEP]
            rows.append(Bar(label=label, parts=parts, value=step_time(total), faint=faint))
    return bars(rows, PHASE_PARTS, scale=max(sum(seconds for _, seconds in row.parts) for row in rows))


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

    def chart(title: str, value: Callable[[Study, str], float | None], *names: str) -> Html:
        curves = [
            Curve(
                name=name,
                points=[(gpus, y) for gpus, study in studies.items() if (y := value(study, name)) is not None],
                dots=True,
            )
            for name in names
        ]
        return curve_chart(
            title, curves, height=160, logarithmic=True, x="GPUs", show=lambda found: number(found, ".3g")
        )

    matrix = [name for name in STRATEGIES if name != "adamw"]
    return side_by_side(
        chart("iteration, s", lambda study, name: study.result(name).iteration_s, *STRATEGIES),
        chart("iteration over AdamW's, %", _overhead, *matrix),
    )


def _overhead(study: Study, name: str) -> float | None:
    share = study.overhead(name)
    return None if share is None else 100 * share
