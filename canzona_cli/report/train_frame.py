"""One frame of the live view: progress bar, loss curve and figures, laid out for the width at hand."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from canzona_cli.report.charts import line_chart, sparkline
from canzona_cli.report.train_state import TrainState, set_losses
from canzona_cli.run.words import MISSING, clean, count, duration, number, step_time

_WIDE = 110
_WIDE_ROWS = 14
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SEEN = "tokens seen"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Draws a `TrainState`: two columns (curve, figures) from 110 columns on, else six lines with a sparkline.

    No line exceeds the console's width; the wide form also needs 14 rows.
    """

    state: TrainState
    closed: bool = False
    """Whether this is the frame that stays."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width = self.state, options.max_width
        guarded = [Text(f"  {text}", style="yellow") for text in state.guarded]
        if state.updated is None and not state.validations:
            lines = [] if self.closed else [self._waiting()]
        elif width >= _WIDE and console.size.height >= _WIDE_ROWS + len(guarded):
            lines = [Text(), self._bar(width), Text(), *self._wide(width), *guarded]
        else:
            lines = [Text(), self._bar(width), *self._narrow(width), *guarded]
        for line in lines:
            line.no_wrap = True
            line.rstrip()
            line.truncate(width, overflow="ellipsis")
            yield line

    def _waiting(self) -> Text:
        """The current stage before the first step: `⠹ build model 3 s`."""
        now = self.state.clock()
        line = Text(f"  {_SPINNER[int(now * 4) % len(_SPINNER)]} ", style="cyan")
        if not self.state.stages:
            return line.append("start")
        stage = self.state.stages[-1]
        line.append(f"{clean(stage.name)} {duration(now - stage.started)}", style="default")
        return line.append(f"  {clean(stage.detail)}", style="dim") if stage.detail else line

    def _bar(self, width: int) -> Text:
        state = self.state
        name = clean(state.stages[-1].name) if state.stages and not self.closed else "train"
        place = f"{state.step:,}".rjust(len(f"{state.total:,}")) + f"/{state.total:,}"
        left = duration(state.elapsed) if self.closed else duration(state.eta)
        tail = f"  {place}  {100 * state.fraction:3.0f}%  {'took' if self.closed else 'ETA'} {left:<12}"
        head = f"  {name:<9}"
        length = max(4, width - len(head) - len(tail))
        done = round(length * state.fraction)
        full, half, empty = "━", "╸", "─"
        filled = full * done if done in (0, length) else full * (done - 1) + half
        return Text.assemble(
            (head, "bold"), (filled, "green"), (empty * (length - done), "bright_black"), (tail.rstrip(), "bold")
        )

    def _figures(self) -> dict[str, str]:
        """Values by label, in the order of the wide form."""
        state, last = self.state, self.state.last
        return {
            "loss": number(state.loss, ".4f"),
            "smoothed": number(state.smoothed, ".4f"),
            "lr": number(last and last.lr, ".2e"),
            "gradient norm": number(last and last.grad_norm, ".3f"),
            "tokens/s": number(state.tokens_per_s, ",.0f"),
            f"per {state.unit}": number(state.tokens_per_s_per_rank, ",.0f"),
            _SEEN: count(state.tokens_seen),
            "step": step_time(state.step_s),
            "elapsed": duration(state.elapsed),
        }

    def _figure(self, label: str, value: str, label_width: int, value_width: int) -> Text:
        broken = label == "loss" and self.state.loss is not None and math.isnan(self.state.loss)
        style = "bold red" if broken else "bold"
        return Text.assemble((f"{label:<{label_width}}", "dim"), (f"{value:>{value_width}}", style))

    def _notes(self) -> list[tuple[str, str]]:
        """Warnings, with their styles."""
        notes = []
        if self.state.non_finite:
            notes.append((f"{self.state.non_finite:,} x loss not finite", "bold red"))
        if self.state.stalled and not self.closed:
            notes.append((f"no step for {duration(self.state.idle)}", "yellow"))
        return notes

    def _narrow(self, width: int) -> list[Text]:
        figures, state = self._figures(), self.state
        seen = figures.pop(_SEEN)
        lines = [
            Text.assemble("  ", self._figure(*left, 10, 9), "   ", self._figure(*right, 13, 12), "   ")
            for left, right in batched(figures.items(), 2)
        ]
        lines[0].append(sparkline(state.history.values, width - len(lines[0]) - 2), style="cyan")
        lines[2].append(f"{seen} {_SEEN}", style="dim")
        for line, (note, style) in zip((lines[1], lines[3]), self._notes(), strict=False):
            line.append(note, style=style)
        validation = Text.assemble("  ", ("validation   ", "dim"), (state.validation_change(), "bold"))
        if len(state.validations) > 1:
            validation.append(f"  steps {state.validations[0][0]:,} → {state.validations[-1][0]:,}", style="dim")
        return [*lines, validation, *self._sets(width)]

    def _wide(self, width: int) -> list[Text]:
        state = self.state
        right = [self._figure(label, value, 16, 14) for label, value in self._figures().items()]
        right.append(Text.assemble(("validation  ", "dim"), (state.validation_change(), "bold")))
        for (note, style), line in zip(self._notes(), (right[0], right[7]), strict=False):
            line.append(f"  {note}", style=style)
        column = 40
        chart = line_chart(state.history.points, width - column - 5, len(right))
        lines = []
        for row, figure in enumerate(right):
            drawn = chart[row] if row < len(chart) else ""
            line = Text("  ")
            line.append(f"{drawn:<{width - column - 5}}", style="dim" if row == len(right) - 1 else "cyan")
            lines.append(line.append("   ").append_text(figure))
        if not chart:
            lines[0] = Text.assemble(f"  {MISSING:<{width - column - 5}}   ", right[0])
        return [*lines, *self._sets(width)]

    def _sets(self, width: int) -> Iterator[Text]:
        """The newest validation of each set of a blend."""
        if self.state.sets:
            line = Text.assemble("  ", ("validation of  ", "dim"), set_losses(self.state.sets), no_wrap=True)
            line.truncate(width, overflow="ellipsis")
            yield line
