"""`canzona checkpoint verify`: hashing with a bar, then a line for each checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from canzona_cli.checkpoint.choose import Chosen
from canzona_cli.checkpoint.commit import bytes_written
from canzona_cli.checkpoint.store import Found
from canzona_cli.checkpoint.verify import foreign_files, verify
from canzona_cli.errors import CheckpointInvalid, Problem
from canzona_cli.report.page import Page, Screen, wrapped
from canzona_cli.run.words import clean, plural, size, step_time

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One checkpoint, every byte of it read."""

    found: Found
    bytes: int
    """Read."""
    seconds: float
    problems: tuple[Problem, ...]
    foreign: tuple[str, ...]
    """Names in its folder that are not part of it."""


@dataclass(frozen=True, kw_only=True)
class AllVerified(Page):
    """A line for each, and the stable form of `canzona checkpoint verify --json`."""

    root: str
    each: tuple[Verified, ...]

    @property
    def problems(self) -> list[Problem]:
        """Of all checkpoints; where several were read, the fix names the last one before it that is intact."""
        found: list[Problem] = []
        intact: str | None = None
        for verified in self.each:
            if not verified.problems:
                intact = verified.found.name
            fix = "no earlier one is intact"
            if intact is not None:
                fix = f"resume from the last intact one before it: checkpoint.resume={intact}"
            found += verified.problems if len(self.each) == 1 else (replace(p, fix=fix) for p in verified.problems)
        return found

    def as_json(self) -> dict[str, object]:
        """Additions keep `version`, anything else raises it."""
        return {
            "version": VERSION,
            "root": self.root,
            "sound": not self.problems,
            "checkpoints": [
                {
                    "name": verified.found.name,
                    "path": str(verified.found.path),
                    "sound": not verified.problems,
                    "bytes": verified.bytes,
                    "seconds": verified.seconds,
                    "problems": [{"file": problem.key, "reason": problem.reason} for problem in verified.problems],
                    "foreign": list(verified.foreign),
                }
                for verified in self.each
            ],
        }

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        good, bad = ("ok  ", "FAIL") if screen.ascii_only else ("✓", "✗")
        for verified in self.each:
            mark = (bad, "bold red") if verified.problems else (good, "green")
            rate = size(verified.bytes / max(verified.seconds, 1e-6))
            text = f"{size(verified.bytes)} read in {step_time(verified.seconds)}, {rate}/s"
            if verified.problems:
                text = f"{plural(len(verified.problems), 'bad file')}; {text}"
            yield wrapped(Text.assemble(mark, f" {verified.found.name}  {text}"), rest="      ")
            if verified.foreign:
                names = ", ".join(map(clean, verified.foreign))
                yield wrapped(f"also in the folder, never read: {names}", "yellow", first="    ")


def verify_all(chosen: Chosen) -> AllVerified:
    """Hash all files of every chosen checkpoint; a bar on standard error where that is a terminal."""
    total = sum(bytes_written(found.path) for found in chosen.found)
    each = []
    with _bar(total) as on_bytes:
        for found in chosen.found:
            each.append(_verified(found, on_bytes))
    return AllVerified(root=str(chosen.root), each=tuple(each))


def _verified(found: Found, on_bytes: Callable[[int], None]) -> Verified:
    read: list[int] = []  # appending is safe from several threads
    began = time.perf_counter()

    def count(done: int) -> None:
        read.append(done)
        on_bytes(done)

    foreign: tuple[str, ...] = ()
    try:
        manifest, problems = verify(found.path, on_bytes=count)
        foreign = foreign_files(found.path, manifest)
    except CheckpointInvalid as error:
        problems = list(error.problems)
    seconds = time.perf_counter() - began
    return Verified(found=found, bytes=sum(read), seconds=seconds, problems=tuple(problems), foreign=foreign)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("hashing"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
