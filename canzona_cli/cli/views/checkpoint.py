"""The screens of `canzona checkpoint` (the list of checkpoints, and their verification) and of `canzona eval`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from canzona_cli.checkpoint.commit import bytes_written
from canzona_cli.checkpoint.contents import Verified, verify_chosen
from canzona_cli.checkpoint.store import ChosenCheckpoints, StoredCheckpoint
from canzona_cli.cli.views.header import optimizer_words
from canzona_cli.cli.views.page import Cell, Page, Screen, joined, labelled_rows, paragraph, rows_table
from canzona_cli.core.errors import Problem
from canzona_cli.core.setup import Layout
from canzona_cli.records.codec import load_if_valid
from canzona_cli.records.records import Evaluation
from canzona_cli.records.words import (
    MISSING,
    count,
    duration,
    layout_words,
    number,
    plural,
    size,
    step_time,
)

VERSION = 1
"""The version of the JSON output. New keys do not change it; any other change raises it."""
_LAYOUT = "layout.json"
_MOST_LAYOUT_BYTES = 1 << 16
_INTACT = "intact: manifest and file sizes are as written; `canzona checkpoint verify` also hashes the contents"


@dataclass(frozen=True)
class CheckpointListView(Page):
    """The list of a run's checkpoints: a table, and the JSON of `canzona checkpoint list --json`."""

    chosen: ChosenCheckpoints

    def as_json(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "root": str(self.chosen.root),
            "checkpoints": [_checkpoint_json(checkpoint) for checkpoint in self.chosen.checkpoints],
        }

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        yield paragraph(f"checkpoints in {self.chosen.root}", "dim")
        if not self.chosen.checkpoints:
            yield Text("no checkpoints yet")
            return
        rows = ((checkpoint.name, _cells(checkpoint)) for checkpoint in self.chosen.checkpoints)
        yield rows_table(("age", "size", "ranks", "layout", "optimizer", "state"), rows, head="checkpoint")
        for checkpoint in self.chosen.checkpoints:
            for problem in checkpoint.problems:
                yield paragraph(f"{problem.key}: {problem.reason}", "red", rest="  ")
        if all(checkpoint.usable for checkpoint in self.chosen.checkpoints):
            yield paragraph(_INTACT, "dim")


def _cells(checkpoint: StoredCheckpoint) -> tuple[Cell, ...]:
    manifest, layout = checkpoint.manifest, _saved_layout(checkpoint)
    if manifest is None:
        return (*[MISSING] * 5, Text("damaged", style="bold red"))
    return (
        duration(max(0.0, time.time() - manifest.created)),
        size(manifest.bytes),
        f"{manifest.world_size:,}",
        MISSING if layout is None else layout_words(layout, times="×"),
        optimizer_words(manifest.optimizer, manifest.strategy),
        Text("intact", style="green"),
    )


def _checkpoint_json(checkpoint: StoredCheckpoint) -> dict[str, object]:
    manifest, layout = checkpoint.manifest, _saved_layout(checkpoint)
    facts = ("created", "bytes", "world_size", "optimizer", "strategy")
    axes = ("tp", "pp", "vpp", "cp", "dp")
    return {
        **_problems_json(checkpoint, checkpoint.problems),
        "step": checkpoint.step,
        **{name: getattr(manifest, name, None) for name in facts},
        "layout": None if layout is None else {name: getattr(layout, name) for name in axes},
    }


def _problems_json(checkpoint: StoredCheckpoint, problems: Sequence[Problem]) -> dict[str, object]:
    """Returns a checkpoint's name, path and problems as JSON values."""
    shown = [{"file": problem.key, "reason": problem.reason} for problem in problems]
    return {"name": checkpoint.name, "path": str(checkpoint.path), "sound": not problems, "problems": shown}


def _saved_layout(checkpoint: StoredCheckpoint) -> Layout | None:
    """Returns the layout of the ranks that wrote a checkpoint; None if it was not saved or cannot be read."""
    if checkpoint.manifest is None or _LAYOUT not in checkpoint.manifest.files:
        return None
    if checkpoint.manifest.files[_LAYOUT].bytes > _MOST_LAYOUT_BYTES:
        return None
    return load_if_valid(checkpoint.path / _LAYOUT, Layout)


