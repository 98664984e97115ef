"""The screen of `canzona doctor`: one table of findings, what to do about the wrong ones, and a verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.doctor import Diagnosis, Status
from canzona_cli.report.page import Page, Screen, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.words import clean, plural

_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}


@dataclass(frozen=True, kw_only=True)
class DiagnosisView(Page):
    """A row for each finding, fixes below what needs one, and at the end what can run here."""

    diagnosis: Diagnosis

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        table, group = Table("", "", "finding", "meaning"), ""
        for finding in self.diagnosis.findings:
            if finding.group != group and group:
                table.add_section()
            group = finding.group
            name = f"torch {finding.name}" if group == "torch" else clean(finding.name)
            table.add_row(Text(*_MARKS[finding.status]), name, clean(finding.value), finding.meaning)
            if finding.fix:
                table.add_row("", "", "", Text(f"→ {clean(finding.fix)}", style="green"))
        yield table
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
