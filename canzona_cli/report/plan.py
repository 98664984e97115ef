"""What `canzona plan` prints: summary, strategies, load map, memory, timeline and, on request, assumptions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.planner.memory import GIB
from canzona_cli.report.header import describe_batch, describe_layout
from canzona_cli.report.heat import heat_map, owners_a_column
from canzona_cli.report.plan_tables import comparison, strategies, traffic
from canzona_cli.report.plan_time import iterations, streams
from canzona_cli.report.stacked import Ink, legend, stacked
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import clean, count, plural, size, step_time
from canzona_cli.simulate.study import Study

_MEMORY = {
    "weights": Ink(letter="W", style="dodger_blue2"),
    "gradients": Ink(letter="G", style="sky_blue2"),
    "padding": Ink(letter="P", style="red3"),
    "masters": Ink(letter="M", style="green3"),
    "matrix_state": Ink(letter="S", style="pale_green1"),
    "adamw_state": Ink(letter="A", style="gold3"),
    "activations": Ink(letter="C", style="medium_purple2"),
    "logits": Ink(letter="L", style="plum2"),
    "workspace": Ink(letter="K", style="grey62"),
    "exchange": Ink(letter="X", style="indian_red1"),
}
_WIDEST = 120


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A rich renderable, from 80 columns on."""

    study: Study
    written: Path | None = None
    """The plan file; None for a dry run."""
    drawn: Path | None = None
    """The picture."""
    phases: bool = False
    """Whether to list every strategy's phases."""
    assumptions: bool = False
    """Whether to list what the simulated times assume, not only how many assumptions there are."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(max_width=min(options.max_width, _WIDEST))
        yield from self._summary(console, options)
        yield Text()
        yield from strategies(self.study, console, options)
        for title, lines in (
            *((title, (table,)) for title, table in comparison(self.study, options, of_phases=self.phases)),
            self._map(options),
            self._memory(console, options),
            iterations(self.study, console, options),
            streams(self.study, console, options),
        ):
            yield Text()
            yield from wrapped(title, console, options)
            yield from lines
        yield Text()
        if self.assumptions:
            yield Text("Assumptions", style="bold")
            for line in self.study.assumptions:
                yield from wrapped(Text(line, style="dim"), console, options, first="  - ", rest="    ")
            yield Text()
        else:
            told = f"The times are simulated, under {len(self.study.assumptions)} assumptions: add --assumptions."
            yield from wrapped(Text(told, style="dim"), console, options)
        yield from wrapped(Text(self._where()), console, options)

    @property
    def _unit(self) -> str:
        return "GPU" if self.study.config.cluster.device == "cuda" else "CPU rank"

    def _summary(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        study, config = self.study, self.study.config
        times = "x" if options.ascii_only else "×"
        title = Text.assemble(
            (f"Plan {study.plan.name}", "bold"),
            f"  {clean(config.name)}, {self._optimizer()}, "
            f"{describe_layout(study.layout, self._unit, times=times)} on {clean(config.cluster.name)}",
        )
        yield from wrapped(title, console, options)
        for label, value in self._rows(times):
            first = f"  {label:<14}"
            for line in wrapped(value, console, options, first=first, rest=" " * len(first)):
                line.stylize("dim", 0, len(first))
                yield line

    def _optimizer(self) -> str:
        algorithm = self.study.plan.subject.optimizer
        if algorithm.custom:
            return f"custom (priced like {algorithm.name})"
        if algorithm.name == "muon":
            return f"muon ({algorithm.ns_steps} Newton-Schulz steps)"
        return f"{algorithm.name} (refreshed every {algorithm.refresh_period} steps)"

    def _rows(self, times: str) -> Iterator[tuple[str, Text]]:
        study, balance, moved = self.study, self.study.balance, self.study.communication
        plan, mesh, settings = study.plan, study.plan.subject.layout, study.plan.subject.settings
        yield "batch", Text(describe_batch(study.layout, study.config.train.seq_length, times=times))
        elements = sum(matrix.elements for matrix in plan.matrices)
        ranks = mesh.pp * mesh.cells
        few = (
            f"; more ranks than matrices: {ranks - self._busy():,} of {ranks:,} ranks update none, and updating takes "
            f"{balance.grid:.1f} times an even share of it"
        )
        yield (
            "matrices",
            Text(
                f"{len(plan.matrices):,} ({settings.splitting}) with {count(elements)} elements"
                + (few if len(plan.matrices) < ranks else "")
            ),
        )
        layout = f"{settings.layout} layout, alpha {settings.alpha:g}" if settings.strategy == "canzona" else "in order"
        grid = f"{plural(mesh.owners, 'owner')} {times} {plural(mesh.tp, 'host')}"
        yield "assignment", Text(f"{settings.strategy}: {layout}; grid of {grid}")
        yield (
            "load balance",
            Text.assemble(
                (f"{balance.grid:.3f}", "bold"),
                f" over the grid (max / mean; DP {balance.dp:.3f} {times} TP {balance.tp:.3f}); no plan can be below ",
                (f"{balance.lower_bound:.3f}", "bold"),
                f": {100 * balance.gap:.1f}% above the bound",
            ),
        )
        yield (
            "slowest",
            Text(
                f"{balance.slowest.describe(mesh)}: {step_time(balance.slowest_s)} of updates "
                f"(mean {step_time(balance.mean_s)})"
            ),
        )
        largest = max((sum(plan.matrices[i].elements for i in group.matrices) for group in plan.groups), default=0)
        yield (
            "buckets",
            Text(
                f"{len(plan.buckets)}, {100 * moved.padding_fraction:.1f}% padding; "
                f"{plural(len(plan.groups), 'micro-group')} ({settings.grouping}), the largest of {count(largest)}"
            ),
        )
        yield (
            "moved",
            Text(
                f"per {self._unit} and step {traffic(moved.dp_reduce_bytes)} of gradients reduced, "
                f"{traffic(moved.dp_gather_bytes)} of weights gathered, {traffic(moved.tp_exchange_bytes)} "
                "exchanged over TP"
            ),
        )
        against = [f"{study.optimizer_speedup(name):.1f}{times} shorter than {name}'s" for name in ("layerwise", "sc")]
        yield (
            "optimizer",
            Text.assemble(
                (step_time(study.planned.result.optimizer_s), "bold"),
                f": {', '.join(against)}; {100 * study.overhead(study.strategy):+.2f}% on AdamW's iteration",
            ),
        )

    def _busy(self) -> int:
        plan = self.study.plan
        return len({(m.stage, cell) for m, cell in zip(plan.matrices, plan.assignment.cells, strict=True)})

    def _map(self, options: ConsoleOptions) -> tuple[Text, RenderResult]:
        study = self.study
        mesh = study.plan.subject.layout
        shown = [(name, study.strategies[name].loads) for name in ("canzona", "asc", "layerwise")]
        maps = [(name, loads) for name, loads in shown if loads is not None]
        gap = 2
        width = (options.max_width - 2 - gap * (len(maps) - 1)) // len(maps)
        width = min(width, max(4 * mesh.owners, 24))
        title = Text.assemble(
            ("Update time of every rank", "bold"),
            f": columns are owners (DP 0 to {mesh.owners - 1}), rows hosts (TP 0 to {mesh.tp - 1}), "
            "a full block the slowest",
        )
        together = owners_a_column(mesh.owners, width)
        if together > 1:
            title.append(f" (of up to {together} owners a column)")
        if mesh.pp > 1:
            title.append(f"; pipeline stage {study.balance.slowest.stage}")

        def lines() -> Iterator[Text]:
            names, slowest, columns = [], [], []
            for name, loads in maps:
                mean = sum(loads) / len(loads)
                names.append(Text(f"{name} {max(loads) / mean:.2f}", style="bold"))
                slowest.append(Text(f"slowest {step_time(max(loads))}", style="dim"))
                columns.append(list(heat_map(loads, mesh.tp, width, ascii_only=options.ascii_only)))
            for row in (names, slowest, *zip(*columns, strict=True)):
                line = Text("  ", no_wrap=True)
                for cell in row:
                    cell.truncate(width, pad=True)
                    line.append_text(cell).append(" " * gap)
                line.rstrip()
                yield line

        return title, lines()

    def _memory(self, console: Console, options: ConsoleOptions) -> tuple[Text, RenderResult]:
        memory, mesh = self.study.memory, self.study.plan.subject.layout
        colour = console.color_system is not None
        total = max(memory.capacity, memory.total)
        width = options.max_width - 4
        parts = [(name, float(memory.parts[name])) for name in _MEMORY if memory.parts.get(name)]
        free = memory.capacity - memory.total
        title = Text.assemble(
            ("Memory", "bold"),
            f" of the fullest {self._unit}, {memory.worst.describe(mesh)}: {memory.total / GIB:.1f} of "
            f"{memory.capacity / GIB:.1f} GiB, {max(free, 0) / GIB:.1f} free",
        )

        def lines() -> Iterator[Text]:
            drawn = stacked(parts, total, width, _MEMORY, colour=colour)
            drawn.append(("·" if not options.ascii_only else ".") * (width - drawn.cell_len), style="dim")
            yield Text.assemble("  ", drawn)
            labels = [(name, f"{name.replace('_', ' ')} {_gib(amount)}") for name, amount in parts]
            yield from legend(labels, _MEMORY, options.max_width, colour=colour)

        return title, lines()

    def _where(self) -> str:
        where = "nothing was written" if self.written is None else f"written to {self.written}"
        drawn = "" if self.drawn is None else f"; drawn in {self.drawn}"
        took = step_time(self.study.planning_s)
        return f"Plan {self.study.plan.hash}, {where}{drawn}. Planning and simulation took {took}."


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 20 else size(amount)
