"""The screens of `canzona clusters` and `canzona doctor`: hardware profiles, and the checks of this machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.doctor import Diagnosis, Status
from canzona_cli.cluster.profiles import Profile
from canzona_cli.config.recipes import shown
from canzona_cli.report.page import Page, Screen, note, remarks, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.words import clean, plural

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileList(Page):
    """A table with a row for each hardware profile."""

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
            origin = "built-in" if profile.builtin else shown(profile.path)
            if cluster is None:
                table.add_row(profile.name, *["?"] * 7, origin, style="yellow")
                continue
            sizes = (cluster.memory_gib, cluster.bf16_tflops, cluster.memory_gb_per_s)
            links = (cluster.intra_node_gb_per_s, cluster.inter_node_gb_per_s)
            numbers = [str(cluster.gpus_per_node), *(f"{value:,g}" for value in (*sizes, *links))]
            table.add_row(profile.name, *numbers, "yes" if cluster.calibrated else "no", origin)
        yield table
        yield note(
            "ranks: GPUs or CPU processes per node; GiB: memory per rank; TFLOP/s: dense bf16 peak per rank; mem BW, "
            "intra, inter: bandwidth per rank in GB/s of memory, intra-node links and inter-node links, one direction"
        )
        yield note(
            "calibrated: measured by `canzona calibrate`; `canzona clusters show NAME` lists where each number is from"
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
    """A table with a row for each finding, its fix below it if there is one, and a verdict on what can run
    here."""

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
            text = Text(f"{plural(failures, 'failure')} must be fixed before anything can run here", style="bold red")
            yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="default")
            return
        can = f"CPU and GPU runs (up to gpus={diagnosis.gpus})" if diagnosis.gpus else "CPU runs"
        text = Text(f"{can} are possible here", style="bold green")
        yield text.append(f"; {plural(warnings, 'warning')}" if warnings else "", style="yellow")
        if not diagnosis.gpus:
            yield Text("next: canzona train recipe=qwen3-tiny", style="dim")
