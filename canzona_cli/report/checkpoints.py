"""The list of a run's checkpoints, and words about checkpoints that several views share."""

import json
import time
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from canzona_cli.checkpoint.choose import Chosen
from canzona_cli.checkpoint.manifest import Header
from canzona_cli.checkpoint.store import Found
from canzona_cli.config.schema import Layout
from canzona_cli.report.header import describe_layout
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import MISSING, clean, duration, size

VERSION = 1
_LAYOUT = "layout.json"
_LARGEST_LAYOUT = 1 << 16


def saved_layout(found: Found) -> Layout | None:
    """How the ranks that wrote a checkpoint were laid out; None when it does not tell."""
    if found.manifest is None or _LAYOUT not in found.manifest.files:
        return None
    if found.manifest.files[_LAYOUT].bytes > _LARGEST_LAYOUT:
        return None
    try:
        return Layout(**json.loads((found.path / _LAYOUT).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def optimizer_words(header: Header) -> str:
    """`muon (canzona)`; AdamW alone needs no strategy."""
    strategy = "" if header.optimizer == "adamw" else f" ({clean(header.strategy)})"
    return f"{clean(header.optimizer)}{strategy}"


@dataclass(frozen=True)
class Listing:
    """A rich renderable, and the stable form of `canzona checkpoint list --json`."""

    chosen: Chosen

    def as_json(self) -> dict[str, object]:
        """Additions keep `version`, anything else raises it."""
        return {
            "version": VERSION,
            "root": str(self.chosen.root),
            "checkpoints": [_as_json(found) for found in self.chosen.found],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        where = Text(f"checkpoints in {clean(self.chosen.root)}", style="dim")
        yield from wrapped(where, console, options)
        if not self.chosen.found:
            yield Text("there is none yet")
            return
        style = box.ASCII if options.ascii_only else box.SIMPLE_HEAD
        table = Table(box=style, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
        table.add_column("checkpoint", no_wrap=True)
        for title in ("age", "size", "ranks"):
            table.add_column(title, justify="right", no_wrap=True)
        for title in ("layout", "optimizer"):
            table.add_column(title, overflow="fold")
        table.add_column("state", no_wrap=True)
        for found in self.chosen.found:
            table.add_row(*_cells(found, "x" if options.ascii_only else "×"))
        yield table
        for problem in (problem for found in self.chosen.found for problem in found.problems):
            said = Text(clean(f"{problem.key}: {problem.reason}"), style="red")
            yield from wrapped(said, console, options, rest="  ")
        if all(found.sound for found in self.chosen.found):
            note = "whole by manifest and sizes; `canzona checkpoint verify` reads their content"
            yield from wrapped(Text(note, style="dim"), console, options)


def _cells(found: Found, times: str) -> list[Text]:
    manifest = found.manifest
    if manifest is None:
        return [Text(found.name), *(Text(MISSING) for _ in range(5)), Text("bad", style="bold red")]
    layout = saved_layout(found)
    spread = MISSING if layout is None else describe_layout(layout, "rank", times=times).partition(": ")[2]
    return [
        Text(found.name),
        Text(duration(max(0.0, time.time() - manifest.created))),
        Text(size(manifest.bytes)),
        Text(f"{manifest.world_size:,}"),
        Text(spread),
        Text(optimizer_words(manifest)),
        Text("whole", style="green"),
    ]


def _as_json(found: Found) -> dict[str, object]:
    manifest, layout = found.manifest, saved_layout(found)
    return {
        "name": found.name,
        "step": found.step,
        "path": str(found.path),
        "sound": found.sound,
        "problems": [{"file": problem.key, "reason": problem.reason} for problem in found.problems],
        "created": None if manifest is None else manifest.created,
        "bytes": None if manifest is None else manifest.bytes,
        "world_size": None if manifest is None else manifest.world_size,
        "optimizer": None if manifest is None else manifest.optimizer,
        "strategy": None if manifest is None else manifest.strategy,
        "layout": None if layout is None else {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")},
    }
