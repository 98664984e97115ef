"""What `canzona doctor` finds: one finding per thing looked at, with its meaning and its fix."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from canzona_cli.errors import ExitCode

Status = Literal["ok", "info", "warn", "fail"]
Group = Literal["python", "torch", "gpu", "machine", "storage", "network", "slurm", "environment"]

VERSION = 1
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for its workers; left over in a shell, they confuse whatever starts there."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    group: Group
    name: str
    status: Status
    """ok; info: worth knowing; warn: something will be slow or unavailable; fail: no run is possible."""
    value: str
    """What was found."""
    meaning: str
    """What that means for training, in one line."""
    fix: str = ""
    """What to do about it; there is one for every warn and fail."""


def info(group: Group, name: str, value: str, meaning: str) -> Finding:
    """Worth knowing, neither good nor bad."""
    return Finding(group=group, name=name, status="info", value=value, meaning=meaning)


def judged(
    group: Group, name: str, fine: bool, value: str, meaning: str, fix: str = "", *, otherwise: Status = "warn"
) -> Finding:
    """ok where it is fine; else as bad as `otherwise`, with its fix."""
    status: Status = "ok" if fine else otherwise
    return Finding(group=group, name=name, status=status, value=value, meaning=meaning, fix="" if fine else fix)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings about this machine."""

    findings: tuple[Finding, ...]
    gpus: int
    """GPUs that torch can really use."""
    slurm: bool
    """Whether jobs can be submitted from here."""

    @property
    def ok(self) -> bool:
        """Whether some run, if only on CPU, is possible."""
        return not any(finding.status == "fail" for finding in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.ok else ExitCode.ENVIRONMENT

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> Mapping[str, object]:
        """The stable form of `canzona doctor --json`; additions keep `version`, anything else raises it."""
        return {
            "version": VERSION,
            "ok": self.ok,
            "exit_code": int(self.exit_code),
            "can": {"cpu": self.ok, "cuda": self.ok and self.gpus > 0, "slurm": self.slurm},
            "gpus": self.gpus,
            "findings": [asdict(finding) for finding in self.findings],
        }
