"""The outcome of a part of the check, and the setup that all parts share."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from canzona_cli.core.setup import Device, FastPath

VERSION = 2
"""The version of the JSON file."""

Status = Literal["pass", "short", "not run"]
"""The status of a part: `pass`; `short` if it ran but missed a goal; `not run`, for the reason in the summary."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity that was simulated and measured."""

    what: str
    unit: Literal["ms", "GiB", "TFLOP/s", "GB/s", "us"]
    simulated: float
    measured: float

    def row(self) -> tuple[str, ...]:
        """Returns the cells of the printed table."""
        return (
            self.what,
            f"{self.simulated:.4g} {self.unit}",
            f"{self.measured:.4g} {self.unit}",
            f"{self.measured / self.simulated:.2f}" if self.simulated else "",
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A part's status and summary for the table, its numbers and its comparisons."""

    status: Status
    summary: str
    numbers: Mapping[str, object] = field(default_factory=dict)
    comparisons: Sequence[Comparison] = ()
    verified: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "comparisons": tuple(Comparison(**fields) for fields in content["comparisons"])})


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """An outcome with the name and the duration of its part."""

    part: str
    seconds: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The machine, and the folder through which parts share their runs."""

    device: Device
    """The device to check. With cpu, every part runs on gloo ranks, which is only a smoke test."""
    name: str
    """The name of the GPU."""
    memory_gib: float
    """The memory of each GPU; 0 if it is unknown."""
    gpus: int
    work: str
    """The folder that parts share."""

    @property
    def learnt(self) -> int:
        """The number of steps of the demo. Other runs start from its checkpoint, because errors would hardly change the
        loss of an untrained model. On a CPU, which is only a smoke test, there are fewer steps."""
        return 60 if self.device == "cuda" else 12

    @property
    def compared(self) -> int:
        """The number of steps after the demo's last step that run on both the CPU and the device."""
        return 20 if self.device == "cuda" else 4

    @property
    def handed_over(self) -> int:
        """The step of the checkpoint that the device's run saves for other runs to resume from."""
        return self.learnt + self.compared // 2

    @property
    def folder(self) -> Path:
        return Path(self.work)

    @property
    def profile(self) -> str:
        """The name of the cluster profile for predictions; `h100-80g` for an unknown GPU."""
        if self.device == "cpu":
            return "cpu"
        profiles = {"H200": "h200", "B200": "b200", "A100": "a100-80g"}
        return next((profile for name, profile in profiles.items() if name in self.name), "h100-80g")

    def result(self, part: str) -> Path:
        """Returns the path to which a part's process writes its outcome. While the part runs, the outcome is
        incomplete."""
        return self.folder / f"{part}.result.json"

    def keep(self, part: str, outcome: Outcome) -> None:
        """Writes a part's outcome, complete or incomplete, for the process that started the part."""
        path = self.result(part)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.replace(temporary, path)

    def save(self) -> None:
        self.file(self.folder).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Setup":
        return cls(**json.loads(cls.file(folder).read_text(encoding="utf-8")))

    @staticmethod
    def file(folder: Path) -> Path:
        return folder / "setup.json"


def table(results: Sequence[PartResult]) -> str:
    """Formats a line for each part (name, status, seconds, summary), followed by all comparisons."""
    width = max(len(result.part) for result in results)
    lines = [
        f"{result.part:{width}}  {result.outcome.status:7}  {result.seconds:5.0f} s  {result.outcome.summary}"
        for result in results
    ]
    comparisons = [comparison for result in results for comparison in result.outcome.comparisons]
    return "\n".join([*lines, "", *_compared(comparisons)] if comparisons else lines)


def _compared(comparisons: Sequence[Comparison]) -> Iterator[str]:
    rows = [("", "simulated", "measured", "measured / simulated"), *(comparison.row() for comparison in comparisons)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for what, *numbers in rows:
        cells = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((f"{what:{widths[0]}}", *cells)).rstrip()


def verified(setup: Setup, results: Sequence[PartResult]) -> list[FastPath]:
    """Lists the fast paths that agreed with their references on the GPUs: the value of `cluster.verified`. The part
    `shared` verifies one, and the calibration verified the others."""
    agreed = {result.part for result in results if result.outcome.status == "pass"}
    agreed |= {str(path) for result in results for path in result.outcome.verified}
    return [path for path in get_args(FastPath) if setup.device == "cuda" and path in agreed]


def content(setup: Setup, about: Mapping[str, object], results: Sequence[PartResult]) -> str:
    """Returns the content of the JSON file."""
    parts = [{"part": part.part, "seconds": round(part.seconds, 1), **asdict(part.outcome)} for part in results]
    head = {"version": VERSION, "device": setup.device, "gpu": setup.name, "gpus": setup.gpus, **about}
    return json.dumps({**head, "verified": verified(setup, results), "parts": parts}, indent=1)
