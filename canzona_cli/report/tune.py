"""The screen of `canzona tune`: measured and predicted times of layouts, and the prediction errors by
phase."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.layouts import LEAST_SHARE, ORDER_MARGIN, Accuracy, Errors, LayoutBench, TuneResult
from canzona_cli.report.bench import cells_with_error, predictions, quartiles
from canzona_cli.report.header import layout_name, rank_word
from canzona_cli.report.page import Page, Screen, items, labelled_rows, note, paragraph, section_head
from canzona_cli.report.tables import Cell, rows_table
from canzona_cli.run.phases import PHASES
from canzona_cli.run.statistics import no_verdict
from canzona_cli.run.words import layout_code, number, overhead, plural


@dataclass(frozen=True, kw_only=True)
class TuneView(Page):
    """The measured layouts: a table with the fastest first and in bold, then the prediction errors."""

    result: TuneResult

    widest = 140

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        result = self.result
        ranks = plural(result.gpus, rank_word(result.device))
        yield section_head("Tune", f": {result.recipe}, {result.optimizer}, {ranks}")
        yield from labelled_rows(self._facts(), 11)
        yield Text()
        names = sorted(result.layouts, key=result.slower)
        rows = [(layout_code(result.layouts[name].layout), self._cells(name, result.layouts[name])) for name in names]
        plan_heads = ("plan", "error") if result.planned else ()
        heads = ("batch", "recompute", "ms/step", *plan_heads, "slower", "")
        yield rows_table(heads, rows, bold=names.index(result.best), needed=len(heads) - 1)
        plan = "plan: predicted ms; error: predicted / measured - 1; " if result.planned else ""
        yield note(
            f"batch: micro-batch x accumulation x DP; ms/step: median [quartiles] of the rounds; {plan}"
            "slower: time per sequence, relative to the fastest measured"
        )
        yield Text()
        yield paragraph(self._verdict())
        if result.accuracy is not None and result.planned:
            yield Text()
            yield from _errors(result.accuracy, len(result.layouts))
        yield from items("Failed", (f"{name}: {reason}" for name, reason in result.failed.items()))
        yield from items("Notes", result.notes)

    def _facts(self) -> Iterator[tuple[str, Text | str]]:
        result = self.result
        fitted = f"fitted to steps of {result.fitted_on}" if result.fitted_on else "not fitted to whole steps"
        yield from predictions(result, fitted).items()
        selection = "all of them" if result.everything else "the predicted fastest"
        yield (
            "measured",
            f"{len(result.layouts)} of {plural(result.legal, 'layout')}, {selection}, interleaved: "
            f"{plural(result.rounds, 'round')} of {plural(result.steps, 'step')}, each after "
            f"{plural(result.warm_up_steps, 'warm-up step')}",
        )
        machine = (str(result.machine[key]) for key in ("processor", "cores") if key in result.machine)
        load = number(result.machine.get("load_average"))
        yield "machine", f"{' x '.join(machine)} cores, load average {load}"
        if result.overrides:
            yield "settings", " ".join(result.overrides)

    def _cells(self, name: str, bench: LayoutBench) -> tuple[Cell, ...]:
        result, layout = self.result, bench.layout
        facts = {"fastest": name == result.best, "simulator's choice": name == result.chosen, "fitted on": bench.fitted}
        return (
            f"{layout.micro_batch_size} x {layout.num_microbatches} x {layout.dp}",
            layout.recompute,
            quartiles(bench.iteration_s),
            *(cells_with_error(bench.median_s, bench.predicted.iteration_s)[1:] if result.planned else ()),
            "" if name == result.best else overhead(result.slower(name)),
            ", ".join(mark for mark, applies in facts.items() if applies),
        )

    def _verdict(self) -> str:
        result = self.result
        if result.best == result.chosen:
            return "The simulator's choice is also the fastest measured layout."
        if result.chosen not in result.layouts:
            return "The simulator's choice could not be measured."
        best, chosen = (layout_name(result.layouts[name].layout) for name in (result.best, result.chosen))
        slower = overhead(result.slower(result.chosen))
        return (
            f"{best} is the fastest measured layout; the simulator's choice, {chosen}, is {slower} slower per "
            f"sequence{self._doubt()}."
        )

    def _doubt(self) -> str:
        """Returns the end of the sentence that says how the fastest layout and the simulator's choice differ."""
        if self.result.certain is None:
            return f" ({no_verdict(self.result.rounds)})"
        return "" if self.result.certain else ", which is not significant (paired t-test)"


def _errors(accuracy: Accuracy, layouts: int) -> Iterator[RenderableType]:
    """Yields a table of the prediction errors for the step and for each phase."""
    layout_count = accuracy.step.layouts
    scope = "" if layout_count == layouts else f" {plural(layout_count, 'layout')} that the profile was not fitted to"
    yield section_head("Errors of the predictions", f":{scope or ' all layouts'}")
    rows = {"step": accuracy.step, **{PHASES[name].name: errors for name, errors in accuracy.phases.items()}}
    heads = ("layouts", "share of step", "MAPE", "mean", "worst", "layout")
    yield rows_table(heads, ((name, _error_cells(errors)) for name, errors in rows.items()), bold=0, needed=5)
    yield note(
        f"phases: only layouts that spend at least {LEAST_SHARE:.0%} of the step there; mean: mean signed error; "
        "layout: the layout with the worst error"
    )
    if accuracy.pairs:
        yield paragraph(
            f"Predicted in the right order: {accuracy.in_order} of {plural(accuracy.pairs, 'pair')} of layouts whose "
            f"measured times differ by more than {ORDER_MARGIN:.0%}."
        )


def _error_cells(errors: Errors) -> tuple[Cell, ...]:
    return (
        str(errors.layouts),
        f"{errors.share:.1%}",
        f"{errors.mape:.1%}",
        overhead(errors.mean),
        overhead(errors.worst),
        errors.worst_layout,
    )
