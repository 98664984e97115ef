"""The screens of `canzona clusters` and `canzona doctor`: hardware profiles, and the checks of this
machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.links import SLOW, LinkCheck, bus_gb_per_s
from canzona_cli.cli.views.page import Page, Screen, Table, joined, note, paragraph, remarks
from canzona_cli.config.profiles import Profile
from canzona_cli.core.reading import display_path
from canzona_cli.launch.doctor import Diagnosis, Finding, Status
from canzona_cli.records.words import milliseconds, plural, size

_NAMED = 8
"""The largest number of machines that are all named."""


@dataclass(frozen=True, kw_only=True)
class ProfileList(Page):
    """The list of hardware profiles: a table with a row for each."""

    profiles: Sequence[Profile]

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


_MARKS: Mapping[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}


_Row = tuple[Status, str, str, Finding | None]
"""The status, name and value of a line, and its finding; None for a line about several packages."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisView(Page):
    """The findings about this machine, and a verdict on what can run here."""

    diagnosis: Diagnosis
    verbose: bool = False
    """True to show and explain every finding. Otherwise required packages share a line, and only findings
    that need a fix are explained."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        rows = list(map(_row, self.diagnosis.findings)) if self.verbose else self._brief_rows()
        width = max(len(name) for _, name, _, _ in rows) + 2
        for status, name, value, finding in rows:
            yield paragraph(value, first=joined(_MARKS[status], f" {name:<{width}}"))
            if finding is not None and (self.verbose or finding.fix):
                rest = " " * (width + 2)
                yield paragraph(finding.meaning, first=rest)
                if finding.fix:
                    yield paragraph(f"→ {finding.fix}", "green", first=rest)
        yield Text()
        yield from map(paragraph, self._verdict())
        if not self.verbose:
            yield paragraph("-v shows every package, and what each finding means", "dim")

    def _brief_rows(self) -> list[_Row]:
        findings = self.diagnosis.findings
        packages = [finding for finding in findings if finding.group == "python" and finding.name != "Python"]
        compatible = [finding for finding in packages if finding.status == "ok"]
        absent = [finding.name for finding in packages if (finding.status, finding.value) == ("info", "not installed")]
        shown_alone = [finding for finding in findings if finding not in packages or finding.status in ("warn", "fail")]
        summaries: list[_Row] = []
        if compatible:
            quantifier = "" if any(finding.status in ("warn", "fail") for finding in packages) else "all "
            installed = f"{quantifier}{plural(len(compatible), 'required package')} installed, in compatible versions"
            summaries.append(("ok", "packages", installed, None))
        if absent:
            summaries.append(("info", "optional", f"not installed: {', '.join(absent)}", None))
        first_row, *other_rows = map(_row, shown_alone)
        return [first_row, *summaries, *other_rows]

    def _verdict(self) -> Iterator[Text]:
        diagnosis = self.diagnosis
        failures, warnings = diagnosis.count("fail"), diagnosis.count("warn")
        warning_count = f"; {plural(warnings, 'warning')}" if warnings else ""
        if failures:
            words = f"{plural(failures, 'failure')} must be fixed before anything can run here"
            text = Text(words, style="bold red")
            yield text.append(warning_count, style="default")
            return
        if not diagnosis.torch_checked:
            text = Text("no failures, but torch took too long to say whether runs are possible here", style="yellow")
            yield text.append(warning_count)
            return
        possible = f"CPU and GPU runs (up to gpus={diagnosis.gpus})" if diagnosis.gpus else "CPU runs"
        text = Text(f"{possible} are possible here", style="bold green")
        yield text.append(warning_count, style="yellow")
        if not diagnosis.gpus:
            yield Text("next: canzona train recipe=qwen3-tiny", style="dim")


def _row(finding: Finding) -> _Row:
    name = f"torch {finding.name}" if finding.group == "torch" else finding.name
    return finding.status, name, finding.value, finding


@dataclass(frozen=True, kw_only=True)
class LinksView(Page):
    """The times of all-reduces over all machines of a run, and a verdict."""

    check: LinkCheck

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        check = self.check
        where = ", ".join(check.names) if len(check.names) <= _NAMED else plural(len(check.names), "machine")
        yield paragraph(f"all-reduce over {plural(check.overall[0].ranks, 'rank')} on {where}", "bold")
        table = Table("bytes")
        table.add_numbers("ms", "GB/s", "profile", "of the profile")
        for time in check.overall:
            predicted_s, measured = check.predicted_s(time), (milliseconds(time.seconds), f"{time.bus_gb_per_s:.3g}")
            if predicted_s is None:
                table.add_row(size(time.bytes), *measured, "", "")
            else:
                profile = f"{bus_gb_per_s(time, predicted_s):.3g}"
                table.add_row(size(time.bytes), *measured, profile, f"{predicted_s / time.seconds:.0%}")
        yield table
        yield note(f"GB/s: sent by each rank in a ring; profile: the same by cluster={check.cluster.name}")
        for name in check.slow_machines:
            yield paragraph(f"{name} takes more than {SLOW:g} times as long as the fastest machines", "bold red")
        if check.slower_than_profile:
            yield paragraph(f"the largest takes more than {SLOW:g} times as long as by the profile", "bold red")
        if check.predicted_s(check.overall[0]) is None:
            yield note("no verdict: a profile of CPUs that is not calibrated describes no real machine")
        elif check.ok:
            yield paragraph("the links are fast enough", "bold green")
