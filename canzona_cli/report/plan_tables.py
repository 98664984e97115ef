"""The tables of a plan's report: strategies, their phases, and alternative settings."""

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.planner.memory import GIB
from canzona_cli.report.text import wrapped
from canzona_cli.run.phases import LABELS
from canzona_cli.run.words import MISSING, milliseconds, step_time
from canzona_cli.simulate.study import STRATEGIES, Study


def strategies(study: Study, console: Console, options: ConsoleOptions) -> RenderResult:
    """Every strategy's times, what the planned one gains over it, and its memory."""
    title = Text.assemble(("Strategies", "bold"), ", simulated on the same layout and batch")
    yield from wrapped(title, console, options)
    planned = study.strategy
    names = ("iteration", "optimizer", "exposed", "+ AdamW", "opt. /", "iter. /", "GiB")
    table = _table(options, *names)
    for name in STRATEGIES:
        compared = study.strategies[name]
        result, gains = compared.result, ("", "")
        if name not in ("adamw", planned):
            gains = f"{study.optimizer_speedup(name):.2f}x", f"{study.iteration_speedup(name):.2f}x"
        table.add_row(
            name,
            step_time(result.iteration_s),
            step_time(result.optimizer_s),
            step_time(result.optimizer_exposed_s),
            MISSING if name == "adamw" else f"{100 * study.overhead(name):+.2f}%",
            *gains,
            f"{compared.memory_bytes / GIB:.1f}" + (" " if compared.fits else "!"),
            style="bold" if name == planned else "",
        )
    yield table
    notes = [
        f"exposed: what the iteration waits for; + AdamW: overhead over its iteration; / : divided by {planned}'s; "
        "GiB: of the fullest rank"
    ]
    if not all(study.strategies[name].fits for name in STRATEGIES):
        notes.append(f"! does not fit in {study.memory.capacity / GIB:.1f} GiB, timed as if it did")
    for note in notes:
        yield from wrapped(Text(note, style="dim"), console, options, first="  ", rest="  ")


def phases(study: Study, options: ConsoleOptions) -> Table:
    """Milliseconds of the slowest rank by phase and strategy."""
    table = _table(options, *STRATEGIES)
    table.columns[0].header = "phase, ms"
    results = [study.strategies[name].result for name in STRATEGIES]
    for phase, label in LABELS.items():
        times = [result.phases.get(phase, 0.0) for result in results]
        if any(times):
            style = "dim" if phase.endswith("_total") else ""
            table.add_row(Text(label), *(milliseconds(time) if time else MISSING for time in times), style=style)
    table.add_section()
    table.add_row("iteration", *(milliseconds(result.iteration_s) for result in results), style="bold")
    return table


def variants(study: Study, options: ConsoleOptions) -> Table:
    """The same run planned with other settings."""
    wide = options.max_width >= 100
    moves = ("reduced", "exchanged") if wide else ()
    table = _table(options, "balance", "bound", "bytes", "padding", *moves, "optimizer", "iteration", "GiB")
    for variant in study.variants:
        moved = variant.communication
        table.add_row(
            variant.name,
            f"{variant.balance.grid:.3f}",
            f"{variant.balance.lower_bound:.3f}",
            f"{moved.dp_byte_balance:.2f}",
            f"{100 * moved.padding_fraction:.1f}%",
            *((traffic(moved.dp_reduce_bytes), traffic(moved.tp_exchange_bytes)) if wide else ()),
            step_time(variant.result.optimizer_s),
            step_time(variant.result.iteration_s),
            f"{variant.memory_bytes / GIB:.1f}",
        )
    return table


def comparison(study: Study, options: ConsoleOptions, *, of_phases: bool) -> Iterator[tuple[Text, Table]]:
    """What `--compare` asked for, with a title."""
    if of_phases:
        yield (
            Text.assemble(("Phases", "bold"), " of the slowest rank; those that follow one another add up"),
            phases(study, options),
        )
    if study.variants:
        yield (
            Text.assemble(
                ("Alternatives", "bold"),
                f" to this plan, strategy {study.strategy}; bytes: of each bucket's busiest owner, over an even share",
            ),
            variants(study, options),
        )


def traffic(amount: int) -> str:
    """Bytes in decimal units, as links are rated."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount} B"


def _table(options: ConsoleOptions, *names: str) -> Table:
    style = box.ASCII if options.ascii_only else box.SIMPLE_HEAD
    table = Table(box=style, padding=(0, 1) if options.max_width >= 90 else (0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
