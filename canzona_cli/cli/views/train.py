"""The live views of a run: in a terminal, a frame redrawn below the printed lines; in a pipe, plain lines."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from canzona_cli.cli.views.charts import progress_bar, sparkline
from canzona_cli.cli.views.header import header_rows
from canzona_cli.cli.views.page import joined, labelled_rows, paragraph
from canzona_cli.cli.views.train_state import REPEATED_STAGES, Clock, TrainState, relative_change, set_losses
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.planner.plan_file import ObtainedPlan
from canzona_cli.core.setup import Layout
from canzona_cli.launch.view import EarlierSteps, TrainView
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.records import Note, RunStatus, StageEvent, StepMetrics, ValidationLoss
from canzona_cli.records.words import MISSING, count, duration, number, step_time

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SEEN = "tokens seen"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The drawing of a `TrainState`: the figures in a few lines, with a sparkline of the losses. Before the first step
    or validation, only the stage is shown.

    No line exceeds the console's width.
    """

    state: TrainState
    closed: bool = False
    """True for the last frame, which stays on the screen."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width = self.state, options.max_width
        guarded = [Text(f"  {text}", style="yellow") for text in state.guard_lines]
        if state.updated is None and not state.validations:
            lines = [] if self.closed else [self._stage_line()]
        else:
            lines = [Text(), self._bar(width), *self._lines(width), *guarded]
        for line in lines:
            line.no_wrap = True
            line.rstrip()
            line.truncate(width, overflow="ellipsis")
            yield line

    def _stage_line(self) -> Text:
        """Returns the line of the current stage, such as `⠹ build model 3 s`."""
        now = self.state.clock()
        line = Text(f"  {_SPINNER[int(now * 4) % len(_SPINNER)]} ", style="cyan")
        if not self.state.stages:
            return line.append("start")
        stage = self.state.stages[-1]
        took = duration(now - stage.started)
        return line.append_text(joined((f"{stage.name} {took}", "default"), (f"  {stage.detail}", "dim")))

    def _bar(self, width: int) -> Text:
        state = self.state
        name = state.stages[-1].name if state.stages and not self.closed else "train"
        step_text = f"{state.step:,}".rjust(len(f"{state.total:,}")) + f"/{state.total:,}"
        time_text = duration(state.elapsed) if self.closed else duration(state.eta)
        tail = f"  {step_text}  {100 * state.fraction:3.0f}%  {'took' if self.closed else 'ETA'} {time_text:<12}"
        head = f"  {name:<9}"
        length = max(4, width - len(head) - len(tail))
        return joined((head, "bold")) + progress_bar(state.fraction, length) + Text(tail.rstrip(), style="bold")

    def _figures(self) -> dict[str, str]:
        """Returns the formatted figures by label."""
        state, newest = self.state, self.state.last
        return {
            "loss": number(state.loss, ".4f"),
            "smoothed": number(state.smoothed, ".4f"),
            "lr": number(newest and newest.lr, ".2e"),
            "gradient norm": number(newest and newest.grad_norm, ".3f"),
            "tokens/s": number(state.tokens_per_s, ",.0f"),
            f"per {state.unit}": number(state.tokens_per_s_per_rank, ",.0f"),
            _SEEN: count(state.tokens_seen),
            "step": step_time(state.step_s),
            "elapsed": duration(state.elapsed),
        }

    def _figure(self, label: str, value: str, label_width: int, value_width: int) -> Text:
        is_nan = label == "loss" and self.state.loss is not None and math.isnan(self.state.loss)
        style = "bold red" if is_nan else "bold"
        return Text.assemble((f"{label:<{label_width}}", "dim"), (f"{value:>{value_width}}", style))

    def _notes(self) -> list[tuple[str, str]]:
        """Returns the remarks that apply now, with their styles."""
        notes = []
        if self.state.non_finite:
            notes.append((f"{self.state.non_finite:,} x loss not finite", "bold red"))
        if self.state.stalled and not self.closed:
            notes.append((f"no step for {duration(self.state.idle)}", "yellow"))
        if self.state.experts:
            notes.append((self.state.experts, "dim"))
        return notes

    def _lines(self, width: int) -> list[Text]:
        figures, state = self._figures(), self.state
        tokens_seen = figures.pop(_SEEN)
        lines = [
            Text.assemble("  ", self._figure(*left, 10, 9), "   ", self._figure(*right, 13, 12), "   ")
            for left, right in batched(figures.items(), 2)
        ]
        lines[0].append(sparkline(state.losses, width - len(lines[0]) - 2), style="cyan")
        lines[2].append(f"{tokens_seen} {_SEEN}", style="dim")
        for line, (note, style) in zip((lines[1], lines[3]), self._notes(), strict=False):
            line.append(note, style=style)
        validation = Text.assemble("  ", ("validation   ", "dim"), (state.validation_change(), "bold"))
        if len(state.validations) > 1:
            first, last = state.validations[0][0], state.validations[-1][0]
            validation.append(f"  steps {first:,} → {last:,}", style="dim")
        return [*lines, validation, *self._sets()]

    def _sets(self) -> Iterator[Text]:
        """Yields a line with the newest validation loss of each data set of a blend, if there is a blend."""
        if self.state.sets:
            yield joined("  ", ("validation of  ", "dim"), set_losses(self.state.sets))


_REFRESHES_PER_SECOND = 4
_STATUS_STYLE: Mapping[RunStatus, str] = {
    "done": "bold green",
    "failed": "bold red",
    "diverged": "bold red",
    "interrupted": "bold yellow",
    "preempted": "bold yellow",
}
_SECONDS_BETWEEN_LINES = 2.0
_LINES_BETWEEN_TITLES = 50
_TITLES = f"{'elapsed':>8} {'step':>13} {'loss':>9} {'lr':>9} {'grad norm':>9} {'tokens/s':>10} {'time':>8} {'left':>7}"


def make_view(config: RunConfig, layout: Layout, console: Console, *, short: str = "") -> "ConsoleView":
    """Returns the view for a console: a live frame in an interactive terminal, plain lines in pipes and dumb
    terminals.

    Args:
        short: the name of the run, if only warnings and one line at the end are printed; empty to print
            everything.
    """
    if console.is_terminal and console.is_interactive and not console.is_dumb_terminal:
        return LiveView(config, layout, console, short=short)
    return PlainView(config, layout, console, short=short)


class ConsoleView(TrainView, ABC):
    """The base class of both views. It keeps the run's state and prints the header before training.

    If `short`, the name of the run, is not empty, the view prints only warnings and, at the end, one line
    that begins with this name.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        console: Console,
        *,
        clock: Clock = time.monotonic,
        short: str = "",
    ) -> None:
        self.state = TrainState(config=config, layout=layout, clock=clock)
        self._short = short
        self._console = console
        self._lock = threading.Lock()
        self._closed = False

    def header(
        self,
        *,
        run_dir: Path,
        corpus: PreparedCorpus | None = None,
        plan: ObtainedPlan | None = None,
        earlier: EarlierSteps | None = None,
    ) -> None:
        """Prints the description of the run; for a resumed run, also loads the earlier steps into the state.

        Args:
            plan: the plan that the run executes; None for a run without a plan.
            earlier: the completed part of a resumed run; None for a run that starts at step 1.
        """
        config, layout = self.state.config, self.state.layout
        rows = header_rows(config, layout, run_dir=run_dir, corpus=corpus, plan=plan, earlier=earlier, routed=False)
        if earlier is not None:
            with self._lock:
                self.state.continue_from(earlier)
        if not self._short:
            self._print_header(rows)

    @abstractmethod
    def _print_header(self, rows: list[tuple[str, str]]) -> None:
        """Prints the (label, value) rows of the header."""


