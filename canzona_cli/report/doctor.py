"""How `canzona doctor` reads: findings by group, each with its meaning, fixes where something is wrong, a verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.findings import Diagnosis, Finding, Group, Status
from canzona_cli.report.page import Page, Screen, Wrapped, wrapped
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
_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
_NAME_WIDTH = 20


@dataclass(frozen=True, kw_only=True)
class DiagnosisView(Page):
    """Findings grouped, with fixes below what needs one, and at the end what can run here."""

    diagnosis: Diagnosis

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        for group, findings in groupby(self.diagnosis.findings, key=lambda finding: finding.group):
            yield Text(_TITLES[group], style="bold")
            for finding in findings:
                yield from _finding(finding)
            yield Text()
        yield from map(wrapped, self._verdict())

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


def _finding(finding: Finding) -> Iterator[Wrapped]:
    mark, style = _MARKS[finding.status]
    name = f"{clean(finding.name):<{_NAME_WIDTH - 1}} "
    rest = " " * (len(mark) + 3 + _NAME_WIDTH)
    text = Text.assemble(clean(finding.value), ": ", (clean(finding.meaning), "dim"))
    yield wrapped(text, first=Text.assemble("  ", (mark, style), f" {name}"), rest=rest)
    if finding.fix:
        yield wrapped(clean(finding.fix), "green", first=f"{rest}→ ")
