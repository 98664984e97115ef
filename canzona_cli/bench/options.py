"""Checks the options of `canzona bench`. Does not import torch."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.core.errors import Problem, closest
from canzona_cli.core.host import existing_folder
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.setup.execution import AnyStrategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of a bench, and the problems with them."""

    strategies: tuple[AnyStrategy, ...] | None
    """The strategies that the user named; None for every possible strategy."""
    rounds: int
    steps_per_turn: int
    html: Path | None
    problems: tuple[Problem, ...]


def read_options(
    *,
    strategies: Sequence[str],
    rounds: int,
    steps_per_turn: int,
    html: Path | None = None,
) -> Options:
    """Checks the options. Problems are returned in `Options.problems`, so that they can be raised together
    with the problems of the run.

    Args:
        strategies: the values of --strategies, each with one or more strategies, separated by commas.
    """
    names = _words(strategies)
    problems = [
        *_unknown_strategies(names),
        *_length_problems(rounds, steps_per_turn),
        *page_problems(html),
    ]
    return Options(
        strategies=tuple(name for name in STRATEGIES if name in names) or None,
        # Invalid numbers are already in `problems`. They are corrected here so that the rest can be checked.
        rounds=max(1, rounds),
        steps_per_turn=max(2, steps_per_turn),
        html=html,
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
