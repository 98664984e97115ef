"""What the command line of `canzona bench` asks for besides the run itself, checked. No torch."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from canzona_cli.bench.simulated import parse_gpus
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.hints import closest
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.run.phases import STRATEGIES

SweepKind = Literal["alpha", "c_max", "gpus", "optimizer", "layers"]
SIMULATED_GPUS = "8..1024"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Strategies, length and outputs of a bench; `problems` is what is wrong with them."""

    strategies: tuple[AnyStrategy, ...] | None
    """None: all that the run can have."""
    rounds: int
    steps_per_turn: int
    out: Path | None
    plot: Path | None
    sweep: SweepKind | None
    values: tuple[str, ...]
    gpus: tuple[int, ...]
    """What is simulated; empty where a bench is run."""
    problems: tuple[Problem, ...]


def read_options(
    *,
    strategies: Sequence[str],
    rounds: int,
    steps_per_turn: int,
    out: Path | None = None,
    plot: Path | None = None,
    sweep: SweepKind | None = None,
    values: Sequence[str] = (),
    simulate: bool = False,
    gpus: str | None = None,
) -> Options:
    """Check options by themselves; problems are kept, to be told with those of the run.

    Args:
        strategies: as typed: names, several in one word with commas between.
        values: likewise.
        gpus: numbers and ranges; `SIMULATED_GPUS` where a simulation names none.

    Raises:
        EnvironmentProblem: matplotlib is wanted and not there.
    """
    names = _words(strategies)
    if plot is not None and find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            Problem(key="--plot", value=plot, reason="matplotlib is not installed", fix="pip install 'canzona[plot]'")
        )
    counts, wrong_counts = _counts(gpus or SIMULATED_GPUS)
    problems = (
        *_unknown(names),
        *_lengths(rounds, steps_per_turn),
        *_places(out, plot),
        *_ignored(simulate, names, sweep, values, gpus),
        *(wrong_counts if simulate else ()),
    )
    return Options(
        strategies=tuple(name for name in STRATEGIES if name in names) or None,
        # What is wrong is told anyway; the rest of the run is checked with something that works.
        rounds=max(1, rounds),
        steps_per_turn=max(2, steps_per_turn),
        out=out,
        plot=plot,
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
                reason=f"is none of {', '.join(STRATEGIES)}",
                fix=f"did you mean {meant}?" if meant else "--strategies canzona,sc",
            )


def _lengths(rounds: int, steps_per_turn: int) -> Iterator[Problem]:
    if rounds < 1:
        yield Problem(key="--rounds", value=rounds, reason="nothing would be measured", fix="use --rounds 6")
    if steps_per_turn < 2:
        yield Problem(
            key="--steps-per-turn",
            value=steps_per_turn,
            reason="the first step of a turn is left out, so one has at least two",
            fix="use --steps-per-turn 3",
        )


def _places(out: Path | None, plot: Path | None) -> Iterator[Problem]:
    if plot is not None and plot.suffix.lower() != ".png":
        yield Problem(key="--plot", value=plot, reason="is drawn as PNG", fix=f"use --plot {plot.stem}.png")
    for key, path in (("--out", out), ("--plot", plot)):
        if path is not None and (reason := _not_writable(path)):
            yield Problem(
                key=key, value=path, reason=reason, fix=f"name a file in a place you may write to: {key} FILE"
            )


def _not_writable(path: Path) -> str:
    """Why no file can be written there, after what may be minutes; empty when it can."""
    if path.is_dir():
        return "is a directory"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "does not allow writing"
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} does not allow writing"


def _counts(text: str) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """What --gpus says, and what is wrong with it."""
    try:
        return parse_gpus(text), ()
    except ConfigError as error:
        return parse_gpus(SIMULATED_GPUS), error.problems


def _ignored(
    simulate: bool, names: Sequence[str], sweep: SweepKind | None, values: Sequence[str], gpus: str | None
) -> Iterator[Problem]:
    """Options that would do nothing beside the others."""
    if values and sweep is None:
        yield Problem(
            key="--values",
            value=",".join(values),
            reason="is what --sweep goes through, and there is no --sweep",
            fix="add --sweep alpha, c_max, gpus, optimizer or layers",
        )
    if gpus is not None and not simulate:
        yield Problem(
            key="--gpus",
            value=gpus,
            reason="is what --simulate goes through, and a bench that is run has one number of ranks",
            fix=f"add --simulate, or write gpus={gpus} for ranks here, or --sweep gpus",
        )
    if simulate and sweep is not None:
        yield Problem(key="--sweep", value=sweep, reason="runs benches, --simulate runs none", fix="leave one out")
    if simulate and names:
        yield Problem(
            key="--strategies",
            value=",".join(names),
            reason="a simulation has all of them: they cost nothing",
            fix="leave it out",
        )
