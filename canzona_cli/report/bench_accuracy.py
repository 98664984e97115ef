"""The table of prediction errors over several benches, and what was predicted in the wrong order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.bench.accuracy import APART, WITHIN, Cell, Time, cells, pairs, share_good
from canzona_cli.bench.results import STRATEGIES, BenchResult
from canzona_cli.report.bench_words import error_text
from canzona_cli.report.columns import Group, tables
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import clean, milliseconds, plural

_TIMES: dict[Time, str] = {"optimizer": "optimizer step", "iteration": "iteration"}


@dataclass(frozen=True)
class AccuracyView:
    """A rich renderable, from 60 columns on."""

    results: Sequence[BenchResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = {of: cells(self.results, of) for of in _TIMES}
        yield Text("Prediction errors: predicted over measured median, less 1", style="bold")
        benches = [f"{clean(cell.recipe)} {clean(cell.optimizer)} {cell.layout}" for cell in found["optimizer"]]
        starts = [n for n in range(len(benches)) if n == 0 or benches[n] != benches[n - 1]]
        width = max(map(len, benches), default=0)
        labels = [
            f"{bench if n in starts else '':<{width}} {clean(cell.strategy)}"
            for n, (bench, cell) in enumerate(zip(benches, found["optimizer"], strict=True))
        ]
        groups = [
            Group(
                title=f"{title}, ms",
                heads=("measured", "plan", "error"),
                rows=tuple(
                    (
                        milliseconds(cell.measured.median),
                        milliseconds(cell.predicted_s),
                        error_text(cell.measured.median, cell.predicted_s),
                    )
                    for cell in found[of]
                ),
            )
            for of, title in _TIMES.items()
        ]
        yield from tables(labels, groups, options, head="bench, strategy", sections=starts[1:])
        for of in _TIMES:
            yield Text()
            yield from self._verdict(of, found[of], console, options)

    def _verdict(self, of: Time, found: Sequence[Cell], console: Console, options: ConsoleOptions) -> Iterator[Text]:
        title = _TIMES[of].capitalize()
        good = sum(cell.good for cell in found)
        said = [f"{good} of {plural(len(found), 'cell')} ({100 * share_good(found):.0f}%) within {100 * WITHIN:.0f}%"]
        for name in STRATEGIES:
            own = [cell for cell in found if cell.strategy == name]
            if own:
                said.append(f"{name} {sum(cell.good for cell in own)}/{len(own)}")
        yield from wrapped(
            Text.assemble((title, "bold"), f": {said[0]} ({', '.join(said[1:])})"), console, options, rest="  "
        )
        ranked = pairs(self.results, of)
        wrong = [pair for pair in ranked if not pair.right]
        order = (
            f"{plural(len(ranked), 'pair')} of strategies measured more than {100 * APART:.0f}% apart, "
            f"{len(ranked) - len(wrong)} predicted in that order"
        )
        yield from wrapped(Text(order), console, options, first="  ", rest="  ")
        for pair in wrong:
            text = (
                f"wrong: {clean(pair.bench)}: {clean(pair.slower)} took {pair.measured:.2f} times as long as "
                f"{clean(pair.faster)}, predicted {pair.predicted:.2f} times"
            )
            yield from wrapped(Text(text, style="yellow"), console, options, first="    ", rest="      ")
