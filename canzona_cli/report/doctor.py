"""How `canzona doctor` reads: findings by group, each with its meaning, fixes where something is wrong, a verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from canzona_cli.cluster.findings import Diagnosis, Finding, Group, Status
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import clean, plural

_TITLES: Mapping[Group, str] = {
    "python": "Python and packages",
    "torch": "torch and communication",
    "gpu": "GPUs",
    "machine": "Machine",
    "storage": "Storage",
    "network": "Network",
    "slurm": "Slurm",
    "environment": "Environment variables",
}
_MARKS: Mapping[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok  ", "green"),
    "info": ("·", "info", "cyan"),
    "warn": ("!", "warn", "yellow"),
    "fail": ("✗", "FAIL", "bold red"),
}
_NAME_WIDTH = 20


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """Findings grouped, with fixes below what needs one, and at the end what can run here."""
    return _DiagnosisView(diagnosis=diagnosis)


@dataclass(frozen=True, kw_only=True)
class _DiagnosisView:
    diagnosis: Diagnosis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for group, findings in groupby(self.diagnosis.findings, key=lambda finding: finding.group):
            yield Text(_TITLES[group], style="bold")
            for finding in findings:
                yield from _finding(finding, console, options)
            yield Text()
        for text in self._verdict():
            yield from wrapped(text, console, options)

    def _verdict(self) -> Iterator[Text]:
        diagnosis = self.diagnosis
        failures, warnings = diagnosis.count("fail"), diagnosis.count("warn")
        if failures:
            text = Text(f"{plural(failures, 'finding')} must be fixed before anything can run here", style="bold red")
            yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="default")
            return
        can = f"CPU and GPU runs (up to gpus={diagnosis.gpus})" if diagnosis.gpus else "CPU runs"
        text = Text(f"{can} are possible here", style="bold green")
        yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="yellow")
        if not diagnosis.gpus:
            yield Text("next: canzona train recipe=qwen3-tiny", style="dim")


def _finding(finding: Finding, console: Console, options: ConsoleOptions) -> Iterator[Text]:
    symbol, word, style = _MARKS[finding.status]
    mark = word if options.ascii_only else symbol
    name = clean(finding.name)
    head = f"  {mark} {name:<{_NAME_WIDTH}}"
    if len(name) >= _NAME_WIDTH:
        head += " "
    rest = " " * (len(mark) + 3 + _NAME_WIDTH)
    text = Text.assemble(clean(finding.value), ": ", (clean(finding.meaning), "dim"))
    for number, line in enumerate(wrapped(text, console, options, first=head, rest=rest)):
        if number == 0:
            line.stylize(style, 2, 2 + len(mark))
        yield line
    if finding.fix:
        arrow = "-> " if options.ascii_only else "→ "
        fix = Text(clean(finding.fix), style="green")
        yield from wrapped(fix, console, options, first=rest + arrow, rest=" " * (len(rest) + len(arrow)))
