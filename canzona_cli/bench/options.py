"""The options of `canzona bench`, apart from the run itself, checked. No torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from canzona_cli.bench.simulated import parse_gpus
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.errors import Clash, ConfigError, Problem, clashes, closest
from canzona_cli.run.phases import STRATEGIES

SweepKind = Literal["gpus", "optimizer", "alpha", "c_max"]
AFFECTED: Mapping[SweepKind, tuple[AnyStrategy, ...]] = {
    "alpha": ("canzona", "paper"),
    "c_max": ("canzona", "paper"),
}
"""The strategies that have the swept setting, where not all do."""
SIMULATED_GPUS = "8..1024"
CLASHES = (
    Clash(
        option="--values",
        without="--sweep",
        reason="are values for --sweep, and there is no --sweep",
        fix="add --sweep gpus, optimizer, alpha or c_max",
    ),
    Clash(
        option="--gpus",
        without="--simulate",
        reason="needs --simulate: a bench on real ranks has one number of ranks",
        fix="add --simulate; for real ranks use gpus={0}, or --sweep gpus",
    ),
    Clash(
        option="--sweep",
        beside="--simulate of gpus",
        reason="has no effect with --simulate, which takes --gpus",
        fix=f"use --gpus {SIMULATED_GPUS}",
    ),
    Clash(
        option="--html",
        beside="--simulate --sweep",
        reason="does not draw a simulated sweep",
        fix="leave out --html, or --sweep",
    ),
    Clash(
        option="--strategies",
        beside="--simulate",
        reason="has no effect: a simulation always has all strategies",
        fix="leave it out",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Strategies, length and outputs of a bench; `problems` lists the mistakes among them."""

    strategies: tuple[AnyStrategy, ...] | None
    """None: every strategy that the run can have."""
    rounds: int
    steps_per_turn: int
    out: Path | None
    html: Path | None
    sweep: SweepKind | None
    values: tuple[str, ...]
    gpus: tuple[int, ...]
    """Numbers of GPUs to simulate; empty where a bench is run."""
    problems: tuple[Problem, ...]


def read_options(
    *,
    strategies: Sequence[str],
    rounds: int,
    steps_per_turn: int,
    out: Path | None = None,
    html: Path | None = None,
    sweep: SweepKind | None = None,
    values: Sequence[str] = (),
    simulate: bool = False,
    gpus: str | None = None,
) -> Options:
    """Check the options by themselves; their problems are kept and raised later,
    together with those of the run.

    Args:
        strategies, values: as typed; a word may hold several, separated by commas.
        gpus: numbers and ranges; None means `SIMULATED_GPUS` where a simulation is asked for.
    """
    names = _words(strategies)
    typed = {
        "--strategies": ",".join(names),
        "--values": ",".join(_words(values)),
        "--gpus": gpus,
        "--sweep": sweep,
        "--html": html,
        "--simulate": simulate,
        "--simulate --sweep": simulate and sweep is not None,
        "--simulate of gpus": simulate and sweep == "gpus",
    }
    counts, wrong_counts = _counts(gpus or SIMULATED_GPUS)
    problems = (
        *_unknown(names),
        *_lengths(rounds, steps_per_turn),
        *_places(out, html),
        *clashes(typed, CLASHES),
        *(wrong_counts if simulate else ()),
    )
    return Options(
        strategies=tuple(name for name in STRATEGIES if name in names) or None,
        # The mistakes are reported anyway; valid numbers let the rest of the run be checked.
        rounds=max(1, rounds),
        steps_per_turn=max(2, steps_per_turn),
        out=out,
        html=html,
        sweep=sweep,
        values=tuple(_words(values)),
        gpus=counts if simulate else (),
        problems=problems,
    )


def _words(typed: Sequence[str]) -> list[str]:
    return [word.strip() for part in typed for word in part.split(",") if word.strip()]


def _unknown(names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if name not in STRATEGIES:
            meant = closest(name, STRATEGIES)
            yield Problem(
                key="--strategies",
                value=name,
                reason=f"is not one of {', '.join(STRATEGIES)}",
                fix=f"did you mean {meant}?" if meant else "--strategies canzona,sc",
            )


def _lengths(rounds: int, steps_per_turn: int) -> Iterator[Problem]:
    if rounds < 1:
        yield Problem(
            key="--rounds", value=rounds, reason="is less than 1, so nothing would be measured", fix="use --rounds 6"
        )
    if steps_per_turn < 2:
        yield Problem(
            key="--steps-per-turn",
            value=steps_per_turn,
            reason="must be at least 2, because the first step of a turn is not counted",
            fix="use --steps-per-turn 3",
        )


def page_problems(html: Path | None) -> Iterator[Problem]:
    """Yield what is wrong with the place of a page, before anything long is done."""
    if html is not None and html.suffix.lower() != ".html":
        yield Problem(key="--html", value=html, reason="must end in .html", fix=f"use --html {html.stem}.html")
    elif html is not None and (reason := _not_writable(html)):
        yield Problem(key="--html", value=html, reason=reason, fix="choose a file in a writable folder: --html FILE")


def _places(out: Path | None, html: Path | None) -> Iterator[Problem]:
    yield from page_problems(html)
    if out is not None and (reason := _not_writable(out)):
        yield Problem(key="--out", value=out, reason=reason, fix="choose a file in a writable folder: --out FILE")


def _not_writable(path: Path) -> str:
    """Returns why no file can be written there, known before the bench runs; empty when it can."""
    if path.is_dir():
        return "is a directory"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "is not writable"
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file, not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def _counts(text: str) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """The numbers that --gpus names, and its mistakes."""
    try:
        return parse_gpus(text), ()
    except ConfigError as error:
        return parse_gpus(SIMULATED_GPUS), error.problems
