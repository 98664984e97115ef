"""A run on a terminal: header and finished stages scroll by, below them one frame that redraws itself."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.data.corpus import PreparedCorpus
from canzona_cli.launch.view import Earlier, TrainView
from canzona_cli.planner.plan_file import Obtained
from canzona_cli.report.charts import bar
from canzona_cli.report.header import header_rows
from canzona_cli.report.page import labelled, wrapped
from canzona_cli.report.train_frame import Frame
from canzona_cli.report.train_plain import PlainView, closing
from canzona_cli.report.train_state import REPEATED_STAGES, Clock, TrainState
from canzona_cli.run.events import Note
from canzona_cli.run.records import RunStatus, StageEvent, StepMetrics, ValidationLoss
from canzona_cli.run.words import clean, duration, real

__all__ = ["LiveView", "PlainView", "RunStatus", "TrainView", "make_view"]

_REFRESHES_PER_SECOND = 4
_STATUS_STYLE: Mapping[RunStatus, str] = {
    "done": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
    "preempted": "bold yellow",
}


def make_view(config: RunConfig, layout: Layout, console: Console) -> TrainView:
    """The view that suits the console: live where the cursor can move, plain lines in pipes and dumb terminals."""
    if console.is_terminal and console.is_interactive and not console.is_dumb_terminal:
        return LiveView(config, layout, console)
    return PlainView(config, layout, console)


class LiveView(TrainView):
    """Redraws four times a second at any terminal width; the last frame stays.

    Records arrive on the caller's thread while rich draws on its own: `_lock` guards the state between them. It is
    never held while printing, because rich's drawing thread takes its own lock first and then this one.
    """

    def __init__(self, config: RunConfig, layout: Layout, console: Console, *, clock: Clock = time.monotonic) -> None:
        self.state = TrainState(config=config, layout=layout, clock=clock)
        self._console = console
        self._lock = threading.Lock()
        self._closed = False
        self._preparing: tuple[str, float] | None = None
        self._live = Live(
            self, console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=False, vertical_overflow="crop"
        )

    def header(
        self,
        *,
        run_dir: Path,
        corpus: PreparedCorpus | None = None,
        plan: Obtained | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        rows = header_rows(
            self.state.config,
            self.state.layout,
            run_dir,
            corpus,
            plan=plan,
            earlier=earlier,
            ascii_only=self._console.options.ascii_only,
        )
        if earlier is not None:
            with self._lock:
                self.state.go_on(earlier)
        styled = ((label, Text(value, style="bold" if label == "recipe" else "")) for label, value in rows)
        self._console.print(*labelled(styled, 11))
        self._console.print()

    def progress(self, what: str, fraction: float) -> None:
        share = min(1.0, max(0.0, real(fraction) or 0.0))
        with self._lock:
            ended = share >= 1 and self._preparing is not None
            self._preparing = None if share >= 1 else (what, share)
        if ended:
            self._finished(what, "")
        self._begin()

    def stage(self, event: StageEvent) -> None:
        with self._lock:
            self._preparing = None
            ended = self.state.add_stage(event)
        if ended is not None and ended.name not in REPEATED_STAGES:
            self._finished(ended.name, duration(self.state.clock() - ended.started))
        self._begin()

    def step(self, metrics: StepMetrics) -> None:
        with self._lock:
            self.state.add_step(metrics)
        self._begin()

    def validation(self, validation: ValidationLoss) -> None:
        with self._lock:
            self.state.add_validation(validation)
        self._begin()

    def note(self, note: Note) -> None:
        text = Text(f"  {note.text}", style="yellow" if note.warning else "dim")
        self._console.print(wrapped(text, rest="    "))

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        if self._closed:
            return
        with self._lock:
            self._closed = True
        if self._live.is_started:
            self._live.stop()
        self._console.print(wrapped(closing(self.state, status, message), _STATUS_STYLE[status], first="  "))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            if self._preparing is not None and not self._closed:
                what, share = self._preparing
                drawn = bar(share, 20, ascii_only=options.ascii_only)
                line = Text(f"  {clean(what)}  {drawn:<20}  {100 * share:3.0f}%", no_wrap=True)
                line.truncate(options.max_width)
                yield line
            else:
                yield from Frame(state=self.state, closed=self._closed).__rich_console__(console, options)

    def _begin(self) -> None:
        # Started late: what is printed before the first record scrolls by undisturbed.
        if not self._closed and not self._live.is_started:
            self._live.start(refresh=True)

    def _finished(self, name: str, took: str) -> None:
        mark = "+" if self._console.options.ascii_only else "✓"
        line = Text.assemble(("  " + mark, "green"), f" {clean(name)}", (f" {took}" if took else "", "dim"))
        line.truncate(self._console.width)
        self._console.print(line)
