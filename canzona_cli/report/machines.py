"""The screens of `canzona clusters` and `canzona doctor`: hardware profiles, and the checks of this
machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.doctor import Diagnosis, Finding, Status
from canzona_cli.cluster.profiles import Profile
from canzona_cli.config.recipes import display_path
from canzona_cli.report.page import Page, Screen, note, paragraph, remarks
from canzona_cli.report.tables import Table
from canzona_cli.run.words import clean, plural

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileList(Page):
    """The list of hardware profiles: a table with a row for each."""

    profiles: Sequence[Profile]

    def as_json(self) -> dict[str, object]:
        """Returns the JSON of `canzona clusters list --json`."""
        return {"version": VERSION, "clusters": [_content(profile) for profile in self.profiles]}

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        table = Table("cluster")
        table.add_numbers("ranks", "GiB", "TFLOP/s", "mem BW", "intra", "inter")
        table.add_words("calibrated", "from")
        for profile in self.profiles:
            cluster = profile.cluster
            origin = "built-in" if profile.builtin else display_path(profile.path)
            if cluster is None:
                table.add_row(profile.name, *["?"] * 7, origin, style="yellow")
                continue
            sizes = (cluster.memory_gib, cluster.bf16_tflops, cluster.memory_gb_per_s)
            links = (cluster.intra_node_gb_per_s, cluster.inter_node_gb_per_s)
            numbers = [str(cluster.gpus_per_node), *(f"{value:,g}" for value in (*sizes, *links))]
            table.add_row(profile.name, *numbers, "yes" if cluster.calibrated else "no", origin)
        yield table
        yield note(
            "ranks: GPUs or CPU processes per node; GiB: memory per rank; TFLOP/s: dense bf16 peak per rank; mem BW: "
            "memory bandwidth per rank in GB/s; intra, inter: bandwidth per rank within a node and between nodes, in "
            "GB/s in one direction"
        )
        yield note(
            "calibrated: measured by `canzona calibrate`; `canzona clusters show NAME` lists each number's source"
        )
        yield from remarks(
            f"{profile.name} cannot be used: {problem.key} {problem.reason}; {problem.fix}"
            for profile in self.profiles
            for problem in profile.problems
        )


def profile_json(profile: Profile) -> dict[str, object]:
    """Returns the JSON of `canzona clusters show --json`."""
    return {"version": VERSION, **_content(profile)}


def _content(profile: Profile) -> dict[str, object]:
    return {
        "name": profile.name,
        "path": str(profile.path),
        "builtin": profile.builtin,
        "measured": profile.cluster is not None and profile.cluster.calibrated,
        "problems": [{"key": p.key, "reason": p.reason, "fix": p.fix} for p in profile.problems],
        "settings": None if profile.cluster is None else asdict(profile.cluster),
    }


_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}


@dataclass(frozen=True, kw_only=True)
class DiagnosisView(Page):
    """The findings about this machine, and a verdict on what can run here."""

    diagnosis: Diagnosis
    verbose: bool = False
    """True for a table that explains every finding. Otherwise required packages share a line, and only
    findings that need a fix are explained."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        yield from [self._table()] if self.verbose else self._lines()
        yield Text()
        yield from map(paragraph, self._verdict())
        if not self.verbose:
            yield paragraph("-v shows every package, and what each finding means", "dim")

    def _lines(self) -> Iterator[RenderableType]:
        findings = self.diagnosis.findings
        packages = [finding for finding in findings if finding.group == "python" and finding.name != "Python"]
        compatible = [finding for finding in packages if finding.status == "ok"]
        absent = [
            clean(finding.name) for finding in packages if finding.status == "info" and finding.value == "not installed"
        ]
        facts = [finding for finding in findings if finding not in packages or finding.status in ("warn", "fail")]
        rows = [(finding.status, self._name(finding), clean(finding.value)) for finding in facts]
        if compatible:
            quantifier = "" if any(finding.status in ("warn", "fail") for finding in packages) else "all "
            installed = f"{quantifier}{plural(len(compatible), 'required package')} installed, in compatible versions"
            rows.insert(1, ("ok", "packages", installed))
        if absent:
            rows.insert(2 if compatible else 1, ("info", "optional", f"not installed: {', '.join(absent)}"))
        width = max(len(name) for _, name, _ in rows) + 2
        explained = {self._name(finding): finding for finding in facts if finding.fix}
        for status, name, value in rows:
            yield paragraph(value, first=Text.assemble(_MARKS[status], f" {name:<{width}}"))
            if (finding := explained.get(name)) is not None:
                rest = " " * (width + 2)
                yield paragraph(finding.meaning, first=rest)
                yield paragraph(f"→ {clean(finding.fix)}", "green", first=rest)

    def _name(self, finding: Finding) -> str:
        return f"torch {finding.name}" if finding.group == "torch" else clean(finding.name)

    def _table(self) -> Table:
        table, group = Table("", "", "finding", "meaning"), ""
        for finding in self.diagnosis.findings:
            if finding.group != group and group:
                table.add_section()
            group = finding.group
            table.add_row(Text(*_MARKS[finding.status]), self._name(finding), clean(finding.value), finding.meaning)
            if finding.fix:
                table.add_row("", "", "", Text(f"→ {clean(finding.fix)}", style="green"))
        return table

    def _verdict(self) -> Iterator[Text]:
        diagnosis = self.diagnosis
        failures, warnings = diagnosis.count("fail"), diagnosis.count("warn")
        if failures:
            text = Text(f"{plural(failures, 'failure')} must be fixed before anything can run here", style="bold red")
            yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="default")
            return
        if not diagnosis.torch_checked:
            text = Text("no failures, but torch took too long to say whether runs are possible here", style="yellow")
            yield text.append(f"; {plural(warnings, 'warning')}")
            return
        can = f"CPU and GPU runs (up to gpus={diagnosis.gpus})" if diagnosis.gpus else "CPU runs"
        text = Text(f"{can} are possible here", style="bold green")
        yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="yellow")
        if not diagnosis.gpus:
            yield Text("next: canzona train recipe=qwen3-tiny", style="dim")