class LiveView(ConsoleView):
    """A view that is redrawn four times a second; the last frame stays on the screen, unless `short` is set.

    Records arrive on the caller's thread, and rich draws in its own thread; `_lock` guards the state that
    both use. Do not print while holding `_lock`: rich's thread takes rich's lock first and then `_lock`, so
    the opposite order would deadlock.
    """

    _preparing: tuple[str, float] | None = None

    @cached_property
    def _live(self) -> Live:
        return Live(
            self,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=bool(self._short),
            vertical_overflow="crop",
        )

    def _print_header(self, rows: list[tuple[str, str]]) -> None:
        styled = ((label, joined((value, "bold" if label == "recipe" else ""))) for label, value in rows)
        self._console.print(*labelled_rows(styled, 11))
        self._console.print()

    def progress(self, what: str, fraction: float) -> None:
        with self._lock:
            is_finished = fraction >= 1 and self._preparing is not None
            self._preparing = None if fraction >= 1 else (what, fraction)
        if is_finished:
            self._print_finished(what, "")
        self._start_live()

    def stage(self, event: StageEvent) -> None:
        with self._lock:
            self._preparing = None
            ended = self.state.add_stage(event)
        if ended is not None and ended.name not in REPEATED_STAGES:
            self._print_finished(ended.name, duration(self.state.clock() - ended.started))
        self._start_live()

    def step(self, metrics: StepMetrics) -> None:
        with self._lock:
            self.state.add_step(metrics)
        self._start_live()

    def validation(self, validation: ValidationLoss) -> None:
        with self._lock:
            self.state.add_validation(validation)
        self._start_live()

    def note(self, note: Note) -> None:
        if self._short and not note.warning:
            return
        text = Text(f"  {note.text}", style="yellow" if note.warning else "dim")
        self._console.print(paragraph(text, rest="    "))

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        if self._closed:
            return
        with self._lock:
            self._closed = True
        if self._live.is_started:
            self._live.stop()
        line = closing_line(self.state, status, message, short=self._short)
        self._console.print(paragraph(line, _STATUS_STYLE[status], first="" if self._short else "  "))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            if self._preparing is not None and not self._closed:
                what, share = self._preparing
                line = joined(f"  {what}  ") + progress_bar(share, 20) + Text(f"  {100 * share:3.0f}%")
                line.no_wrap = True
                line.truncate(options.max_width)
                yield line
            else:
                yield from Frame(state=self.state, closed=self._closed).__rich_console__(console, options)

    def _start_live(self) -> None:
        # Started with the first record, so that lines printed before are not redrawn.
        if not self._closed and not self._live.is_started:
            self._live.start(refresh=True)

    def _print_finished(self, name: str, took: str) -> None:
        if self._short:
            return
        line = joined(("  ✓", "green"), f" {name}", (f" {took}" if took else "", "dim"))
        line.truncate(self._console.width)
        self._console.print(line)


