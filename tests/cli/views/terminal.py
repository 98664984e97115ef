"""The screen of a terminal."""

import io

from rich.console import Console, RenderableType


def printed(view: RenderableType, width: int = 80, *, terminal: bool = False) -> str:
    """Prints a view to a file, or to a terminal of this width."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    Console(file=file, width=width, force_terminal=terminal, legacy_windows=False).print(view)
    file.flush()
    file.seek(0)
    return file.read()


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))
