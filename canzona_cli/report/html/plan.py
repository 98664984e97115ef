"""`canzona plan --html`: what the terminal shows of a plan, with its pictures drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from canzona_cli.costs.memory import GIB
from canzona_cli.report.html.charts import (
    MEMORY_PARTS,
    PHASE_PARTS,
    Bar,
    Curve,
    Lane,
    LoadMap,
    bars,
    curve_chart,
    lanes_chart,
    load_maps,
)
from canzona_cli.report.html.document import Document, Html, joined
from canzona_cli.report.html.views import SCREEN, sections
from canzona_cli.report.plan import CUT, PlanView
from canzona_cli.run.phases import PHASES, STREAMS, Interval
from canzona_cli.run.words import milliseconds, size, step_time
from canzona_cli.simulate.compare import STRATEGIES, Study

_LOADS = "Update time of every rank"


def plan_page(view: PlanView) -> Document:
    """All of it simulated, as its first lines say."""
    study = view.study
    pictures = {
        _LOADS: _loads(study),
        "Memory": _memory(study),
        "Iteration": _iterations(study),
        "Timeline": _timeline(study),
    }
    head, *rest = sections(view.parts(SCREEN), pictures=pictures)
    lead = "simulated; colour: a rank's time over the mean of its strategy"  # the terminal has heights
    rest = [replace(part, lead=lead) if part.title == _LOADS else part for part in rest]
    title = f"{head.title} {head.lead}"
    return Document(kind="canzona plan", title=title, top=head.body, sections=rest)


def _loads(study: Study) -> Html:
    shown = ((name, study.strategies[name].loads) for name in study.mapped)
    maps = [LoadMap(title=name, loads=loads) for name, loads in shown if loads is not None]
    return joined([load_maps(maps, hosts=study.plan.subject.layout.tp), _sorted_loads(study, maps)])


def _sorted_loads(study: Study, maps: Sequence[LoadMap]) -> Html:
    """A curve for each strategy over the ranks of a stage, busiest first: a flat one is a perfect balance."""
    bound = study.plan.lower_bounds[study.balance.slowest.stage]
    curves = [Curve(name=one.title, points=[*enumerate(sorted(one.loads, reverse=True), 1)]) for one in maps]
    ranks = len(maps[0].loads)
    curves.append(Curve(name=f"lower bound {step_time(bound)}", points=[(1, bound), (ranks, bound)]))
    return curve_chart("ms of updates, busiest rank first", curves, height=140, show=milliseconds, x="rank")


def _memory(study: Study) -> Html:
    account = study.memory
    parts = [(name, float(account.parts[name])) for name in MEMORY_PARTS if account.parts.get(name)]
    value = f"{size(account.total)} of {account.capacity / GIB:.1f} GiB"
    row = Bar(label="fullest rank", parts=parts, value=value, limit=account.capacity)
    return bars([row], MEMORY_PARTS, scale=max(account.capacity, account.total), show=size)


def _iterations(study: Study) -> Html:
    results = {name: study.strategies[name].result for name in STRATEGIES}
    longest = max(result.iteration_s for name, result in results.items() if name != "sc")
    scale = min(max(result.iteration_s for result in results.values()), CUT * longest)
    rows = [
        Bar(
            label=name,
            parts=[(phase, result.phases.get(phase, 0.0)) for phase in PHASES],
            value=step_time(result.iteration_s) + (" (cut off)" if result.iteration_s > 1.001 * scale else ""),
        )
        for name, result in results.items()
    ]
    return bars(rows, PHASE_PARTS, scale=scale)


def _timeline(study: Study) -> Html:
    """The streams of the slowest rank, whole; enlarged from the last reduced gradient on, also those of the
    rank with least to update."""
    result = study.planned.result
    ranks = list(dict.fromkeys(event.rank for event in result.events))
    end = max(event.end_s for event in result.events)
    begin = min((event.start_s for event in result.events if event.phase == "norm_clip"), default=0.0)

    def lanes(start: float, ranks: Sequence[int]) -> Iterator[Lane]:
        for rank in ranks:
            for stream, name in STREAMS.items():
                shown = [
                    Interval(name=event.phase, start_s=event.start_s - start, end_s=event.end_s - start)
                    for event in result.events
                    if (event.rank, event.stream) == (rank, stream) and event.end_s > start
                ]
                if shown:
                    yield Lane(label=f"rank {rank}: {name}", intervals=shown, begins=stream == "compute")

    whole = lanes_chart(lanes(0.0, [result.slowest_rank]), end_s=end)
    return joined([whole, lanes_chart(lanes(begin, ranks), end_s=end - begin)])
