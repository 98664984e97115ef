"""The outcome of a part of the check, and the setting in which all parts work."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from canzona_cli.config.schema import Device

VERSION = 2
"""Of the JSON file."""

Status = Literal["pass", "short", "not run"]
"""It does what it must; it ran and does not; nothing is known, and the summary says why."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity that the simulator predicts, measured."""

    what: str
    unit: Literal["ms", "GiB", "TFLOP/s", "GB/s", "us"]
    simulated: float
    measured: float

    def row(self) -> tuple[str, ...]:
        return (
            self.what,
            f"{self.simulated:.4g} {self.unit}",
            f"{self.measured:.4g} {self.unit}",
            f"{self.measured / self.simulated:.2f}" if self.simulated else "",
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A part's line in the table, and its numbers."""

    status: Status
    summary: str
    numbers: Mapping[str, object] = field(default_factory=dict)
    comparisons: Sequence[Comparison] = ()

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "comparisons": tuple(Comparison(**one) for one in content["comparisons"])})


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """An outcome with the part it belongs to."""

    part: str
    seconds: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The machine, and the folder where parts leave what later parts need."""

    device: Device
    """cpu: every part runs on gloo ranks, which shows that it works and says nothing about a GPU."""
    name: str
    """The name of the GPU."""
    memory_gib: float
    """Memory of each GPU; 0 where nothing tells."""
    gpus: int
    sizes: tuple[str, ...]
    """Recipes whose matrices are updated."""
    budget_s: float
    """Seconds for the samples of one number."""
    work: str

    @property
    def learnt(self) -> int:
        """Steps of the demo, after which all others begin: the loss of an untrained model hardly depends on what it
        does. On a CPU, which only shows that parts work, a few."""
        return 60 if self.device == "cuda" else 12

    @property
    def compared(self) -> int:
        """Steps after those, which the CPU and the device both do."""
        return 20 if self.device == "cuda" else 4

    @property
    def handed_over(self) -> int:
        """The step whose checkpoint the device leaves for other runs."""
        return self.learnt + self.compared // 2

    @property
    def folder(self) -> Path:
        return Path(self.work)

    @property
    def profile(self) -> str:
        """The cluster profile that predictions are made with; an unknown GPU is taken for an H100."""
        if self.device == "cpu":
            return "cpu"
        known = {"H200": "h200", "B200": "b200", "A100": "a100-80g"}
        return next((profile for name, profile in known.items() if name in self.name), "h100-80g")

    def result(self, part: str) -> Path:
        """Where the process of a part leaves its outcome, and what it has of it so far."""
        return self.folder / f"{part}.result.json"

    def keep(self, part: str, outcome: Outcome) -> None:
        """Leaves an outcome, whole or so far, for whoever started the part."""
        path = self.result(part)
        before = path.with_suffix(".tmp")
        before.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.replace(before, path)

    def save(self) -> None:
        self.file(self.folder).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Setup":
        content = json.loads(cls.file(folder).read_text(encoding="utf-8"))
        return cls(**{**content, "sizes": tuple(content["sizes"])})

    @staticmethod
    def file(folder: Path) -> Path:
        return folder / "setup.json"


def table(results: Sequence[PartResult]) -> str:
    """One line a part: its name, how it ended, its seconds, and its summary; then all comparisons."""
    width = max(len(result.part) for result in results)
    lines = [
        f"{result.part:{width}}  {result.outcome.status:7}  {result.seconds:5.0f} s  {result.outcome.summary}"
        for result in results
    ]
    comparisons = [one for result in results for one in result.outcome.comparisons]
    return "\n".join([*lines, "", *_compared(comparisons)] if comparisons else lines)


def _compared(comparisons: Sequence[Comparison]) -> Iterator[str]:
    rows = [("", "simulated", "measured", "measured / simulated"), *(one.row() for one in comparisons)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for what, *numbers in rows:
        cells = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((f"{what:{widths[0]}}", *cells)).rstrip()


def content(setup: Setup, about: Mapping[str, object], results: Sequence[PartResult]) -> str:
    """The JSON file."""
    parts = [{"part": one.part, "seconds": round(one.seconds, 1), **asdict(one.outcome)} for one in results]
    head = {"version": VERSION, "device": setup.device, "gpu": setup.name, "gpus": setup.gpus, **about}
    return json.dumps({**head, "parts": parts}, indent=1)
