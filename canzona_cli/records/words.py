"""Formats numbers, durations, sizes, plurals and untrusted text for users, with the standard library only."""

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canzona_cli.core.setup import Layout

MISSING = "-"
"""The text in place of a missing number."""


def clean(value: object, *, newlines: bool = False) -> str:
    """Returns the value as text without control characters, so that no input can move the cursor or hide a
    line.

    Control characters appear as Python escapes (`\\x1b`); newlines stay only where the caller lays out
    several lines.
    """
    text = str(value).expandtabs(4)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (newlines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def number(value: object, spec: str = ".4g") -> str:
    """Formats a number with a format specification. NaN and infinity become `nan`, `inf` and `-inf`; a value
    that is not a number becomes `-`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return MISSING
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return format(value, spec)


def finite_or_none(value: object) -> float | None:
    """Returns the value as a finite float; None if it is missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def experts_words(load: float, balancing_loss: float | None) -> str:
    """Describes how evenly tokens are spread over experts.

    Args:
        load: the tokens of the busiest expert over the mean of all experts.
    """
    loss = "" if balancing_loss is None else f", balancing loss {balancing_loss:.3f}"
    return f"busiest expert {load:.2f} x mean{loss}"


def guard_notes(skipped: int, fallbacks: int) -> list[str]:
    """Describes the steps skipped and the updates that needed a fallback so far in a run; empty if there were
    none."""
    sentences = []
    if skipped:
        sentences.append(f"{plural(skipped, 'step')} skipped: gradients not finite")
    if fallbacks:
        sentences.append(f"{plural(fallbacks, 'matrix update')} needed a fallback: see logs")
    return sentences


def duration(seconds: object) -> str:
    """Formats an elapsed or remaining time: `4 s`, `2 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    value = finite_or_none(seconds)
    if value is None or value < 0:
        return MISSING
    total = round(value)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86_400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86_400} d {total % 86_400 // 3600} h"


def milliseconds(seconds: object) -> str:
    """Formats seconds as milliseconds without a unit, small ones with more decimals: `0.412`, `41.2`,
    `1,204`."""
    value = finite_or_none(seconds)
    if value is None:
        return MISSING
    ms = value * 1e3
    if ms >= 100:
        return f"{ms:,.0f}"
    if ms >= 10:
        return f"{ms:.1f}"
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def overhead(share: object, *, digits: int = 1) -> str:
    """Formats a relative overhead in per cent: 0.012 as `+1.2%`."""
    value = finite_or_none(share)
    return MISSING if value is None else f"{100 * value:+.{digits}f}%"


def predicted_overhead(share: object) -> str:
    """Formats a predicted overhead over AdamW in whole per cent: 0.0066 as `+1%`, 0.004 as `<1%`. No
    published step of a matrix optimizer on H100s confirms more digits; JSON has them all."""
    value = finite_or_none(share)
    if value is None:
        return MISSING
    return f"{100 * value:+.0f}%" if abs(value) >= 0.005 else "<1%"


def error_percent(error: float) -> str:
    """Formats a relative error in per cent with its sign: `+12%`; `>+999%` for larger errors."""
    if abs(error) < 0.005:
        return "0%"
    return f"{100 * error:+.0f}%" if error < 9.995 else ">+999%"


def step_time(seconds: object) -> str:
    """Formats the time of a step with its unit: `84.1 ms`, `2.31 s`."""
    value = finite_or_none(seconds)
    if value is None:
        return MISSING
    return f"{value:.2f} s" if value >= 1 else f"{milliseconds(value)} ms"


def count(value: object) -> str:
    """Formats a count with a decimal suffix: `512`, `20.5 k`, `1.72 M`, `31.2 B`."""
    amount = finite_or_none(value)
    if amount is None:
        return MISSING
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, " k"), (1e9, 1e6, " M"), (1e12, 1e9, " B")):
        if abs(amount) < limit * 0.9995:
            return f"{amount:.0f}" if not suffix else f"{amount / divisor:.3g}{suffix}"
    return f"{amount / 1e12:.3g} T"


def size(value: object) -> str:
    """Formats bytes with a binary suffix: `640 MiB`, `22.4 GiB`."""
    amount = finite_or_none(value)
    if amount is None:
        return MISSING
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1000 or suffix == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {suffix}" if suffix == "B" or amount >= 100 else f"{amount:.1f} {suffix}"


def traffic(amount: int) -> str:
    """Formats bytes in decimal units, as link bandwidths are given: `4.87 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount} B"


def plural(amount: int, noun: str) -> str:
    """Formats an amount with its noun: `1 problem`, `3 problems`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def layout_words(layout: "Layout", *, times: str = "x") -> str:
    """Formats a layout for a sentence, with the sign `times` between the axes: `TP 2 x DP 4`, `TP 2 x PP 4 (2
    chunks each) x DP 1`."""
    chunks = {"PP": f" ({layout.vpp} chunks each)"} if layout.vpp > 1 else {}
    return f" {times} ".join(f"{name} {ranks}{chunks.get(name, '')}" for name, ranks in layout.axes)


def layout_code(layout: "Layout") -> str:
    """Formats a layout for a cell of a table: `TP2 DP4`. `PP4x2` means four stages of two model chunks."""
    chunks = {"PP": f"x{layout.vpp}"} if layout.vpp > 1 else {}
    return " ".join(f"{name}{ranks}{chunks.get(name, '')}" for name, ranks in layout.axes)


def json_text(value: object) -> str:
    """Returns `jsonable(value)` as indented JSON."""
    return json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)


def jsonable(value: object) -> object:
    """Converts a value to types that JSON can represent. NaN and infinity become null, paths become
    strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
