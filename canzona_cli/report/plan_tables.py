"""The tables of `canzona plan`: strategies, their phases, and the plan under other settings."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.planner.memory import GIB
from canzona_cli.report.page import Screen, note, wrapped
from canzona_cli.report.tables import Columns, GroupedTable, column
from canzona_cli.run.phases import LABELS
from canzona_cli.run.words import MISSING, milliseconds, step_time, traffic
from canzona_cli.simulate.simulate import StrategyResult
from canzona_cli.simulate.study import STRATEGIES, Study


def strategies(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Every strategy's times, what the planned one gains over it, and its memory."""
    yield wrapped(Text.assemble(("Strategies", "bold"), ", simulated on the same layout and batch"))
    planned, found = study.strategy, [study.strategies[name] for name in STRATEGIES]
    gains = [name not in ("adamw", planned) for name in STRATEGIES]
    yield GroupedTable(
        labels=STRATEGIES,
        groups=[
            column("iteration", [step_time(one.result.iteration_s) for one in found]),
            column("optimizer", [step_time(one.result.optimizer_s) for one in found]),
            column("exposed", [step_time(one.result.optimizer_exposed_s) for one in found]),
            column(
                "+ AdamW",
                [MISSING if name == "adamw" else f"{100 * study.overhead(name):+.2f}%" for name in STRATEGIES],
            ),
            *(
                column(head, [f"{of(name):.2f}x" * gain for name, gain in zip(STRATEGIES, gains, strict=True)])
                for head, of in (("opt. /", study.optimizer_speedup), ("iter. /", study.iteration_speedup))
            ),
            column("GiB", [f"{one.memory_bytes / GIB:.1f}{' ' if one.fits else '!'}" for one in found]),
        ],
        styles=["bold" if name == planned else "" for name in STRATEGIES],
    )
    yield note(
        "exposed: the part that the iteration waits for; + AdamW: overhead over its iteration; /: divided by "
        f"{planned}'s; GiB: on the fullest rank"
    )
    if not all(one.fits for one in found):
        yield note(f"! does not fit in {study.memory.capacity / GIB:.1f} GiB, timed as if it did")


def phases(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Milliseconds of the slowest rank by phase and strategy."""
    yield wrapped(Text.assemble(("Phases", "bold"), " of the slowest rank; those that follow one another add up"))
    results = [study.strategies[name].result for name in STRATEGIES]
    shown = [phase for phase in LABELS if any(result.phases.get(phase) for result in results)]
    yield GroupedTable(
        head="phase, ms",
        labels=[*(LABELS[phase] for phase in shown), "iteration"],
        groups=[column(strategy, _times(one, shown)) for strategy, one in zip(STRATEGIES, results, strict=True)],
        sections=(len(shown),),
        styles=[*("dim" if phase.endswith("_total") else "" for phase in shown), "bold"],
    )


def _times(result: StrategyResult, phases: Sequence[str]) -> list[str]:
    """Of the phases, those it does not have left open, and of the iteration."""
    return [*(milliseconds(result.phases.get(phase) or None) for phase in phases), milliseconds(result.iteration_s)]


def variants(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """The same run planned with other settings."""
    title = f" to this plan, strategy {study.strategy}; bytes: of each bucket's busiest owner, over an even share"
    yield wrapped(Text.assemble(("Alternatives", "bold"), title))
    found = study.variants
    moved = [variant.communication for variant in found]
    yield GroupedTable(
        labels=[variant.name for variant in found],
        groups=[
            column("balance", [f"{variant.balance.grid:.3f}" for variant in found]),
            column("bound", [f"{variant.balance.lower_bound:.3f}" for variant in found]),
            column("bytes", [f"{one.dp_byte_balance:.2f}" for one in moved]),
            column("padding", [f"{100 * one.padding_fraction:.1f}%" for one in moved]),
            column("optimizer", [step_time(variant.result.optimizer_s) for variant in found]),
            column("iteration", [step_time(variant.result.iteration_s) for variant in found]),
            column("GiB", [f"{variant.memory_bytes / GIB:.1f}" for variant in found]),
            Columns(
                heads=("reduced", "exchanged"),
                rows=tuple((traffic(one.dp_reduce_bytes), traffic(one.tp_exchange_bytes)) for one in moved),
            ),
        ],
    )
