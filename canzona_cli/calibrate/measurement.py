"""What `canzona calibrate` hands from its ranks to the launcher: one line of JSON a number. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from canzona_cli.launch.monitor import JsonLines
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.statistics import Quartiles

Part = Literal["arithmetic", "memory", "adamw", "collectives", "model", "updates"]
"""In the order they are measured. A part that is missing from a calibration comes from the profile it started from."""
Quantity = Literal[
    "matmul_tflops",
    "fp32_tflops",
    "tf32_tflops",
    "qr_tflops",
    "eigh_tflops",
    "launch_us",
    "memory_gb_per_s",
    "adamw_ns",
    "updates",
    "collectives",
    "forward",
    "backward",
]
"""Profile fields in their own units; updates, collectives, forward and backward in seconds."""

WHAT: dict[Part, str] = {
    "arithmetic": "matrix products, decompositions, launches",
    "memory": "memory bandwidth",
    "adamw": "AdamW",
    "collectives": "collectives",
    "model": "forward and backward",
    "updates": "matrix updates",
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number, measured more than once."""

    quantity: Quantity
    key: tuple[str | int, ...] = ()
    """matmul_tflops: (n,); updates: (label, rows, columns); collectives: (kind, ranks, bytes)."""
    spread: Quartiles
    repetitions: int
    """Over all ranks that worked at it."""
    busy: float = 0.0
    """Collectives: processor cores they kept busy."""

    @classmethod
    def of(cls, quantity: Quantity, values: Sequence[float], *key: str | int, busy: float = 0.0) -> "Measurement":
        return cls(quantity=quantity, key=key, spread=Quartiles.of(values), repetitions=len(values), busy=busy)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What only the ranks know of what they ran on."""

    torch: str
    backend: str
    threads: int
    """Of one rank."""
    workers: int
    """Ranks that computed at the same time."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that a calibration's ranks have left so far."""

    measurements: tuple[Measurement, ...] = ()
    done: tuple[Part, ...] = ()
    """Parts that came to their end."""
    skipped: tuple[str, ...] = ()
    """What was left to the cost model, and why."""
    facts: Facts | None = None


class Recorder:
    """Rank 0's pen: every number is on disk before the next one is measured. Other ranks write nothing."""

    def __init__(self, files: RunFiles, *, writes: bool) -> None:
        self._path, self._writes = _path(files), writes

    def add(self, measurement: Measurement) -> None:
        self._line({"measurement": asdict(measurement)})

    def done(self, part: Part) -> None:
        self._line({"done": part})

    def skipped(self, what: str) -> None:
        self._line({"skipped": what})

    def facts(self, facts: Facts) -> None:
        self._line({"facts": asdict(facts)})

    def _line(self, content: dict[str, object]) -> None:
        if self._writes:
            append_json_line(self._path, content)


def read_record(files: RunFiles) -> Record:
    """What is there; lines that were cut off are left out."""
    measurements: list[Measurement] = []
    done: list[Part] = []
    skipped: list[str] = []
    facts: Facts | None = None
    for line in JsonLines(_path(files)).read():
        match line:
            case {"measurement": dict(found)}:
                measurements.append(
                    Measurement(**{**found, "key": tuple(found["key"]), "spread": Quartiles(**found["spread"])})
                )
            case {"done": str(part)}:
                done += [known for known in get_args(Part) if known == part]
            case {"skipped": str(what)}:
                skipped.append(what)
            case {"facts": dict(found)}:
                facts = Facts(**found)
    return Record(measurements=tuple(measurements), done=tuple(done), skipped=tuple(skipped), facts=facts)


def parts(ranks: int) -> Iterator[Part]:
    """Those that a calibration on so many ranks has; one rank alone has no collectives."""
    yield from (part for part in get_args(Part) if part != "collectives" or ranks > 1)


def _path(files: RunFiles) -> Path:
    return files.root / "measured.jsonl"
