"""The screens of `canzona clusters`: hardware profiles."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import RenderableType

from canzona_cli.cluster.profiles import Profile
from canzona_cli.config.recipes import shown
from canzona_cli.report.page import Page, Screen, note
from canzona_cli.report.tables import Table

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
