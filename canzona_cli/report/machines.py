"""The screens of `canzona clusters` and `canzona doctor`: hardware profiles, and what is found on this machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.doctor import Diagnosis, Status
from canzona_cli.cluster.profiles import Profile
from canzona_cli.config.recipes import shown
from canzona_cli.report.page import Page, Screen, note, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.words import clean, plural

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileList(Page):
    """A line for each."""

    profiles: Sequence[Profile]

    def as_json(self) -> dict[str, object]:
        """The stable form of `canzona clusters list --json`."""
        return {"version": VERSION, "clusters": [_content(profile) for profile in self.profiles]}

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        table = Table("cluster")
        table.add_numbers("ranks", "GiB", "TFLOP/s", "memory", "inside", "between")
        table.add_words("numbers", "from")
        for profile in self.profiles:
            cluster = profile.cluster
            origin = "built-in" if profile.builtin else shown(profile.path)
            if cluster is None:
                reason = f"{profile.problems[0].key} {profile.problems[0].reason}"
                table.add_row(profile.name, *["?"] * 6, f"cannot be used: {reason}", origin, style="yellow")
                continue
            sizes = (cluster.memory_gib, cluster.bf16_tflops, cluster.memory_gb_per_s)
            links = (cluster.intra_node_gb_per_s, cluster.inter_node_gb_per_s)
            numbers = [str(cluster.gpus_per_node), *(f"{value:,g}" for value in (*sizes, *links))]
            table.add_row(profile.name, *numbers, "measured" if cluster.calibrated else "not measured", origin)
        yield table
        yield note(
            "ranks: GPUs or processes of a machine; TFLOP/s: dense bf16 peak; memory, inside, between: GB/s of one "
            "rank's memory, and of its links inside a machine and between machines, one direction"
        )
        yield note(
            "not measured: not by `canzona calibrate`; `canzona clusters show NAME` says where each number is from"
        )


def profile_json(profile: Profile) -> dict[str, object]:
    """The stable form of `canzona clusters show --json`."""
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
