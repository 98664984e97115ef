"""What a part of the check found, and the setting all parts work in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from canzona_cli.config.schema import Device

Status = Literal["pass", "short", "not run"]
"""It does what it must; it ran and does not; nothing is known, and `said` says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A part's line in the table, and its numbers."""

    status: Status
    said: str
    numbers: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Found:
    """An outcome with the part it is of."""

    part: str
    seconds: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The machine, and where parts leave what later parts need."""

    device: Device
    """cpu: every part runs on gloo ranks, which shows that it works and says nothing of a GPU."""
    name: str
    """Of the GPU."""
    memory_gib: float
    """Of each GPU; 0 where nothing tells."""
    gpus: int
    sizes: tuple[str, ...]
    """Recipes whose matrices are updated."""
    budget_s: float
    """For the samples of one number."""
    work: str

    @property
    def learnt(self) -> int:
        """Steps of the demo, behind which all others begin: the loss of an untrained model hardly depends on what it
        does. On a CPU, where nothing is found out but that parts work, a few."""
        return 60 if self.device == "cuda" else 12

    @property
    def compared(self) -> int:
        """Steps behind those, which the CPU and the device both do."""
        return 20 if self.device == "cuda" else 4

    @property
    def handed_over(self) -> int:
        """Step whose checkpoint the device leaves for the CPU."""
        return self.learnt + self.compared // 2

    @property
    def folder(self) -> Path:
        return Path(self.work)

    def result(self, part: str) -> Path:
        """Where the process of a part leaves its outcome."""
        return self.folder / f"{part}.result.json"

    def save(self) -> None:
        self.file(self.folder).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Setup":
        content = json.loads(cls.file(folder).read_text(encoding="utf-8"))
        return cls(**{**content, "sizes": tuple(content["sizes"])})

    @staticmethod
    def file(folder: Path) -> Path:
        return folder / "setup.json"


def table(found: Sequence[Found]) -> str:
    """One line a part: its name, how it ended, its seconds, and what it has to say."""
    width = max(len(one.part) for one in found)
    return "\n".join(
        f"{one.part:{width}}  {one.outcome.status:7}  {one.seconds:5.0f} s  {one.outcome.said}" for one in found
    )


def content(setup: Setup, about: Mapping[str, object], found: Sequence[Found]) -> str:
    """The JSON file."""
    parts = [{"part": one.part, "seconds": round(one.seconds, 1), **asdict(one.outcome)} for one in found]
    return json.dumps({"version": 1, "device": setup.device, "gpu": setup.name, **about, "parts": parts}, indent=1)
