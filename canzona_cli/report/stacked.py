"""Bars made of parts, one below the other: in colours where there are any, in letters where there are none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.text import Text


class Drawn(Protocol):
    """How a part is drawn."""

    @property
    def letter(self) -> str: ...
    @property
    def style(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Ink:
    """A `Drawn` for parts that are no phases, which have theirs in `run.phases`."""

    letter: str
    style: str


def stacked(
    parts: Sequence[tuple[str, float]], total: float, width: int, inks: Mapping[str, Drawn], *, colour: bool
) -> Text:
    """A bar in which `width` characters stand for `total`. A part above 0 that rounds to nothing is not drawn.

    Args:
        parts: (name, amount) from left to right.
        inks: by name.
    """
    drawn = Text(no_wrap=True)
    done, at = 0.0, 0
    for name, amount in parts:
        done += amount
        end = min(width, round(done / total * width)) if total > 0 else 0
        if end > at:
            ink = inks[name]
            drawn.append(("█" if colour else ink.letter) * (end - at), style=ink.style if colour else "")
            at = end
    return drawn


def legend(parts: Sequence[tuple[str, str]], inks: Mapping[str, Drawn], width: int, *, colour: bool) -> Iterator[Text]:
    """Indented lines like `█ weights 7.6  █ gradients 15.2`, or with letters; broken between parts only.

    Args:
        parts: (name, what is written behind its mark).
        width: of a line.
    """
    line = Text()
    for name, label in parts:
        ink = inks[name]
        entry = Text.assemble(
            "  ", ("█" if colour else ink.letter, ink.style if colour else "bold"), f" {label}", no_wrap=True
        )
        if line and line.cell_len + entry.cell_len > width:
            yield line
            line = Text()
        line.append_text(entry)
    yield line