@dataclass(frozen=True, kw_only=True)
class VerificationView(Page):
    """The result of a verification: a line for each checkpoint, and the JSON of `canzona checkpoint verify
    --json`."""

    root: str
    verified: tuple[Verified, ...]
    removed: tuple[str, ...] = ()
    """The checkpoints that a running job removed during the verification, because it keeps only the newest
    ones."""

    @property
    def problems(self) -> list[Problem]:
        """The problems of all checkpoints; if several were verified, each fix names the last intact
        checkpoint before the damaged one."""
        if len(self.verified) == 1:
            return list(self.verified[0].problems)
        problems: list[Problem] = []
        fix = "no earlier checkpoint is intact"
        for verified in self.verified:
            if not verified.problems:
                resume = f"checkpoint.resume={verified.checkpoint.name}"
                fix = f"resume from the last intact checkpoint before it: {resume}"
            problems += [replace(problem, fix=fix) for problem in verified.problems]
        return problems

    def as_json(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "root": self.root,
            "sound": not self.problems,
            "removed": list(self.removed),
            "checkpoints": [
                {
                    **_problems_json(verified.checkpoint, verified.problems),
                    "bytes": verified.bytes,
                    "seconds": verified.seconds,
                    "foreign": list(verified.foreign),
                }
                for verified in self.verified
            ],
        }

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        for verified in self.verified:
            mark = ("✗", "bold red") if verified.problems else ("✓", "green")
            result = f"{plural(len(verified.problems), 'problem')}; " if verified.problems else ""
            rate = size(verified.bytes / max(verified.seconds, 1e-6))
            amounts = f"{result}{size(verified.bytes)} read in {step_time(verified.seconds)}, {rate}/s"
            yield paragraph(joined(mark, f" {verified.checkpoint.name}  {amounts}"), rest="      ")
            if verified.foreign:
                names = ", ".join(verified.foreign)
                words = f"other files in the folder, which canzona ignores: {names}"
                yield paragraph(words, "yellow", first="    ")
        if self.removed:
            yield paragraph(f"removed by the run during verification: {', '.join(self.removed)}", "dim")


@contextmanager
def bar_of_bytes(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar if standard error is a terminal; yields a function to call with the number of
    bytes processed since its last call.

    Args:
        doing: the text in front of the bar, such as `hashing`.
        total: the number of bytes to process.
    """
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn(doing),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task("", total=total))


def verify_all(chosen: ChosenCheckpoints) -> VerificationView:
    """Hashes all files of every chosen checkpoint, with a progress bar."""
    total = sum(bytes_written(checkpoint.path) for checkpoint in chosen.checkpoints)
    with bar_of_bytes("hashing", total) as on_bytes:
        verified, removed = verify_chosen(chosen, on_bytes)
    return VerificationView(root=str(chosen.root), verified=verified, removed=removed)


@dataclass(frozen=True, kw_only=True)
class EvaluationView(Page):
    """The loss, perplexity and bits per byte of a checkpoint, and the data and layout of the evaluation."""

    evaluation: Evaluation

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        evaluation = self.evaluation
        bits = number(evaluation.bits_per_byte, ".4f")
        if evaluation.text_bytes is None:
            bits += " (the data's tokenizer is not known)"
        elif not evaluation.bytes_counted:
            bits += " (from the corpus's mean bytes per token, because its tokenizer does not count a token's bytes)"
        yield from labelled_rows(
            (
                ("loss", f"{number(evaluation.loss, '.4f')} nats per token"),
                *((f"  {name}", number(loss, ".4f")) for name, loss in evaluation.sets.items()),
                ("perplexity", number(evaluation.perplexity, ".4g")),
                ("bits per byte", bits),
                ("checkpoint", str(evaluation.checkpoint)),
                ("data", f"{evaluation.data} ({evaluation.tokenizer}), {_DOCUMENTS[evaluation.documents]}"),
                ("read", f"{count(evaluation.tokens)} tokens in {plural(evaluation.sequences, 'sequence')}"),
                ("layout", layout_words(evaluation.layout)),
            )
        )


_DOCUMENTS = {"held-out": "held-out documents", "all": "all documents"}