class PlainView(ConsoleView):
    """A view that prints plain lines: a step at most every two seconds, the last step, all validations."""

    _printed_at: float | None = None
    _lines = 0
    _unprinted = False
    _printed_guard_lines: Sequence[str] = ()
    _progress_at: float | None = None
    _progress = ""

    def _print_header(self, rows: list[tuple[str, str]]) -> None:
        for label, value in rows:
            self._print(f"{label:<10} {value}")

    def progress(self, what: str, fraction: float) -> None:
        now, done = self.state.clock(), fraction >= 1
        if self._progress_at is None or done or now - self._progress_at >= 5 * _SECONDS_BETWEEN_LINES:
            self._progress_at = None if done else now
            words = f"{what} {100 * fraction:.0f}%"
            if words != self._progress:  # two stages may have the same name
                self._print(f"{self._time()} {words}")
            self._progress = words

    def stage(self, event: StageEvent) -> None:
        ended = self.state.add_stage(event)
        stage = self.state.stages[-1]
        # When training and validation alternate, only the first change is printed, because each step and each
        # validation prints a line.
        if stage.name not in REPEATED_STAGES or ended is None or ended.name not in REPEATED_STAGES:
            detail = f": {stage.detail}" if stage.detail else ""
            self._print(f"{self._time()} {stage.name}{detail}")

    def step(self, metrics: StepMetrics) -> None:
        state = self.state
        state.add_step(metrics)
        now = state.clock()
        due = self._printed_at is None or now - self._printed_at >= _SECONDS_BETWEEN_LINES
        if due or state.step >= state.total:
            self._print_step(now)
        else:
            self._unprinted = True

    def validation(self, validation: ValidationLoss) -> None:
        state = self.state
        is_first = not state.validations
        state.add_validation(validation)
        if self._unprinted:
            self._print_step(state.clock())
        (_, first), (step, loss) = state.validations[0], state.validations[-1]
        change = ""
        if not is_first:
            change = f" (from {number(first, '.4f')}, {number(relative_change(first, loss), '+.1f')}%)"
        by_set = f": {set_losses(state.sets)}" if state.sets else ""
        step_text = f"{step:,}/{state.total:,}"
        self._print(f"{self._time()} {step_text:>13} validation loss {number(loss, '.4f')}{change}{by_set}")

    def note(self, note: Note) -> None:
        line = f"{self._time()} {'warning: ' if note.warning else ''}{note.text}"
        self._print(line, always=note.warning)

    def close(self, status: RunStatus = "done", message: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        if self._unprinted:
            self._print_step(self.state.clock())
        line = closing_line(self.state, status, message, short=self._short)
        self._print(line if self._short else f"{self._time()} {line}", always=True)

    def _print_step(self, now: float) -> None:
        state, newest = self.state, self.state.last
        if self._lines % _LINES_BETWEEN_TITLES == 0:
            self._print(_TITLES)
        self._lines += 1
        self._printed_at, self._unprinted = now, False
        self._print(
            f"{self._time()} {f'{state.step:,}/{state.total:,}':>13} {number(state.loss, '.4f'):>9} "
            f"{number(newest and newest.lr, '.2e'):>9} {number(newest and newest.grad_norm, '.3f'):>9} "
            f"{number(state.tokens_per_s, ',.0f'):>10} {step_time(state.step_s):>8} {_clock(state.eta):>7}"
        )
        for text in state.guard_lines:
            if text not in self._printed_guard_lines:
                self._print(f"{self._time()} {text}")
        self._printed_guard_lines = state.guard_lines

    def _time(self) -> str:
        return f"{_clock(self.state.elapsed):>8}"

    def _print(self, line: str, *, always: bool = False) -> None:
        """Prints a line; a view with a `short` name prints it only if `always` is True."""
        if always or not self._short:
            # Without soft_wrap, rich would break lines at the width that it assumes for a pipe.
            self._console.print(joined(line.rstrip()), soft_wrap=True)


def closing_line(state: TrainState, status: RunStatus, message: str, *, short: str = "") -> str:
    """Returns one line that describes how the run ended.

    Args:
        short: the name of the run, with which the line then begins; the line also has the losses. Empty if
            other lines show both.
    """
    if short:
        parts = [closing_line(state, status, message)]
        parts += [f"loss {number(state.loss, '.4f')}"] if state.last is not None else []
        parts += [f"validation {number(state.validations[-1][1], '.4f')}"] if state.validations else []
        return f"{short}: {', '.join(parts)}"
    elapsed = duration(state.elapsed)
    details = (*state.guard_lines, *((state.experts,) if state.experts else ()))
    remarks = (f": {message}" if message else "") + "".join(f"; {detail}" for detail in details)
    if status == "done":
        return f"done, {state.step:,} steps in {elapsed}{remarks}"
    return f"{status} at step {state.step:,} of {state.total:,} after {elapsed}{remarks}"


def _clock(seconds: float | None) -> str:
    """Returns a duration as `2:05` or `3:20:11`, for narrow columns."""
    if seconds is None:
        return MISSING
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"
