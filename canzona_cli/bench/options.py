"""Checks the options of `canzona bench` and chooses the values of a sweep. Does not import torch."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from canzona_cli.bench.simulated import Simulation, parse_gpus, run_simulation
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import Clash, Problem, clashes, closest, collect_problems, refuse
from canzona_cli.model.matrices import matrix_shapes
from canzona_cli.run.machine import existing_folder
from canzona_cli.run.phases import STRATEGIES

SweepKind = Literal["gpus", "optimizer", "alpha", "c_max"]
AFFECTED: Mapping[SweepKind, tuple[AnyStrategy, ...]] = {
    "alpha": ("canzona", "paper"),
    "c_max": ("canzona", "paper", "asc"),
}
"""The strategies that each swept setting affects, which a sweep compares by default. A setting that is not
listed affects all strategies."""
_KEYS: Mapping[SweepKind, str] = {
    "alpha": "engine.alpha",
    "c_max": "engine.c_max_mib",
    "gpus": "gpus",
    "optimizer": "optimizer",
}
_AUTO = "auto"
_MIB = 1 << 20
SIMULATED_GPUS = "8..1024"
CLASHES = (
    Clash(
        option="--values",
        needs="--sweep",
        reason="needs --sweep",
        fix="add --sweep gpus, optimizer, alpha or c_max",
    ),
    Clash(
        option="--gpus",
        needs="--simulate",
        reason="needs --simulate: a bench on real ranks runs on a single number of GPUs",
        fix="add --simulate; for real ranks use gpus={0}, or --sweep gpus",
    ),
    Clash(
        option="--sweep",
        excludes="--simulate of gpus",
        reason="has no effect with --simulate, which has --gpus instead",
        fix=f"use --gpus {SIMULATED_GPUS}",
    ),
    Clash(
        option="--html",
        excludes="--simulate --sweep",
        reason="cannot draw a simulated sweep",
        fix="remove --html or --sweep",
    ),
    Clash(
        option="--strategies",
        excludes="--simulate",
        reason="has no effect with --simulate, which always simulates all strategies",
        fix="remove --strategies",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of a bench, and the problems with them."""

    strategies: tuple[AnyStrategy, ...] | None
    """The strategies that the user named; None for every possible strategy."""
    rounds: int
    steps_per_turn: int
    out: Path | None
    html: Path | None
    sweep: SweepKind | None
    values: tuple[str, ...]
    gpus: tuple[int, ...]
    """The numbers of GPUs to simulate; empty without --simulate."""
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
    """Checks the options. Problems are returned in `Options.problems`, so that they can be raised together
    with the problems of the run.

    Args:
        strategies: the values of --strategies, each with one or more strategies, separated by commas.
        values: the values of --values, each with one or more values of the sweep, separated by commas.
        gpus: the value of --gpus, numbers and ranges; with --simulate, None means `SIMULATED_GPUS`.
    """
    names = _words(strategies)
    by_option = {
        "--strategies": ",".join(names),
        "--values": ",".join(_words(values)),
        "--gpus": gpus,
        "--sweep": sweep,
        "--html": html,
        "--simulate": simulate,
        "--simulate --sweep": simulate and sweep is not None,
        "--simulate of gpus": simulate and sweep == "gpus",
    }
    problems = [
        *_unknown_strategies(names),
        *_length_problems(rounds, steps_per_turn),
        *page_problems(html),
        *_out_problems(out),
    ]
    problems += clashes(by_option, CLASHES)
    counts = parse_gpus(SIMULATED_GPUS) if simulate else ()
    if simulate and gpus is not None:
        with collect_problems(problems):
            counts = parse_gpus(gpus)
    return Options(
        strategies=tuple(name for name in STRATEGIES if name in names) or None,
        # Invalid numbers are already in `problems`. They are corrected here so that the rest can be checked.
        rounds=max(1, rounds),
        steps_per_turn=max(2, steps_per_turn),
        out=out,
        html=html,
        sweep=sweep,
        values=tuple(_words(values)),
        gpus=counts,
        problems=tuple(problems),
    )


def _words(parts: Sequence[str]) -> list[str]:
    return [word.strip() for part in parts for word in part.split(",") if word.strip()]


def _unknown_strategies(names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if name not in STRATEGIES:
            hint = closest(name, STRATEGIES)
            yield Problem(
                key="--strategies",
                value=name,
                reason=f"is not one of {', '.join(STRATEGIES)}",
                fix=f"did you mean {hint}?" if hint else "--strategies canzona,sc",
            )


def _length_problems(rounds: int, steps_per_turn: int) -> Iterator[Problem]:
    if rounds < 1:
        reason = "is less than 1, so nothing would be measured"
        yield Problem(key="--rounds", value=rounds, reason=reason, fix="use --rounds 6")
    if steps_per_turn < 2:
        reason = "must be at least 2, because the first step of a turn is not measured"
        yield Problem(key="--steps-per-turn", value=steps_per_turn, reason=reason, fix="use --steps-per-turn 3")


def page_problems(html: Path | None) -> Iterator[Problem]:
    """Yields a problem if the page cannot be written to `html`, the path of --html."""
    if html is not None and html.suffix.lower() != ".html":
        yield Problem(key="--html", value=html, reason="must end in .html", fix=f"use --html {html.stem}.html")
    elif html is not None and (reason := _write_obstacle(html)):
        yield Problem(key="--html", value=html, reason=reason, fix="choose a file in a writable folder: --html FILE")


def _out_problems(out: Path | None) -> Iterator[Problem]:
    if out is not None and (reason := _write_obstacle(out)):
        yield Problem(key="--out", value=out, reason=reason, fix="choose a file in a writable folder: --out FILE")


def _write_obstacle(path: Path) -> str:
    """Returns the reason why no file can be written to a path; an empty string if a file can be written."""
    existing = existing_folder(path.absolute())
    if path.is_dir():
        return "is a directory"
    if not path.exists() and not existing.is_dir():
        return f"{existing} is a file, not a folder"
    if os.access(existing, os.W_OK):
        return ""
    return "is not writable" if path.exists() else f"{existing} is not writable"


def without_swept(overrides: Sequence[str], kind: SweepKind) -> list[str]:
    """Returns the overrides that do not set the swept setting."""
    return [word for word in overrides if key_of(word) != _KEYS[kind]]


def with_value(overrides: Sequence[str], kind: SweepKind, value: str) -> list[str]:
    """Returns the overrides with the swept setting set to `value`."""
    return [*without_swept(overrides, kind), f"{_KEYS[kind]}={'null' if value == _AUTO else value}"]


def default_values(kind: SweepKind, config: RunConfig) -> tuple[str, ...]:
    """Returns the values to sweep if the user does not name any. For C_max, the last value is `auto`, the
    planner's choice."""
    if kind == "alpha":
        return ("0", "0.25", "0.5", "0.75", "1")
    if kind == "optimizer":
        return ("muon", "soap", "shampoo")
    if kind == "gpus":
        largest = config.cluster.gpus_per_node
        return tuple(str(1 << power) for power in range(1, largest.bit_length()))
    return (*(f"{size:.6g}" for size in capacities_mib(config)), _AUTO)


def capacities_mib(config: RunConfig) -> tuple[float, ...]:
    """Returns the values of C_max in MiB that allow micro-groups of 1, 2, 4 and 8 matrices of the largest
    size."""
    largest = max(math.prod(shape) for shape in matrix_shapes(config)) * config.exchange_bytes
    return tuple(times * largest / _MIB for times in (1, 2, 4, 8))


def simulate_sweep(
    overrides: Sequence[str], options: Options, kind: SweepKind, recipes_dirs: Sequence[Path] = ()
) -> dict[str, Simulation]:
    """Simulates all sizes and numbers of GPUs for each swept value; returns the simulations by value.

    Raises:
        ConfigError: options contradict each other, or a run is impossible; the problems of all values are
            reported at once.
    """
    refuse(options.problems)
    values = options.values
    if not values:
        fewest = [*without_swept(overrides, kind), f"gpus={options.gpus[0]}"]
        config, _ = resolve(compose_run(fewest, recipes_dirs=recipes_dirs, training=False).config)
        values = default_values(kind, config)
    problems: list[Problem] = []
    simulations = {}
    for value in dict.fromkeys(values):
        with collect_problems(problems):
            changed = with_value(overrides, kind, value)
            simulations[value] = run_simulation(changed, options.gpus, recipes_dirs=recipes_dirs)
    refuse(dict.fromkeys(problems))
    return simulations
